"""Properties: the exact answer of further calls, rows, judgements, and kernels with faults between calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.errors import ExitCode, ResultsError
from attncheck.execution.worker import Computed, evaluate_on
from attncheck.properties.judging import Side, Truths, _combined_side, judge_arrays, judge_merged, side_of
from attncheck.properties.problem import PropertyVariant, SessionVariant, StoredProblem
from attncheck.properties.run import Asking, PropertyQuestion, questions_of
from attncheck.reading.selection import select_cases
from attncheck.reports.properties import exit_code_of, sentence_of, worst_of
from attncheck.results import parts
from attncheck.results.format import PROPERTY_PART, Row
from attncheck.results.parts import read_property_rows
from attncheck.results.writer import write_property_rows
from attncheck.spec.properties import PROPERTIES
from attncheck.verdicts import PropertyOutcome

pytestmark = pytest.mark.usefixtures("forked_workers")

Real = NDArray[np.float64]


ONE, TWO = np.ones(1), np.full(1, 2.0)
NO, YES = np.zeros(1, bool), np.ones(1, bool)
NAN = np.full(1, np.nan)
ALLOWED = 1e-6


def sides(first: Real, second: Real, exact: Real, is_open: tuple[Any, Any]) -> Callable[[], tuple[Side, Side]]:
    """Return both sides, of which an error beyond the bound is wrong where there is an exact answer."""

    def made(what: str, given: Real, own: Any) -> Side:
        wrong = ~(np.abs(given - exact) <= ALLOWED) & ~own
        return Side(what, given, exact, np.full(given.shape, ALLOWED), wrong, own)

    return lambda: (made("the first call", first, is_open[0]), made("the further", second, is_open[1]))


def refused() -> tuple[Side, Side]:
    raise AssertionError("where every bit is the same nothing else is asked")


PAIRS: tuple[tuple[Real, Real, Real, tuple[Any, Any], str], ...] = (
    (np.zeros(1), -np.zeros(1), np.zeros(1), (NO, NO), "within bounds"),  # the sign of zero is a bit
    (ONE + 4e-7, ONE - 3e-7, ONE, (NO, NO), "within bounds"),
    (ONE, ONE + 0.1, ONE, (NO, NO), "broken"),
    (ONE + 0.1, ONE, ONE, (NO, NO), "broken"),
    (ONE, NAN, ONE, (NO, NO), "broken"),
    (ONE, ONE * np.inf, ONE, (NO, NO), "broken"),
    (NAN, ONE, ONE, (YES, YES), "broken"),  # also without an exact answer
    (ONE, NAN, ONE, (YES, YES), "broken"),
    (ONE, ONE + 1e-9, ONE, (YES, NO), "not judged"),
    (ONE, TWO, ONE, (YES, YES), "not judged"),
)


def test_what_two_results_come_to() -> None:
    for first, second, exact, is_open, outcome in PAIRS:
        found = judge_arrays("output", first, second, "again", sides(first, second, exact, is_open))
        assert found.verdict == outcome


def test_calls_without_one_exact_answer_are_not_held_against_each_other() -> None:
    def apart() -> tuple[Side, Side]:
        (one, _), (_, other) = sides(ONE, TWO, ONE, (NO, NO))(), sides(ONE, TWO, TWO, (NO, NO))()
        return one, other

    assert judge_arrays("output", ONE, TWO, "again", apart).verdict is PropertyOutcome.NOT_JUDGED


def test_equal_bits_need_no_exact_answer_and_another_form_is_broken() -> None:
    array = np.array([1.0, -0.0, np.nan])
    found = judge_arrays("output", array, array.copy(), "again", refused)
    assert (found.verdict, found.differing, found.elements) == (PropertyOutcome.BITWISE, 0, 3)
    found = judge_arrays("output", array, array[::-1].copy(), "again", refused, np.array([False, True, False]))
    assert (found.verdict, found.elements) == (PropertyOutcome.BITWISE, 1)  # nothing is said of the rest
    for second in (np.ones((3, 2)), np.ones((2, 3), np.float32)):
        assert judge_arrays("output", np.ones((2, 3)), second, "again", refused).verdict is PropertyOutcome.BROKEN


def test_the_element_is_named_with_its_numbers_and_whoever_is_wrong() -> None:
    exact, no = np.ones(2), np.zeros(2, bool)
    first, second = np.array([1.0, 1 + 4e-7]), np.array([1.0, 1 - 3e-7])
    found = judge_arrays("output", first, second, "again", sides(first, second, exact, (no, no)))
    assert (found.index, found.value, found.reference, found.exact) == ("1", first[1], second[1], 1.0)
    assert (found.first_bound, found.second_bound, found.differing) == (ALLOWED, ALLOWED, 1)
    for pair, blamed in (((exact, exact + 0.1), "the further"), ((exact + 0.1, exact), "the first call")):
        found = judge_arrays("output", *pair, "again", sides(*pair, exact, (no, no)))
        assert found.message.endswith(f"beyond its bound is {blamed}")


ROW = Row(
    *("mine/a", "attention", "float32", "own.attention", "property", "", "bitwise"),
    property_name="repeated",
    variant="20 calls",
    message="all 5, elements",
)


FAILS = {
    ("bitwise", ""): False,
    ("within bounds", ""): False,
    ("broken", ""): True,
    ("xpass", ""): True,
    ("bitwise", "bitwise"): False,
    ("within bounds", "bitwise"): True,
    ("not judged", "bitwise"): True,
    ("unsupported", "bitwise"): False,
    ("failed", "bitwise"): False,
    ("within bounds", "within bounds"): False,
    ("broken", "within bounds"): True,
    ("nan", ""): False,
    ("nan", "within bounds"): True,
}
"""Outcomes and claims, and whether a row of them fails."""


def test_what_fails_follows_from_the_outcome_and_the_claim() -> None:
    rows = {each: replace(ROW, verdict=each[0], claim=each[1]) for each in FAILS}
    assert {each: row.fails for each, row in rows.items()} == FAILS
    assert not any(replace(row, xfail=True).fails_run for row in rows.values())


def test_a_run_disagrees_where_something_fails_and_did_not_run_where_a_call_failed() -> None:
    assert exit_code_of([ROW]) is ExitCode.AGREE
    assert exit_code_of([ROW, replace(ROW, verdict="failed")]) is ExitCode.NOT_RUN
    assert exit_code_of([replace(ROW, verdict="unsupported")]) is ExitCode.NOT_RUN
    assert exit_code_of([replace(ROW, verdict="failed"), replace(ROW, verdict="broken")]) is ExitCode.DISAGREE
    assert exit_code_of([replace(ROW, verdict="broken", xfail=True)]) is ExitCode.AGREE


def test_the_worst_row_stands_for_several_and_an_expected_one_comes_behind() -> None:
    expected = replace(ROW, verdict="broken", xfail=True)
    claimed = replace(ROW, verdict="within bounds", claim="bitwise")
    assert worst_of([ROW, expected, claimed]) is claimed
    assert worst_of([ROW, expected]) is expected
    assert worst_of([]) is None


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        ROW,
        replace(
            ROW, verdict="broken", value=0.1, reference=math.inf, exact=-1e-310, xfail=True, index="0,1", differing=3
        ),
        replace(ROW, value=math.nan, reference=None),
        replace(ROW, message='quotes "and", commas\nand lines', claim="bitwise"),
    ]
    write_property_rows(tmp_path, rows)
    assert repr(read_property_rows(tmp_path)) == repr(rows)  # NaN is NaN there


@pytest.mark.parametrize("change", [{"verdict": "splendid"}, {"property_name": "unheard_of"}, {"comparison": "stage"}])
def test_a_table_that_is_none_of_ours_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    write_property_rows(tmp_path, [replace(ROW, **change)])
    with pytest.raises(ResultsError, match=f"{PROPERTY_PART} cannot be read"):
        read_property_rows(tmp_path)


def test_more_rows_than_any_run_asks_for_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_property_rows(tmp_path, [ROW, ROW])
    monkeypatch.setattr(parts, "_MAX_PROPERTY_ROWS", 1)
    with pytest.raises(ResultsError, match="it has 2 rows; expected at most 1"):
        read_property_rows(tmp_path)


def test_the_sentence_names_what_does_not_hold() -> None:
    assert sentence_of([ROW]) == "Properties hold: 1 property, 1 comparison."
    assert "own.attention: repeated" in sentence_of([ROW, replace(ROW, verdict="broken")])
    assert sentence_of([replace(ROW, verdict="unsupported")]) == "No property was judged."


def test_outcomes_are_ordered_from_harmless_to_severe() -> None:
    assert PropertyOutcome.BITWISE.severity < PropertyOutcome.WITHIN_BOUNDS.severity < PropertyOutcome.BROKEN.severity


TRUTHS = Truths()


def questions() -> list[PropertyQuestion]:
    """Return what the bundled cases ask in float32, in which NumPy computes as it is."""
    selection = select_cases(["properties"], properties=True)
    assert not selection.faults
    return questions_of(selection.cases, Asking(dtypes=["float32"]))


QUESTIONS = questions()


def variants() -> Iterator[tuple[str, PropertyQuestion, PropertyVariant]]:
    for question in QUESTIONS:
        for variant in question.variants:
            if isinstance(variant, PropertyVariant) and variant.where == "here":
                yield f"{question.name}: {question.case.id}: {variant.what}", question, variant


VARIANTS = list(variants())


def computed(problem: StoredProblem, stages: tuple[str, ...]) -> dict[str, np.ndarray]:
    outcome = evaluate_on(numpy_backend, problem.task(stages))
    assert isinstance(outcome, Computed), outcome
    return dict(outcome.stages)


@pytest.mark.parametrize("name", sorted({question.name for question in QUESTIONS}))
def test_further_calls_have_the_first_calls_exact_answer(name: str) -> None:
    offenders = [
        what for what, question, variant in VARIANTS if question.name == name and not is_same(question, variant)
    ]
    assert offenders == []


def is_same(question: PropertyQuestion, variant: PropertyVariant) -> bool:
    problem, stages = question.problem, variant.stages or question.problem.results
    first = computed(problem, stages)
    if variant.is_merged:
        parts = [computed(call.problem, stages) for call in variant.calls]
        found = judge_merged(variant, problem, first, parts, "native", TRUTHS)
        return found.verdict in (PropertyOutcome.BITWISE, PropertyOutcome.WITHIN_BOUNDS)
    for stage in stages:
        arrays = [computed(call.problem, (stage,))[stage] for call in variant.calls]
        one = side_of("first", TRUTHS.of(problem), stage, first[stage], "native")
        other = _combined_side(variant, stage, arrays, "native", TRUTHS)
        if other.exact.shape != one.exact.shape or not np.allclose(other.exact, one.exact, rtol=1e-12, atol=1e-300):
            return False
    return True


def test_every_property_is_asked_by_a_bundled_case() -> None:
    assert {question.name for question in QUESTIONS} == set(PROPERTIES)


def test_sessions_compare_results_of_one_problem() -> None:
    sessions = [each for question in QUESTIONS for each in question.variants if isinstance(each, SessionVariant)]
    assert sessions
    for variant in sessions:
        for pair in variant.pairs:
            given = variant.session.steps[pair.other].task
            assert variant.session.steps[pair.other].returns
            wanted = pair.problem.task()
            assert given.operation == wanted.operation
            assert {name: each.tobytes() for name, each in given.inputs.items()} == {
                name: each.tobytes() for name, each in wanted.inputs.items()
            }


Ask = Callable[..., list[Row]]
OF_A_PROMPT = (
    *("repeated", "batch_invariant", "padding", "cached_prefix", "decoding", "heads_permuted", "values_scaled"),
    *("scores_shifted", "layout", "poison_large", "poison_nan", "output_buffer", "inputs_unchanged"),
    *("outputs_independent", "after_other_shapes", "packed", "fresh_process", "threads"),
)
RETURNED = '    return {"output": output.astype(query.dtype)'
FAULTS: dict[str, tuple[str, tuple[str, str]]] = {
    "it is nondeterministic once in 20 calls": (
        "repeated",
        (RETURNED, f"    if len(CALLS) % 20 == 13:\n        output[0, 0, 3, 2] *= 1.001\n{RETURNED}"),
    ),
    "a row depends on the batch": (
        "batch_invariant",
        ("    (batch, heads", "    if len(query) > 2:\n        key = key.astype(np.float16)\n    (batch, heads"),
    ),
    "it keeps state between shapes": (
        "after_other_shapes",
        (
            "            total = weights.sum()\n",
            "            room = ROOM.setdefault('weights', np.zeros(256, query.dtype))\n"
            "            room[:keys] = 0\n"
            "            room[: len(weights)] = weights\n"
            "            total = room.sum()\n",
        ),
    ),
    "it writes its inputs": ("inputs_unchanged", ("    (batch, heads", "    query *= 1.5\n    (batch, heads")),
}


def test_a_kernel_that_computes_row_by_row_is_bitwise_the_same_in_all(ask: Ask) -> None:
    rows = ask(OF_A_PROMPT)
    found = {row.property_name: row.verdict for row in rows if row.verdict not in ("bitwise", "unsupported")}
    assert found.keys() <= {"scores_shifted", "packed"}, found
    assert set(found.values()) <= {"within bounds"}
    assert {row.property_name for row in rows if row.verdict == "bitwise"} >= set(OF_A_PROMPT) - found.keys() - {
        "packed"
    }
    assert exit_code_of(rows) is ExitCode.AGREE


SOUND = {
    "it is nondeterministic once in 20 calls": ["batch_invariant", "poison_nan", "inputs_unchanged"],
    "a row depends on the batch": ["repeated", "poison_nan", "inputs_unchanged", "after_other_shapes"],
    "it keeps state between shapes": ["inputs_unchanged", "poison_nan"],
    "it writes its inputs": [],
}
"""What each fault leaves sound."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_for_what_it_is_and_for_nothing_else(fault: str, ask: Ask) -> None:
    name, change = FAULTS[fault]
    rows = ask([name, *SOUND[fault]], change)
    broken = [row for row in rows if row.verdict == "broken"]
    assert {row.property_name for row in broken} == {name}, rows
    assert exit_code_of(rows) is ExitCode.DISAGREE
    if name == "inputs_unchanged":  # what it wrote into is named with its element
        (row,) = broken
        assert (row.stage, row.index) == ("query", "0,0,0,0")
        assert row.value is not None
        assert row.reference == pytest.approx(row.value * 1.5)
        assert "query[0, 0, 0, 0]" in row.message


