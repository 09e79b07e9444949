"""A right stage is judged by what an earlier run has left in the store, and every verdict is as without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck.attention.errors import Bound
from attncheck.attention.exact_array import Enclosure
from attncheck.backends import numpy_backend
from attncheck.common.store import NO_STORE, Store, UnreadableEntry
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.worker import Computed, evaluate_on_backend
from attncheck.judging import judge, truth
from attncheck.judging.single_stage import StoredReference, reference_from_bytes, reference_to_bytes
from attncheck.judging.stage_bounds import StageReference
from attncheck.judging.truth import Truth
from attncheck.judging.units import Judge
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_inputs, make_problem_of_case
from attncheck.reading.selection import select_cases
from attncheck.results.format import Row
from attncheck.spec.verdicts import Verdict

[NUMPY] = select_implementations(["numpy"], []).implementations
Change = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]

CHANGES: Mapping[str, Change] = {
    "nothing": lambda output: output,
    "last bits": lambda output: np.nextafter(output, 0),
    "a sign": lambda output: -output,
    "NaN": lambda output: np.where(np.arange(output.size).reshape(output.shape) == 0, np.nan, output),
    "another dtype": lambda output: output.astype(np.float16),
    "another shape": lambda output: output[..., :-1],
}


@dataclass(frozen=True)
class Evaluation:
    """One case in one dtype, of which only the output is returned."""

    case: Case
    dtype: str

    def judge_changed(self, change: Change, store: Store) -> list[str]:
        """Return the rows as texts, in which NaN equals NaN."""
        return [str([str(value) for value in vars(row).values()]) for row in self.judge(change, store)]

    def judge(self, change: Change, store: Store) -> Sequence[Row]:
        inputs = make_inputs(self.case, self.dtype)
        outcome = evaluate_on_backend(numpy_backend, make_problem_of_case(self.case, inputs).as_call())
        assert isinstance(outcome, Computed)
        output = Computed({"output": change(outcome.stages["output"])})
        return Judge((NUMPY,), store=store).judge_unit(self.case, self.dtype, inputs, {NUMPY.name: output}).rows


@pytest.fixture(scope="module")
def evaluations() -> Sequence[Evaluation]:
    cases = select_cases(["attention", "edges", "empty_rows", "grouped_heads", "large"]).cases
    chosen = [case for case in cases if case.operation == "attention" and "float32" in case.dtypes]
    return [Evaluation(case, "float32") for case in chosen[::2]]


def test_every_verdict_is_as_without_what_the_store_has_of_a_stage(
    evaluations: Sequence[Evaluation], tmp_path: Path
) -> None:
    store = Store(tmp_path)
    for name, change in CHANGES.items():
        different = [
            evaluation.case.id
            for evaluation in evaluations
            if evaluation.judge_changed(change, store) != evaluation.judge_changed(change, NO_STORE)
        ]
        assert not different, name


def test_a_right_stage_with_other_last_bits_needs_no_truth(
    evaluations: Sequence[Evaluation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, judged = Store(tmp_path), [evaluation for evaluation in evaluations if not evaluation.case.expected]
    for evaluation in judged:
        evaluation.judge(CHANGES["nothing"], store)
    truths: list[str] = []

    def truth_of_case(case: Case, *others: Any) -> Truth:
        truths.append(case.id)
        return truth.truth_of_case(case, *others)

    monkeypatch.setattr(judge, "truth_of_case", truth_of_case)
    rows = [row for evaluation in judged for row in evaluation.judge(CHANGES["last bits"], store)]
    assert {row.verdict for row in rows} == {Verdict.AGREE}
    assert any(row.judged_rows for row in rows)
    no_exact_answer = [case for case in truths if case.startswith("empty_rows/") or "without-a-key" in case]
    assert truths == no_exact_answer
    assert len(truths) < len(judged) / 2


def test_a_stage_is_read_as_it_was_written_and_a_damaged_one_is_refused() -> None:
    exact = Enclosure(*(np.full((1, 2), size) for size in (1.0, 2.0**-60, 2.0**-90)))
    reference = StageReference(exact, Bound(np.full((1, 2), 1e-7), np.full((1, 2), 1e-9)), "float32", True)
    for step in (None, reference, StageReference(exact, Bound(exact.low, exact.radius), "float32", False)):
        for rows in (None, np.array([3])):
            known = reference_from_bytes(reference_to_bytes(StoredReference(reference, step, rows, 7)), "float32")
            assert (known.query_count, known.reference.supports_statistics) == (7, True)
            assert known.judged_rows is None if rows is None else known.judged_rows == rows
            assert (known.step is None) == (step is None)
            if known.step is not None and step is not None:
                assert known.step.exact is known.reference.exact
                assert known.step.supports_statistics == step.supports_statistics
                assert (known.step.bound.sigma == step.bound.sigma).all()
    with pytest.raises(UnreadableEntry):
        reference_from_bytes(b"[]\nx", "float32")
