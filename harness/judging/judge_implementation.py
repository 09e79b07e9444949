"""One implementation's stages, judged, and what fails said to be another convention or a known mistake where it is one.

An implementation may declare a convention (a mode of ``attncheck.backends``). It is then judged by the case, and what
fails by the case as it declares to read it: a stage that is right by that is ``semantic``, and known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from attncheck.harness.judging.conventions import Convention, empty_row_conventions
from attncheck.harness.judging.judge_stages import StageJudgement, judge_stages, sound_stages, where_it_begins
from attncheck.harness.judging.recognition import recognise, truth_of
from attncheck.harness.judging.truth import Truth
from attncheck.harness.reading.lowering import Posed
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import Shape

_RECOGNISABLE = (Verdict.NUMERIC, Verdict.NONFINITE)
"""What a wrong number can be; a wrong shape or dtype is no convention."""


@dataclass(frozen=True)
class JudgedStages:
    """The stages of one implementation, where it goes wrong, and what it is recognised as.

    ``declared`` are the stages that follow a convention which the implementation declares: what is known of it.
    """

    judgements: tuple[StageJudgement, ...]
    begins_at: str
    recognised: Convention | None = None
    declared: frozenset[str] = frozenset()


def judge_and_recognise(
    truth: Truth,
    stages: Mapping[str, NDArray[Any]],
    shapes: Mapping[str, Shape],
    numerical_class: str,
    conventions: Mapping[str, str] | None = None,
) -> JudgedStages:
    """Judge every stage, and say of what fails which convention or mistake it is, where that can be told.

    ``conventions`` are those that the implementation declares, such as ``{"empty_rows": "uniform"}``.
    """
    judgements = judge_stages(truth, stages, shapes, numerical_class)
    if not _failed(judgements) or truth.posed is None:
        return JudgedStages(tuple(judgements), where_it_begins(judgements))
    bases = [_Base(truth, judgements)]
    declared = _declared(truth, truth.posed, conventions or {})
    if declared is not None:
        other = truth_of(truth, declared)
        base = _as_declared(other, judgements, judge_stages(other, stages, shapes, numerical_class), declared)
        bases = [base] if base.settled else [*bases, base]
    sound = sound_stages(truth, stages, shapes)
    for base in bases:
        failed = {stage: sound[stage] for stage in _failed(base.judgements)}
        found = recognise(base.truth, failed, numerical_class) if failed else None
        if found is not None:
            says = found.says.format(stage=next(iter(failed)))
            # Beside a mistake, what is declared adds nothing to its size.
            sized = bases[-1] if declared is not None and found.option == declared.option else base
            told = [_told(each, found, says) if each.stage in failed else each for each in sized.judgements]
            return JudgedStages(tuple(told), found.stage, found, base.settled)
    base = bases[-1]  # what nothing explains is judged by what is declared
    begins_at = where_it_begins([each for each in base.judgements if each.stage not in base.settled])
    if not base.settled or declared is None:
        return JudgedStages(tuple(base.judgements), begins_at)
    return JudgedStages(tuple(base.judgements), begins_at or declared.stage, declared, base.settled)


@dataclass(frozen=True, eq=False)
class _Base:
    """What other readings start from: a truth, the judgements by it, and the stages that are settled already."""

    truth: Truth
    judgements: Sequence[StageJudgement]
    settled: frozenset[str] = frozenset()


def _as_declared(
    truth: Truth, own: Sequence[StageJudgement], under: Sequence[StageJudgement], declared: Convention
) -> _Base:
    """Settle what is right by a declared convention, and judge what else fails by it too."""
    by_stage = {found.stage: found for found in under}
    settled = frozenset(stage for stage in _failed(own) if by_stage[stage].verdict is Verdict.AGREE)
    says = f"{declared.says} (declared)"
    judgements = [
        _told(found, declared, says)
        if found.stage in settled
        else by_stage[found.stage]
        if found.verdict in _RECOGNISABLE
        else found
        for found in own
    ]
    return _Base(truth, judgements, settled)


def _failed(judgements: Sequence[StageJudgement]) -> list[str]:
    return [found.stage for found in judgements if found.verdict in _RECOGNISABLE]


def _declared(truth: Truth, posed: Posed, conventions: Mapping[str, str]) -> Convention | None:
    """Return the reading that an implementation declares, where the case has rows for which it matters."""
    if not conventions:
        return None
    of_rows = empty_row_conventions(truth.operation, posed)
    return next((each for each in of_rows if each.option and each.option in conventions.items()), None)


def _told(judgement: StageJudgement, convention: Convention, says: str) -> StageJudgement:
    if convention.verdict is Verdict.SEMANTIC:
        return replace(judgement, verdict=Verdict.SEMANTIC, message=says)
    return replace(judgement, message=f"{says}; {judgement.message}")
