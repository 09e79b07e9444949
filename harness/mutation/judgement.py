"""How the mutation score asks for verdicts, and the harness's own: the exact answer and the derived bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.backends import EAGER
from attncheck.judging.diagnosis import Evidence, evidence_of
from attncheck.judging.judge_implementation import DIAGNOSABLE, judge_and_diagnose
from attncheck.judging.judge_stages import StageJudgement, judge_stages
from attncheck.judging.truth import find_truth
from attncheck.mutation.remembering import RememberingTruth
from attncheck.oracle.enclosure import Enclosure
from attncheck.reading.case import Case
from attncheck.reading.dtypes import numpy_dtype
from attncheck.reading.inputs import Inputs
from attncheck.verdicts import Verdict

REFERENCE_CLASSES: Mapping[str, str] = EAGER
"""The dtypes in which variants are judged, and the reference's rounding model in each.

NumPy adds products of float16 up in float32, and so the numbers of a row. Of bfloat16 it knows nothing: what is judged
there are kernels that compute in float32 between their ends.
"""
Stages: TypeAlias = Mapping[str, NDArray[Any]]


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
    exact: NDArray[Any] | None = None


JudgeStages: TypeAlias = Callable[[Case, str, Inputs, Stages, str | None], Mapping[str, StageFinding]]
"""Judges what one implementation returned for a case in a dtype, stage by stage, by the class that it claims if any."""


class ExactJudge:
    """Judges by the oracle and the bounds of a rounding model; the oracle runs once per case, seed and dtype.

    An implementation that claims no class is judged by ``rounding_model``, or else by the reference's own.
    """

    def __init__(self, rounding_model: str | None = None) -> None:
        self._numerical_class = rounding_model
        self._inputs: Inputs | None = None
        self._truth: RememberingTruth | None = None

    def evidence(
        self, case: Case, dtype: str, inputs: Inputs, stages: Stages, claimed: str | None = None
    ) -> Evidence | None:
        """Return what a case says of the fault of an implementation; None where it does not fail it by its numbers."""
        truth, rounding_model = self._truth_of(case, dtype, inputs), self._class_of(dtype, claimed)
        judged = judge_and_diagnose(truth, stages, case.stage_shapes, rounding_model)
        failing = [each.stage for each in judged.judgements if each.verdict in DIAGNOSABLE]
        return evidence_of(judged.findings, failing[0], case.operation) if failing else None

    def __call__(
        self, case: Case, dtype: str, inputs: Inputs, stages: Stages, claimed: str | None = None
    ) -> dict[str, StageFinding]:
        """Judge every stage."""
        truth = self._truth_of(case, dtype, inputs)
        judgements = judge_stages(truth, stages, case.stage_shapes, self._class_of(dtype, claimed))
        return {
            item.stage: StageFinding(
                _tier(item), item.goes_wrong_here, _ratio(item), _rounded(truth.exact.get(item.stage), dtype)
            )
            for item in judgements
        }

    def _truth_of(self, case: Case, dtype: str, inputs: Inputs) -> RememberingTruth:
        if inputs is not self._inputs or self._truth is None:  # the subjects of one unit come one after the other
            self._inputs = inputs
            truth = find_truth(
                case.operation,
                case.options,
                inputs.arrays,
                dtype,
                supports_statistics=case.supports_statistics,
                whole=True,  # rules are tried on whole arrays
            )
            self._truth = RememberingTruth.of(truth)
        return self._truth

    def _class_of(self, dtype: str, claimed: str | None) -> str:
        return claimed or self._numerical_class or REFERENCE_CLASSES[dtype]


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


def _rounded(exact: Enclosure | None, dtype: str) -> NDArray[Any] | None:
    # To nearest in float64 and then once more: off by one unit in the last place where the first hits a midpoint.
    if exact is None:
        return None
    with np.errstate(over="ignore"):
        return exact.high.astype(numpy_dtype(dtype))