READS_MASKED = (
    "            output[place] = (weights[:, None] * value[entry, head][own]).sum(0) / total\n",
    "            full = np.zeros(keys, query.dtype)\n            full[own] = weights / total\n"
    "            output[place] = full @ value[entry, head]\n",
)


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
    before, after = READS_MASKED
    change = before, f"{after}            output[np.isnan(output)] = {number}\n"
    below = f'attention.properties = {{"poison_nan": "{claim}"}}' if claim else ""
    rows = ask(["poison_nan", "poison_large", "repeated"], change, below=below)
    assert {row.verdict for row in rows if row.property_name == "poison_nan" and "in values" in row.variant} == {
        outcome
    }
    assert {row.verdict for row in rows if "in keys" in row.variant or row.property_name != "poison_nan"} == {"bitwise"}
    assert exit_code_of(rows) is (ExitCode.DISAGREE if fails else ExitCode.AGREE)


OVERWRITTEN = """
inner, KEPT = attention, {}

def attention(query, key, value, *, is_causal=False):
    found = inner(query, key, value, is_causal=is_causal)["output"]
    out = KEPT.setdefault(found.shape, np.empty_like(found))
    out[...] = found
    return out
"""
SHARED = """
def attention(query, key, value, *, is_causal=False):
    return value[:, :, :, :]
"""


