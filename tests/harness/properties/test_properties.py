"""Properties: the exact answer of further calls, rows, judgements, and kernels with faults between calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tables import tables_beside

from attncheck.backends import numpy_backend
from attncheck.common.errors import ExitCode, ResultsError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import load_user_implementation
from attncheck.execution.user_code import Target
from attncheck.execution.worker import Computed, evaluate_on_backend
from attncheck.properties.judging import (
    CallResult,
    TruthCache,
    _combined_call_result,
    judge_arrays,
    judge_call_result,
    judge_merged_parts,
)
from attncheck.properties.run import PropertyQuestion, PropertyRequest, judge_implementations, property_questions
from attncheck.properties.variants import PropertyVariant, SessionVariant, call_returning, result_stage_names
from attncheck.reading.case import Case
from attncheck.reading.problem import Problem
from attncheck.reading.selection import select_cases
from attncheck.reports.properties import properties_exit_code, properties_sentence, worst_row
from attncheck.results import parts
from attncheck.results.format import PROPERTY_PART, Row
from attncheck.results.parts import read_property_rows
from attncheck.results.writer import write_property_rows
from attncheck.spec import PROPERTIES
from attncheck.spec.verdicts import PropertyOutcome

pytestmark = pytest.mark.usefixtures("forked_workers")

Real = NDArray[np.float64]

# Two results.

TABLES = tables_beside(__file__)
ALLOWED = 1e-6


def side(what: str, given: Real, exact: Real, is_open: bool) -> CallResult:
    """Return a side of which an error beyond the bound is wrong where there is an exact answer."""
    own = np.full(given.shape, is_open)
    wrong = ~(np.abs(given - exact) <= ALLOWED) & ~own
    return CallResult(what, given, exact, np.full(given.shape, ALLOWED), wrong, own)


def sides(
    first: Real, second: Real, exact: Sequence[Real], is_open: str
) -> Callable[[], tuple[CallResult, CallResult]]:
    opens, names = [letter == "?" for letter in is_open], ("the first call", "the further")
    one, other = map(side, names, (first, second), exact, opens)
    return lambda: (one, other)


def refused() -> tuple[CallResult, CallResult]:
    raise AssertionError("where every bit is the same nothing else is asked")


def test_what_two_results_come_to() -> None:
    for *numbers, is_open, outcome in TABLES["pairs"]:
        first, second, *exact = (np.full(1, number) for number in numbers)
        found = judge_arrays("output", first, second, "again", sides(first, second, exact, is_open))
        assert found.verdict == outcome
    array = np.array([1.0, -0.0, np.nan])
    some = np.array([False, True, False])  # nothing is said of the rest
    for second, judged, elements in ((array.copy(), None, 3), (array[::-1].copy(), some, 1)):
        found = judge_arrays("output", array, second, "again", refused, judged)
        assert (found.verdict, found.differing, found.elements) == (PropertyOutcome.BITWISE, 0, elements)
    for second in (np.ones((3, 2)), np.ones((2, 3), np.float32)):
        assert judge_arrays("output", np.ones((2, 3)), second, "again", refused).verdict is PropertyOutcome.BROKEN


# Rows.

ROW = Row(
    *("mine/a", "attention", "float32", "own.attention", "property", "", "bitwise"),
    property_name="repeated",
    variant="20 calls",
    message="all 5, elements",
)
BROKEN = replace(ROW, verdict="broken")
EXPECTED, CLAIMED = replace(BROKEN, xfail=True), replace(ROW, verdict="within bounds", claim="bitwise")


def test_what_fails_follows_from_outcome_and_claim_and_the_worst_row_stands_for_several() -> None:
    for claim, outcomes in TABLES["fails"].items():
        rows = {outcome: replace(ROW, verdict=outcome, claim=claim) for outcome in outcomes}
        assert {outcome: row.fails for outcome, row in rows.items()} == outcomes
        assert not any(replace(row, xfail=True).fails_run for row in rows.values())
    failed, unsupported = (replace(ROW, verdict=verdict) for verdict in ("failed", "unsupported"))
    for rows, code, worst in (
        ([ROW], ExitCode.AGREE, ROW),
        ([ROW, failed], ExitCode.NOT_RUN, failed),
        ([unsupported], ExitCode.NOT_RUN, unsupported),
        ([failed, BROKEN], ExitCode.DISAGREE, BROKEN),
        ([ROW, EXPECTED], ExitCode.AGREE, EXPECTED),
        ([ROW, EXPECTED, CLAIMED], ExitCode.DISAGREE, CLAIMED),  # an expected one comes behind
    ):
        assert (properties_exit_code(rows), worst_row(rows)) == (code, worst)
    assert worst_row([]) is None
    assert properties_sentence([ROW]) == "Properties hold: 1 property, 1 comparison."
    assert "own.attention: repeated" in properties_sentence([ROW, BROKEN])
    assert properties_sentence([unsupported]) == "No property was judged."


def test_rows_are_read_back_as_they_were_written_and_a_table_that_is_none_of_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: dict[str, Any] = {"value": 0.1, "reference": math.inf, "exact": -1e-310}
    rows = [
        ROW,
        replace(EXPECTED, index="0,1", differing=3, **numbers),
        replace(ROW, value=math.nan, reference=None),
        replace(ROW, message='quotes "and", commas', claim="bitwise"),
    ]
    write_property_rows(tmp_path, rows)
    assert repr(read_property_rows(tmp_path)) == repr(rows)  # NaN is NaN there
    changes = {"verdict": "splendid", "property_name": "unheard_of", "comparison": "stage"}
    for field, value in changes.items():
        change: dict[str, Any] = {field: value}
        write_property_rows(tmp_path, [replace(ROW, **change)])
        with pytest.raises(ResultsError, match=f"{PROPERTY_PART} cannot be read"):
            read_property_rows(tmp_path)
    write_property_rows(tmp_path, [ROW, ROW])
    monkeypatch.setattr(parts, "_MAX_PROPERTY_ROWS", 1)
    with pytest.raises(ResultsError, match="it has 2 rows; expected at most 1"):
        read_property_rows(tmp_path)


# The questions of bundled cases, in float32, in which NumPy computes as it is.

TRUTHS = TruthCache()
QUESTIONS = property_questions(select_cases(["properties"], properties=True).cases, PropertyRequest(dtypes=["float32"]))


def computed(problem: Problem, stages: tuple[str, ...]) -> dict[str, np.ndarray]:
    outcome = evaluate_on_backend(numpy_backend, call_returning(problem, stages))
    assert isinstance(outcome, Computed), outcome
    return dict(outcome.stages)


def is_same(question: PropertyQuestion, variant: PropertyVariant) -> bool:
    problem, stages = question.problem, variant.stages or result_stage_names(question.problem)
    first = computed(problem, stages)
    if variant.merges_parts:
        parts_of_it = [computed(call.problem, stages) for call in variant.calls]
        found = judge_merged_parts(variant, problem, first, parts_of_it, "native", TRUTHS)
        return found.verdict in (PropertyOutcome.BITWISE, PropertyOutcome.WITHIN_BOUNDS)
    for stage in stages:
        arrays = [computed(call.problem, (stage,))[stage] for call in variant.calls]
        one = judge_call_result("first", TRUTHS.truth_of(problem), stage, first[stage], "native").exact
        other = _combined_call_result(variant, stage, arrays, "native", TRUTHS).exact
        if other.shape != one.shape or not np.allclose(other, one, rtol=1e-12, atol=1e-300):
            return False
    return True


@pytest.mark.parametrize("name", PROPERTIES)
def test_further_calls_have_the_first_calls_exact_answer(name: str) -> None:
    questions = [question for question in QUESTIONS if question.name == name]
    assert questions, "every property is asked by a bundled case"
    offenders = [
        f"{question.case.id}: {variant.description}"
        for question in questions
        for variant in question.variants
        if isinstance(variant, PropertyVariant) and variant.process_kind == "here" and not is_same(question, variant)
    ]
    assert offenders == []


def test_sessions_compare_results_of_one_problem() -> None:
    sessions = [each for question in QUESTIONS for each in question.variants if isinstance(each, SessionVariant)]
    assert sessions
    for variant in sessions:
        for pair in variant.pairs:
            step, wanted = variant.session.steps[pair.second_step], call_returning(pair.problem)
            assert (step.returns_result, step.problem.operation) == (True, wanted.operation)
            given, expected = (
                {name: each.tobytes() for name, each in problem.inputs.items()} for problem in (step.problem, wanted)
            )
            assert given == expected


# Kernels of somebody's own, right and wrong.

Ask = Callable[..., list[Row]]


@pytest.fixture
def ask(tmp_path: Path, load_text: Callable[[str], list[Case]]) -> Ask:
    """Ask properties of the kernel with something replaced, and with what is written below it."""

    def asked(names: Sequence[str], *changes: Mapping[str, str], below: str = "") -> list[Row]:
        text = TABLES["kernel"]
        for change in changes:
            assert change["old"] in text
            text = text.replace(change["old"], change["new"])
        path = tmp_path / "kernel.py"
        path.write_text(f"{text}\n{below}\n", encoding="utf-8")
        implementation = load_user_implementation(Target.parse(f"{path}:attention"), None)
        asking = PropertyRequest(limits=Limits(case_seconds=60))
        cases = load_text(TABLES["prompt"].replace("NAMES", ", ".join(names)))
        return judge_implementations([implementation], property_questions(cases, asking), asking)

    return asked


def test_a_kernel_that_computes_row_by_row_is_bitwise_the_same_in_all(ask: Ask) -> None:
    names = TABLES["asked of a prompt"]
    rows = ask(names)
    found = {row.property_name: row.verdict for row in rows if row.verdict not in ("bitwise", "unsupported")}
    assert found.keys() <= {"scores_shifted", "packed"}, found
    assert set(found.values()) <= {"within bounds"}
    bitwise = {row.property_name for row in rows if row.verdict == "bitwise"}
    assert bitwise >= set(names) - found.keys() - {"packed"}
    assert properties_exit_code(rows) is ExitCode.AGREE


@pytest.mark.parametrize("fault", TABLES["faults"])
def test_a_fault_is_named_for_what_it_is_and_for_nothing_else(fault: str, ask: Ask) -> None:
    table = TABLES["faults"][fault]
    name = table["breaks"]
    rows = ask([name, *table.get("sound", [])], *table.get("replaced", []), below=table.get("below", ""))
    broken = [row for row in rows if row.verdict == "broken"]
    assert {row.property_name for row in broken} == {name}, rows
    assert properties_exit_code(rows) is ExitCode.DISAGREE
    assert any(table.get("says", "") in row.message for row in broken)
    if name == "inputs_unchanged":  # what it wrote into is named with its element
        (row,) = broken
        assert (row.stage, row.index, row.reference) == ("query", "0,0,0,0", pytest.approx((row.value or 0) * 1.5))


@pytest.mark.parametrize(
    ("claim", "number", "outcome", "fails"),
    [
        ("", "np.nan", "nan", False),
        ("within bounds", "np.nan", "nan", True),
        ("bitwise", "np.nan", "nan", True),
        ("", "7", "broken", True),
    ],
)
def test_a_masked_nan_may_give_nan_alone(claim: str, number: str, outcome: str, fails: bool, ask: Ask) -> None:
    below = f'attention.properties = {{"poison_nan": "{claim}"}}' if claim else ""
    change = {side: text.replace("NUMBER", number) for side, text in TABLES["reads masked values"].items()}
    rows = ask(["poison_nan", "poison_large", "repeated"], change, below=below)
    of_values = [row for row in rows if row.property_name == "poison_nan" and "in keys" not in row.variant]
    assert {row.verdict for row in of_values if "in values" in row.variant} == {outcome}
    assert {row.verdict for row in rows if row not in of_values} == {"bitwise"}
    assert properties_exit_code(rows) is (ExitCode.DISAGREE if fails else ExitCode.AGREE)


@pytest.mark.parametrize(("claim", "fails"), [("bitwise", True), ("within bounds", False)])
def test_a_claim_that_does_not_hold_fails(claim: str, fails: bool, ask: Ask) -> None:
    below = f'attention.properties = {{"batch_invariant": "{claim}"}}'
    change = {"old": "scores.max())\n", "new": "scores.max() - batch / 7)\n"}
    rows = ask(["batch_invariant", "repeated"], change, below=below)
    of_batch = [row for row in rows if row.property_name == "batch_invariant"]
    assert {(row.verdict, row.claim) for row in of_batch} == {("within bounds", claim), ("bitwise", claim)}
    assert any(row.fails for row in of_batch) is fails
    rest = {(row.verdict, row.claim, row.fails) for row in rows if row not in of_batch}
    assert rest == {("bitwise", "", False)}
    assert properties_exit_code(rows) is (ExitCode.DISAGREE if fails else ExitCode.AGREE)
