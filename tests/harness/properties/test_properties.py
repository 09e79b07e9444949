"""Properties: the exact answer of further calls, rows, judgements, and kernels with faults between calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.errors import ExitCode, ResultsError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import user_implementation
from attncheck.execution.user_code import Target
from attncheck.execution.worker import Computed, evaluate_on
from attncheck.properties.judging import Side, Truths, _combined_side, judge_arrays, judge_merged, side_of
from attncheck.properties.problem import PropertyVariant, SessionVariant, StoredProblem
from attncheck.properties.run import Asking, PropertyQuestion, ask_implementations, questions_of
from attncheck.reading.case import Case
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

# Two results.

ONE, TWO, NAN, ZERO = np.ones(1), np.full(1, 2.0), np.full(1, np.nan), np.zeros(1)
ALLOWED = 1e-6


def side(what: str, given: Real, exact: Real, is_open: bool) -> Side:
    """Return a side of which an error beyond the bound is wrong where there is an exact answer."""
    own = np.full(given.shape, is_open)
    wrong = ~(np.abs(given - exact) <= ALLOWED) & ~own
    return Side(what, given, exact, np.full(given.shape, ALLOWED), wrong, own)


def sides(first: Real, second: Real, exact: Sequence[Real], is_open: str) -> Callable[[], tuple[Side, Side]]:
    opens, names = [letter == "?" for letter in is_open], ("the first call", "the further")
    one, other = map(side, names, (first, second), exact, opens)
    return lambda: (one, other)


def refused() -> tuple[Side, Side]:
    raise AssertionError("where every bit is the same nothing else is asked")


PAIRS: tuple[tuple[Real, Real, tuple[Real, Real], str, str], ...] = (
    (ZERO, -ZERO, (ZERO, ZERO), "..", "within bounds"),  # the sign of zero is a bit
    (ONE + 4e-7, ONE - 3e-7, (ONE, ONE), "..", "within bounds"),
    (ONE, ONE + 0.1, (ONE, ONE), "..", "broken"),
    (ONE + 0.1, ONE, (ONE, ONE), "..", "broken"),
    (ONE, NAN, (ONE, ONE), "..", "broken"),
    (ONE, ONE * np.inf, (ONE, ONE), "..", "broken"),
    (NAN, ONE, (ONE, ONE), "??", "broken"),  # also without an exact answer
    (ONE, NAN, (ONE, ONE), "??", "broken"),
    (ONE, ONE + 1e-9, (ONE, ONE), "?.", "not judged"),
    (ONE, TWO, (ONE, ONE), "??", "not judged"),
    (ONE, TWO, (ONE, TWO), "..", "not judged"),  # calls without one exact answer are not held against each other
)


def test_what_two_results_come_to() -> None:
    for first, second, exact, is_open, outcome in PAIRS:
        found = judge_arrays("output", first, second, "again", sides(first, second, exact, is_open))
        assert found.verdict == outcome
    array = np.array([1.0, -0.0, np.nan])
    some = np.array([False, True, False])  # nothing is said of the rest
    for second, judged, elements in ((array.copy(), None, 3), (array[::-1].copy(), some, 1)):
        found = judge_arrays("output", array, second, "again", refused, judged)
        assert (found.verdict, found.differing, found.elements) == (PropertyOutcome.BITWISE, 0, elements)
    for second in (np.ones((3, 2)), np.ones((2, 3), np.float32)):
        assert judge_arrays("output", np.ones((2, 3)), second, "again", refused).verdict is PropertyOutcome.BROKEN


def test_the_element_is_named_with_its_numbers_and_whoever_is_wrong() -> None:
    exact = np.ones(2)
    first, second = np.array([1.0, 1 + 4e-7]), np.array([1.0, 1 - 3e-7])
    found = judge_arrays("output", first, second, "again", sides(first, second, (exact, exact), ".."))
    assert (found.index, found.value, found.reference, found.exact) == ("1", first[1], second[1], 1.0)
    assert (found.first_bound, found.second_bound, found.differing) == (ALLOWED, ALLOWED, 1)
    for pair, blamed in (((exact, exact + 0.1), "the further"), ((exact + 0.1, exact), "the first call")):
        found = judge_arrays("output", *pair, "again", sides(*pair, (exact, exact), ".."))
        assert found.message.endswith(f"beyond its bound is {blamed}")


# Rows.

ROW = Row(
    *("mine/a", "attention", "float32", "own.attention", "property", "", "bitwise"),
    property_name="repeated",
    variant="20 calls",
    message="all 5, elements",
)
BROKEN = replace(ROW, verdict="broken")
EXPECTED, CLAIMED = replace(BROKEN, xfail=True), replace(ROW, verdict="within bounds", claim="bitwise")
FAILS = {
    "": {"bitwise": False, "within bounds": False, "broken": True, "xpass": True, "nan": False},
    "bitwise": {"bitwise": False, "within bounds": True, "not judged": True, "unsupported": False, "failed": False},
    "within bounds": {"within bounds": False, "broken": True, "nan": True},
}
"""Claims and outcomes, and whether a row of them fails."""


def test_what_fails_follows_from_the_outcome_and_the_claim() -> None:
    for claim, outcomes in FAILS.items():
        rows = {outcome: replace(ROW, verdict=outcome, claim=claim) for outcome in outcomes}
        assert {outcome: row.fails for outcome, row in rows.items()} == outcomes
        assert not any(replace(row, xfail=True).fails_run for row in rows.values())


def test_the_worst_row_stands_for_several_and_a_run_disagrees_or_did_not_run() -> None:
    failed, unsupported = (replace(ROW, verdict=verdict) for verdict in ("failed", "unsupported"))
    for rows, code, worst in (
        ([ROW], ExitCode.AGREE, ROW),
        ([ROW, failed], ExitCode.NOT_RUN, failed),
        ([unsupported], ExitCode.NOT_RUN, unsupported),
        ([failed, BROKEN], ExitCode.DISAGREE, BROKEN),
        ([ROW, EXPECTED], ExitCode.AGREE, EXPECTED),
        ([ROW, EXPECTED, CLAIMED], ExitCode.DISAGREE, CLAIMED),  # an expected one comes behind
    ):
        assert (exit_code_of(rows), worst_of(rows)) == (code, worst)
    assert worst_of([]) is None
    assert sentence_of([ROW]) == "Properties hold: 1 property, 1 comparison."
    assert "own.attention: repeated" in sentence_of([ROW, BROKEN])
    assert sentence_of([unsupported]) == "No property was judged."


def test_rows_are_read_back_as_they_were_written_and_a_table_that_is_none_of_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: dict[str, Any] = {"value": 0.1, "reference": math.inf, "exact": -1e-310}
    rows = [
        ROW,
        replace(EXPECTED, index="0,1", differing=3, **numbers),
        replace(ROW, value=math.nan, reference=None),
        replace(ROW, message='quotes "and", commas\nand lines', claim="bitwise"),
    ]
    write_property_rows(tmp_path, rows)
    assert repr(read_property_rows(tmp_path)) == repr(rows)  # NaN is NaN there
    changes: tuple[dict[str, Any], ...]
    changes = ({"verdict": "splendid"}, {"property_name": "unheard_of"}, {"comparison": "stage"})
    for change in changes:
        write_property_rows(tmp_path, [replace(ROW, **change)])
        with pytest.raises(ResultsError, match=f"{PROPERTY_PART} cannot be read"):
            read_property_rows(tmp_path)
    write_property_rows(tmp_path, [ROW, ROW])
    monkeypatch.setattr(parts, "_MAX_PROPERTY_ROWS", 1)
    with pytest.raises(ResultsError, match="it has 2 rows; expected at most 1"):
        read_property_rows(tmp_path)


# The questions of bundled cases, in float32, in which NumPy computes as it is.

TRUTHS = Truths()
QUESTIONS = questions_of(select_cases(["properties"], properties=True).cases, Asking(dtypes=["float32"]))


def computed(problem: StoredProblem, stages: tuple[str, ...]) -> dict[str, np.ndarray]:
    outcome = evaluate_on(numpy_backend, problem.task(stages))
    assert isinstance(outcome, Computed), outcome
    return dict(outcome.stages)


def is_same(question: PropertyQuestion, variant: PropertyVariant) -> bool:
    problem, stages = question.problem, variant.stages or question.problem.results
    first = computed(problem, stages)
    if variant.is_merged:
        parts_of_it = [computed(call.problem, stages) for call in variant.calls]
        found = judge_merged(variant, problem, first, parts_of_it, "native", TRUTHS)
        return found.verdict in (PropertyOutcome.BITWISE, PropertyOutcome.WITHIN_BOUNDS)
    for stage in stages:
        arrays = [computed(call.problem, (stage,))[stage] for call in variant.calls]
        one = side_of("first", TRUTHS.of(problem), stage, first[stage], "native").exact
        other = _combined_side(variant, stage, arrays, "native", TRUTHS).exact
        if other.shape != one.shape or not np.allclose(other, one, rtol=1e-12, atol=1e-300):
            return False
    return True


@pytest.mark.parametrize("name", PROPERTIES)
def test_further_calls_have_the_first_calls_exact_answer(name: str) -> None:
    questions = [question for question in QUESTIONS if question.name == name]
    assert questions, "every property is asked by a bundled case"
    offenders = [
        f"{question.case.id}: {variant.what}"
        for question in questions
        for variant in question.variants
        if isinstance(variant, PropertyVariant) and variant.where == "here" and not is_same(question, variant)
    ]
    assert offenders == []


def test_sessions_compare_results_of_one_problem() -> None:
    sessions = [each for question in QUESTIONS for each in question.variants if isinstance(each, SessionVariant)]
    assert sessions
    for variant in sessions:
        for pair in variant.pairs:
            step, wanted = variant.session.steps[pair.other], pair.problem.task()
            assert (step.returns, step.task.operation) == (True, wanted.operation)
            given, expected = (
                {name: each.tobytes() for name, each in task.inputs.items()} for task in (step.task, wanted)
            )
            assert given == expected


# Kernels of somebody's own, right and wrong.

KERNEL = """\
import numpy as np

