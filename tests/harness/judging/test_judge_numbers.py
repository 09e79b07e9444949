"""Implementations compared with numbers: what holds, what does not, and whose fault it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from problems import Array, Arrays, Problem
from tables import tables_beside

from attncheck.execution.worker import Computed
from attncheck.judging.judge import CaseJudgement, judge_case
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs
from attncheck.results.format import Row
from attncheck.spec.verdicts import Verdict

Compute = Callable[[Case, str], tuple[RoundedInputs, Arrays]]
LoadText = Callable[[str | bytes], list[Case]]
Hold = Callable[..., list[Row]]
DTYPES = ("float32", "float64")

EQUAL = "[[0, 0], [0, 0]]"
"""Scores whose weights are halves."""
APART = "[[0, 1], [2, -1]]"
"""Scores whose weights are those of the logistic function at 1 and 3."""
RIGHT = [[1 - 0.7310585786300049, 0.7310585786300049], [0.9525741268224334, 1 - 0.9525741268224334]]
OFF = [RIGHT[0], [0.9525741268224334, 0.06]]
TABLES = tables_beside(__file__)
CASE, COSINES = (TABLES["case files"][name] for name in ("two rows of scores", "cosines"))


def judged(case: Case, dtype: str, inputs: RoundedInputs, **stages: Arrays) -> CaseJudgement:
    outcomes = {name: Computed(own) for name, own in stages.items()}
    return judge_case(case, dtype, inputs, outcomes, dict.fromkeys(outcomes, "native"))


def numbers(found: CaseJudgement) -> list[Row]:
    return [row for row in found.rows if row.comparison in ("printed", "known", "exact")]


def verdicts(rows: list[Row]) -> list[str]:
    return [str(row.verdict) for row in rows]


def bound_on_weights(scores: list[list[float]], dtype: str) -> Array:
    """What the class allows the weights' errors to be; the bounds have tests of their own."""
    problem = Problem("softmax", {}, {"scores": np.array([[scores]], dtype)})
    return problem.truth(dtype, supports_statistics=False).bounds.bounds_by_stage("native")["weights"].max_error


@pytest.fixture(scope="module")
def hold(load_text: LoadText, compute: Compute) -> Hold:
    """Judge stages given by hand against one expectation on the weights of a softmax of two rows."""

    def call(
        expected: Mapping[str, Any] | str, *weights: Any, dtype: str = "float64", scores: str = EQUAL, says: str = ""
    ) -> list[Row]:
        text = (
            CASE.replace("EXPECTED", f"{{{expected}}}" if isinstance(expected, str) else json.dumps(expected))
            .replace("SCORES", scores)
            .replace("    SAYS\n", f"    {says}\n")
        )
        (case,) = load_text(text)
        inputs, own = compute(case, dtype)
        given = [np.array(each, dtype).reshape(1, 1, 2, 2) for each in weights] or [own["weights"]]
        return numbers(judged(case, dtype, inputs, **{f"i{n}": {"weights": each} for n, each in enumerate(given)}))

    return call


# Half a unit of the last printed digit.


def test_a_number_holds_to_half_a_unit_and_the_error_bound_and_no_further(hold: Hold) -> None:
    for dtype in DTYPES:
        # Half a unit of 0.5 is 0.05, and weights of a half are known to within a few roundings.
        allowed = 0.05 + bound_on_weights([[0, 0], [0, 0]], dtype)[0, 0, 0, 0]
        for sign in (1, -1):
            inside = np.array(0.5 + sign * allowed, dtype)
            if abs(float(inside) - 0.5) > allowed:
                inside = np.nextafter(inside, np.array(0.5, dtype))
            outside = np.nextafter(inside, np.array(sign * np.inf, dtype))
            for value, verdict in ((0.5 + sign * 0.05, "agree"), (inside, "agree"), (outside, "numeric")):
                rows = hold('stage: weights, printed: "0.5 0.5\\n 0.5 0.5"', [[value, 0.5], [0.5, 0.5]], dtype=dtype)
                assert verdicts(rows) == [verdict, "agree", "agree", "agree"], value
                assert (rows[0].half_unit, rows[0].propagated, rows[0].allowed) == (0.05, 0.0, allowed)


