"""Faults are named by what they are, or not at all; and every name is explained."""

from __future__ import annotations

import re
from pathlib import Path

from attncheck.judging.diagnosis import Decision, Fit
from attncheck.judging.readings import Readings
from attncheck.judging.truth import Truth
from attncheck.judging.wrong_result import ACCURACIES
from attncheck.mutation.catalogue import CONTROLS, MUTANTS, SUBJECTS
from attncheck.mutation.naming import NOT_NAMED, RIGHTLY, WRONGLY, how_named, names_of
from attncheck.mutation.score import run_mutants
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.spec import EMPTY_ROWS

PAGE = Path(__file__).parents[3] / "docs" / "diagnoses.md"
ROWS = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
NAMED = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row)}
FEW = [
    "attention/a-bias-per-head-*",
    "attention/a-causal-row-sees-*",
    "attention/every-dimension-is-different-*",
    "attention/padding-of-different-length-*",
    "windows/a-window-alone-*",
]
SOME = {
    "scale_missing": "scale-one",
    "scores_squared": "scores-squared",
    "bias_scaled_with_scores": "bias-scaled",
    "bias_of_the_first_head": "bias-of-first-head",
    "softmax_over_queries": "softmax-over-queries",
    "log_sum_exp_in_base_two": "log-sum-exp-mixed-base",
    "mask_after_softmax": "weights-not-renormalised",
    "mask_of_the_first_batch_entry": "mask-of-first-batch-entry",
    "causal_sees_the_next_key": "causal-next-key",
    "window_one_key_too_many_before": "window-too-wide-left",
    "value_of_the_next_head": "value-of-next-head",
}
NOTHING = ("one_added_to_the_sum", "two_values_swapped", "causal_by_groups_of_four", "last_value_column_zero")


def test_a_fault_is_named_by_what_it_is_or_not_at_all() -> None:
    subjects = [SUBJECTS[name] for name in (*SOME, *NOTHING)]
    frames = run_mutants(select_cases(FEW).cases, subjects=[*subjects, *CONTROLS[:3]])
    assert frames.names_well
    assert frames.naming() == {RIGHTLY: len(SOME), WRONGLY: 0, NOT_NAMED: len(NOTHING)}
    names = dict(zip(frames.subjects["subject"], frames.subjects["named"], strict=True))
    assert names == SOME | dict.fromkeys((*NOTHING, *(honest.name for honest in CONTROLS[:3])), "")
    declared = {mutant.name: mutant.diagnosis for mutant in MUTANTS}
    assert [name for name, diagnosis in SOME.items() if diagnosis not in declared[name]] == []


def test_what_is_told_of_a_fault_is_right_wrong_or_nothing() -> None:
    missing, honest = SUBJECTS["scale_missing"], CONTROLS[0]
    assert how_named(missing, ()) == NOT_NAMED
    assert how_named(missing, ("scale-one",)) == RIGHTLY
    assert how_named(missing, ("scale-twice or scale-one",)) == RIGHTLY
    assert how_named(missing, ("scale-one", "bias-twice")) == WRONGLY
    assert how_named(honest, ("scale-one",)) == WRONGLY
    fit = Fit("scale-one", "", "scores", "numeric", "1")
    assert names_of([Decision(fit), Decision(), Decision(fit)]) == ("scale-one",)


def test_every_name_that_a_case_can_give_is_explained_and_no_other() -> None:
    given = {f"accuracy-of-{name}" for name, _, _ in ACCURACIES} | {"scale-fitted", "bias-fitted"}
    given |= {f"empty-rows-{value}" for value in (*EMPTY_ROWS, "unmasked")}
    for case in select_cases([]).cases:
        if not case.id.startswith("large/"):
            inputs = convert_inputs(case, make_exact_inputs(case), case.dtypes[0]).arrays
            called = case.problem(inputs)
            problem = called.lowered()
            was_called = None if problem is called else called
            truth = Truth(problem, case.dtypes[0], False, {}, called=was_called)
            given |= {each.name for each in Readings.of(truth, problem).alternatives}
    assert given == NAMED
    assert {name for mutant in MUTANTS for name in mutant.diagnosis} <= NAMED
