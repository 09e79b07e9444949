"""Calls padded to what a function requires: the same numbers, and no fault that is hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.backends import BACKENDS, PADDED_BY, numpy_backend
from attncheck.backends.numpy_backend import attention, attention_gradients
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.operations import Parameters, Task, parameters_of
from attncheck.execution.padding import Padding, padded_call
from attncheck.execution.user_call import own_backend
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on
from attncheck.judging.judge_implementation import judge_and_diagnose, with_padding_faults
from attncheck.judging.truth import find_truth
from attncheck.reading.lowering import Problem

pytestmark = pytest.mark.usefixtures("forked_workers")

Array = NDArray[Any]
EIGHT = {"width_multiple": 8, "value_width": "equal"}
TILES = {**EIGHT, "query_length_multiple": 4, "key_length_multiple": 4}
RNG = np.random.default_rng(14)


def restricted(function: Callable[..., Any], requires: Mapping[str, Any]) -> Callable[..., Any]:
    """Let a function assert what it requires."""

    def asserting(query: Array, key: Array, value: Array, *more: Array, **options: Any) -> Any:
        widths, lengths = {query.shape[-1], value.shape[-1]}, (query.shape[-2], key.shape[-2])
        if (past := options.get("past_key")) is not None:
            lengths = (lengths[0], lengths[1] + past.shape[-2])
        assert all(width % requires.get("width_multiple", 1) == 0 for width in widths)
        assert widths <= set(requires.get("widths", widths))
        assert len(widths) == 1 or "value_width" not in requires
        assert lengths[0] % requires.get("query_length_multiple", 1) == 0
        assert lengths[1] % requires.get("key_length_multiple", 1) == 0
        assert lengths[0] == lengths[1] or "lengths" not in requires
        return function(query, key, value, *more, **options)

    return asserting


def padding_of(
    task: Task, requires: Mapping[str, Any], accepts: frozenset[str] = PADDED_BY
) -> Padding | Failure | None:
    name = "dot_scores" if task.operation == "scoring" else task.operation
    taken = {name: Parameters(frozenset(accepts))}
    entry = UserImplementation("toy", "toy", ("numpy",), requirements={name: requires}, parameters=taken)
    return padded_call(Implementation(entry, "toy"), task)


def outcome_of(
    function: Callable[..., Any], task: Task, requires: Mapping[str, Any], called: Callable[..., Any] | None = None
) -> Outcome:
    """What comes of a task on a function that asserts what it requires."""
    padding = padding_of(task, requires, parameters_of(function).accepted(PADDED_BY))
    if isinstance(padding, Failure):
        return padding
    own = restricted(called or function, requires)
    backend = own_backend(own, task.operation, BACKENDS["numpy"])
    if padding is None:
        return evaluate_on(backend, task)  # type: ignore[arg-type]
    return padding.cut(evaluate_on(backend, padding.task))  # type: ignore[arg-type]


def inputs(*, past: int = 0, gradients: bool = False, dtype: str = "float64", **more: Array) -> dict[str, Array]:
    shapes = {"query": (2, 2, 3, 5), "key": (2, 2, 6, 5), "value": (2, 2, 6, 3)}
    if past:
        shapes |= {"past_key": (2, 2, past, 5), "past_value": (2, 2, past, 3)}
    if gradients:
        shapes["grad_output"] = (2, 2, 3, 3)
    drawn = {name: RNG.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return {**drawn, **more}


def verdicts_of(outcome: Outcome, task: Task) -> dict[str, str]:
    """Judge what came back by the exact answer of the task as the case has it."""
    assert isinstance(outcome, Computed), outcome
    dtype = task.inputs["query"].dtype.name
    truth = find_truth(Problem(task.operation, task.options, task.inputs), dtype, supports_statistics=True)
    shapes = {stage: array.high.shape for stage, array in truth.exact.items()}
    judged = judge_and_diagnose(truth, outcome.stages, shapes, "native" if dtype.endswith(("64", "32")) else "fused")
    judged = with_padding_faults(judged, outcome.padding_faults)
    return {each.stage: each.verdict.value for each in judged.judgements}


def assert_same(padded: Outcome, plain: Outcome) -> None:
    assert isinstance(padded, Computed), padded
    assert isinstance(plain, Computed), plain
    assert not padded.padding_faults
    for stage, array in plain.stages.items():
        np.testing.assert_allclose(padded.stages[stage], array, rtol=1e-12, atol=1e-13, err_msg=stage)


whole = st.integers(-2, 2)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Small whole numbers, and any way to say who may attend to whom."""
    queries, keys, past = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 2]))
    width, value_width, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))

    def array(*shape: int) -> Array:
        count = int(np.prod(shape))
        return np.array(draw(st.lists(whole, min_size=count, max_size=count)), dtype=float).reshape(shape)

    total = keys + past
    given_inputs = {
        "query": array(batch, 1, queries, width),
        "key": array(batch, 1, keys, width),
        "value": array(batch, 1, keys, value_width),
    }
    has_gradients = not past and draw(st.booleans())
    if past:
        given_inputs |= {"past_key": array(batch, 1, past, width), "past_value": array(batch, 1, past, value_width)}
    if has_gradients:
        given_inputs["grad_output"] = array(batch, 1, queries, value_width)
    rows, columns = draw(st.sampled_from([1, queries])), draw(st.sampled_from([1, total]))
    if draw(st.booleans()):
        given_inputs["mask"] = array(1, 1, rows, columns) > -2
    if draw(st.booleans()):
        given_inputs["bias"] = array(1, 1, rows, columns)
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, total), min_size=batch, max_size=batch))
        given_inputs["key_lengths"] = np.array(lengths)
    sides = st.one_of(st.none(), st.integers(0, 3))
    options = draw(st.fixed_dictionaries({}, optional={"scale": st.just(0.3), "softcap": st.just(2.0)}))
    if not past and draw(st.booleans()):
        options["is_causal"] = True
    if (window := (draw(sides), draw(sides))) != (None, None):
        options["window"] = window
    return Task("attention_gradients" if has_gradients else "attention", options, given_inputs)


