"""Judgements that mutants share: as ever, and worked out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attncheck.execution.operations import Task
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Computed, evaluate_on
from attncheck.judging.judge_stages import StageJudgement, in_order, judge_stages
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.mutation import judgement
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.judgement import RememberingTruth
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs

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


@pytest.fixture
def case(load_text: Callable[[str], list[Case]]) -> Case:
    return load_text(CASE)[0]


@pytest.fixture
def task(case: Case) -> Task:
    return task_of(case, convert_inputs(case, make_exact_inputs(case), "float64"))


@pytest.fixture
def truth(case: Case) -> Truth:
    return truth_of_case(case, "float64", convert_inputs(case, make_exact_inputs(case), "float64"))


def _judged(truth: Truth, name: str, case: Case, task: Task) -> dict[str, StageJudgement]:
    outcome = evaluate_on(SUBJECTS[name].backend, task)
    assert isinstance(outcome, Computed)
    return {item.stage: item for item in judge_stages(truth, outcome.stages, case.stage_shapes, "native")}


def test_verdicts_are_those_of_the_truth_itself_and_a_fault_begins_where_it_begins(
    truth: Truth, case: Case, task: Task
) -> None:
    begins = {"scale_missing": ["scores"], "attention_mask_neutral": ["masked"], "two_values_swapped": ["output"]}
    for name in (*begins, "reference"):
        plain, remembered = (_judged(each, name, case, task) for each in (truth, RememberingTruth.of(truth)))
        assert [item.verdict for item in plain.values()] == [item.verdict for item in remembered.values()]
        for judgements in (plain, remembered):
            assert [stage for stage, item in judgements.items() if item.goes_wrong_here][:1] == begins.get(name, [])


def test_a_step_from_the_same_numbers_is_worked_out_once_and_none_behind_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch, truth: Truth, case: Case, task: Task
) -> None:
    asked: list[str] = []
    work_out = Truth.introduced

    def counted(self: Truth, stage: str, *rest: Any) -> Any:
        asked.append(stage)
        return work_out(self, stage, *rest)

    monkeypatch.setattr(Truth, "introduced", counted)
    remembering = RememberingTruth.of(truth)
    _judged(remembering, "reference", case, task)
    stages = ["raw_scores", "scores", "masked", "weights", "log_sum_exp", "output"]
    assert asked == stages
    _judged(remembering, "reference", case, task)
    _judged(remembering, "two_values_swapped", case, task)  # its output follows from the reference's weights
    assert asked == stages
    _judged(remembering, "scale_missing", case, task)
    assert asked == stages, (
        "the scores follow from the reference's raw scores, and what is behind them is not asked for"
    )


def test_what_begins_with_the_same_stages_is_judged_once_and_as_ever(
    monkeypatch: pytest.MonkeyPatch, truth: Truth, case: Case, task: Task
) -> None:
    judged: list[str] = []
    judge_one = judgement.judge_stage

    def counted(truth: Truth, stage: str, *rest: Any) -> StageJudgement:
        judged.append(stage)
        return judge_one(truth, stage, *rest)

    monkeypatch.setattr(judgement, "judge_stage", counted)
    remembering = RememberingTruth.of(truth)
    firsts = {"reference": "raw_scores", "two_values_swapped": "output", "attention_mask_neutral": "masked"}
    for name, first in (firsts | {"scale_missing": "scores"}).items():
        judged.clear()
        outcome = evaluate_on(SUBJECTS[name].backend, task)
        assert isinstance(outcome, Computed)
        found = remembering.judgements(outcome.stages, case.stage_shapes, "native")
        alone = judge_stages(RememberingTruth.of(truth), outcome.stages, case.stage_shapes, "native")
        assert found == alone, "a judgement does not depend on who was judged before"
        order = in_order(outcome.stages)
        assert judged == order[order.index(first) :]
    judged.clear()
    remembering.judgements(outcome.stages, case.stage_shapes, "native_lse")
    assert judged == order, "another rounding model has other bounds"


def test_a_judgement_of_what_is_infinite_does_not_depend_on_who_was_judged_before(truth: Truth, case: Case) -> None:
    shapes, sound = case.stage_shapes, {stage: each.high for stage, each in truth.exact.items()}
    unmasked = {**sound, "masked": np.where(np.isinf(sound["masked"]), -1e4, sound["masked"])}
    alone = RememberingTruth.of(truth).judgements(unmasked, shapes, "native")
    behind = RememberingTruth.of(truth)
    behind.judgements(sound, shapes, "native")
    assert behind.judgements(unmasked, shapes, "native") == alone
