"""The judgement of variants: of each stage, also by other tolerances, as a row for each unit, and as names of faults.

Common tolerances are compared with the correctly rounded answer: ``|got - exact| <= absolute + relative |exact|``.
``numpy.allclose`` and ``torch.testing.assert_close`` by default also refuse NaN, and both pass equal infinities.

Each fault of the catalogue has its right names (``Mutant.diagnosis``). The diagnosis is decided as in any run, from the
cases that it fails: from the first small ones, so that naming costs no more than finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attncheck.attention.exact_array import Enclosure
from attncheck.backends import EAGER
from attncheck.diagnosis.case_evidence import Evidence
from attncheck.diagnosis.decision import NAME_SEPARATOR, Decision, decide_diagnoses
from attncheck.judging.compare import ErrorTier
from attncheck.judging.exact_stages import Array
from attncheck.judging.judge_stages import StageJudgement
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.spec.dtypes import numpy_dtype
from attncheck.spec.verdicts import Verdict

NUMERIC_TIERS = frozenset({str(ErrorTier.PROVEN), str(ErrorTier.STATISTICAL), str(Verdict.NONFINITE)})
"""The tiers of wrong numbers: a wrong form or an error has no cause that its numbers could name."""

REFERENCE_ROUNDING_MODELS: Mapping[str, str] = EAGER
"""The dtypes in which variants are judged, and the reference's rounding model in each.

NumPy adds products of float16 up in float32, and so the numbers of a row. Of bfloat16 it knows nothing: what is judged
there are kernels that compute in float32 between their ends.
"""


class StageResult(NamedTuple):
    """The judgement of one stage; ``stage`` is empty if the subject raised an error.

    ``tier`` is the bound that a fault exceeds: proven, statistical, or the verdict on form or NaN; None if the stage
    agrees. ``begins_error`` is false if the stage only inherits its error from one before it. ``ratio`` is the largest
    error over its bound. Each of the ``TOLERANCE_RULES`` is true if it rejects the stage.
    """

    stage: str
    tier: str | None
    begins_error: bool = True
    ratio: float | None = None
    assert_close: bool | None = None
    allclose: bool | None = None
    rtol_1e_3: bool | None = None

    @property
    def caught(self) -> bool:
        """True if the stage is flagged."""
        return self.tier is not None


TOLERANCE_RULES = ("assert_close", "allclose", "rtol_1e_3")
StageResults = tuple[StageResult, ...]
"""The judged stages of one evaluation; a single one without a name if it raised an error."""


def judge_stage_result(judgement: StageJudgement, result: Array, exact: Enclosure | None, dtype: str) -> StageResult:
    """Return the result of a stage by its judgement and by other rules, with the exact answer if there is one."""
    measured = [item for item in (judgement.accumulated, judgement.introduced) if item is not None]
    tier = None
    if judgement.verdict is Verdict.NUMERIC:
        tier = min(str(item.tier) for item in measured if item.tier.is_failure)
    elif judgement.verdict.exit_code:
        tier = str(judgement.verdict)
    ratio = max((float(item.ratio) for item in measured), default=None)
    rejected = {} if exact is None else rejected_by_rules(result, exact.high, dtype)
    return StageResult(judgement.stage, tier, judgement.is_at_fault, ratio, **rejected)


class VariantRow(NamedTuple):
    """One subject on one unit, a case in a dtype and a seed (0 is the case's own); one that draws nothing is of all.

    ``complete`` cases are small: an exhaustive run puts them to every fault. ``stage`` is the first flagged one that is
    itself at fault, else the first flagged one, None where none is, with its ``tier`` and ``ratio``. ``largest`` is the
    largest ratio of all. ``rejects`` are the rules that reject any stage, the harness's own (``caught``) among them.
    """

    subject: str
    case: str
    dtype: str
    seed: int
    drawn: bool
    complete: bool
    stage: str | None
    tier: str
    ratio: float
    largest: float
    rejects: frozenset[str]

    @classmethod
    def from_results(cls, subject: str, unit: tuple[str, str, int, bool, bool], results: StageResults) -> VariantRow:
        """Return the row of a subject on a unit: case, dtype, seed, drawn and complete."""
        wrong, ratios = (
            first_wrong_stage(results),
            [finding.ratio for finding in results if finding.ratio is not None],
        )
        largest = max((ratio for ratio in ratios if not math.isnan(ratio)), default=math.nan)
        rejects = frozenset(
            rule for rule in ("caught", *TOLERANCE_RULES) if any(getattr(finding, rule) for finding in results)
        )
        if wrong is None:
            return cls(subject, *unit, None, "", math.nan, largest, rejects)
        ratio = math.nan if wrong.ratio is None else wrong.ratio
        return cls(subject, *unit, wrong.stage, str(wrong.tier), ratio, largest, rejects)


def first_wrong_stage(results: StageResults) -> StageResult | None:
    """Return the first flagged stage that is itself at fault, else the first flagged one; None without any."""
    flagged = [finding for finding in results if finding.caught]
    return next((finding for finding in flagged if finding.begins_error), flagged[0] if flagged else None)


_ASSERT_CLOSE_TOLERANCES: Mapping[str, tuple[float, float]] = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float16": (1e-3, 1e-5),
}
"""A relative and an absolute tolerance."""


def rejected_by_rules(result: Array, exact: Array, dtype: str) -> dict[str, bool]:
    """Return which rules reject an array, compared with the exact answer, rounded once to the working dtype.

    To nearest in float64 and then once more: off by one unit in the last place where the first hits a midpoint.
    """
    if result.shape != exact.shape:
        return dict.fromkeys(TOLERANCE_RULES, True)
    with np.errstate(over="ignore"):
        wide, truth = result.astype(np.float64), exact.astype(numpy_dtype(dtype)).astype(np.float64)
    same, finite = wide == truth, np.isfinite(wide) & np.isfinite(truth)
    with np.errstate(all="ignore"):
        distance = np.abs(wide - truth)
        return {
            name: not bool(np.all(same | (finite & (distance <= absolute + relative * np.abs(truth)))))
            for name, (relative, absolute) in zip(
                TOLERANCE_RULES, (_ASSERT_CLOSE_TOLERANCES[dtype], (1e-5, 1e-8), (1e-3, 1e-7)), strict=True
            )
        }


MAX_WRONGLY_NAMED_SHARE = 1 / 500
"""The share of faults that may be named wrongly: a wrong name is worse than none."""
RIGHTLY, WRONGLY, NOT_NAMED = "rightly", "wrongly", "not"


EvidenceByUnit = Mapping[tuple[str, str, int], Evidence]
"""The evidence of units that a subject fails (case, dtype, seed), in their order."""


def diagnoses_by_subject(evidence: Mapping[str, EvidenceByUnit]) -> dict[str, tuple[str, ...]]:
    """Return the diagnosis of every subject that fails anywhere."""
    return {name: diagnosis_names(decide_diagnoses(cases).values()) for name, cases in evidence.items()}


def diagnosis_names(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """Return the names that were diagnosed, each once."""
    return tuple(dict.fromkeys(decision.match.name for decision in decisions if decision.match is not None))


def judge_diagnosis(subject: Subject, names: Sequence[str]) -> str:
    """Return whether the diagnosis of a subject is right, wrong or missing; a control has no right one."""
    if not names:
        return NOT_NAMED
    right = set(subject.diagnosis) if isinstance(subject, Mutant) else set()
    return RIGHTLY if all(right & set(name.split(NAME_SEPARATOR)) for name in names) else WRONGLY