requirements = st.fixed_dictionaries(
    {},
    optional={
        "width_multiple": st.sampled_from([1, 2, 4]),
        "widths": st.just([4, 16]),
        "value_width": st.just("equal"),
        "query_length_multiple": st.integers(1, 4),
        "key_length_multiple": st.integers(1, 4),
        "lengths": st.just("equal"),
    },
)
FUNCTIONS = {"attention": attention, "attention_gradients": attention_gradients}
NO_KEY, NO_KEY_ADDED = "a query may attend to no key", "one that is added would have no key"


@settings(max_examples=100, deadline=None)
@given(tasks(), requirements)
def test_a_padded_call_is_the_same_call(task: Task, requires: dict[str, Any]) -> None:
    function = FUNCTIONS[task.operation]
    padded, plain = outcome_of(function, task, requires), outcome_of(function, task, {})
    if isinstance(padded, Failure):
        given_inputs = {name: array for name, array in task.inputs.items() if name != "grad_output"}
        if NO_KEY in padded.message:
            assert (attention(**given_inputs, **task.options)["weights"].sum(-1) == 0).any()
        else:
            assert NO_KEY_ADDED in padded.message
            assert task.operation == "attention_gradients"
        return
    assert_same(padded, plain)


def test_what_meets_the_requirements_is_called_as_it_is() -> None:
    task = Task("attention", {}, inputs())
    assert padding_of(task, {}) is None
    assert padding_of(task, {"width_multiple": 1, "max_width": 5}) is None
    softmax = Task("softmax", {}, {"scores": np.zeros((1, 1, 2, 3))})
    assert padding_of(softmax, TILES) is None


def test_what_was_added_is_said_in_words() -> None:
    padding = padding_of(Task("attention", {}, inputs(past=3)), TILES)
    assert isinstance(padding, Padding)
    assert padding.description == "zero columns (D 5 to 8, Dv 3 to 8), queries (Lq 3 to 4), masked keys (T 9 to 12)"
    assert padding.task.inputs["past_key"].shape == (2, 2, 3, 8)
    assert padding.task.inputs["key"].shape == (2, 2, 9, 8)
    np.testing.assert_array_equal(padding.task.inputs["key_lengths"], [9, 9])
    assert padding.task.options == {"scale": 1 / np.sqrt(5)}


