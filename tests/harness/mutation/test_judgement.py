"""Judgements that mutants share: as ever, and worked out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attncheck.execution.worker import Computed, evaluate_on
from attncheck.judging.judge_stages import StageJudgement, in_order, judge_stages
from attncheck.judging.truth import Truth
from attncheck.mutation import unit
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.judgement import first_wrong
from attncheck.mutation.mutant import Mutant, Variant
from attncheck.mutation.unit import Unit, UnitScorer
from attncheck.reading.case import Case

CASE = """\
title: One case
source: {kind: derivation, title: Made for the tests}
operation: attention
cases:
  - name: Drawn and masked
    random: {generator: numpy-legacy, seed: 3}
    inputs:
      query: {draw: randn, shape: [3, 5]}
      key: {draw: randn, shape: [4, 5]}
      value: {draw: randn, shape: [4, 2]}
      mask: {values: [[true, false, true, true], [true, true, true, true], [true, true, false, false]]}
"""
BEGINS = {"scale_missing": "scores", "attention_mask_neutral": "masked", "two_values_swapped": "output"}


@pytest.fixture
def case(load_text: Callable[[str], list[Case]]) -> Case:
    return load_text(CASE)[0]


def test_what_begins_with_the_same_stages_is_judged_once_and_as_ever(
    monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    judged: list[str] = []
    judge_one = unit.judge_stage

    def counted(truth: Truth, stage: str, *rest: Any) -> StageJudgement:
        judged.append(stage)
        return judge_one(truth, stage, *rest)

    monkeypatch.setattr(unit, "judge_stage", counted)
    scorer = UnitScorer(Unit(case, "float64"))
    for name, first in ({"reference": "raw_scores"} | BEGINS).items():
        judged.clear()
        findings = scorer.findings(SUBJECTS[name])
        assert findings is not None
        outcome = evaluate_on(SUBJECTS[name].backend, scorer.task)
        assert isinstance(outcome, Computed)
        plain = judge_stages(scorer.truth, outcome.stages, case.stage_shapes, "native")
        assert [each.caught for each in findings] == [bool(each.verdict.exit_code) for each in plain]
        wrong = first_wrong(findings)
        assert (wrong.stage if wrong else None) == BEGINS.get(name)
        order = in_order(outcome.stages)
        assert judged == order[order.index(first) :], "all stages before it are the reference's"
    judged.clear()
    again = Mutant("again", "", SUBJECTS["scale_missing"].backend)
    assert scorer.findings(again) == scorer.findings(SUBJECTS["scale_missing"])
    assert judged == []
    scorer.findings(Mutant("of another class", "", again.backend, classes={"float64": "native_lse"}))
    assert judged == order, "another rounding model has other bounds"


def test_a_judgement_of_what_is_infinite_does_not_depend_on_who_was_judged_before(case: Case) -> None:
    def finite(scores: Any, **masks: Any) -> Any:
        stages = SUBJECTS["reference"].backend.mask_scores(scores, **masks)
        return stages | {"masked": np.maximum(stages["masked"], -1e4)}

    fault, scorer = Mutant("finite", "", Variant({"mask_scores": finite})), UnitScorer(Unit(case, "float64"))
    scorer.findings(SUBJECTS["reference"])
    assert scorer.findings(fault) == UnitScorer(Unit(case, "float64")).findings(fault)
