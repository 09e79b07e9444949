"""Calls padded to what a function requires: the same numbers, and no fault that is hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.backends import BACKENDS, PADDED_BY, numpy_backend
from attncheck.execution.implementations import Implementation
from attncheck.execution.operations import Parameters, parameters_of
from attncheck.execution.padding import Padding, padded_call
from attncheck.execution.user_call import own_backend
from attncheck.execution.user_code import UserImplementation
from attncheck.execution.worker import Computed, Failure, Outcome, Task, evaluate_on
from attncheck.judging.judge_implementation import judge_and_diagnose, with_padding_faults
from attncheck.judging.truth import find_truth

pytestmark = pytest.mark.usefixtures("forked_workers")

Array = NDArray[Any]
EIGHT = {"width_multiple": 8, "value_width": "equal"}
TILES = {**EIGHT, "query_length_multiple": 4, "key_length_multiple": 4}
RNG = np.random.default_rng(14)


def masked(shape: tuple[int, ...], mask: Any, is_causal: bool, window: Any, key_lengths: Any, past: int = 0) -> Array:
    """Who may attend to whom, (B, H, Lq, T)."""
    positions, keys = np.arange(shape[-2])[:, None] + past, np.arange(shape[-1])
    allowed = np.ones(shape, dtype=bool) if mask is None else np.broadcast_to(mask, shape)
    if is_causal:
        allowed = allowed & (keys <= positions)
    for side, distance in zip(window or (None, None), (positions - keys, keys - positions), strict=True):
        allowed = allowed if side is None else allowed & (distance <= side)
    return allowed if key_lengths is None else allowed & (keys < key_lengths.reshape(-1, 1, 1, 1))


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: Any = None,
    key_lengths: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
) -> dict[str, Array]:
    """Right, and in NumPy."""
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[-2]
        key, value = np.concatenate([past_key, key], -2), np.concatenate([past_value, value], -2)
    key, value = (np.repeat(each, query.shape[1] // key.shape[1], axis=1) for each in (key, value))
    scores = query @ key.mT * np.asarray(query.shape[-1] ** -0.5 if scale is None else scale, query.dtype)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    scores = np.where(masked(scores.shape, mask, is_causal, window, key_lengths, past), scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    exponentials = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = exponentials.sum(-1, keepdims=True)
    weights = exponentials / np.where(total == 0, 1, total)
    log_sum_exp = (np.log(total) + top)[..., 0]
    return {"weights": weights, "log_sum_exp": log_sum_exp, "output": weights @ value}


def attention_gradients(query: Array, key: Array, value: Array, grad_output: Array, **options: Any) -> dict[str, Array]:
    """Right, without groups."""
    weights = attention(query, key, value, **options)["weights"]
    grad_weights = grad_output @ value.mT
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdims=True))
    scale = options.get("scale") or query.shape[-1] ** -0.5
    found = {
        "grad_query": scale * grad_scores @ key,
        "grad_key": scale * grad_scores.mT @ query,
        "grad_value": weights.mT @ grad_output,
    }
    if (bias := options.get("bias")) is not None:
        spread = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        found["grad_bias"] = grad_scores.sum(spread, keepdims=True)
    return found


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
    truth = find_truth(task.operation, task.options, task.inputs, dtype, supports_statistics=True)
    shapes = {stage: array.high.shape for stage, array in truth.exact.items()}
    judged = judge_and_diagnose(truth, outcome.stages, shapes, "native" if dtype.endswith(("64", "32")) else "fused")
    judged = with_padding_faults(judged, outcome.padding_faults)
    return {each.stage: each.verdict.value for each in judged.judgements}


MASK = np.array([True, False, True, True, True, True])
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plainly": ("attention", {}, {}),
    "with a scale": ("attention", {}, {"scale": 0.3}),
    "with a softcap": ("attention", {}, {"softcap": 2.0}),
    "causally": ("attention", {}, {"is_causal": True}),
    "in a window": ("attention", {}, {"window": (2, 1)}),
    "in a window without an end": ("attention", {}, {"window": (1, None)}),
    "with a mask": ("attention", {"mask": np.broadcast_to(MASK, (1, 1, 3, 6))}, {}),
    "with a mask of keys": ("attention", {"mask": MASK.reshape(1, 1, 1, 6)}, {}),
    "with a mask of queries": ("attention", {"mask": np.ones((1, 1, 3, 1), dtype=bool)}, {}),
    "with a bias": ("attention", {"bias": RNG.normal(size=(1, 2, 3, 6))}, {}),
    "with a bias of queries": ("attention", {"bias": RNG.normal(size=(2, 1, 3, 1))}, {}),
    "with lengths": ("attention", {"key_lengths": np.array([6, 2])}, {}),
    "behind a past": ("attention", {"past": 3}, {}),
    "behind a past, in a window": ("attention", {"past": 3, "bias": RNG.normal(size=(1, 1, 3, 9))}, {"window": (4, 1)}),
    "gradients": ("attention_gradients", {"gradients": True}, {}),
    "gradients with a bias": ("attention_gradients", {"gradients": True, "bias": RNG.normal(size=(1, 2, 3, 6))}, {}),
    "gradients, a bias of keys": (
        "attention_gradients",
        {"gradients": True, "bias": RNG.normal(size=(1, 1, 1, 6))},
        {},
    ),
    "gradients, causal": ("attention_gradients", {"gradients": True}, {"is_causal": True}),
}
FUNCTIONS = {"attention": attention, "attention_gradients": attention_gradients}


def task_of(call: str, dtype: str = "float64") -> Task:
    operation, given_inputs, options = CALLS[call]
    return Task(operation, options, inputs(dtype=dtype, **given_inputs))


@pytest.mark.parametrize("call", CALLS)
def test_a_padded_call_agrees_with_the_exact_answer_of_the_case(call: str) -> None:
    for requires in (EIGHT, TILES, {"lengths": "equal"}, {"widths": [4, 16]}):
        task = task_of(call)
        outcome = outcome_of(FUNCTIONS[task.operation], task, requires)
        assert set(verdicts_of(outcome, task).values()) == {"agree"}, requires
        assert isinstance(outcome, Computed)
        assert outcome.padded


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


def test_keys_that_no_query_reaches_need_no_mask() -> None:
    task = Task("attention", {"is_causal": True}, inputs())
    padding = padding_of(task, TILES, frozenset({"scale"}))
    assert isinstance(padding, Padding)
    assert not padding.task.inputs.keys() & {"mask", "key_lengths"}


@pytest.mark.parametrize(("accepts", "given_input"), [({"mask"}, "mask"), ({"mask", "key_lengths"}, "key_lengths")])
def test_keys_are_masked_by_what_the_function_takes(accepts: set[str], given_input: str) -> None:
    padding = padding_of(Task("attention", {}, inputs()), {"key_length_multiple": 4}, frozenset(accepts))
    assert isinstance(padding, Padding)
    assert padding.task.inputs.keys() - {"query", "key", "value"} == {given_input}


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


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_output"])
def test_columns_of_zeros_meet_no_other_number(name: str, number: float) -> None:
    given_inputs = inputs(gradients=True)
    given_inputs[name][0, 0, 1, 2] = number
    for operation in ("attention", "attention_gradients"):
        names = [each for each in given_inputs if each != "grad_output" or operation != "attention"]
        task = Task(operation, {"scale": 0.5}, {each: given_inputs[each] for each in names})
        padded = outcome_of(FUNCTIONS[operation], task, EIGHT)
        plain = outcome_of(FUNCTIONS[operation], task, {})
        assert isinstance(padded, Computed)
        assert isinstance(plain, Computed)
        assert not padded.padding_faults
        for stage, array in plain.stages.items():
            np.testing.assert_allclose(padded.stages[stage], array, rtol=1e-12, atol=1e-15, err_msg=stage)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("layout", ["strided", "transposed", "broadcast"])
def test_a_padded_input_lies_in_memory_as_the_case_asks(name: str, layout: str) -> None:
    given_inputs = inputs()
    given_inputs[name] = np.broadcast_to(given_inputs[name][:, :1], given_inputs[name].shape)
    task = Task("attention", {}, given_inputs, {name: layout})
    seen: dict[str, tuple[int, ...]] = {}

    def looking(query: Array, key: Array, value: Array, **options: Any) -> Any:
        seen.update(query=query.strides, key=key.strides, value=value.strides)
        return attention(query, key, value, **options)

    outcome = outcome_of(attention, task, EIGHT, looking)
    assert set(verdicts_of(outcome, task).values()) == {"agree"}
    strides = seen[name]
    expected = {"strided": strides[-1] == 16, "transposed": strides[1] < strides[2], "broadcast": strides[1] == 0}
    assert expected[layout], strides


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
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
    outcome = padding.cut(evaluate_on(numpy_backend, padding.task))
    plain = evaluate_on(numpy_backend, task)
    assert isinstance(outcome, Computed)
    assert isinstance(plain, Computed)
    assert not outcome.padding_faults
    for stage, array in plain.stages.items():
        np.testing.assert_allclose(outcome.stages[stage], array, rtol=1e-12, atol=1e-14, err_msg=stage)


def test_a_projection_by_zeros_meets_infinity() -> None:
    task = multi_head(5, 3, value=np.full((1, 6, 7), np.inf))
    found = padding_of(task, {"width_multiple": 8})
    assert isinstance(found, Failure)
    assert "value holds NaN or infinity" in found.message


# Faults that padding must not hide


def reading_past_the_last_key(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """Masks wrongly: the weights of masked keys are small, and not 0."""
    found = attention(query, key, value, **options)
    weights = (found["weights"] + 1e-3) / (found["weights"] + 1e-3).sum(-1, keepdims=True)
    return {"weights": weights, "output": weights @ value}


def last_column_of_query(query: Array, key: Array, value: Array, **options: Any) -> Any:
    query = query.copy()
    query[..., -1] = 0
    return attention(query, key, value, **options)


def last_column_before_the_padding(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """The fault is in the last block of 4 columns, of which the case has one."""
    query = query.copy()
    query[..., 4:] = 0
    return attention(query, key, value, **options)


def spills_into_the_next_column(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """Writes the output one column too far where the value ends: only in columns that are added."""
    found = attention(query, key, value, **options)
    found["output"][..., 4] = found["output"][..., 2]
    return found


def scales_by_the_padded_width(query: Array, key: Array, value: Array, **options: Any) -> Any:
    return attention(query, key, value, **{**options, "scale": query.shape[-1] ** -0.5})


def ignores_lengths(query: Array, key: Array, value: Array, **options: Any) -> Any:
    return attention(query, key, value, **{**options, "key_lengths": None, "mask": None})


@pytest.mark.parametrize(
    ("kernel", "stages"),
    [
        (reading_past_the_last_key, {"weights", "output"}),
        (last_column_before_the_padding, {"weights", "output"}),
        (spills_into_the_next_column, {"output"}),
        (scales_by_the_padded_width, {"weights", "output"}),
        (ignores_lengths, {"weights", "output"}),
    ],
)
def test_a_faulty_kernel_is_caught_in_a_padded_case(kernel: Callable[..., Any], stages: set[str]) -> None:
    task = Task("attention", {}, inputs())
    verdicts = verdicts_of(outcome_of(attention, task, TILES, kernel), task)
    assert {stage for stage, verdict in verdicts.items() if verdict != "agree"} >= stages, verdicts


def test_a_fault_of_the_last_column_shows_in_a_case_of_a_width_that_is_taken() -> None:
    shapes = {"query": (1, 1, 3, 8), "key": (1, 1, 6, 8), "value": (1, 1, 6, 8)}
    task = Task("attention", {}, {name: RNG.normal(size=shape) for name, shape in shapes.items()})
    verdicts = verdicts_of(outcome_of(attention, task, EIGHT, last_column_of_query), task)
    assert verdicts["weights"] == verdicts["output"] == "numeric"


def gradient_leaks(query: Array, key: Array, value: Array, grad_output: Array, **options: Any) -> Any:
    found = attention_gradients(query, key, value, grad_output, **options)
    found["grad_key"][..., -1, :] = 1e-3
    return found


def test_a_gradient_of_an_added_key_is_caught() -> None:
    task = Task("attention_gradients", {}, inputs(gradients=True))
    outcome = outcome_of(attention_gradients, task, TILES, gradient_leaks)
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


# In exact arithmetic, bit for bit


def exact_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float,
    mask: Any = None,
    bias: Any = None,
    is_causal: bool = False,
    window: Any = None,
    key_lengths: Any = None,
    past_key: Any = None,
    past_value: Any = None,
) -> dict[str, Array]:
    """Powers of two of whole scores in place of exponentials, so that all is rational, and rounded once in the end."""
    past = 0
    if past_key is not None:
        past = past_key.shape[-2]
        key, value = np.concatenate([past_key, key], -2), np.concatenate([past_value, value], -2)
    query, key, value = (np.vectorize(Fraction, otypes=[object])(each) for each in (query, key, value))
    scores = query @ key.mT * Fraction(scale)
    if bias is not None:
        scores = scores + np.vectorize(Fraction, otypes=[object])(bias)
    allowed = masked(scores.shape, mask, is_causal, window, key_lengths, past)
    powers = np.where(
        allowed, np.vectorize(lambda score: Fraction(2) ** int(score), otypes=[object])(scores), Fraction(0)
    )
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total == 0, Fraction(1), total)
    return {"weights": weights.astype(np.float64), "output": (weights @ value).astype(np.float64)}


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
    if past:
        given_inputs |= {"past_key": array(batch, 1, past, width), "past_value": array(batch, 1, past, value_width)}
    rows, columns = draw(st.sampled_from([1, queries])), draw(st.sampled_from([1, total]))
    if draw(st.booleans()):
        given_inputs["mask"] = array(1, 1, rows, columns) > -2
    if draw(st.booleans()):
        given_inputs["bias"] = array(1, 1, rows, columns)
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, total), min_size=batch, max_size=batch))
        given_inputs["key_lengths"] = np.array(lengths)
    sides = st.one_of(st.none(), st.integers(0, 3))
    options = {"scale": 1.0} | ({"is_causal": True} if not past and draw(st.booleans()) else {})
    window = (draw(sides), draw(sides))
    return Task("attention", options | ({"window": window} if window != (None, None) else {}), given_inputs)


requirements = st.fixed_dictionaries(
    {},
    optional={
        "width_multiple": st.integers(1, 4),
        "value_width": st.just("equal"),
        "query_length_multiple": st.integers(1, 4),
        "key_length_multiple": st.integers(1, 4),
        "lengths": st.just("equal"),
    },
)


@settings(max_examples=150, deadline=None)
@given(tasks(), requirements)
def test_a_padded_call_is_the_same_bit_for_bit_in_exact_arithmetic(task: Task, requires: dict[str, Any]) -> None:
    padded, plain = outcome_of(exact_attention, task, requires), outcome_of(exact_attention, task, {})
    assert isinstance(plain, Computed)
    if isinstance(padded, Failure):
        assert padded.message == "cannot be padded with masked keys: a query may attend to no key", padded
        assert (plain.stages["weights"].sum(-1) == 0).any()
        return
    assert not padded.padding_faults
    for stage, array in plain.stages.items():
        np.testing.assert_array_equal(padded.stages[stage], array, err_msg=stage)


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


def test_a_mask_of_sequences_is_padded_as_its_function_requires() -> None:
    folded = padded_call(toy("attention", requires={"width_multiple": 8}), packed_task())
    assert isinstance(folded, Padding)
    assert folded.description.startswith("a block mask (2 sequences), zero columns (D 5 to 8")
    assert folded.task.inputs["query"].shape[-1] == 8


def test_widths_of_sequences_are_padded_and_lengths_are_not() -> None:
    padded = padded_call(toy("packed_attention", requires={"width_multiple": 8}), packed_task())
    assert isinstance(padded, Padding)
    assert padded.task.operation == "packed_attention"
    assert padded.task.inputs["key"].shape == (1, 2, 9, 8)
    refused = padded_call(toy("packed_attention", requires={"key_length_multiple": 8}), packed_task())
    assert isinstance(refused, Failure)
    assert "keep their lengths" in refused.message


def test_latent_vectors_keep_their_length() -> None:
    inputs = {"query": RNG.normal(size=(1, 2, 3, 4)), "latent": RNG.normal(size=(1, 5, 4))}
    inputs |= {name: RNG.normal(size=(2, 4, 4)) for name in ("key_projection", "value_projection")}
    task = Task("latent_attention", {}, inputs)
    refused = padded_call(toy("latent_attention", requires={"key_length_multiple": 8}), task)
    assert isinstance(refused, Failure)
    assert "latent keep their lengths" in refused.message


def test_added_queries_have_rows_of_rotary_tables_behind_an_offset_too() -> None:
    inputs = {name: RNG.normal(size=(2, 1, length, 4)) for name, length in (("query", 3), ("key", 9), ("value", 9))}
    inputs |= {name: RNG.normal(size=(9, 2)) for name in ("rotary_cos", "rotary_sin")}
    inputs["query_offsets"] = np.array([0, 6])
    padded = padded_call(
        toy("attention", requires={"query_length_multiple": 4}), Task("attention", {"is_causal": True}, inputs)
    )
    assert isinstance(padded, Padding)
    assert padded.task.inputs["rotary_cos"].shape == (6 + 4, 2)