@pytest.mark.parametrize(
    ("options", "accepts", "added"),
    [
        ({}, {"mask"}, {"mask"}),
        ({}, {"mask", "key_lengths"}, {"key_lengths"}),
        ({"is_causal": True}, {"scale"}, set()),  # no query reaches the keys that are added
    ],
)
def test_how_keys_are_masked(options: dict[str, Any], accepts: set[str], added: set[str]) -> None:
    padding = padding_of(Task("attention", options, inputs()), {"key_length_multiple": 4}, frozenset(accepts))
    assert isinstance(padding, Padding)
    assert padding.task.inputs.keys() - {"query", "key", "value"} == added


NAN, INF = np.full((2, 2, 6, 5), np.nan), np.full((2, 2, 6, 5), np.inf)


@pytest.mark.parametrize(
    ("operation", "more", "requires", "accepts", "message"),
    [
        ("attention", {}, EIGHT, set(), "takes no scale, which has to be given where the width is padded"),
        ("attention", {}, {"max_width": 4}, PADDED_BY, "requires widths of at most 4; D is 5"),
        ("attention", {}, {"widths": [2, 4]}, PADDED_BY, "requires widths of 2, 4; D is 5"),
        ("attention", {}, {"key_length_multiple": 4}, {"scale"}, "takes neither mask nor key_lengths"),
        ("attention", {"key_lengths": np.array([6, 0])}, TILES, PADDED_BY, "a query may attend to no key"),
        ("attention", {"bias": np.full((1, 1, 3, 6), -np.inf)}, TILES, PADDED_BY, "a query may attend to no key"),
        ("attention", {"bias": np.full((1, 1, 1, 6), -1e9)}, TILES, PADDED_BY, "may be as low as a mask's"),
        ("attention", {"key": np.full((2, 2, 6, 5), 1e5)}, TILES, PADDED_BY, "may be as low as a mask's"),
        ("attention", {"query": NAN[:, :, :3]}, TILES, PADDED_BY, "query holds NaN or infinity"),
        ("attention_gradients", {"key": NAN}, TILES, PADDED_BY, "key holds NaN or infinity"),
        ("attention_gradients", {"value": INF[..., :3]}, TILES, PADDED_BY, "value holds NaN or infinity"),
        ("attention_gradients", {"grad_output": INF[:, :, :3, :3]}, TILES, PADDED_BY, "grad_output holds NaN"),
        ("attention_gradients", {"bias": np.full((1, 1, 1, 6), np.nan)}, {"lengths": "equal"}, PADDED_BY, "bias holds"),
    ],
)  # fmt: skip
def test_what_padding_would_change_is_unsupported_with_the_reason(
    operation: str, more: dict[str, Array], requires: dict[str, Any], accepts: set[str], message: str
) -> None:
    task = Task(operation, {}, inputs(gradients=operation != "attention", **more))
    found = padding_of(task, requires, frozenset(accepts))
    assert isinstance(found, Failure), found
    assert found.verdict == "unsupported"
    assert message in found.message


def test_an_added_query_behind_a_window_would_have_no_key() -> None:
    task = Task("attention_gradients", {"window": (0, 0)}, inputs(gradients=True))
    found = padding_of(task, {"query_length_multiple": 16})
    assert isinstance(found, Failure)
    assert "one that is added would have no key" in found.message
    forward = Task("attention", task.options, inputs())
    assert isinstance(padding_of(forward, {"query_length_multiple": 16}), Padding)


@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_output"])
def test_columns_of_zeros_meet_no_other_number(operation: str, name: str) -> None:
    for number in (np.nan, np.inf, -np.inf):
        given_inputs = inputs(gradients=operation != "attention")
        if name not in given_inputs:
            return
        given_inputs[name][0, 0, 1, 2] = number
        task = Task(operation, {"scale": 0.5}, given_inputs)
        with np.errstate(all="ignore"):
            padded, plain = (outcome_of(FUNCTIONS[operation], task, requires) for requires in (EIGHT, {}))
        assert_same(padded, plain)


