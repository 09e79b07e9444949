"""What is found of variants: verdicts by the exact answer and the derived bounds, other tolerances, names, and counts.

Many implementations are compared with one truth, one after the other. Most faults change a single step: all stages
before it are the reference's, and so are the steps between them. No exact step is worked out twice, and nearly all
variants of a case return the bits of another one: what is found of them is one object.

Common tolerances are compared with the correctly rounded answer: ``|got - exact| <= absolute + relative |exact|``.
``numpy.allclose`` and ``torch.testing.assert_close`` by default also refuse NaN, and both pass equal infinities.

Each fault of the catalogue says what it is (``Mutant.diagnosis``). What is diagnosed is decided as in any run, from the
cases that it fails: the first of them that are small, so that naming costs no more than finding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from attncheck.attention.bounds import Bound
from attncheck.attention.enclosure import Enclosure
from attncheck.backends import EAGER
from attncheck.dtypes import numpy_dtype
from attncheck.judging.compare import Tier
from attncheck.judging.diagnosis import OR, Decision, Evidence, decide, evidence_of
from attncheck.judging.judge_implementation import DIAGNOSABLE, judge_and_diagnose
from attncheck.judging.judge_stages import (
    StageJudgement,
    failing_elements,
    in_order,
    judge_stage,
    sound_stages,
)
from attncheck.judging.truth import Array, Stages, Truth, digest, find_truth, is_measured
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.spec import Shape, stage_position
from attncheck.verdicts import Verdict

OF_NUMBERS = frozenset({str(Tier.PROVEN), str(Tier.STATISTICAL), str(Verdict.NONFINITE)})
"""The tiers of wrong numbers: what is wrong in form or raises has no cause that could be named by its numbers."""


class StageResult(NamedTuple):
    """What is found of one stage: the last columns of an evaluation (``EVALUATION_COLUMNS``)."""

    stage: str
    tier: str | None
    caught: bool
    own: bool
    ratio: float | None
    assert_close: bool | None
    allclose: bool | None
    rtol_1e_3: bool | None


Findings = tuple[StageResult, ...]
"""What is found of one evaluation, stage by stage; one without a stage where it raised."""


def is_caught(findings: Findings) -> bool:
    """Whether any stage is flagged."""
    return any(each.caught for each in findings)


def has_wrong_numbers(findings: Findings) -> bool:
    """Whether any stage is flagged for its numbers."""
    return any(each.tier in OF_NUMBERS for each in findings)


@dataclass(frozen=True)
class UnitFindings:
    """What is found of every variant that one case was put to in one dtype; faults that it does not reach are left out.

    ``complete``, ``drawn`` and the rest are the first columns of an evaluation.
    """

    case: str
    dtype: str
    seed: int
    drawn: bool
    complete: bool
    found: tuple[tuple[str, Findings], ...]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield evaluations, one per subject and stage."""
        unit = self.case, self.dtype, self.seed, self.drawn, self.complete
        for subject, findings in self.found:
            for each in findings:
                yield (subject, *unit, *each)


REFERENCE_CLASSES: Mapping[str, str] = EAGER
"""The dtypes in which variants are judged, and the reference's rounding model in each.

NumPy adds products of float16 up in float32, and so the numbers of a row. Of bfloat16 it knows nothing: what is judged
there are kernels that compute in float32 between their ends.
"""


@dataclass(frozen=True)
class StageFinding:
    """What is said of one stage.

    ``tier`` is None where it agrees, else what found the fault: proven, statistical, or the verdict where form or NaN
    did. ``own`` is false where the stage only inherits its error from one before it. ``ratio`` is the largest error
    over its bound. ``exact`` is the exact answer, rounded once to the working dtype.
    """

    tier: str | None
    own: bool = True
    ratio: float | None = None
    exact: Array | None = None


JudgeStages: TypeAlias = Callable[[Case, str, Inputs, Stages, str | None], Mapping[str, StageFinding]]
"""Judges what one implementation returned for a case in a dtype, stage by stage, by the class that it claims if any."""


class ExactJudge:
    """Judges by the oracle and the bounds of a rounding model; the oracle runs once per case, seed and dtype.

    An implementation that claims no class is judged by ``rounding_model``, or else by the reference's own.
    """

    def __init__(self, rounding_model: str | None = None) -> None:
        self._rounding_model = rounding_model
        self._inputs: Inputs | None = None
        self._truth: RememberingTruth | None = None

    def evidence(
        self, case: Case, dtype: str, inputs: Inputs, stages: Stages, claimed: str | None = None
    ) -> Evidence | None:
        """Return what a case says of the fault of an implementation; None where it does not fail it by its numbers."""
        truth, rounding_model = self._truth_of(case, dtype, inputs), self.model_of(dtype, claimed)
        judged = judge_and_diagnose(truth, stages, case.stage_shapes, rounding_model)
        failing = [each.stage for each in judged.judgements if each.verdict in DIAGNOSABLE]
        return evidence_of(judged.findings, failing[0], case.operation) if failing else None

    def __call__(
        self, case: Case, dtype: str, inputs: Inputs, stages: Stages, claimed: str | None = None
    ) -> dict[str, StageFinding]:
        """Judge every stage."""
        truth = self._truth_of(case, dtype, inputs).for_returned(stages)
        assert isinstance(truth, RememberingTruth)
        judgements = truth.judgements(stages, case.stage_shapes, self.model_of(dtype, claimed))
        return {
            item.stage: StageFinding(_tier(item), item.goes_wrong_here, _ratio(item), truth.rounded(item.stage))
            for item in judgements
        }

    def _truth_of(self, case: Case, dtype: str, inputs: Inputs) -> RememberingTruth:
        if inputs is not self._inputs or self._truth is None:  # the subjects of one unit come one after the other
            self._inputs = inputs
            truth = find_truth(
                case.problem(inputs.arrays), dtype, supports_statistics=case.supports_statistics, whole=True
            )
            self._truth = RememberingTruth.of(truth)
        return self._truth

    def model_of(self, dtype: str, claimed: str | None) -> str:
        """Return the rounding model by which an implementation is judged that claims one, or none."""
        return claimed or self._rounding_model or REFERENCE_CLASSES[dtype]


