"""Functions that cannot be called as the contract says, what they lack, and calls padded to what they require."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bundled import bundled
from evaluating import attention_output, attention_problem, in_worker, own
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tables import tables_beside

from attncheck.backends import BACKENDS, PADDING_KEYWORDS, numpy_backend
from attncheck.backends.numpy_backend import attention, attention_gradients
from attncheck.diagnosis.examine import judge_and_diagnose
from attncheck.execution.implementations import Implementation, UserImplementation, make_user_entry
from attncheck.execution.operations import Parameters, function_parameters
from attncheck.execution.padding import PaddedCall, pad_call, unsupported_before_call
from attncheck.execution.requirements import Requirements
from attncheck.execution.signatures import (
    NameForAdapter,
    adapter_lines,
    explain_unfit_function,
    required_keywords,
    signature_faults,
    unused_parameter_hints,
)
from attncheck.execution.user_call import read_target_declarations, wrap_target
from attncheck.execution.user_code import Target, UnfitError
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on_backend
from attncheck.judging.judge_implementation import mark_faulty_stages
from attncheck.judging.truth import find_truth
from attncheck.planning.plan import Plan
from attncheck.reading.inputs import make_problem_of_case
from attncheck.reading.problem import Problem
from attncheck.spec import OPERATIONS

TABLES = tables_beside(__file__)

pytestmark = pytest.mark.usefixtures("forked_workers")

SOURCE = TABLES["texts_of_signatures"]["source"]


Invoke = Callable[..., tuple[int, str, str]]


def function(parameters: str, name: str = "my_attn") -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "my_kernel"}
    exec(SOURCE.format(name=name, parameters=parameters), names)
    found: Callable[..., Any] = names[name]
    return found


@pytest.mark.parametrize("parameters", TABLES["signatures"])
def test_what_does_not_fit_is_refused_and_its_adapter_computes_attention(parameters: str) -> None:
    kernel = function(parameters)
    assert signature_faults("attention", kernel)
    names: dict[str, Any] = {"my_attn": kernel}
    exec("\n".join(adapter_lines(kernel, NameForAdapter("my_attn"), None)), names)
    assert not signature_faults("attention", names["attention"])
    assert not unused_parameter_hints("attention", names["attention"])
    for options in ({}, {"is_causal": True, "scale": 0.3}):
        problem = attention_problem(**options)
        output = names["attention"](*problem.inputs.values(), **options)
        np.testing.assert_allclose(output, attention_output(problem), rtol=1e-12)


def test_a_function_with_the_inputs_of_another_operation_is_told_how_to_be_called() -> None:
    for parameters, name in (
        ("q, k, v, topk_indices", "sparse_attention"),
        ("query, key, value, gate", "gated_attention"),
    ):
        kernel = function(parameters)
        error = UnfitError("unsupported", "attention", kernel, signature_faults("attention", kernel))
        text = explain_unfit_function(error, Target("kernel.py", "my_attn"), None)
        assert f"If the function computes {name}, name it {name}." in text
        assert "def attention" not in text


def test_what_does_not_fit_or_cannot_be_guessed_and_optional_parameters_that_nobody_gives_are_named() -> None:
    for parameters, expected in TABLES["misfits"]:
        found = signature_faults("attention", function(parameters))
        assert len(found) == len(expected)
        assert all(words in line for words, line in zip(expected, found, strict=True))
    for parameters, expected in TABLES["hints"]:
        found = unused_parameter_hints("attention", function(parameters))
        assert len(found) == len(expected)
        assert all(line.startswith(words) for words, line in zip(expected, found, strict=True))
    lines = adapter_lines(function("qkv, block_size, causal"), NameForAdapter("my_attn"), "torch")
    blanks = "qkv, block_size (not passed yet: query, key and value)"
    assert f"    # FILL IN what stands as ...: {blanks}" in lines
    assert "    return my_attn(qkv=..., block_size=..., causal=is_causal)" in lines
    assert lines[-1] == 'attention.framework = "torch"'


def test_an_adapter_never_drops_an_input(tmp_path: Path, invoke: Invoke) -> None:
    for parameters, call in {
        "query, kv": "query, kv=...",
        "query, mask=None, key=None, value=None": "query, mask=mask, key=key, value=value",
        "query, **inputs": "query, key=key, value=value",
        "query, both, **options": "query, both=...",
    }.items():
        kernel = taking(parameters)
        lines = adapter_lines(kernel, NameForAdapter("my_attn"), None)
        assert f"    return my_attn({call})" in lines
        assert any("not passed yet: key and value" in line for line in lines) == ("..." in call)
    assert adapter_lines(taking("query"), NameForAdapter("my_attn"), None) == []
    (tmp_path / "kernel.py").write_text("def attention(query, *, scale=None):\n    return query\n", encoding="utf-8")
    code, _, error = invoke("check", "attention/e*", "--implementation", "kernel.py:attention")
    assert code == 2
    assert error.endswith(
        "\nThe function has no parameter for key and value: add a parameter for each, or name another function.\n"
    )


def test_keywords_of_the_contract_without_a_default_are_given_what_the_contract_says(tmp_path: Path) -> None:
    found = required_keywords("attention", function("q, k, v, mask, is_causal, *, scale, softcap=2.0"))
    assert found == {"mask": None, "is_causal": False, "scale": None}
    assert required_keywords("multi_head_attention", lambda q, k, v, heads, query_weight, scale: q) == {"scale": None}
    text = SOURCE.format(name="attention", parameters="q, k, v, is_causal, scale")
    text = text.replace("if causal", "if is_causal").replace("sm_scale", "scale or q.shape[-1] ** -0.5")
    (tmp_path / "kernel.py").write_text(text, encoding="utf-8")
    problem = attention_problem(is_causal=True)
    (outcome,) = in_worker(own(f"{tmp_path / 'kernel.py'}:attention"), [problem], tmp_path)
    assert isinstance(outcome, Computed), outcome
    np.testing.assert_allclose(outcome.stages["output"], attention_output(problem), rtol=1e-12)


def test_the_pasted_adapter_runs_under_the_name_that_is_told(tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "my_kernel.py"
    path.write_text(SOURCE.format(name="attention", parameters=TABLES["signatures"][0]), encoding="utf-8")
    arguments = ["check", "attention/e*", "attention/a-causal-row-s*", "--dtype", "float64", "--implementation"]
    code, _, said = invoke(*arguments, "my_kernel.py:attention")
    assert code == 2
    assert "unsupported signature attention(q, k, v, causal, sm_scale); expected attention(query, key" in said
    assert "Mismatch: required parameter causal (probably is_causal)" in said
    (target,) = re.findall(r"and name (\S+) instead:\n\n", said)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n\n" + said.partition("instead:\n\n")[2])
    code, out, said = invoke(*arguments, target)
    assert code == 0, out + said
    assert re.search(r"my_kernel\.attention\S* +\d+ +- ", out), out


# What an implementation lacks for a case, known before anything is drawn, and what it requires of shapes


class Called(Exception):
    """The call came as far as somebody's code."""