def test_an_output_that_the_next_call_overwrites_or_that_is_memory_of_an_input_is_broken(ask: Ask) -> None:
    for below, says in ((OVERWRITTEN, "after the next call"), (SHARED, "memory of the input value")):
        (row,) = ask(["outputs_independent"], below=below)
        assert (row.verdict, says in row.message) == ("broken", True)


def test_an_output_of_which_some_is_what_was_there_before_is_broken(ask: Ask) -> None:
    change = (
        "    output = np.zeros((batch, heads, queries, value.shape[-1]), query.dtype)",
        "    output = np.empty((batch, heads, queries, value.shape[-1]), query.dtype)\n    output *= 0",
    )
    accumulated = ("            output[place] = (", "            output[place] += (")
    rows = ask(["output_buffer"], change, accumulated)
    assert [row for row in rows if row.verdict == "broken"], rows


@pytest.mark.parametrize(("claim", "fails"), [("bitwise", True), ("within bounds", False)])
def test_a_claim_that_does_not_hold_fails(claim: str, fails: bool, ask: Ask) -> None:
    below = f'attention.properties = {{"batch_invariant": "{claim}"}}'
    change = (
        "            weights = np.exp(scores - scores.max())\n",
        "            weights = np.exp(scores - scores.max() - batch / 7)\n",
    )
    rows = ask(["batch_invariant", "repeated"], change, below=below)
    by_name: dict[str, list[Any]] = {}
    for row in rows:
        by_name.setdefault(row.property_name, []).append(row)
    assert {row.verdict for row in by_name["batch_invariant"]} == {"within bounds", "bitwise"}
    assert any(row.fails for row in by_name["batch_invariant"]) is fails
    assert {row.claim for row in by_name["batch_invariant"]} == {claim}
    assert {(row.verdict, row.claim, row.fails) for row in by_name["repeated"]} == {("bitwise", "", False)}
    assert exit_code_of(rows) is (ExitCode.DISAGREE if fails else ExitCode.AGREE)
