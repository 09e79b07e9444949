"""Variants are the backend's own code, with some of its steps replaced; a step alone may tell that nothing changes."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Backend
from attncheck.dtypes import numpy_dtype
from attncheck.execution.operations import Task, apply_layout, run_operation
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Computed, Outcome, evaluate_on
from attncheck.mutation.catalogue import SUBJECTS, variant_named
from attncheck.mutation.kernel import Kernel
from attncheck.mutation.mutant import PerCall, Variant
from attncheck.mutation.unit import count_scores, run_reference
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases

Array = NDArray[Any]

RNG = np.random.default_rng(20170612)
QUERY, KEY, VALUE = (RNG.normal(size=(2, 4, 3, 5)), *(RNG.normal(size=(2, 2, 6, 5)) for _ in range(2)))
GRAD_OUTPUT = RNG.normal(size=(2, 4, 3, 5))


_SMALL, _OF_AN_OPERATION = 200, 6


@pytest.fixture(scope="session")
def tasks() -> dict[str, Task]:
    """Return small tasks in float64 by their cases: of every operation, each combination of what is given once."""
    found: dict[str, Task] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    counts: Counter[str] = Counter()
    for case in select_cases([]).cases:
        given = case.operation, frozenset({*case.options, *case.inputs})
        is_wanted = "float64" in case.dtypes and given not in seen and counts[case.operation] < _OF_AN_OPERATION
        if is_wanted and count_scores(case) <= _SMALL:
            seen.add(given)
            counts[case.operation] += 1
            found[case.id] = task_of(case, convert_inputs(case, make_exact_inputs(case), "float64"))
    return found


def doubled(query: Array, key: Array) -> Array:
    return 2 * numpy_backend._dot(query, key)


@pytest.mark.parametrize("variant", [Variant(), Kernel(lambda store: {})])
def test_a_variant_has_the_contracts_functions_with_their_parameters(variant: Variant) -> None:
    contract = {name: member for name, member in vars(Backend).items() if inspect.isfunction(member) and name[0] != "_"}
    assert len(contract) == 25
    for name, member in contract.items():
        assert _parameters(getattr(variant, name)) == _parameters(member)[1:], name


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(item.name, item.kind, item.default) for item in inspect.signature(function).parameters.values()]


def test_a_variant_with_nothing_replaced_is_the_backend_bit_for_bit(tasks: dict[str, Task]) -> None:
    for name, task in tasks.items():
        with np.errstate(all="ignore"):
            given = task.operation, apply_layout(task.inputs, task.memory_layout), task.options
            got, wanted = (run_operation(each, *given) for each in (Variant(), numpy_backend))
        assert list(got) == list(wanted), name
        for stage in wanted:
            np.testing.assert_array_equal(got[stage], wanted[stage], err_msg=f"{name}, {stage}", strict=True)


def test_a_step_is_replaced_wherever_it_is_used_or_in_one_function_alone() -> None:
    everywhere, in_one = Variant({"_dot": doubled}), Variant({"dot_scores._dot": doubled})
    right = numpy_backend.cosine_scores(QUERY, QUERY)["scores"]
    assert np.array_equal(everywhere.cosine_scores(QUERY, QUERY)["scores"], 2 * right)
    assert np.array_equal(in_one.cosine_scores(QUERY, QUERY)["scores"], right)
    raw = numpy_backend.attention(QUERY, KEY, VALUE)["raw_scores"]
    assert np.array_equal(in_one.attention(QUERY, KEY, VALUE)["raw_scores"], 2 * raw)
    gradients = (each.attention_gradients(QUERY, KEY, VALUE, GRAD_OUTPUT) for each in (numpy_backend, everywhere))
    assert not np.allclose(*(each["grad_query"] for each in gradients))


def test_a_step_that_would_change_nothing_is_refused() -> None:
    for step, message in (
        ("_no_such_step", "no function _no_such_step"),
        ("no_such_function._dot", "no function no_such_function"),
        ("mask_scores._dot", "mask_scores of numpy_backend uses no _dot"),
    ):
        with pytest.raises(KeyError, match=message):
            Variant({step: doubled})
    with pytest.raises(KeyError, match="attention of numpy_backend uses no _dot"):
        Variant({"attention": PerCall(lambda call: {"_dot": doubled})}).attention(QUERY, KEY, VALUE)


# What is told of a fault from a step alone: that it has the bits of the reference


@pytest.fixture
def task() -> Task:
    rng = np.random.default_rng(11)
    inputs = {name: rng.normal(size=(2, 2, 4, 3)) for name in ("query", "key", "value", "grad_output")}
    return Task("attention_gradients", {"is_causal": True}, inputs)


def _bits(outcome: Outcome) -> Any:
    if not isinstance(outcome, Computed):
        return outcome
    return [(name, str(each.dtype), each.shape, each.tobytes()) for name, each in outcome.stages.items()]


@pytest.mark.parametrize(("dtype", "first"), [("float64", 0), ("float16", 3)])
def test_whoever_is_said_to_have_the_references_bits_has_them(
    dtype: str,
    first: int,
    tasks: Mapping[str, Task],
) -> None:
    decided = same = 0
    for problem in list(tasks.values())[first::12]:
        stored = numpy_dtype(dtype)
        with np.errstate(over="ignore"):
            arrays = {
                name: each.astype(stored) if each.dtype.kind == "f" else each for name, each in problem.inputs.items()
            }
        asked = Task(problem.operation, problem.options, arrays, problem.memory_layout)
        run = run_reference(asked)
        right = _bits(evaluate_on(SUBJECTS["reference"].backend, asked))
        assert _bits(run.outcome) == right
        for name, subject in SUBJECTS.items():
            is_same = _bits(evaluate_on(subject.backend, asked)) == right
            is_decided = run.has_the_bits_of(subject.backend)
            assert is_same or not is_decided, name
            decided, same = decided + is_decided, same + is_same
    assert decided > same / 2, "most of what is the same is told from a step alone"


def test_a_step_that_writes_into_what_it_is_handed_spoils_nothing(task: Task) -> None:
    run = run_reference(task)
    before = _bits(run.outcome)

    def in_place(scores: Any, sinks: Any, empty_rows: Any) -> Any:
        scores[...] = 0
        return numpy_backend._softmax_with_sinks(scores, sinks, empty_rows)

    variant = Variant({"_softmax_with_sinks": in_place})
    assert not run.has_the_bits_of(variant)
    assert _bits(run.outcome) == before
    assert isinstance(evaluate_on(variant, task), Computed)


def test_scales_that_are_multiplied_elsewhere_are_rounded_elsewhere() -> None:
    """With scales that are no round numbers, as no small case has them."""
    rng = np.random.default_rng(1603)
    codes = [(30 * rng.normal(size=(2, 2, 9, 6))).astype(ml_dtypes.float8_e4m3fn) for _ in range(2)]
    scales = {f"{name}_scale": rng.uniform(0.02, 0.2, (1, 2, 1)) for name in ("key", "value")}  # one for a head
    query = rng.normal(size=(2, 4, 5, 6))
    right = numpy_backend.quantized_attention(query, *codes, **scales)["output"]
    moved = variant_named("scales_multiplied_into_queries_and_output").quantized_attention(query, *codes, **scales)
    np.testing.assert_allclose(moved["output"], right, rtol=1e-12)
    assert not np.array_equal(moved["output"], right)
