"""The catalogue of faults, the variants that have them, and the tensor cores that some of them emulate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attncheck.mutation
from attncheck.backends import numpy_backend
from attncheck.backends.contract import Window
from attncheck.diagnosis.case_evidence import Match
from attncheck.diagnosis.decision import Decision
from attncheck.diagnosis.readings import READING_CATALOGUE
from attncheck.execution.operations import run_operation
from attncheck.execution.worker import Computed, Outcome, evaluate_on_backend
from attncheck.mutation.catalogue import (
    CONTROLS,
    EQUIVALENTS,
    FAULTS_IN_THE_WILD,
    HAND_WRITTEN_FAULTS,
    MUTANTS,
    SUBJECTS_BY_NAME,
    TOPIC_MODULES,
    arguments_of_operation,
    faults_of_argument,
    faults_of_option,
    variant_named,
)
from attncheck.mutation.judgement import NOT_NAMED, RIGHTLY, WRONGLY, diagnosis_names, judge_diagnosis
from attncheck.mutation.kernel import (
    Array,
    MixedPrecisionKernel,
    round_to_bfloat16,
    round_to_tf32,
    truncate_to_bfloat16,
    truncate_to_tf32,
)
from attncheck.mutation.mutant import WIDE_DTYPES, BackendVariant, Control, StepsPerCall, subjects_of_module
from attncheck.mutation.narrow import rounded_product, tensor_core_product, two_part_product
from attncheck.mutation.unit import count_case_scores, run_reference
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_inputs, make_problem_of_case
from attncheck.reading.problem import Problem
from attncheck.reading.selection import select_cases
from attncheck.spec import OPERATIONS, OptionSpec
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.dtypes import numpy_dtype
from attncheck.spec.inputs import optional_input

ALL_DTYPES = {*WIDE_DTYPES, "bfloat16", "float16"}
LOG_SUM_EXP_IN_FLOAT32 = {
    "fused_kernel_with_statistics_in_float32",
    "fused_kernel_in_base_two_with_statistics_in_float32",
    "log_sum_exp_widened_too_late",
    "log_sum_exp_of_exponentials_in_16_bits",
}


def test_names_are_unique_and_can_be_written_in_an_identifier_and_diagnoses_are_those_of_readings() -> None:
    assert len(SUBJECTS_BY_NAME) == len(MUTANTS) + len(CONTROLS) + len(EQUIVALENTS)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]+", name) for name in SUBJECTS_BY_NAME)
    assert variant_named("reference") == SUBJECTS_BY_NAME["reference"].backend
    with pytest.raises(KeyError):
        variant_named("no_such_fault")
    names = {reading.name for readings in READING_CATALOGUE.values() for reading in readings}
    assert {name for mutant in MUTANTS for name in mutant.diagnosis} <= names


def test_every_variant_says_what_it_does_and_where_it_applies() -> None:
    texts = {each.name: (each.description,) for each in CONTROLS}
    texts |= {each.name: (each.description, each.topic) for each in MUTANTS}
    texts |= {each.name: (each.description, each.proof) for each in EQUIVALENTS}
    silent = [name for name, said in texts.items() if not all(text.strip() for text in said)]
    nowhere = [name for name, each in SUBJECTS_BY_NAME.items() if not each.dtypes or not set(each.dtypes) <= ALL_DTYPES]
    assert (silent, nowhere) == ([], [])


def test_every_module_that_registers_subjects_is_a_topic_of_the_catalogue() -> None:
    modules = {
        path.stem
        for path in Path(attncheck.mutation.__file__).parent.glob("*.py")
        if re.search(
            r"^from attncheck\.mutation\.mutant import [^)]*?\b(register_fault|register_control)\b",
            path.read_text(),
            re.MULTILINE,
        )
    }
    assert modules - {"catalogue"} == {topic.__name__.rpartition(".")[2] for topic in TOPIC_MODULES}
    assert all(subjects_of_module(topic.__name__) for topic in TOPIC_MODULES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_with_ends_in_16_bits_return_16_bits(dtype: str) -> None:
    rng = np.random.default_rng(20240711)
    shapes = {"query": (1, 1, 2, 64), "key": (1, 1, 3, 64), "value": (1, 1, 3, 64)}
    inputs = {name: rng.normal(size=shape).astype(numpy_dtype(dtype)) for name, shape in shapes.items()}
    learned = inputs | {"mask": rng.random((1, 1, 2, 3)) < 0.8, "grad_output": inputs["query"]}
    tasks = Problem("attention", {}, inputs), Problem("attention_gradients", {"softcap": 1.3}, learned)
    kernels = [each for each in (*MUTANTS, *CONTROLS) if isinstance(each.backend, MixedPrecisionKernel)]
    kernels = [each for each in kernels if not isinstance(each, Control) or "float64" in each.dtypes]
    offenders = []
    for subject in kernels:
        for task in tasks:
            with np.errstate(all="ignore"):
                stages = run_operation(subject.backend, task.operation, task.inputs, task.options)
            found = {name: str(stage.dtype) for name, stage in stages.items()}
            of_statistics = {found.pop("log_sum_exp")} - {dtype} if "log_sum_exp" in found else set()
            is_wide = subject.name in LOG_SUM_EXP_IN_FLOAT32 and "output" in found
            if not set(found.values()) <= {dtype} or of_statistics != ({"float32"} if is_wide else set()):
                offenders.append((subject.name, task.operation, found, of_statistics))
    assert not offenders


def test_what_is_told_of_a_fault_is_right_wrong_or_nothing() -> None:
    missing, honest = SUBJECTS_BY_NAME["scale_missing"], CONTROLS[0]
    assert judge_diagnosis(missing, ()) == NOT_NAMED
    assert judge_diagnosis(missing, ("scale-one",)) == RIGHTLY
    assert judge_diagnosis(missing, ("scale-twice or scale-one",)) == RIGHTLY
    assert judge_diagnosis(missing, ("scale-one", "bias-twice")) == WRONGLY
    assert judge_diagnosis(honest, ("scale-one",)) == WRONGLY
    fit = Match("scale-one", "", "scores", "numeric", "1")
    assert diagnosis_names([Decision(fit), Decision(), Decision(fit)]) == ("scale-one",)


def test_a_new_option_has_its_faults_by_its_row() -> None:
    temperature = OptionSpec("A number that divides the logits.", must_be_positive=True, type=float)
    assert [fault.name for fault in faults_of_option(temperature)] == ["left_out", "taken_twice"]
    edges = [fault.change((2, None)) for fault in faults_of_option(OptionSpec("A second window.", type=Window))]
    assert edges == [None, (3, None), (1, None), (2, None), (2, None), (None, 2)]


def test_an_operation_that_takes_one_more_argument_has_faults_of_it() -> None:
    attention = OPERATIONS["attention"]
    scales = optional_input("H", neutral_value=1)
    wider = replace(attention, inputs={**attention.inputs, "head_scales": scales})
    found = {fault.name for fault in faults_of_argument(wider, "head_scales", scales)}
    assert found >= {"left_out", "neutral", "taken_twice", "negated", "in_bfloat16", "of_the_next_head"}
    assert "head_scales" not in dict(arguments_of_operation(wider)), "the NumPy backend does not take it yet"


def test_every_operation_has_faults_and_none_has_two_of_a_name() -> None:
    generated = [fault for fault in MUTANTS if fault.operation_and_argument is not None]
    assert {fault.operation_and_argument[0] for fault in generated if fault.operation_and_argument} == set(OPERATIONS)
    met = [fault for fault in generated if fault in HAND_WRITTEN_FAULTS]
    assert {fault.name for fault in met} == FAULTS_IN_THE_WILD.keys()
    assert (
        len({fault.name for fault in MUTANTS}) == len(MUTANTS) == len(HAND_WRITTEN_FAULTS) + len(generated) - len(met)
    )


RNG = np.random.default_rng(20170612)
QUERY, KEY, VALUE = (RNG.normal(size=(2, 4, 3, 5)), *(RNG.normal(size=(2, 2, 6, 5)) for _ in range(2)))
GRAD_OUTPUT = RNG.normal(size=(2, 4, 3, 5))


_MOST_SCORES, _MOST_NUMBERS = 200, 2000
"""Of a task and of its inputs: every fault is evaluated on each task, and NumPy multiplies float16 without BLAS."""


@pytest.fixture(scope="session")
def tasks() -> list[Problem]:
    """Return a small task in float64 of every operation, with as many inputs and options as a small case has."""
    chosen: dict[str, tuple[int, int, Case]] = {}
    for case in select_cases([]).cases:
        numbers = sum(map(math.prod, case.input_shapes.values()))
        if "float64" in case.dtypes and 0 < numbers <= _MOST_NUMBERS and count_case_scores(case) <= _MOST_SCORES:
            candidate = -len({*case.options, *case.inputs}), numbers, case
            chosen[case.operation] = min(candidate, chosen.get(case.operation, candidate), key=itemgetter(0, 1))
    cases = [case for _, (_, _, case) in sorted(chosen.items())]
    return [make_problem_of_case(case, make_inputs(case, "float64")).as_call() for case in cases]


def doubled(query: Array, key: Array) -> Array:
    return 2 * numpy_backend._dot(query, key)


def test_a_step_is_replaced_wherever_it_is_used_or_in_one_function_alone() -> None:
    everywhere, in_one = BackendVariant({"_dot": doubled}), BackendVariant({"dot_scores._dot": doubled})
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
            BackendVariant({step: doubled})
    with pytest.raises(KeyError, match="attention of numpy_backend uses no _dot"):
        BackendVariant({"attention": StepsPerCall(lambda call: {"_dot": doubled})}).attention(QUERY, KEY, VALUE)


# What is told of a fault from a step alone: that it has the bits of the reference


def _bits(outcome: Outcome) -> Any:
    if not isinstance(outcome, Computed):
        return outcome
    return [(name, str(each.dtype), each.shape, each.tobytes()) for name, each in outcome.stages.items()]


@pytest.mark.parametrize(("dtype", "first"), [("float64", 0), ("float16", 1)])
def test_whoever_is_said_to_have_the_references_bits_has_them(dtype: str, first: int, tasks: Sequence[Problem]) -> None:
    """Every second operation in each dtype."""
    decided = same = 0
    for problem in tasks[first::2]:
        stored = numpy_dtype(dtype)
        with np.errstate(over="ignore"):
            arrays = {
                name: each.astype(stored) if each.dtype.kind == "f" else each for name, each in problem.inputs.items()
            }
        asked = Problem(problem.operation, problem.options, arrays, problem.memory_layout)
        run = run_reference(asked)
        right = _bits(evaluate_on_backend(numpy_backend, asked))
        assert _bits(run.outcome) == _bits(evaluate_on_backend(SUBJECTS_BY_NAME["reference"].backend, asked)) == right
        for name, subject in SUBJECTS_BY_NAME.items():
            is_same = _bits(evaluate_on_backend(subject.backend, asked)) == right
            is_decided = run.has_same_result_as(subject.backend)
            assert is_same or not is_decided, name
            decided, same = decided + is_decided, same + is_same
    assert decided > same / 2, "most of what is the same is told from a step alone"


def test_a_step_that_writes_into_what_it_is_handed_spoils_nothing() -> None:
    task = Problem("attention", {"is_causal": True}, {"query": QUERY, "key": KEY, "value": VALUE})
    run = run_reference(task)
    before = _bits(run.outcome)

    def in_place(scores: Any, sinks: Any, empty_rows: Any) -> Any:
        scores[...] = 0
        return numpy_backend._softmax_with_sinks(scores, sinks, empty_rows)

    variant = BackendVariant({"_softmax_with_sinks": in_place})
    assert not run.has_same_result_as(variant)
    assert _bits(run.outcome) == before
    assert isinstance(evaluate_on_backend(variant, task), Computed)


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


Product = Callable[[Array, Array], Array]


PRODUCTS: dict[str, tuple[Product, ...]] = {
    "tf32_products": (
        rounded_product(round_to_tf32),
        rounded_product(truncate_to_tf32, tensor_core_product(4)),
        rounded_product(truncate_to_tf32, tensor_core_product(8)),
    ),
    "bf16_products": (
        rounded_product(round_to_bfloat16),
        rounded_product(truncate_to_bfloat16, tensor_core_product(4)),
    ),
    "bf16x3_products": (
        two_part_product(round_to_bfloat16),
        two_part_product(truncate_to_bfloat16, tensor_core_product(4)),
    ),
}


def matrices(rng: np.random.Generator, inner: int) -> tuple[Array, Array]:
    left, right = rng.standard_normal((2, 5, inner)), rng.standard_normal((2, inner, 7))
    return left.astype(np.float32), right.astype(np.float32)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_rounded_factors_is_within_its_class(name: str) -> None:
    rounding = rounding_model_named(name, "float32")
    for inner, seed in product((1, 3, 4, 5, 9, 64, 300), range(10)):
        left, right = matrices(np.random.default_rng(seed), inner)
        exact = left.astype(np.longdouble) @ right.astype(np.longdouble)
        size = np.abs(left).astype(np.longdouble) @ np.abs(right).astype(np.longdouble)
        allowed = (inner * rounding.accumulate_unit + rounding.product_error) * (1 + 8 * rounding.coarsest_unit)
        for multiply in PRODUCTS[name]:
            assert (np.abs(multiply(left, right) - exact) <= allowed * size).all(), inner


def test_the_next_coarser_product_is_outside_of_it() -> None:
    left, right = matrices(np.random.default_rng(0), 4)
    exact, size = left.astype(np.float64) @ right.astype(np.float64), np.abs(left) @ np.abs(right)
    order = ("bf16_products", "tf32_products", "bf16x3_products")
    for coarse, fine in pairwise(order):
        rounding = rounding_model_named(fine, "float32")
        allowed = 4 * rounding.accumulate_unit + rounding.product_error
        assert (np.abs(PRODUCTS[coarse][0](left, right) - exact) > allowed * size).any(), (coarse, fine)


@pytest.mark.parametrize("terms", [4, 8])
def test_a_tensor_core_cuts_sums_off_towards_zero(terms: int) -> None:
    rng = np.random.default_rng(terms)
    left, right = (round_to_tf32(np.abs(array)) for array in matrices(rng, 64))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    found = tensor_core_product(terms)(left, right)
    assert found.dtype == np.float32
    assert (found <= exact).all()
    assert (found < exact).mean() > 0.9


def test_a_tensor_core_aligns_what_it_adds_to_the_largest_and_small_integers_are_exact() -> None:
    """2^24 and 1 do not meet in 24 bits: each 1 is lost beside 2^24, though four of them would not be."""
    left, right = np.array([[2.0**24, 1, 1, 1]], np.float32), np.ones((4, 1), np.float32)
    assert tensor_core_product(4)(left, right).item() == 2.0**24
    assert tensor_core_product(4)(left[:, ::-1], right).item() == 2.0**24
    assert (left[:, 1:] @ right[1:]).item() == 3
    rng = np.random.default_rng(3)
    left, right = rng.integers(-8, 9, (6, 33)).astype(np.float32), rng.integers(-8, 9, (33, 5)).astype(np.float32)
    for products in PRODUCTS.values():
        for multiply in products:
            np.testing.assert_array_equal(multiply(left, right), left @ right)