def _tier(judgement: StageJudgement) -> str | None:
    if not judgement.verdict.exit_code:
        return None
    if judgement.verdict is not Verdict.NUMERIC:
        return str(judgement.verdict)
    measured = (judgement.accumulated, judgement.introduced)
    return min(str(item.tier) for item in measured if item is not None and item.tier.fails)


def _ratio(judgement: StageJudgement) -> float | None:
    measured = (judgement.accumulated, judgement.introduced)
    return max((item.ratio for item in measured if item is not None), default=None)


Step: TypeAlias = tuple[Enclosure, Bound] | None
_BESIDE = frozenset({"log_sum_exp"})
"""Stages that no other follows from."""


@dataclass(frozen=True, eq=False)
class RememberingTruth(Truth):
    """The same truth, its exact steps kept by what they start from.

    Behind a step that is itself proved wrong nothing more is to be learnt: its followers have no exact step.
    """

    _steps: dict[Any, Step] = field(default_factory=dict)
    _wrong: dict[Any, bool] = field(default_factory=dict)
    _judged: dict[Any, StageJudgement] = field(default_factory=dict)
    _rounded: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, truth: Truth) -> RememberingTruth:
        """Return a truth that remembers."""
        return cls(**{item.name: getattr(truth, item.name) for item in fields(Truth)})

    def _with_wide_statistics(self) -> Truth:
        return RememberingTruth.of(super()._with_wide_statistics())  # which remembers nothing of this one's

    def rounded(self, stage: str) -> Array | None:
        """Return a stage's exact answer, rounded once to the working dtype; None where there is none.

        To nearest in float64 and then once more: off by one unit in the last place where the first hits a midpoint.
        """
        if stage not in self.exact:
            return None
        if stage not in self._rounded:
            with np.errstate(over="ignore"):
                self._rounded[stage] = self.exact[stage].high.astype(numpy_dtype(self.dtype))
        return self._rounded[stage]

    def judgements(self, stages: Stages, shapes: Mapping[str, Shape], rounding_model: str) -> list[StageJudgement]:
        """Judge every stage, in the order of computation; what begins with the same stages, bit by bit, once."""
        sound = sound_stages(self, stages, shapes)
        found: list[StageJudgement] = []
        past: tuple[Any, ...] = (rounding_model,)
        for stage in in_order(stages, self.options):
            array = stages[stage]
            past = (*past, (stage, array.dtype, array.shape, digest(array)))
            if past not in self._judged:
                self._judged[past] = judge_stage(self, stage, array, sound, shapes, rounding_model)
            found.append(self._judged[past])
        return found

    def introduced(self, stage: str, returned: Stages, rounding_model: str) -> Step:
        """Return a stage's exact value from the stages before it, and its bound; None behind a step that is wrong."""
        order = in_order(returned, self.options)
        before = [name for name in order[: order.index(stage)] if name not in _BESIDE]
        keys = {name: (name, rounding_model, digest(returned[name])) for name in before}
        past: tuple[Any, ...] = (rounding_model,)  # the first stage follows from no other, but its bound is of a class
        for name in before:
            if self._is_wrong(name, returned, past, keys[name]):
                return None
            past = (*past, keys[name])
        return self._step_behind(past, stage, returned, rounding_model)

    def _step_behind(self, past: tuple[Any, ...], stage: str, returned: Stages, rounding_model: str) -> Step:
        if (stage, past) not in self._steps:
            self._steps[stage, past] = super().introduced(stage, returned, rounding_model)
        return self._steps[stage, past]

    def _is_wrong(self, stage: str, returned: Stages, past: tuple[Any, ...], key: Any) -> bool:
        """Whether a stage is proved wrong by its own step, or by the places where it is not finite."""
        if (past, key) not in self._wrong:
            self._wrong[past, key] = self._finds_wrong(stage, returned, past, key[1])
        return self._wrong[past, key]

    def _finds_wrong(self, stage: str, returned: Stages, past: tuple[Any, ...], rounding_model: str) -> bool:
        if stage not in self.exact:
            return False
        array = returned[stage]
        step = self._step_behind(past, stage, returned, rounding_model)
        if step is None:
            finite = np.isfinite(array.astype(np.float64)) & np.isfinite(self.exact[stage].high)
            return bool((failing_elements(self, stage, array, rounding_model) & ~finite).any())
        exact, bound = step
        with np.errstate(invalid="ignore"):  # infinity against infinity is out of range
            beyond = is_measured(exact, bound, self.dtype) & (exact.error_of(array) - exact.radius > bound.max_error)
        return bool(beyond.any())


