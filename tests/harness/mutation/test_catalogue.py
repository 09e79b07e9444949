from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import attncheck.mutation
from attncheck.backends import numpy_backend
from attncheck.backends.contract import Backend
from attncheck.execution.worker import Task
from attncheck.mutation.catalogue import CONTROLS, EQUIVALENT, MUTANTS, SUBJECTS, TOPICS, variant_named
from attncheck.mutation.kernel import Kernel
from attncheck.mutation.mutant import Control, Equivalent, Mutant, Subject, subjects_of_module
from attncheck.spec import STAGES

Stages = dict[str, NDArray[Any]]
Solve = Callable[[Backend, Task, str], Stages]
Problems = dict[str, Task]

WIDE = ("float64", "float32")
REDUCED = 1e7
"""Units of eps of float32 that products of bfloat16 may be apart from it behind softmax of large logits."""
ROUNDING = 4.0
"""Units of eps of a row's largest number that two orders of the same sums may differ by on these small problems."""

OF_KERNELS = {"sizes", "tiles", "decoding", "pairs", "gradients of pairs", "chosen products", "special values"}
"""Topics of faults that show at the sizes of kernels or with two options: ``test_kernel_faults.py`` has problems."""

each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
each_small_mutant = pytest.mark.parametrize(
    "mutant",
    [mutant for mutant in MUTANTS if mutant.topic not in {*OF_KERNELS, "sixteen bits"}],
    ids=lambda mutant: mutant.name,
)
each_honest = pytest.mark.parametrize("honest", CONTROLS, ids=lambda honest: honest.name)
each_equivalent = pytest.mark.parametrize("equivalent", EQUIVALENT, ids=lambda equivalent: equivalent.name)


def units_apart(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Return the largest difference in units of eps of the row's largest number; inf for another form or NaN."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return np.inf
    with np.errstate(all="ignore"):
        same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
        finite = np.where(np.isfinite(wanted), np.abs(wanted), 0)
        largest = np.maximum(finite.max(axis=-1, keepdims=True, initial=0), np.finfo(wanted.dtype).tiny)
        units = np.where(same, 0, np.abs(got - wanted) / largest / np.finfo(wanted.dtype).eps)
    return float(np.where(np.isnan(units), np.inf, units).max(initial=0))


def _rows(stage: str, stages: Stages) -> NDArray[Any]:
    # Each weight is a row of its own: a large value can make it visible.
    return stages[stage][..., np.newaxis] if stage == "weights" else _whole(stage, stages)


def _whole(stage: str, stages: Stages) -> NDArray[Any]:
    # Where one key has all the weight, the gradient of its row is a difference that cancels: the tensor is one row.
    return stages[stage].reshape(-1) if stage.startswith("grad_") else stages[stage]


def first_wrong(backend: Backend, solve: Solve, task: Task, dtype: str) -> str | None:
    got, wanted = solve(backend, task, dtype), solve(numpy_backend, task, dtype)
    for stage in STAGES:
        if stage in got and units_apart(*(_rows(stage, stages) for stages in (got, wanted))) > ROUNDING:
            return "context" if stage == "output" and task.operation == "attention" else stage
    return None


def test_names_are_unique_and_can_be_written_in_an_identifier() -> None:
    assert len(SUBJECTS) == len(MUTANTS) + len(CONTROLS) + len(EQUIVALENT)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]+", name) for name in SUBJECTS)


def test_at_least_three_hundred_faults_are_counted_and_spread_over_the_topics() -> None:
    topics = Counter(mutant.topic for mutant in MUTANTS)
    wanted = {"scale", "softmax", "precision", "masks", "causal", "blocks", "heads", "projections"}
    wanted |= {"gradients", "caches", "windows", "softcap", "grouped", "lengths", "layouts", "other scores"}
    assert len(MUTANTS) >= 407
    assert wanted <= set(topics)
    assert min(topics[topic] for topic in wanted) >= 5


def test_at_least_fifty_variants_are_honest_and_twenty_of_them_in_all_dtypes() -> None:
    assert len(CONTROLS) >= 50
    assert sum(set(honest.dtypes) == {*WIDE, "bfloat16", "float16"} for honest in CONTROLS) >= 20


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS.keys())
def test_every_variant_says_what_it_user_function_and_where_it_applies(subject: Subject) -> None:
    texts = {
        Mutant: lambda: [subject.defect, subject.topic],  # type: ignore[union-attr]
        Control: lambda: [subject.why],  # type: ignore[union-attr]
        Equivalent: lambda: [subject.defect, subject.proof],  # type: ignore[union-attr]
    }[type(subject)]()
    assert all(text.strip() for text in texts)
    assert set(subject.dtypes) <= {"float64", "float32", "bfloat16", "float16"}
    assert subject.dtypes