def taking(parameters: str) -> Callable[..., Any]:
    """Return a function of these parameters that says so when it is called."""
    names: dict[str, Any] = {"Called": Called}
    exec(f"def function({parameters}):\n    raise Called", names)
    found: Callable[..., Any] = names["function"]
    return found


plain = taking("query, key, value")
usual = taking("query, key, value, *, mask=None, is_causal=False, scale=None")
TARGETS = {
    "plain": plain,
    "usual": usual,
    "without_mask": taking("query, key, value, *, is_causal=False, window=None"),
    "anything": taking("query, key, value, **options"),
    "several": SimpleNamespace(
        attention=usual,
        softmax=taking("scores"),
        attention_gradients=taking("query, key, value, grad_output, *, is_causal=False"),
    ),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.of(bundled().cases, ("float32", "float16"))


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_what_the_call_says(name: str, plan: Plan) -> None:
    target = TARGETS[name]
    entry = make_user_entry(Target("kernels", "attention"), read_target_declarations(target, "attention"), None)
    implementation, backend = Implementation(entry), wrap_target(target, "attention", BACKENDS["numpy"])
    known, left_to_the_call = 0, 0
    for unit in plan.units[:: 5 if name == "usual" else 23]:
        case = plan.case(unit)
        found = unsupported_before_call(implementation, case, unit.dtype)
        problem = make_problem_of_case(case, plan.inputs(unit)).as_call()
        outcome = evaluate_on_backend(backend, problem)  # type: ignore[arg-type] # it has those functions that the target has
        assert isinstance(outcome, Failure)
        if found is not None:
            assert found == outcome, case.id
            known += 1
        elif outcome.verdict == "unsupported" and not OPERATIONS[case.operation].may_run_as_lowered:
            assert not outcome.lacks, case.id
        else:
            left_to_the_call += 1
    assert left_to_the_call
    assert known


def test_the_smallest_widths_and_lengths_that_are_taken() -> None:
    cases: tuple[tuple[dict[str, Any], dict[int, int | None]], ...] = (
        ({}, {1: 1, 7: 7}),
        ({"widths": [64, 16, 128]}, {3: 16, 16: 16, 17: 64, 128: 128, 129: None}),
        ({"width_multiple": 16, "max_width": 40}, {32: 32, 33: None}),
        ({"width_multiple": 32, "widths": (16, 64)}, {3: 64}),
    )
    for declared, widths in cases:
        found = Requirements.from_declaration(declared)
        assert {width: found.smallest_accepted_width(width) for width in widths} == widths
    of_lengths: tuple[tuple[dict[str, Any], tuple[int, int], tuple[int, int]], ...] = (
        ({}, (3, 5), (3, 5)),
        ({"query_length_multiple": 4}, (3, 5), (4, 5)),
        ({"key_length_multiple": 4}, (3, 5), (3, 8)),
        ({"lengths": "equal"}, (3, 5), (5, 5)),
        ({"lengths": "equal", "query_length_multiple": 4, "key_length_multiple": 6}, (13, 5), (24, 24)),
        ({"query_length_multiple": 16, "key_length_multiple": 16}, (0, 0), (0, 0)),  # nothing is a whole tile
    )
    for declared, lengths, taken in of_lengths:
        assert Requirements.from_declaration(declared).smallest_accepted_lengths(*lengths) == taken
    for declared, message in TABLES["requirements"]:
        with pytest.raises(ValueError, match=f"requires: {message}"):
            Requirements.from_declaration(declared)


# Calls padded to what a function requires: the same numbers, and no fault that is hidden

Array = NDArray[Any]
EIGHT = {"width_multiple": 8, "value_width": "equal"}
TILES = {**EIGHT, "query_length_multiple": 4, "key_length_multiple": 4}
RNG = np.random.default_rng(14)
FUNCTIONS = {"attention": attention, "attention_gradients": attention_gradients}


def draw(**shapes: tuple[int, ...]) -> dict[str, Array]:
    return {name: RNG.normal(size=shape) for name, shape in shapes.items()}


def inputs(*, gradients: bool = False, **more: Array) -> dict[str, Array]:
    shapes = {"query": (2, 2, 3, 5), "key": (2, 2, 6, 5), "value": (2, 2, 6, 3)}
    return draw(**shapes, **({"grad_output": (2, 2, 3, 3)} if gradients else {})) | more


def padding_of(
    problem: Problem, requires: Mapping[str, Any], accepts: frozenset[str] = PADDING_KEYWORDS, function: str = ""
) -> PaddedCall | Failure | None:
    """Return how a problem is padded for an implementation that has one function with these requirements."""
    name = function or ("dot_scores" if problem.operation == "scoring" else problem.operation)
    taken = {name: Parameters(frozenset(accepts))}
    entry = UserImplementation("toy", "toy", ("numpy",), requirements={name: requires}, parameters=taken, mode="toy")
    return pad_call(Implementation(entry, "toy"), problem)


def padded(problem: Problem, requires: Mapping[str, Any], **named: Any) -> PaddedCall:
    found = padding_of(problem, requires, **named)
    assert isinstance(found, PaddedCall), found
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


def outcome_of(
    function: Callable[..., Any],
    problem: Problem,
    requires: Mapping[str, Any],
    called: Callable[..., Any] | None = None,
) -> Outcome:
    """Evaluate a problem on a function that asserts what it requires."""
    padding = padding_of(problem, requires, function_parameters(function).accepted_names(PADDING_KEYWORDS))
    if isinstance(padding, Failure):
        return padding
    backend: Any = wrap_target(restricted(called or function, requires), problem.operation, BACKENDS["numpy"])
    return (
        evaluate_on_backend(backend, problem)
        if padding is None
        else padding.strip_padding(evaluate_on_backend(backend, padding.problem))
    )


def assert_same(padded: Outcome, plain: Outcome) -> None:
    assert isinstance(padded, Computed), padded
    assert isinstance(plain, Computed), plain
    assert not padded.faults
    for stage, array in plain.stages.items():
        np.testing.assert_allclose(padded.stages[stage], array, rtol=1e-12, atol=1e-13, err_msg=stage)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small whole numbers, and any way to say who may attend to whom."""
    queries, keys, past = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 2]))
    width, value_width, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))

    def array(*shape: int) -> Array:
        count = int(np.prod(shape))
        numbers = draw(st.lists(st.integers(-2, 2), min_size=count, max_size=count))
        return np.array(numbers, dtype=float).reshape(shape)

    total = keys + past
    arrays = {
        "query": array(batch, 1, queries, width),
        "key": array(batch, 1, keys, width),
        "value": array(batch, 1, keys, value_width),
    }
    has_gradients = not past and draw(st.booleans())
    if past:
        arrays |= {"past_key": array(batch, 1, past, width), "past_value": array(batch, 1, past, value_width)}
    if has_gradients:
        arrays["grad_output"] = array(batch, 1, queries, value_width)
    rows, columns = draw(st.sampled_from([1, queries])), draw(st.sampled_from([1, total]))
    if draw(st.booleans()):
        arrays["mask"] = array(1, 1, rows, columns) > -2
    if draw(st.booleans()):
        arrays["bias"] = array(1, 1, rows, columns)
    if draw(st.booleans()):
        arrays["key_lengths"] = np.array(draw(st.lists(st.integers(0, total), min_size=batch, max_size=batch)))
    options = draw(st.fixed_dictionaries({}, optional={"scale": st.just(0.3), "softcap": st.just(2.0)}))
    if not past and draw(st.booleans()):
        options["is_causal"] = True
    edges = st.one_of(st.none(), st.integers(0, 3))
    if (window := (draw(edges), draw(edges))) != (None, None):
        options["window"] = window
    return Problem("attention_gradients" if has_gradients else "attention", options, arrays)


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
NO_KEY, NO_KEY_ADDED = "a query may attend to no key", "an added query would have no key"


@given(problems(), requirements)
def test_a_padded_call_is_the_same_call(problem: Problem, requires: dict[str, Any]) -> None:
    function = FUNCTIONS[problem.operation]
    outcome, plain = outcome_of(function, problem, requires), outcome_of(function, problem, {})
    if not isinstance(outcome, Failure):
        assert_same(outcome, plain)
    elif NO_KEY in outcome.message:
        forward = {name: array for name, array in problem.inputs.items() if name != "grad_output"}
        assert (attention(**forward, **problem.options)["weights"].sum(-1) == 0).any()
    else:
        assert NO_KEY_ADDED in outcome.message
        assert problem.operation == "attention_gradients"


def test_what_was_added_is_said_in_words_and_nothing_is_where_all_is_met() -> None:
    problem = Problem("attention", {}, inputs())
    assert padding_of(problem, {}) is padding_of(problem, {"width_multiple": 1, "max_width": 5}) is None
    past = draw(past_key=(2, 2, 3, 5), past_value=(2, 2, 3, 3))
    found = padded(Problem("attention", {}, inputs(**past)), TILES)
    assert found.description == "zero columns (D 5 to 8, Dv 3 to 8), queries (Lq 3 to 4), masked keys (T 9 to 12)"
    assert found.problem.inputs["past_key"].shape == (2, 2, 3, 8)
    np.testing.assert_array_equal(found.problem.inputs["key_lengths"], [9, 9])
    assert found.problem.options == {"scale": 1 / np.sqrt(5)}


NAN, INF = np.full((2, 2, 6, 5), np.nan), np.full((2, 2, 6, 5), np.inf)


@pytest.mark.parametrize(
    ("operation", "more", "requires", "accepts", "message"),
    [
        ("attention", {}, EIGHT, set(), "takes no scale, which has to be given where the width is padded"),
        ("attention", {}, {"max_width": 4}, PADDING_KEYWORDS, "requires widths of at most 4; D is 5"),
        ("attention", {}, {"widths": [2, 4]}, PADDING_KEYWORDS, "requires widths of 2, 4; D is 5"),
        ("attention", {}, {"key_length_multiple": 4}, {"scale"}, "takes neither mask nor key_lengths"),
        ("attention", {"bias": np.full((1, 1, 3, 6), -np.inf)}, TILES, PADDING_KEYWORDS,
         "a query may attend to no key"),
        ("attention", {"bias": np.full((1, 1, 1, 6), -1e9)}, TILES, PADDING_KEYWORDS, "as low as those of masked keys"),
        ("attention", {"key": np.full((2, 2, 6, 5), 1e5)}, TILES, PADDING_KEYWORDS, "as low as those of masked keys"),
        ("attention", {"query": NAN[:, :, :3]}, TILES, PADDING_KEYWORDS, "query has NaN or infinity"),
        ("attention_gradients", {"key": NAN}, TILES, PADDING_KEYWORDS, "key has NaN or infinity"),
        ("attention_gradients", {"value": INF[..., :3]}, TILES, PADDING_KEYWORDS, "value has NaN or infinity"),
        ("attention_gradients", {"grad_output": INF[:, :, :3, :3]}, TILES, PADDING_KEYWORDS, "grad_output has NaN"),
        ("attention_gradients", {"bias": np.full((1, 1, 1, 6), np.nan)}, {"lengths": "equal"}, PADDING_KEYWORDS,
         "bias has"),
    ],
)  # fmt: skip
def test_what_padding_would_change_is_unsupported_with_the_reason(
    operation: str, more: dict[str, Array], requires: dict[str, Any], accepts: set[str], message: str
) -> None:
    problem = Problem(operation, {}, inputs(gradients=operation != "attention", **more))
    found = padding_of(problem, requires, frozenset(accepts))
    assert isinstance(found, Failure), found
    assert (found.verdict, message in found.message) == ("unsupported", True), found


@pytest.mark.parametrize(("options", "key"), [({"stored_as": "int4"}, (2, 2, 6, 4)), ({}, (2, 2, 6, 8))])
def test_codes_in_blocks_and_two_in_a_byte_are_asked_as_they_are_or_not_at_all(
    options: dict[str, Any], key: tuple[int, ...]
) -> None:
    arrays = draw(query=(2, 2, 3, 8), key=key, value=(2, 2, 6, 3), key_scale=(1, 1, 1))
    blocks = {} if options else draw(key_block_scale=(2, 2, 6, 2))
    problem = Problem("quantized_attention", options, {**arrays, **blocks})
    assert padding_of(problem, {"width_multiple": 1, "max_width": 8}) is None
    found = padding_of(problem, {"key_length_multiple": 4})
    assert isinstance(found, Failure)
    assert (found.verdict, "keep their widths and lengths" in found.message) == ("unsupported", True)


def test_columns_of_zeros_meet_no_other_number_and_numbers_keep_their_dtype() -> None:
    for operation, function in FUNCTIONS.items():
        for name in inputs(gradients=operation != "attention"):
            for number in (np.nan, np.inf, -np.inf):
                arrays = inputs(gradients=operation != "attention")
                arrays[name][0, 0, 1, 2] = number
                problem = Problem(operation, {"scale": 0.5}, arrays)
                with np.errstate(all="ignore"):
                    assert_same(outcome_of(function, problem, EIGHT), outcome_of(function, problem, {}))
    kind = ml_dtypes.bfloat16
    found = padded(Problem("attention", {}, {name: array.astype(kind) for name, array in inputs().items()}), TILES)
    assert {array.dtype for name, array in found.problem.inputs.items() if name != "key_lengths"} == {np.dtype(kind)}
    cut = found.strip_padding(Computed({"output": np.zeros((2, 2, 4, 8), dtype=kind)}))
    assert isinstance(cut, Computed)
    assert (cut.stages["output"].shape, cut.stages["output"].dtype) == ((2, 2, 3, 3), kind)


# Scores, projections, sequences and rotary tables


def test_scores_are_padded_and_cut_whatever_their_inputs_hold() -> None:
    arrays = {"query": np.full((1, 1, 3, 5), np.nan), "key": np.ones((1, 1, 6, 5))}
    found = padded(Problem("scoring", {}, arrays), TILES)
    assert found.problem.options == {"scale": 1 / np.sqrt(5)}
    cut = found.strip_padding(Computed({"scores": np.arange(32.0).reshape(1, 1, 4, 8)}))
    assert isinstance(cut, Computed)
    np.testing.assert_array_equal(cut.stages["scores"][0, 0], np.arange(32.0).reshape(4, 8)[:3, :6])


def test_heads_side_by_side_are_padded_one_by_one() -> None:
    arrays = draw(query=(1, 3, 7), key=(1, 6, 7), value=(1, 6, 7), query_bias=(10,))
    arrays |= draw(query_weight=(7, 10), key_weight=(7, 10), value_weight=(7, 6))
    problem = Problem("multi_head_attention", {"heads": 2}, arrays)
    found = padded(problem, TILES)
    weight = found.problem.inputs["query_weight"].reshape(7, 2, 8)
    np.testing.assert_array_equal(weight[..., :5], arrays["query_weight"].reshape(7, 2, 5))
    assert not weight[..., 5:].any()
    assert_same(
        found.strip_padding(evaluate_on_backend(numpy_backend, found.problem)),
        evaluate_on_backend(numpy_backend, problem),
    )


def test_sequences_become_a_mask_where_there_is_no_function_for_them() -> None:
    arrays = draw(query=(1, 2, 7, 5), key=(1, 2, 9, 5), value=(1, 2, 9, 5))
    limits = {"cu_seqlens_q": np.array([0, 4, 7]), "cu_seqlens_k": np.array([0, 4, 9])}
    problem = Problem("packed_attention", {"is_causal": True}, {**arrays, **limits})
    assert padding_of(problem, {}) is None
    folded = padded(problem, {}, function="attention")
    assert (folded.problem.operation, folded.description) == ("attention", "a block mask (2 sequences)")
    assert folded.problem.inputs["mask"].sum() == 4 * 5 // 2 + (3 + 4 + 5)
    output = numpy_backend.attention(**folded.problem.inputs)["output"]
    assert np.allclose(output, numpy_backend.packed_attention(**problem.inputs, is_causal=True)["output"])
    folded = padded(problem, {"width_multiple": 8}, function="attention")
    assert folded.description.startswith("a block mask (2 sequences), zero columns (D 5 to 8")
    found = padded(problem, {"width_multiple": 8})
    assert (found.problem.operation, found.problem.inputs["key"].shape) == ("packed_attention", (1, 2, 9, 8))
    latents = draw(query=(1, 2, 3, 4), latent=(1, 5, 4), key_projection=(2, 4, 4), value_projection=(2, 4, 4))
    for fixed in (problem, Problem("latent_attention", {}, latents)):
        refused = padding_of(fixed, {"key_length_multiple": 8})
        assert isinstance(refused, Failure)
        assert "keep their lengths" in refused.message


def test_added_queries_have_rows_of_rotary_tables_behind_an_offset_too() -> None:
    arrays = draw(query=(2, 1, 3, 4), key=(2, 1, 9, 4), value=(2, 1, 9, 4), rotary_cos=(9, 2), rotary_sin=(9, 2))
    problem = Problem("attention", {"is_causal": True}, {**arrays, "query_offsets": np.array([0, 6])})
    assert padded(problem, {"query_length_multiple": 4}).problem.inputs["rotary_cos"].shape == (6 + 4, 2)


# Faults that padding must not hide


def verdicts_of(outcome: Computed, problem: Problem) -> dict[str, str]:
    """Judge what came back by the exact answer of the problem as the case has it."""
    truth = find_truth(replace(problem, dtype="float64", supports_statistics=True))
    shapes = {stage: array.high.shape for stage, array in truth.exact.items()}
    judged = judge_and_diagnose(truth, outcome.stages, shapes, "native")
    judgements = mark_faulty_stages(judged, outcome.faults).judgements
    return {judgement.stage: judgement.verdict.value for judgement in judgements}


def test_what_padding_must_leave_is_looked_at() -> None:
    """A gradient of a key that was added, and a stage in the shape that it has without padding."""

    def leaking(query: Array, key: Array, value: Array, grad_output: Array, **options: Any) -> Any:
        found = attention_gradients(query, key, value, grad_output, **options)
        found["grad_key"][..., -1, :] = 1e-3
        return found

    def unpadded(*_: Any, **__: Any) -> Any:
        return np.zeros((2, 2, 3, 3))

    for called, requires, stage, verdict, message in (
        (leaking, TILES, "grad_key", "numeric", "gives 0.001 at [0, 0, 7, 0] of 2x2x8x8, which padding makes 0"),
        (unpadded, EIGHT, "output", "shape", "has shape 2x2x3x3; the call was padded, expected 2x2x3x8"),
    ):
        operation = "attention" if called is unpadded else "attention_gradients"
        problem = Problem(operation, {}, inputs(gradients=called is leaking))
        outcome = outcome_of(FUNCTIONS[operation], problem, requires, called)
        assert isinstance(outcome, Computed)
        assert verdicts_of(outcome, problem)[stage] == verdict
        assert outcome.faults[stage] == message


def test_a_failure_says_what_the_call_was_padded_with() -> None:
    def raising(query: Array, key: Array, value: Array, *, scale: Any = None) -> Any:
        raise ValueError("not today")

    outcome = outcome_of(raising, Problem("attention", {}, inputs()), EIGHT)
    assert outcome == Failure("error", "ValueError: not today", padded="zero columns (D 5 to 8, Dv 3 to 8)")