SIGNS = {"a": "agree", "n": "numeric", "x": "nonfinite", "m": "misprint", "k": "misprint", "p": "xpass"}
SITUATIONS = TABLES["numbers"]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_numbers_hold_or_not(hold: Hold, situation: str) -> None:
    row = SITUATIONS[situation]
    weights = [{"right": RIGHT, "off": OFF}.get(str(each), each) for each in row.get("returned", ["right"])]
    rows = hold({"stage": "weights", **row["expect"]}, *weights, scores=APART if row.get("apart") else EQUAL)
    assert verdicts(rows) == [SIGNS[sign] for sign in row["verdicts"]]
    assert [each.xfail for each in rows] == [sign == "k" for sign in row["verdicts"]]
    said = [each.message for each in rows if each.verdict != Verdict.AGREE and each.message]
    assert re.match(row.get("says", ""), (said or [""])[0]), said


def test_each_number_has_its_place_and_the_half_unit_of_its_own_digits(hold: Hold) -> None:
    rows = hold('stage: weights, transpose: true, printed: "0.25 1.\\n 0.750 2e-3"', [[0.25, 0.75], [1, 0.002]])
    assert [(row.reference_text, row.index, row.half_unit) for row in rows] == [
        *(("0.25", "0,0,0,0", 0.005), ("1.", "0,0,1,0", 0.5)),
        *(("0.750", "0,0,0,1", 0.0005), ("2e-3", "0,0,1,1", 0.0005)),
    ]


# What is computed and not printed.


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_computed_and_not_printed_is_held_against_the_exact_answer(hold: Hold, dtype: str) -> None:
    rows = hold("stage: weights, called: w, unprinted: true", RIGHT, OFF, scores=APART, dtype=dtype)
    assert verdicts(rows) == ["agree"] * 7 + ["numeric"]
    assert {(row.called, row.comparison, row.reference_text) for row in rows} == {("w", "exact", None)}
    assert [row.reference for row in rows] == [pytest.approx(number, rel=1e-14) for number in RIGHT[0] + RIGHT[1]] * 2
    bound, bad = bound_on_weights([[0, 1], [2, -1]], dtype)[0, 0, 1], rows[7]
    assert (bad.allowed, bad.ratio) == (bound[1], pytest.approx((0.06 - RIGHT[1][1]) / bound[1]))
    assert re.match(r"w\[1, 1\] is exactly 0\.0474258731775\d*, computed 0\.0", bad.message)
    expectation = "quantity: row_maxima, of: weights, unprinted: true"
    right, wrong = hold(expectation, RIGHT, [RIGHT[0], [0.9526, 0]], scores=APART, dtype=dtype)[1::2]
    assert (right.verdict, wrong.verdict) == (Verdict.AGREE, Verdict.NUMERIC)
    # The maximum inherits the largest error of its row, and may round once more.
    assert right.allowed == pytest.approx(bound.max() + np.spacing(np.array(0.9525741268224334, dtype)), rel=1e-6)


def test_a_stage_of_the_wrong_form_is_not_held_against_numbers(load_text: LoadText, compute: Compute) -> None:
    text = CASE.replace("EXPECTED", '{stage: weights, printed: "0 0\\n 0 0"}').replace("SCORES", EQUAL)
    (case,) = load_text(text.replace("    SAYS\n", ""))
    inputs, stages = compute(case, "float64")
    for wrong, verdict in ((np.zeros((1, 2)), Verdict.SHAPE), (np.zeros((1, 1, 2, 2), np.int64), Verdict.DTYPE)):
        found = judged(case, "float64", inputs, bad={"weights": wrong}, good=stages)
        assert {row.implementation for row in numbers(found)} == {"good"}
        of_bad = [row for row in found.rows if row.implementation == "bad" and row.comparison == "stage"]
        assert [row.verdict for row in of_bad] == [verdict]


