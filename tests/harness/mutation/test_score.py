"""The score of a catalogue: which faults are caught, by what, which cases are spared, and how all is counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from processes import has_ended, wait_until
from tables import CASES

from attncheck.execution.worker import Computed, Failure, evaluate_on_backend
from attncheck.judging.judge_stages import StageJudgement, judge_stages, sort_stages
from attncheck.judging.truth import Truth
from attncheck.mutation import unit
from attncheck.mutation.catalogue import CONTROLS, EQUIVALENTS, SUBJECTS_BY_NAME
from attncheck.mutation.judgement import TOLERANCE_RULES, first_wrong_stage, rejected_by_rules
from attncheck.mutation.mutant import BackendVariant, Mutant, Subject
from attncheck.mutation.score import HAND_WRITTEN_STOP_RULE, MutationFrames, process_pool, redraw_case, run_mutants
from attncheck.mutation.unit import MAX_SCORES_FOR_ALL_FAULTS, SeededUnit, UnitScorer
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_exact_inputs
from attncheck.reading.problem import Problem
from attncheck.reading.selection import select_cases


@pytest.fixture(scope="session")
def cases(load_text: Callable[[str], list[Case]]) -> list[Case]:
    return load_text(CASES["drawn and typed"])


def subjects(*names: str) -> list[Subject]:
    return [SUBJECTS_BY_NAME[name] for name in names]


def test_a_fault_is_caught_where_a_case_reaches_it_and_survives_where_none_does(cases: list[Case]) -> None:
    frames = run_mutants(
        cases, subjects=subjects("scale_missing", "attention_scale_left_out", "attention_mask_neutral")
    )
    rows = {(row["subject"], row["dtype"]): row for row in frames.subjects.to_dict("records")}
    missing, ignored = rows["scale_missing", "float64"], rows["attention_scale_left_out", "float64"]
    assert (missing["caught_in"], missing["caught_by"], missing["first_case"]) == (1, 1, "prefix/drawn")
    assert (missing["stages"], ignored["first_case"]) == ("scores", "prefix/typed")
    assert (
        rows["attention_mask_neutral", "float64"]["reached_by"],
        rows["attention_mask_neutral", "float64"]["caught_in"],
    ) == (0, 0)
    # The explicit scale is in a case of float64 alone.
    survivors = set(map(tuple, frames.survivors[["subject", "dtype"]].to_numpy()))
    assert survivors == {
        ("attention_mask_neutral", "float64"),
        ("attention_mask_neutral", "float32"),
        ("attention_scale_left_out", "float32"),
    }
    assert frames.score == pytest.approx(1 / 3)
    assert frames.caught_once.to_dict("records") == [
        {"subject": "attention_scale_left_out", "case": "prefix/typed"},
        {"subject": "scale_missing", "case": "prefix/drawn"},
    ]
    both = run_mutants([cases[0], replace(cases[0], id="prefix/again")], subjects=subjects("scale_missing"))
    assert both.caught_once.empty


def test_a_large_case_is_put_to_faults_alone_that_smaller_ones_did_not_settle(
    cases: list[Case], load_text: Callable[[str], list[Case]]
) -> None:
    long = load_text(CASES["drawn and typed"].replace("shape: [4,", "shape: [700,").replace("Drawn", "Long"))[0]
    again = [replace(cases[0], id=f"prefix/{number}") for number in range(HAND_WRITTEN_STOP_RULE.large_catches)]
    chosen = subjects("scale_missing", "keys_behind_tiles_of_32_dropped", "keys_reversed")
    asked = [each for each in run_mutants([long, *again], subjects=chosen).evaluations if each.case == "prefix/long"]
    assert MAX_SCORES_FOR_ALL_FAULTS < 3 * 700
    assert {each.subject for each in asked} == {"keys_behind_tiles_of_32_dropped", "keys_reversed"}
    assert {each.complete for each in asked} == {False}
    fewer = run_mutants([long, *again[1:]], subjects=chosen).evaluations
    assert "scale_missing" in {each.subject for each in fewer if each.case == "prefix/long"}


def test_a_fault_that_enough_cases_caught_and_named_is_spared_the_others(cases: list[Case]) -> None:
    many = [replace(cases[0], id=f"prefix/{number:03}") for number in range(2 * HAND_WRITTEN_STOP_RULE.diagnosis_cases)]
    chosen = subjects("scale_missing", "attention_mask_neutral")
    few, every = run_mutants(many, subjects=chosen), run_mutants(many, subjects=chosen, exhaustive=True)
    assert (
        HAND_WRITTEN_STOP_RULE.small_catches
        < _caught_by(few)["scale_missing"][0]
        <= HAND_WRITTEN_STOP_RULE.diagnosis_cases
    )
    assert _caught_by(few)["scale_missing"][1]
    assert _caught_by(every) == {"scale_missing": (len(many), False), "attention_mask_neutral": (0, False)}
    assert (few.subjects["named"] == every.subjects["named"]).all()
    assert few.rules.empty, "its own verdict spared faults: no other rule is held to the rest"
    assert not every.rules.empty


def _caught_by(frames: MutationFrames) -> dict[str, tuple[int, bool]]:
    faults = frames.subjects[frames.subjects["kind"].eq("mutant") & frames.subjects["dtype"].eq("float64")]
    return {row["subject"]: (row["caught_by"], row["spared"]) for row in faults.to_dict("records")}


def test_a_fresh_seed_redraws_what_is_drawn_and_every_seed_has_to_catch(cases: list[Case]) -> None:
    """The first query is positive with the case's own seed alone."""
    firsts = [make_exact_inputs(redraw_case(cases[0], seed))["query"].array.flat[0] for seed in (0, 1, 2)]
    assert (firsts[0] > 0, len(set(firsts))) == (True, 3)
    assert (redraw_case(cases[0], 0), redraw_case(cases[1], 5)) == (cases[0], cases[1])

    def dot(query: Any, key: Any) -> Any:
        right = query @ np.swapaxes(key, -1, -2)
        return right + (query.size == 15 and query.flat[0] == query.dtype.type(firsts[0]))

    fault = Mutant("of_one_seed", "", BackendVariant({"dot_scores._dot": dot}))
    frames = run_mutants(cases, (0, 1, 2), subjects=[fault])
    assert {each.seed for each in frames.evaluations} == {0}
    assert [*zip(frames.subjects["seeds"], frames.subjects["caught_in"], strict=True)] == [(3, 1), (3, 1)]
    assert frames.score == 0