@pytest.mark.parametrize("layout", ["strided", "transposed", "broadcast"])
def test_padded_inputs_lie_in_memory_as_the_case_asks(layout: str) -> None:
    given_inputs = {name: np.broadcast_to(array[:, :1], array.shape) for name, array in inputs().items()}
    task = Task("attention", {}, given_inputs, dict.fromkeys(given_inputs, layout))
    seen: dict[str, tuple[int, ...]] = {}

    def looking(query: Array, key: Array, value: Array, **options: Any) -> Any:
        seen.update(query=query.strides, key=key.strides, value=value.strides)
        return attention(query, key, value, **options)

    assert isinstance(outcome_of(attention, task, EIGHT, looking), Computed)
    for name, strides in seen.items():
        expected = {"strided": strides[-1] == 16, "transposed": strides[1] < strides[2], "broadcast": strides[1] == 0}
        assert expected[layout], name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_stay_what_they_are(dtype: str) -> None:
    kind = getattr(ml_dtypes, dtype, dtype)
    task = Task("attention", {}, {name: array.astype(kind) for name, array in inputs().items()})
    padding = padding_of(task, TILES)
    assert isinstance(padding, Padding)
    of_numbers = {name: array.dtype.name for name, array in padding.task.inputs.items() if name != "key_lengths"}
    assert set(of_numbers.values()) == {dtype}
    computed = Computed({"output": np.zeros((2, 2, 4, 8), dtype=kind)})
    assert isinstance(cut := padding.cut(computed), Computed)
    assert cut.stages["output"].shape == (2, 2, 3, 3)
    assert cut.stages["output"].dtype.name == dtype


# Scores and projections


def test_scores_are_padded_and_cut_whatever_their_inputs_hold() -> None:
    given_inputs = {"query": np.full((1, 1, 3, 5), np.nan), "key": np.ones((1, 1, 6, 5))}
    padding = padding_of(Task("scoring", {}, given_inputs), TILES)
    assert isinstance(padding, Padding)
    assert padding.task.options == {"scale": 1 / np.sqrt(5)}
    cut = padding.cut(Computed({"scores": np.arange(32.0).reshape(1, 1, 4, 8)}))
    assert isinstance(cut, Computed)
    np.testing.assert_array_equal(cut.stages["scores"][0, 0], np.arange(32.0).reshape(4, 8)[:3, :6])


def multi_head(width: int, value_width: int, **more: Array) -> Task:
    names = {"query_weight": (7, 2 * width), "key_weight": (7, 2 * width), "value_weight": (7, 2 * value_width)}
    shapes = {"query": (1, 3, 7), "key": (1, 6, 7), "value": (1, 6, 7), **names, "query_bias": (2 * width,)}
    drawn = {name: RNG.normal(size=shape) for name, shape in shapes.items()}
    return Task("multi_head_attention", {"heads": 2}, {**drawn, **more})


def test_heads_side_by_side_are_padded_one_by_one() -> None:
    task = multi_head(5, 3)
    padding = padding_of(task, TILES)
    assert isinstance(padding, Padding)
    weight, was = padding.task.inputs["query_weight"], task.inputs["query_weight"]
    np.testing.assert_array_equal(weight.reshape(7, 2, 8)[..., :5], was.reshape(7, 2, 5))
    assert not weight.reshape(7, 2, 8)[..., 5:].any()
    assert_same(padding.cut(evaluate_on(numpy_backend, padding.task)), evaluate_on(numpy_backend, task))
    found = padding_of(multi_head(5, 3, value=np.full((1, 6, 7), np.inf)), {"width_multiple": 8})
    assert isinstance(found, Failure)
    assert "value holds NaN or infinity" in found.message


# Faults that padding must not hide


def test_a_gradient_of_an_added_key_is_caught() -> None:
    def leaking(query: Array, key: Array, value: Array, grad_output: Array, **options: Any) -> Any:
        found = attention_gradients(query, key, value, grad_output, **options)
        found["grad_key"][..., -1, :] = 1e-3
        return found

    task = Task("attention_gradients", {}, inputs(gradients=True))
    outcome = outcome_of(attention_gradients, task, TILES, leaking)
    assert verdicts_of(outcome, task)["grad_key"] == "numeric"
    assert isinstance(outcome, Computed)
    assert outcome.padding_faults["grad_key"] == "gives 0.001 at [0, 0, 7, 0] of 2x2x8x8, which padding makes 0"