@dataclass(frozen=True)
class Tolerance:
    """A relative and an absolute tolerance."""

    relative: float
    absolute: float


_ASSERT_CLOSE = {
    "float64": Tolerance(1e-7, 1e-7),
    "float32": Tolerance(1.3e-6, 1e-5),
    "bfloat16": Tolerance(1.6e-2, 1e-5),
    "float16": Tolerance(1e-3, 1e-5),
}

RULES = ("assert_close", "allclose", "rtol_1e_3")


def tolerances(dtype: str) -> Mapping[str, Tolerance]:
    """Return each rule's tolerance in a dtype."""
    return {"assert_close": _ASSERT_CLOSE[dtype], "allclose": Tolerance(1e-5, 1e-8), "rtol_1e_3": Tolerance(1e-3, 1e-7)}


def rejected_by_rules(got: Array, exact: Array, dtype: str) -> dict[str, bool]:
    """Return which rules find that an array is not the exact answer."""
    if got.shape != exact.shape:
        return dict.fromkeys(RULES, True)
    wide, truth = got.astype(np.float64), exact.astype(np.float64)
    same, finite = wide == truth, np.isfinite(wide) & np.isfinite(truth)
    with np.errstate(all="ignore"):
        distance = np.abs(wide - truth)
        return {
            name: not bool(np.all(same | (finite & (distance <= rule.absolute + rule.relative * np.abs(truth)))))
            for name, rule in tolerances(dtype).items()
        }


MAX_SCORES = 1 << 11
"""Elements of the score matrix of a case by which a fault is named."""
MAX_WRONGLY = 1 / 500
"""The share of faults that may be named wrongly: a wrong name is worse than none."""
RIGHTLY, WRONGLY, NOT_NAMED = "rightly", "wrongly", "not"

Unit = tuple[str, str, int]
"""case, dtype, seed"""


@dataclass
class Naming:
    """The evidence about every subject, by the cases that it fails, in their order."""

    evidence: dict[str, dict[Unit, Evidence]] = field(default_factory=dict)

    def add(self, subject: str, unit: Unit, evidence: Evidence) -> None:
        """Take note of what a failing case says."""
        self.evidence.setdefault(subject, {})[unit] = evidence

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the diagnosis of every subject that fails anywhere."""
        return {name: names_of(decide(cases).values()) for name, cases in self.evidence.items()}


def names_of(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """Return the names that were diagnosed, each once."""
    return tuple(dict.fromkeys(each.fit.name for each in decisions if each.fit is not None))


def how_named(subject: Subject, names: Sequence[str]) -> str:
    """Say whether the diagnosis of a subject is what it is; a control has none."""
    if not names:
        return NOT_NAMED
    right = set(subject.diagnosis) if isinstance(subject, Mutant) else set()
    return RIGHTLY if all(right & set(name.split(OR)) for name in names) else WRONGLY


class Evaluation(NamedTuple):
    """One subject on one unit: the first flagged stage that is itself at fault, else the first flagged one, if any.

    ``rejects`` says by rule, the harness's own among them, whether any stage is rejected.
    """

    case: str
    seed: int
    drawn: bool
    complete: bool
    stage: str | None
    tier: str
    ratio: float
    rejects: Mapping[str, bool]


def _evaluation(part: UnitFindings, findings: Findings) -> Evaluation:
    flagged = [each for each in findings if each.caught]
    first = min(
        flagged, key=lambda each: (not each.own, stage_position(each.stage) if each.stage else -1), default=None
    )
    ratios = [each.ratio for each in findings if each.ratio is not None and not math.isnan(each.ratio)]
    stage, tier = (None, "") if first is None else (first.stage, first.tier or "")
    rejects = {rule: any(getattr(each, rule) for each in findings) for rule in ("caught", *RULES)}
    return Evaluation(
        part.case, part.seed, part.drawn, part.complete, stage, tier, max(ratios, default=math.nan), rejects
    )


Evaluations: TypeAlias = Mapping[tuple[str, str], Sequence[Evaluation]]
"""By the name of a subject, and the dtype."""


def evaluations_of(parts: Iterable[UnitFindings]) -> Evaluations:
    """Return what was found of each subject that a case reaches."""
    found: dict[tuple[str, str], list[Evaluation]] = defaultdict(list)
    for part in parts:
        known: dict[int, Evaluation] = {}  # many subjects share what is found of them
        for subject, findings in part.found:
            if findings:
                if id(findings) not in known:
                    known[id(findings)] = _evaluation(part, findings)
                found[subject, part.dtype].append(known[id(findings)])
    return found