def test_every_module_that_registers_subjects_is_a_topic_of_the_catalogue() -> None:
    modules = {
        path.stem
        for path in Path(attncheck.mutation.__file__).parent.glob("*.py")
        if re.search(r"^from attncheck\.mutation\.mutant import .*\b(mutant|control)\b", path.read_text(), re.MULTILINE)
    }
    assert modules == {topic.__name__.rpartition(".")[2] for topic in TOPICS}
    assert all(subjects_of_module(topic.__name__) for topic in TOPICS)


@each_small_mutant
def test_every_mutant_goes_wrong_first_where_it_says(mutant: Mutant, problems: Problems, solve: Solve) -> None:
    for dtype in (dtype for dtype in mutant.dtypes if dtype in WIDE):
        # Rotations and norms stand before the scores, and show faults of all that they take: without them, these show
        # where they are.
        others = {"rotary", "norms"} - {mutant.topic}
        tasks = [task for name, task in problems.items() if not name.startswith(tuple(others))]
        wrong = {first_wrong(mutant.backend, solve, task, dtype) for task in tasks} - {None}
        assert wrong, f"no problem shows it in {dtype}"
        assert min(wrong, key=lambda stage: STAGES.index(str(stage))) == mutant.first_wrong_stage, dtype


@each_mutant
def test_every_mutant_keeps_the_dtype_and_returns_the_references_stages(
    mutant: Mutant, problems: Problems, solve: Solve
) -> None:
    for name, task in problems.items():
        if name == "multi-head" and mutant.name == "value_cut_to_the_key_width":
            continue
        stages = solve(mutant.backend, task, "float32")
        wanted = [stage for stage in solve(numpy_backend, task, "float32") if stage not in mutant.backend.hidden]
        assert list(stages) == wanted, name
        assert {str(stage.dtype) for stage in stages.values()} <= {"float32"}, name


def _left_open(task: Task) -> set[str]:
    """Return the stages that no convention but that of zeros says everything of: ``special_rows.py``."""
    is_open = task.options.get("empty_rows", "zero") != "zero"
    return {"log_sum_exp", "grad_query", "grad_key", "grad_bias"} if is_open else set()


@each_honest
def test_every_honest_variant_agrees_with_the_reference_at_every_stage_that_it_returns(
    honest: Control, problems: Problems, solve: Solve
) -> None:
    for dtype in (dtype for dtype in honest.dtypes if dtype in WIDE):
        for name, task in problems.items():
            got, wanted = solve(honest.backend, task, dtype), solve(numpy_backend, task, dtype)
            assert got or honest.backend.hidden, name
            for stage in got.keys() - _left_open(task):
                assert got[stage].shape == wanted[stage].shape
                apart = units_apart(*(_whole(stage, stages) for stages in (got, wanted)))
                assert apart < (REDUCED if honest.classes else 1e5), (dtype, name, stage)


@pytest.mark.parametrize(
    "honest", [honest for honest in CONTROLS if not isinstance(honest.backend, Kernel)], ids=lambda honest: honest.name
)
def test_every_honest_variant_but_the_reference_computes_something_else(
    honest: Control, problems: Problems, solve: Solve
) -> None:
    dtype = next(dtype for dtype in honest.dtypes if dtype in WIDE)
    differs = any(
        not np.array_equal(got, wanted[stage], equal_nan=True)
        for task in problems.values()
        for wanted in [solve(numpy_backend, task, dtype)]
        for stage, got in solve(honest.backend, task, dtype).items()
    )
    # A BLAS may well multiply and add in one rounding, in this order.
    assert differs == (honest.name != "reference") or honest.name == "fused_multiply_add"


@each_equivalent
def test_every_equivalent_fault_is_the_reference_bit_for_bit(
    equivalent: Equivalent, problems: Problems, solve: Solve
) -> None:
    for dtype in (dtype for dtype in equivalent.dtypes if dtype in WIDE):
        for task in problems.values():
            wanted = solve(numpy_backend, task, dtype)
            for stage, got in solve(equivalent.backend, task, dtype).items():
                np.testing.assert_array_equal(got, wanted[stage], strict=True)


def test_a_variant_is_found_by_its_name() -> None:
    assert variant_named("reference") == SUBJECTS["reference"].backend
    with pytest.raises(KeyError):
        variant_named("no_such_fault")