def test_a_number_without_an_exact_answer_is_unverified_and_its_neighbours_are_judged(
    load_text: LoadText, compute: Compute
) -> None:
    (case,) = load_text(COSINES)
    inputs, stages = compute(case, "float64")
    for number in (np.nan, 0.0, 1.0, 55.0):
        scores = stages["scores"].copy()
        scores[..., 1] = number
        found = judged(case, "float64", inputs, one={"scores": scores})
        (stage,) = (row for row in found.rows if row.comparison == "stage")
        assert (stage.verdict, stage.unjudged, stage.shape) == (Verdict.AGREE, 2, "1x1x2x3")
        rows = numbers(found)
        zero, nan = ("agree" if same else "unverified" for same in (number == 0, np.isnan(number)))
        assert verdicts(rows) == ["agree", zero, "misprint", "agree", nan, "agree"]
        assert rows[2].message.endswith("; the exact answer is -1")
        for row in rows:
            if row.verdict == Verdict.UNVERIFIED:
                why = "there is no exact answer: key has a vector of length 0, which has no direction"
                assert (row.allowed, row.message.endswith(f"not compared: {why}")) == (None, True)
        assert not any(row.verdict == Verdict.AGREE and row.allowed is None and row.difference for row in rows)


# The precision that a document was computed in, and digits that are less than rounded.


def held_in(hold: Hold, printed: str, says: str, dtype: str = "float64") -> Row:
    return hold(f'stage: weights, printed: ". {printed}\\n . ."', RIGHT, scores=APART, dtype=dtype, says=says)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("precision", "printed", "wrong"), TABLES["precisions"])
def test_numbers_are_allowed_the_bound_of_the_precision_they_were_computed_in_and_no_more(
    hold: Hold, dtype: str, precision: str, printed: str, wrong: str
) -> None:
    bare = held_in(hold, printed, "", dtype)
    if (dtype, precision) == ("float32", "float64"):
        assert bare.verdict == Verdict.AGREE  # its own bound is wider
        return
    row, bad = (held_in(hold, each, f"computed_in: {precision}", dtype) for each in (printed, wrong))
    assert (row.verdict, row.propagated, bare.document_bound) == (Verdict.AGREE, 0.0, None)
    assert row.document_bound
    assert row.allowed == pytest.approx((bare.allowed or 0) + row.document_bound)
    if bare.verdict == Verdict.MISPRINT:
        assert row.message.endswith(f"{row.document_bound:.3g} of it for rounding in {precision}, as the document says")
    assert bad.verdict == Verdict.MISPRINT
    assert f"of it for rounding in {precision}" in bad.message
    if (dtype, precision) == ("float64", "float32"):
        assert row.document_bound == bound_on_weights([[0, 1], [2, -1]], "float32")[0, 0, 0, 1]
        assert bare.message.endswith(
            "; rounding in float32 would explain it: if the document was computed in float32, say "
            "`computed_in: float32` in its `source` or in the case"
        )
        assert "would explain" not in bad.message + held_in(hold, wrong, "").message


@pytest.mark.parametrize(("says", "holding", "missing"), TABLES["digits"])
def test_digits_that_were_cut_off_lie_above_what_is_printed_and_units_hold_to_half_a_unit_more(
    hold: Hold, says: str, holding: list[str], missing: list[str]
) -> None:
    for dtype in DTYPES:
        found = {each: str(held_in(hold, each, says, dtype).verdict) for each in holding + missing if len(each) < 8}
        assert found == {each: "agree" if each in holding else "misprint" for each in found}
    found = {each: str(held_in(hold, each, says).verdict) for each in holding + missing}
    assert found == {each: "agree" if each in holding else "misprint" for each in found}
    if "units" in says:
        assert held_in(hold, "0.74", says).half_unit == pytest.approx(0.015)


# The documents.


def test_inputs_that_float32_cannot_hold_are_allowed_for(hold: Hold) -> None:
    for dtype, distance in (("float32", abs(float(np.float32(0.1)) - 0.1)), ("float64", 0.0)):
        expected = 'stage: weights, decimals: 3, printed: "0.5 0.5\\n . ."'
        rows = hold(expected, dtype=dtype, scores="[[0.1, 0.1], [0, 0]]")
        # Two equal scores that part by d each: the weights part by tanh(d) / 2, which is d / 2.
        assert [row.propagated for row in rows] == [pytest.approx(distance / 2, rel=1e-6)] * 2
