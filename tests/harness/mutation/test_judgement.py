"""Judgements that mutants share, and that a store remembers: as ever, and worked out once."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from attncheck.execution.operations import Task
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Computed, evaluate_on
from attncheck.judging.diagnosis import Evidence, Fit
from attncheck.judging.judge_stages import StageJudgement, in_order, judge_stages
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.mutation import judgement
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.judgement import ExactJudge, RememberingTruth, StageFinding, StageResult
from attncheck.mutation.mutant import Mutant, Variant
from attncheck.mutation.score import run_mutants
from attncheck.mutation.scoring import ScorersHere
from attncheck.mutation.summary import MutationFrames
from attncheck.mutation.unit import EVIDENCE, FINDINGS, Kind, RememberedUnit, remembered_unit, unit_of
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.store import Key, Store

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
    begins = {"scale_missing": ["scores"], "mask_ignored": ["masked"], "two_values_swapped": ["output"]}
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
    firsts = {"reference": "raw_scores", "two_values_swapped": "output", "mask_ignored": "masked"}
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


# What the store remembers changes nothing, whatever happened to it


TWO_CASES = """\
title: Two cases
source: {kind: derivation, title: Made for the tests}
operation: attention
cases:
  - name: Drawn
    random: {generator: numpy-legacy, seed: 3}
    inputs:
      query: {draw: randn, shape: [3, 5]}
      key: {draw: randn, shape: [4, 5]}
      value: {draw: randn, shape: [4, 2]}
  - name: Masked
    random: {generator: numpy-legacy, seed: 4}
    dtypes: [float64]
    inputs:
      query: {draw: randn, shape: [3, 5]}
      key: {draw: randn, shape: [4, 5]}
      value: {draw: randn, shape: [4, 2]}
      mask: {values: [[true, false, true, true], [true, true, true, true], [true, true, false, false]]}
"""
NAMES = ("scale_missing", "mask_ignored", "two_values_swapped", "keys_reversed", "sums_sequential", "reference")


@pytest.fixture
def cases(load_text: Callable[[str], list[Case]]) -> list[Case]:
    return load_text(TWO_CASES)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note every stage that is judged."""
    stages: list[str] = []
    judge_stage = judgement.judge_stage

    def counted(truth: Any, stage: str, *given: Any) -> Any:
        stages.append(stage)
        return judge_stage(truth, stage, *given)

    monkeypatch.setattr(judgement, "judge_stage", counted)
    return stages


def _run_mutants(cases: list[Case], store: Store, *more: Mutant, seeds: tuple[int, ...] = (0, 1)) -> MutationFrames:
    subjects = [*(SUBJECTS[name] for name in NAMES), *more]
    scorers = ScorersHere({each.name: each for each in subjects}, ExactJudge(), Store(store.folder))
    return run_mutants(cases, seeds, scorers=scorers, subjects=subjects)


def _assert_same(one: MutationFrames, other: MutationFrames) -> None:
    for name in ("evaluations", "catches", "subjects", "rules"):
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name))


def test_a_second_run_judges_nothing_and_finds_the_same(cases: list[Case], store: Store, judged: list[str]) -> None:
    without = _run_mutants(cases, Store(None))
    first = _run_mutants(cases, store)
    assert judged
    judged.clear()
    second = _run_mutants(cases, store)
    assert not judged
    _assert_same(without, first)
    _assert_same(first, second)
    assert first.subjects["named"].any()


def test_a_new_fault_is_judged_where_it_returns_what_no_other_one_did(
    cases: list[Case], store: Store, judged: list[str]
) -> None:
    _run_mutants(cases, store)
    judged.clear()
    twin = Mutant("twin", "", "", SUBJECTS["scale_missing"].backend, "scores")
    _run_mutants(cases, store, twin)
    assert not judged
    own = Mutant("own", "", "", Variant({"_scale_of": lambda query, scale: 0.75}), "scores")
    frames = _run_mutants(cases, store, own)
    assert {"scores", "weights", "output"} <= set(judged)
    assert "own" not in set(frames.survivors["subject"])
    judged.clear()
    _run_mutants(cases, store, own)
    assert not judged


@pytest.mark.parametrize("damage", [b"", b"no entry", "cut"])
def test_a_damaged_entry_is_replaced(cases: list[Case], store: Store, judged: list[str], damage: bytes | str) -> None:
    run = partial(_run_mutants, cases[1:], store, seeds=(0,))
    first = run()
    assert store.folder is not None
    for path in [path for path in store.folder.rglob("*") if path.is_file()]:
        path.write_bytes(path.read_bytes()[:-9] if isinstance(damage, str) else damage)
    judged.clear()
    _assert_same(first, run())
    assert judged
    judged.clear()
    _assert_same(first, run())
    assert not judged


def test_an_entry_that_is_whole_and_says_something_else_is_none(cases: list[Case], store: Store) -> None:
    unit = unit_of(cases[0], 0, "float64")
    asked = FINDINGS, store, unit.case, unit.dtype, unit.inputs
    key = remembered_unit(*asked).key
    assert key is not None
    for content in (b"[]", b"{}x", b'{"a": 3}', b'{"a": [["scores"]]}', b'"text"', b"[1]"):
        for data in (content, zlib.compress(content)):
            store.put(key, data)
            unit_again = remembered_unit(*asked)
            assert unit_again.get("a", lambda: (NOTHING,)) == (NOTHING,)


NOTHING = StageResult("scores", None, False, False, 0.25, False, True, None)


def test_what_is_kept_comes_back(store: Store) -> None:
    fit = Fit("a", "b", "scores", "numeric", "c", "d", True)
    kept: tuple[tuple[Kind[Any], Any], ...] = (
        (FINDINGS, ()),
        (FINDINGS, (NOTHING, NOTHING._replace(tier="proven", caught=True, ratio=float("inf")))),
        (FINDINGS, (NOTHING._replace(stage="", tier="error", ratio=None),)),
        (EVIDENCE, None),
        (EVIDENCE, Evidence((fit,), frozenset("xy"), "scores", "scoring")),
        (EVIDENCE, Evidence()),
    )
    for number, (kind, found) in enumerate(kept):
        key = Key("faults", f"012{number}")
        unit = RememberedUnit(kind, store, key)
        unit.get("digest", lambda found=found: found)
        unit.keep()
        data = store.get(key)
        assert data is not None
        assert kind.known(data) == {"digest": found}


def test_what_nobody_asks_for_goes_when_there_is_too_much(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attncheck.mutation.unit.MAX_FOUND", 3)
    key = Key("faults", "0123")
    unit = RememberedUnit(FINDINGS, store, key, dict.fromkeys("abc", ()))
    unit.get("c", lambda: (NOTHING,))
    unit.get("d", lambda: (NOTHING,))
    unit.keep()
    data = store.get(key)
    assert data is not None
    assert FINDINGS.known(data) == {"c": (), "d": (NOTHING,)}


def test_the_findings_of_a_judge_of_ones_own_are_not_kept(cases: list[Case], store: Store) -> None:
    subjects = [SUBJECTS["scale_missing"]]

    def judge(*asked: Any) -> dict[str, StageFinding]:
        return {"scores": StageFinding("proven")}

    scorers = ScorersHere({each.name: each for each in subjects}, judge, store)
    run_mutants(cases, scorers=scorers, subjects=subjects)
    assert not store.counts["kept"]
    assert store.folder is not None
    assert not store.folder.exists()
