"""How the mutation score asks for verdicts, and the harness's own: the exact answer and the derived bounds.

Many implementations are compared with one truth, one after the other. Most faults change a single step: all stages
before it are the reference's, and so are the steps between them. No exact step is worked out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from attncheck.attention.bounds import Bound
from attncheck.attention.enclosure import Enclosure
from attncheck.backends import EAGER
from attncheck.dtypes import numpy_dtype
from attncheck.judging.diagnosis import Evidence, evidence_of
from attncheck.judging.judge_implementation import DIAGNOSABLE, judge_and_diagnose
from attncheck.judging.judge_stages import (
    StageJudgement,
    failing_elements,
    in_order,
    judge_stage,
    sound_stages,
)
from attncheck.judging.truth import Array, Stages, Truth, digest, find_truth, is_measured
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.spec import Shape
from attncheck.verdicts import Verdict

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