def test_a_variant_that_raises_is_caught_and_one_that_cannot_is_not(cases: list[Case]) -> None:
    def raise_(error: Exception) -> BackendVariant:
        def normalise(scores: Any, *given: Any) -> Any:
            raise error

        return BackendVariant({"_softmax_with_sinks": normalise})

    faulty = Mutant("raises", "", raise_(ValueError("no")))
    unable = Mutant("unable", "", raise_(NotImplementedError("no")))
    frames = run_mutants(cases, subjects=[faulty, unable])
    assert frames.subjects.groupby("subject")["caught_in"].max().to_dict() == {"raises": 1, "unable": 0}
    outcome = evaluate_on_backend(unable.backend, Problem("softmax", {}, {"scores": np.zeros((1, 1, 1, 2))}))
    assert outcome == Failure("unsupported", "NotImplementedError: no")


def test_common_tolerances_reject_what_their_formula_rejects() -> None:
    for got, exact, dtype, rejecting in (
        (1 + 1e-6, 1.0, "float32", set()),
        (1 + 5e-5, 1.0, "float32", {"assert_close", "allclose"}),
        (1 + 3e-7, 1.0, "float64", {"assert_close"}),
        (2e-6, 1e-6, "float32", {"allclose", "rtol_1e_3"}),
        (np.nan, np.nan, "float32", set(TOLERANCE_RULES)),
        (-np.inf, -np.inf, "float32", set()),
        (np.inf, -np.inf, "float32", set(TOLERANCE_RULES)),
        (-1e4, -np.inf, "float32", set(TOLERANCE_RULES)),
    ):
        arrays = np.array([got], dtype), np.array([exact], dtype)
        assert {name for name, rejects in rejected_by_rules(*arrays, dtype).items() if rejects} == rejecting
        assert ("allclose" in rejecting) == (not np.allclose(*arrays))


