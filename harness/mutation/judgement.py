"""What is found of variants: stage by stage, by other tolerances too, as a row of each unit, and as names of faults.

Common tolerances are compared with the correctly rounded answer: ``|got - exact| <= absolute + relative |exact|``.
``numpy.allclose`` and ``torch.testing.assert_close`` by default also refuse NaN, and both pass equal infinities.

Each fault of the catalogue says what it is (``Mutant.diagnosis``). What is diagnosed is decided as in any run, from the
cases that it fails: the first of them that are small, so that naming costs no more than finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attncheck.attention.exact_array import Enclosure
from attncheck.backends import EAGER
from attncheck.diagnosis.case_evidence import Evidence
from attncheck.diagnosis.decision import OR, Decision, decide
from attncheck.judging.compare import Tier
from attncheck.judging.exact_stages import Array
from attncheck.judging.judge_stages import StageJudgement
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.spec.dtypes import numpy_dtype
from attncheck.spec.verdicts import Verdict

OF_NUMBERS = frozenset({str(Tier.PROVEN), str(Tier.STATISTICAL), str(Verdict.NONFINITE)})
"""The tiers of wrong numbers: what is wrong in form or raises has no cause that could be named by its numbers."""

REFERENCE_CLASSES: Mapping[str, str] = EAGER
"""The dtypes in which variants are judged, and the reference's rounding model in each.

NumPy adds products of float16 up in float32, and so the numbers of a row. Of bfloat16 it knows nothing: what is judged
there are kernels that compute in float32 between their ends.
"""


class StageResult(NamedTuple):
    """What is found of one stage; empty where the subject raised.

    ``tier`` is what found a fault: proven, statistical, or the verdict where form or NaN did; None where the stage
    agrees. ``own`` is false where the stage only inherits its error from one before it. ``ratio`` is the largest error
    over its bound. Of the ``RULES``, each says whether it rejects the stage.
    """

    stage: str
    tier: str | None
    own: bool = True
    ratio: float | None = None
    assert_close: bool | None = None
    allclose: bool | None = None
    rtol_1e_3: bool | None = None

    @property
    def caught(self) -> bool:
        """Whether the stage is flagged."""
        return self.tier is not None


RULES = ("assert_close", "allclose", "rtol_1e_3")
Findings = tuple[StageResult, ...]
"""What is found of one evaluation, stage by stage; one without a stage where it raised."""


def stage_result(judgement: StageJudgement, got: Array, exact: Enclosure | None, dtype: str) -> StageResult:
    """Return what a judgement and other rules say of a stage, with its exact answer where there is one."""
    measured = [item for item in (judgement.accumulated, judgement.introduced) if item is not None]
    tier = None
    if judgement.verdict is Verdict.NUMERIC:
        tier = min(str(item.tier) for item in measured if item.tier.fails)
    elif judgement.verdict.exit_code:
        tier = str(judgement.verdict)
    ratio = max((float(item.ratio) for item in measured), default=None)
    rejected = {} if exact is None else rejected_by_rules(got, exact.high, dtype)
    return StageResult(judgement.stage, tier, judgement.goes_wrong_here, ratio, **rejected)


class Evaluation(NamedTuple):
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
    def of(cls, subject: str, unit: tuple[str, str, int, bool, bool], findings: Findings) -> Evaluation:
        """Return the row of what was found of a subject on a unit: case, dtype, seed, drawn and complete."""
        wrong, ratios = first_wrong(findings), [each.ratio for each in findings if each.ratio is not None]
        largest = max((ratio for ratio in ratios if not math.isnan(ratio)), default=math.nan)
        rejects = frozenset(rule for rule in ("caught", *RULES) if any(getattr(each, rule) for each in findings))
        if wrong is None:
            return cls(subject, *unit, None, "", math.nan, largest, rejects)
        ratio = math.nan if wrong.ratio is None else wrong.ratio
        return cls(subject, *unit, wrong.stage, str(wrong.tier), ratio, largest, rejects)


def first_wrong(findings: Findings) -> StageResult | None:
    """Return the first flagged stage that is itself at fault, else the first flagged one; None where none is."""
    flagged = [each for each in findings if each.caught]
    return next((each for each in flagged if each.own), flagged[0] if flagged else None)


_ASSERT_CLOSE: Mapping[str, tuple[float, float]] = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float16": (1e-3, 1e-5),
}
"""A relative and an absolute tolerance."""


def rejected_by_rules(got: Array, exact: Array, dtype: str) -> dict[str, bool]:
    """Return which rules find that an array is not the exact answer, rounded once to the working dtype.

    To nearest in float64 and then once more: off by one unit in the last place where the first hits a midpoint.
    """
    if got.shape != exact.shape:
        return dict.fromkeys(RULES, True)
    with np.errstate(over="ignore"):
        wide, truth = got.astype(np.float64), exact.astype(numpy_dtype(dtype)).astype(np.float64)
    same, finite = wide == truth, np.isfinite(wide) & np.isfinite(truth)
    with np.errstate(all="ignore"):
        distance = np.abs(wide - truth)
        return {
            name: not bool(np.all(same | (finite & (distance <= absolute + relative * np.abs(truth)))))
            for name, (relative, absolute) in zip(
                RULES, (_ASSERT_CLOSE[dtype], (1e-5, 1e-8), (1e-3, 1e-7)), strict=True
            )
        }


MAX_WRONGLY = 1 / 500
"""The share of faults that may be named wrongly: a wrong name is worse than none."""
RIGHTLY, WRONGLY, NOT_NAMED = "rightly", "wrongly", "not"


Failed = Mapping[tuple[str, str, int], Evidence]
"""What units say that a subject fails (case, dtype, seed), in their order."""


def names_from(evidence: Mapping[str, Failed]) -> dict[str, tuple[str, ...]]:
    """Return the diagnosis of every subject that fails anywhere."""
    return {name: names_of(decide(cases).values()) for name, cases in evidence.items()}


def names_of(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """Return the names that were diagnosed, each once."""
    return tuple(dict.fromkeys(each.fit.name for each in decisions if each.fit is not None))


def how_named(subject: Subject, names: Sequence[str]) -> str:
    """Say whether the diagnosis of a subject is what it is; a control has none."""
    if not names:
        return NOT_NAMED
    right = set(subject.diagnosis) if isinstance(subject, Mutant) else set()
    return RIGHTLY if all(right & set(name.split(OR)) for name in names) else WRONGLY