CALLS, ROOM = [], {}

def attention(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, key_lengths=None,
              past_key=None, past_value=None):
    CALLS.append(query.shape)
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        key, value = np.concatenate([past_key, key], 2), np.concatenate([past_value, value], 2)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    allowed = np.ones((batch, heads, queries, keys), bool)
    if mask is not None:
        allowed = allowed & mask
    if is_causal:
        allowed = allowed & (np.arange(keys) <= past + np.arange(queries)[:, None])
    if key_lengths is not None:
        allowed = allowed & (np.arange(keys) < key_lengths.reshape(-1, 1, 1, 1))
    added = np.broadcast_to(np.zeros((), query.dtype) if bias is None else bias, allowed.shape)
    output = np.zeros((batch, heads, queries, value.shape[-1]), query.dtype)
    log_sum_exp = np.full((batch, heads, queries), -np.inf, query.dtype)
    for place in np.ndindex(batch, heads, queries):
        entry, head, row = place
        own = allowed[place]
        if own.any():
            scores = (key[entry, head][own] * query[place]).sum(-1) * np.asarray(scale, query.dtype) + added[place][own]
            weights = np.exp(scores - scores.max())
            total = weights.sum()
            output[place] = (weights[:, None] * value[entry, head][own]).sum(0) / total
            log_sum_exp[place] = np.log(total) + scores.max()
    return {"output": output.astype(query.dtype), "log_sum_exp": log_sum_exp.astype(query.dtype)}
