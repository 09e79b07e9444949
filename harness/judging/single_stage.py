"""Fast judgement of the most frequent result: one correct stage of a case whose exact answer is in the store.

An edited kernel returns the same stage of the same cases again, with numbers that differ only in the last bits. Its
verdict needs the exact values of that stage and their bounds, and nothing else of the truth of the case. The store has
a separate entry for them, so attncheck reads no other stage and computes no bound again.

If the result is wrong, or has elements without an exact answer, attncheck judges it with the whole truth. So a verdict
is the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.errors import Bound
from attncheck.attention.exact_array import Enclosure
from attncheck.attention.sampling import RowIndices, count_queries, select_stage_rows
from attncheck.common.store import Store, StoreKey, UnreadableEntry
from attncheck.judging.exact_stages import Array
from attncheck.judging.judge_stages import StageJudgement, convert_to_whole_indices, judge_finite
from attncheck.judging.remembered import arrays_from_bytes, arrays_to_bytes, make_store_key
from attncheck.judging.stage_bounds import StageReference
from attncheck.judging.truth import Truth
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs
from attncheck.spec.verdicts import Verdict


@dataclass(frozen=True, eq=False)
class StoredReference:
    """The exact values and bounds of one stage: against the exact answer, and in its step from the inputs.

    ``judged_rows`` are the indices of the judged query rows, out of ``query_count``; None if all rows are judged.
    """

    reference: StageReference
    step: StageReference | None
    judged_rows: RowIndices | None
    query_count: int

    @classmethod
    def from_truth(cls, truth: Truth, stage: str, array: Array, rounding_model: str) -> StoredReference | None:
        """Return the reference of a returned stage; None if it depends on the returned values."""
        undefined, judged = truth.undefined, truth.judged_problem
        if truth.no_answer_reason or stage not in truth.exact:
            return None
        if undefined.rows is not None or undefined.elements is not None:
            return None
        if truth.bounds.has_wider_stage({stage: array}):  # a wider log_sum_exp has different bounds
            return None
        rows = select_stage_rows(stage, array, judged.judged_rows)
        reference = truth.stage_reference(stage, rounding_model, rows)
        step = truth.step_reference(stage, {stage: rows}, rounding_model)
        if reference.unjudged_elements.any() or (step is not None and step.exact is not reference.exact):
            return None  # the store keeps one enclosure for both
        return cls(reference, step, judged.judged_rows, count_queries(judged.problem_without_layout.inputs))

    def judge(self, stage: str, array: Array) -> StageJudgement | None:
        """Return the judgement of a stage of the right shape if it is right, else None."""
        rows = select_stage_rows(stage, array, self.judged_rows)
        reference = self.reference
        has_expected_form = rows.shape == reference.exact.shape and str(rows.dtype) == reference.dtype
        if not has_expected_form or reference.flag_wrong_nonfinite(rows).any():
            return None
        judgement = judge_finite(stage, rows, reference, self.step, is_whole=self.judged_rows is None)
        if judgement.verdict is not Verdict.AGREE:
            return None
        return convert_to_whole_indices(judgement, self.judged_rows, self.query_count)


@dataclass(frozen=True, eq=False)
class SingleStage:
    """The only stage that the only implementation returned for a case in a dtype, judged by a rounding model."""

    case: Case
    dtype: str
    inputs: RoundedInputs
    stage: str
    array: Array
    rounding_model: str

    @property
    def _key(self) -> StoreKey:
        judged = self.stage, str(self.array.dtype), self.rounding_model
        return make_store_key("stage", self.case.digest, self.dtype, self.inputs, *judged)

    def judge_if_right(self, store: Store) -> StageJudgement | None:
        """Return the judgement if the store has the stage's exact values, and the stage is right; else None."""
        data = store.get(self._key)
        try:
            known = None if data is None else reference_from_bytes(data, str(self.array.dtype))
        except UnreadableEntry:
            store.count_as_damaged()
            return None
        return None if known is None else known.judge(self.stage, self.array)

    def store_reference(self, store: Store, truth: Truth) -> None:
        """Put what further results of the stage need into the store."""
        if (known := StoredReference.from_truth(truth, self.stage, self.array, self.rounding_model)) is not None:
            store.put(self._key, reference_to_bytes(known))


def reference_to_bytes(known: StoredReference) -> bytes:
    """Serialise a reference; the bound of the step is stored only if it differs."""
    reference, step = known.reference, known.step
    exact, bound = reference.exact, reference.bound
    flags = [reference.supports_statistics, step is not None, step is not None and step.supports_statistics]
    arrays = {"high": exact.high, "low": exact.low, "radius": exact.radius}
    arrays |= {"max_error": bound.max_error, "sigma": bound.sigma}
    arrays |= {"flags": np.array(flags), "query_count": np.array(known.query_count)}
    if known.judged_rows is not None:
        arrays["judged_rows"] = np.asarray(known.judged_rows)
    if step is not None and step.bound is not bound:
        arrays |= {"step_max_error": step.bound.max_error, "step_sigma": step.bound.sigma}
    return arrays_to_bytes(arrays)


def reference_from_bytes(data: bytes, dtype: str) -> StoredReference:
    """Read what ``reference_to_bytes`` wrote of a stage in a dtype. Raises ``UnreadableEntry``."""
    arrays = arrays_from_bytes(data)
    try:
        exact = Enclosure(arrays["high"], arrays["low"], arrays["radius"])
        bound = step_bound = Bound(arrays["max_error"], arrays["sigma"])
        if "step_sigma" in arrays:
            step_bound = Bound(arrays["step_max_error"], arrays["step_sigma"])
        supports_statistics, has_step, step_supports_statistics = map(bool, arrays["flags"])
        query_count = int(arrays["query_count"])
    except (KeyError, ValueError, TypeError) as error:
        raise UnreadableEntry from error
    step = StageReference(exact, step_bound, dtype, step_supports_statistics) if has_step else None
    reference = StageReference(exact, bound, dtype, supports_statistics)
    return StoredReference(reference, step, arrays.get("judged_rows"), query_count)
