"""What the store remembers of findings changes nothing of them, whatever happened to it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attncheck.judging.diagnosis import Evidence, Fit
from attncheck.mutation import judgement
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.findings import StageResult
from attncheck.mutation.judgement import ExactJudge, StageFinding
from attncheck.mutation.mutant import Mutant
from attncheck.mutation.remembered import EVIDENCE, FINDINGS, Kind, RememberedUnit, remembered_unit
from attncheck.mutation.score import run_mutants
from attncheck.mutation.scoring import ScorersHere
from attncheck.mutation.summary import MutationFrames
from attncheck.mutation.unit import unit_of
from attncheck.mutation.variant import Variant
from attncheck.reading.case import Case
from attncheck.store import Key, Store

CASES = """\
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
    return load_text(CASES)


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


def _run(cases: list[Case], store: Store, *more: Mutant, seeds: tuple[int, ...] = (0, 1)) -> MutationFrames:
    subjects = [*(SUBJECTS[name] for name in NAMES), *more]
    scorers = ScorersHere({each.name: each for each in subjects}, ExactJudge(), Store(store.folder))
    return run_mutants(cases, seeds, scorers=scorers, subjects=subjects)


def _assert_same(one: MutationFrames, other: MutationFrames) -> None:
    for name in ("evaluations", "catches", "subjects", "rules"):
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name))


def test_a_second_run_judges_nothing_and_finds_the_same(cases: list[Case], store: Store, judged: list[str]) -> None:
    without = _run(cases, Store(None))
    first = _run(cases, store)
    assert judged
    judged.clear()
    second = _run(cases, store)
    assert not judged
    _assert_same(without, first)
    _assert_same(first, second)
    assert first.subjects["named"].any()


def test_a_new_fault_is_judged_where_it_returns_what_no_other_one_did(
    cases: list[Case], store: Store, judged: list[str]
) -> None:
    _run(cases, store)
    judged.clear()
    twin = Mutant("twin", "", "", SUBJECTS["scale_missing"].backend, "scores")
    _run(cases, store, twin)
    assert not judged
    own = Mutant("own", "", "", Variant({"_scale_of": lambda query, scale: 0.75}), "scores")
    frames = _run(cases, store, own)
    assert {"scores", "weights", "output"} <= set(judged)
    assert "own" not in set(frames.survivors["subject"])
    judged.clear()
    _run(cases, store, own)
    assert not judged


@pytest.mark.parametrize("damage", [b"", b"no entry", "cut"])
def test_a_damaged_entry_is_replaced(cases: list[Case], store: Store, judged: list[str], damage: bytes | str) -> None:
    run = partial(_run, cases[1:], store, seeds=(0,))
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
    monkeypatch.setattr("attncheck.mutation.remembered.MAX_FOUND", 3)
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