def test_a_stage_in_the_shape_that_it_has_without_padding_is_wrong() -> None:
    task = Task("attention", {}, inputs())
    right = outcome_of(attention, task, {})
    assert isinstance(right, Computed)

    def unpadded(*_: Any, **__: Any) -> Any:
        return right.stages["output"]

    outcome = outcome_of(attention, task, EIGHT, unpadded)
    assert verdicts_of(outcome, task) == {"output": "shape"}
    assert isinstance(outcome, Computed)
    assert outcome.padding_faults == {"output": "has shape 2x2x3x3; the call was padded, expected 2x2x3x8"}


def test_a_failure_says_what_the_call_was_padded_with() -> None:
    def raising(query: Array, key: Array, value: Array, *, scale: Any = None) -> Any:
        raise ValueError("not today")

    outcome = outcome_of(raising, Task("attention", {}, inputs()), EIGHT)
    assert outcome == Failure("error", "ValueError: not today", padded="zero columns (D 5 to 8, Dv 3 to 8)")


# Packed sequences.


def packed_task() -> Task:
    rng = np.random.default_rng(5)
    arrays = {name: rng.normal(size=(1, 2, length, 5)) for name, length in (("query", 7), ("key", 9), ("value", 9))}
    limits = {"cu_seqlens_q": np.array([0, 4, 7]), "cu_seqlens_k": np.array([0, 4, 9])}
    return Task("packed_attention", {"is_causal": True}, {**arrays, **limits})


def toy(*functions: str, requires: Mapping[str, Any] | None = None) -> Implementation:
    requirements = dict.fromkeys(functions, requires or {})
    parameters = dict.fromkeys(functions, Parameters(PADDED_BY))
    entry = UserImplementation("toy", "toy", ("numpy",), requirements=requirements, parameters=parameters)
    return Implementation(entry, "toy")


def test_sequences_become_a_mask_where_there_is_no_function_for_them() -> None:
    task = packed_task()
    assert padded_call(toy("packed_attention"), task) is None
    folded = padded_call(toy("attention"), task)
    assert isinstance(folded, Padding)
    assert folded.description == "a block mask (2 sequences)"
    assert folded.task.operation == "attention"
    assert folded.task.inputs["mask"].sum() == 4 * 5 // 2 + (3 + 4 + 5)
    output = numpy_backend.attention(**folded.task.inputs)["output"]
    assert np.allclose(output, numpy_backend.packed_attention(**task.inputs, is_causal=True)["output"])
    folded = padded_call(toy("attention", requires={"width_multiple": 8}), task)
    assert isinstance(folded, Padding)
    assert folded.description.startswith("a block mask (2 sequences), zero columns (D 5 to 8")
    assert folded.task.inputs["query"].shape[-1] == 8


def test_widths_of_sequences_are_padded_and_lengths_are_not_nor_those_of_latent_vectors() -> None:
    padded = padded_call(toy("packed_attention", requires={"width_multiple": 8}), packed_task())
    assert isinstance(padded, Padding)
    assert padded.task.operation == "packed_attention"
    assert padded.task.inputs["key"].shape == (1, 2, 9, 8)
    inputs = {"query": RNG.normal(size=(1, 2, 3, 4)), "latent": RNG.normal(size=(1, 5, 4))}
    inputs |= {name: RNG.normal(size=(2, 4, 4)) for name in ("key_projection", "value_projection")}
    for task in (packed_task(), Task("latent_attention", {}, inputs)):
        refused = padded_call(toy(task.operation, requires={"key_length_multiple": 8}), task)
        assert isinstance(refused, Failure)
        assert "keep their lengths" in refused.message


def test_added_queries_have_rows_of_rotary_tables_behind_an_offset_too() -> None:
    inputs = {name: RNG.normal(size=(2, 1, length, 4)) for name, length in (("query", 3), ("key", 9), ("value", 9))}
    inputs |= {name: RNG.normal(size=(9, 2)) for name in ("rotary_cos", "rotary_sin")}
    inputs["query_offsets"] = np.array([0, 6])
    padded = padded_call(
        toy("attention", requires={"query_length_multiple": 4}), Task("attention", {"is_causal": True}, inputs)
    )
    assert isinstance(padded, Padding)
    assert padded.task.inputs["rotary_cos"].shape == (6 + 4, 2)