# Several processes

SHARED = ("scale_missing", "softcap_ignored", "keys_reversed", "keys_behind_tiles_of_32_dropped", "reference")


def test_several_processes_find_what_one_finds() -> None:
    cases = [*select_cases(["softcap.yaml"]).cases[:4], *select_cases(["probes/long_rows.yaml"]).cases[:1]]
    subjects = [*(SUBJECTS_BY_NAME[name] for name in SHARED), *CONTROLS[:2], *EQUIVALENTS[:1]]
    alone = run_mutants(cases, (0, 1), subjects=subjects)
    with process_pool(2) as pool:
        together = run_mutants(cases, (0, 1), pool=pool, subjects=subjects)
    pd.testing.assert_frame_equal(pd.DataFrame(alone.evaluations), pd.DataFrame(together.evaluations))
    pd.testing.assert_frame_equal(alone.subjects, together.subjects)
    assert alone.subjects["named"].any()


@pytest.mark.skipif(sys.platform != "linux", reason="the processes of others are listed in /proc")
def test_no_process_outlives_the_one_that_asks_even_if_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "from attncheck.mutation.score import process_pool\n"
        "if __name__ == '__main__':\n"
        "    with process_pool(1) as pool:\n"
        "        print(pool.submit(os.getpid).result(), flush=True)\n"
        "        time.sleep(600)\n"
    )
    (tmp_path / "asks.py").write_text(code)
    with subprocess.Popen([sys.executable, str(tmp_path / "asks.py")], stdout=subprocess.PIPE, text=True) as asks:
        assert asks.stdout is not None
        worker = int(asks.stdout.readline())
        assert not has_ended(worker)
        asks.kill()
    wait_until(lambda: has_ended(worker))


# Judgements that mutants share

BEGINS = {"scale_missing": "scores", "attention_mask_neutral": "masked", "two_values_swapped": "output"}


@pytest.fixture
def masked(load_text: Callable[[str], list[Case]]) -> Case:
    mask = "{values: [[true, false, true, true], [true, true, true, true], [true, true, false, false]]}"
    return load_text(CASES["drawn and typed"].replace("  - name: Typed", f"      mask: {mask}\n  - name: Typed"))[0]


def test_what_begins_with_the_same_stages_is_judged_once_and_as_ever(
    monkeypatch: pytest.MonkeyPatch, masked: Case
) -> None:
    judged: list[str] = []
    judge_one = unit.judge_stage

    def counted(truth: Truth, stage: str, *rest: Any, judge_step: bool) -> StageJudgement:
        judged.append(stage)
        return judge_one(truth, stage, *rest, judge_step=judge_step)

    monkeypatch.setattr(unit, "judge_stage", counted)
    scorer = UnitScorer(SeededUnit(masked, "float64"))
    for name, first in ({"reference": "raw_scores"} | BEGINS).items():
        judged.clear()
        findings = scorer.judge_subject(SUBJECTS_BY_NAME[name])
        assert findings is not None
        outcome = evaluate_on_backend(SUBJECTS_BY_NAME[name].backend, scorer.call)
        assert isinstance(outcome, Computed)
        plain = judge_stages(scorer.truth, outcome.stages, masked.stage_shapes, "native")
        assert [each.caught for each in findings] == [bool(each.verdict.exit_code) for each in plain]
        wrong = first_wrong_stage(findings)
        assert (wrong.stage if wrong else None) == BEGINS.get(name)
        order = sort_stages(outcome.stages)
        assert judged == order[order.index(first) :], "all stages before it are the reference's"
    judged.clear()
    again = Mutant("again", "", SUBJECTS_BY_NAME["scale_missing"].backend)
    assert scorer.judge_subject(again) == scorer.judge_subject(SUBJECTS_BY_NAME["scale_missing"])
    assert judged == []
    scorer.judge_subject(Mutant("of another class", "", again.backend, rounding_models={"float64": "native_lse"}))
    assert judged == order, "another rounding model has other bounds"