"""
CASES = """
title: Small calls
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 3}, dtypes: [float32]}
arrays:
  query: {draw: randn, shape: [3, 2, 9, 8]}
  key: {draw: randn, shape: [3, 2, 9, 8]}
  value: {draw: randn, shape: [3, 2, 9, 8]}
cases:
  - name: A prompt
    inputs: {query: query, key: key, value: value}
    options: {is_causal: true}
    properties: [NAMES]
"""
Ask = Callable[..., list[Row]]


@pytest.fixture
def ask(tmp_path: Path, load_text: Callable[[str], list[Case]]) -> Ask:
    """Ask properties of the kernel with something replaced, and with what is written below it."""

    def asked(names: Sequence[str], *changes: tuple[str, str], below: str = "") -> list[Row]:
        text = KERNEL
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "kernel.py"
        path.write_text(f"{text}\n{below}\n", encoding="utf-8")
        implementation = user_implementation(Target.of(f"{path}:attention"), None)
        asking = Asking(limits=Limits(case_seconds=60))
        cases = load_text(CASES.replace("NAMES", ", ".join(names)))
        return ask_implementations([implementation], questions_of(cases, asking), asking)

    return asked


OF_A_PROMPT = (
    *("repeated", "batch_invariant", "padding", "cached_prefix", "decoding", "heads_permuted", "values_scaled"),
    *("scores_shifted", "layout", "poison_large", "poison_nan", "output_buffer", "inputs_unchanged"),
    *("outputs_independent", "after_other_shapes", "packed", "fresh_process", "threads"),
)


def test_a_kernel_that_computes_row_by_row_is_bitwise_the_same_in_all(ask: Ask) -> None:
    rows = ask(OF_A_PROMPT)
    found = {row.property_name: row.verdict for row in rows if row.verdict not in ("bitwise", "unsupported")}
    assert found.keys() <= {"scores_shifted", "packed"}, found
    assert set(found.values()) <= {"within bounds"}
    bitwise = {row.property_name for row in rows if row.verdict == "bitwise"}
    assert bitwise >= set(OF_A_PROMPT) - found.keys() - {"packed"}
    assert exit_code_of(rows) is ExitCode.AGREE


RETURNED = '    return {"output": output.astype(query.dtype)'
SHAPES = "    (batch, heads"
TOTAL = "            total = weights.sum()\n"
IN_ROOM = """\
            room = ROOM.setdefault('weights', np.zeros(256, query.dtype))
            room[:keys] = 0
            room[: len(weights)] = weights
            total = room.sum()
"""
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
MADE = "output = np.zeros((batch, heads, queries, value.shape[-1]), query.dtype)"
UNCLEARED = (
    (MADE, f"{MADE.replace('zeros', 'empty')}\n    output *= 0"),
    ("            output[place] = (", "            output[place] += ("),
)
FAULTS: dict[str, tuple[str, Sequence[str], Sequence[tuple[str, str]], str, str]] = {
    "it is nondeterministic once in 20 calls": (
        *("repeated", ["batch_invariant", "poison_nan", "inputs_unchanged"]),
        [(RETURNED, f"    if len(CALLS) % 20 == 13:\n        output[0, 0, 3, 2] *= 1.001\n{RETURNED}")],
        *("", ""),
    ),
    "a row depends on the batch": (
        *("batch_invariant", ["repeated", "poison_nan", "inputs_unchanged", "after_other_shapes"]),
        [(SHAPES, f"    if len(query) > 2:\n        key = key.astype(np.float16)\n{SHAPES}")],
        *("", ""),
    ),
    "it keeps state between shapes": (
        *("after_other_shapes", ["inputs_unchanged", "poison_nan"], [(TOTAL, IN_ROOM)]),
        *("", ""),
    ),
    "it writes its inputs": (
        *("inputs_unchanged", [], [(SHAPES, f"    query *= 1.5\n{SHAPES}")]),
        *("", "query[0, 0, 0, 0]"),
    ),
    "its output is overwritten by the next call": ("outputs_independent", [], [], OVERWRITTEN, "after the next call"),
    "its output is memory of an input": ("outputs_independent", [], [], SHARED, "memory of the input value"),
    "its output holds what was there before": ("output_buffer", [], UNCLEARED, "", ""),
}
"""What it breaks, what stays sound, what is replaced in the kernel or stands below it, and what is said."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_for_what_it_is_and_for_nothing_else(fault: str, ask: Ask) -> None:
    name, sound, changes, below, says = FAULTS[fault]
    rows = ask([name, *sound], *changes, below=below)
    broken = [row for row in rows if row.verdict == "broken"]
    assert {row.property_name for row in broken} == {name}, rows
    assert exit_code_of(rows) is ExitCode.DISAGREE
    assert any(says in row.message for row in broken)
    if name == "inputs_unchanged":  # what it wrote into is named with its element
        (row,) = broken
        assert (row.stage, row.index, row.reference) == ("query", "0,0,0,0", pytest.approx((row.value or 0) * 1.5))


MEAN = "            output[place] = (weights[:, None] * value[entry, head][own]).sum(0) / total\n"
READS_MASKED = """\
            full = np.zeros(keys, query.dtype)
            full[own] = weights / total
            output[place] = full @ value[entry, head]
            output[np.isnan(output)] = NUMBER
"""


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
    rows = ask(["poison_nan", "poison_large", "repeated"], (MEAN, READS_MASKED.replace("NUMBER", number)), below=below)
    of_values = [row for row in rows if row.property_name == "poison_nan" and "in keys" not in row.variant]
    assert {row.verdict for row in of_values if "in values" in row.variant} == {outcome}
    assert {row.verdict for row in rows if row not in of_values} == {"bitwise"}
    assert exit_code_of(rows) is (ExitCode.DISAGREE if fails else ExitCode.AGREE)


@pytest.mark.parametrize(("claim", "fails"), [("bitwise", True), ("within bounds", False)])
def test_a_claim_that_does_not_hold_fails(claim: str, fails: bool, ask: Ask) -> None:
    below = f'attention.properties = {{"batch_invariant": "{claim}"}}'
    rows = ask(["batch_invariant", "repeated"], ("scores.max())\n", "scores.max() - batch / 7)\n"), below=below)
    of_batch = [row for row in rows if row.property_name == "batch_invariant"]
    assert {(row.verdict, row.claim) for row in of_batch} == {("within bounds", claim), ("bitwise", claim)}
    assert any(row.fails for row in of_batch) is fails
    rest = {(row.verdict, row.claim, row.fails) for row in rows if row not in of_batch}
    assert rest == {("bitwise", "", False)}
    assert exit_code_of(rows) is (ExitCode.DISAGREE if fails else ExitCode.AGREE)
