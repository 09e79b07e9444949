"""Several failing cases decide together what is named of each; a wrong name is worse than none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import tables_beside

from attncheck.diagnosis.case_evidence import Evidence, Match
from attncheck.diagnosis.decision import (
    KEEP_OWN_MESSAGE,
    MIN_CERTAIN_PAIRS,
    NAME_SEPARATOR,
    NO_DIAGNOSIS,
    Decision,
    DiagnosisColumns,
    apply_decision,
    decide_diagnoses,
)
from attncheck.spec.verdicts import Verdict

NUMERIC, SEMANTIC = Verdict.NUMERIC.value, Verdict.SEMANTIC.value


def fit(name: str, verdict: str = NUMERIC, answer: str = "", stage: str = "masked", **more: Any) -> Match:
    return Match(name, f"it is {name}", stage, verdict, answer or name, **more)


A, CONVENTION = fit("a"), fit("convention", SEMANTIC)
SQUARE, INVERSE = (
    fit(name, answer="1/4", ambiguous_description="it is 1/4, a^2 or 1/D") for name in ("square", "inverse")
)
FITTED = fit("fitted", is_fitted=True)
FITS = {
    **{name: fit(name) for name in "abcd"},
    "convention": CONVENTION,
    "square": SQUARE,
    "inverse": INVERSE,
    "ninth": fit("inverse", answer="1/9"),
    "fitted": FITTED,
    "elsewhere": replace(FITTED, first_failing_stage="scores"),
    "accuracy-of-float32": replace(FITTED, name="accuracy-of-float32", first_failing_stage=""),
    "accuracy-of-16-bits": replace(FITTED, name="accuracy-of-16-bits", result_key="16 bits", first_failing_stage=""),
    f"a{NAME_SEPARATOR}b": replace(A, name=f"a{NAME_SEPARATOR}b", description=f"it is a{NAME_SEPARATOR}it is b"),
}


def case(text: str) -> Evidence:
    """Read what fits a case, ``!`` what it refutes, ``@`` the stage that fails, and ``#`` its operation."""
    words = text.split()
    marked = {mark: [word[1:] for word in words if word[0] == mark] for mark in "!@#"}
    fits = tuple(FITS[word] for word in words if word[0] not in "!@#")
    return Evidence(fits, frozenset(marked["!"]), (marked["@"] or ["output"])[0], (marked["#"] or ["attention"])[0])


def decision(name: str) -> Decision:
    return {"-": NO_DIAGNOSIS, "=": KEEP_OWN_MESSAGE}.get(name) or Decision(FITS[name])


SITUATIONS = tables_beside(__file__)["decisions"]
COUNTS = {"CERTAIN": MIN_CERTAIN_PAIRS, "2CERTAIN": 2 * MIN_CERTAIN_PAIRS, "FEWER": MIN_CERTAIN_PAIRS - 1, "": 1}


def times(text: str) -> list[str]:
    """Read ``3 * x; y`` as three of the one and one of the other."""
    parts = [part.rpartition(" * ") for part in text.split("; ")]
    return [part for count, _, part in parts for _ in range(COUNTS.get(count) or int(count))]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_several_cases_decide(situation: str) -> None:
    cases, decisions = map(times, SITUATIONS[situation])
    found = decide_diagnoses(dict(enumerate(map(case, cases))))
    assert [found[number] for number in range(len(cases))] == list(map(decision, decisions))


def described(*fits: Match) -> list[str]:
    found = decide_diagnoses({number: replace(case("a"), matches=(each,)) for number, each in enumerate(fits)})
    return [each.match.description for each in found.values() if each.match]


def test_what_all_cases_share_is_told_and_names_of_one_answer_together() -> None:
    shared, third = replace(SQUARE, common_description="the default is 1/4"), "the default is a third"
    two, three = (replace(FITTED, description=f"it is {number}", common_description=third) for number in (2, 3))
    assert described(shared, shared) == ["the default is 1/4"] * 2
    assert described(shared, SQUARE) == ["it is square"] * 2
    assert described(two, three) == [third] * 2  # a ratio, of cases that mean different numbers
    assert described(two) == ["it is 2"]
    (together,) = decide_diagnoses({"D = 4": case("square inverse")}).values()
    assert (together.match.name, together.match.description) == (
        f"inverse{NAME_SEPARATOR}square",
        "it is 1/4, a^2 or 1/D",
    )


NAMES = st.sampled_from("abcd")
CASES = st.dictionaries(
    st.integers(0, 9),
    st.builds(
        lambda fits, refuted: case(" ".join([*sorted(fits), *(f"!{name}" for name in refuted - fits)])),
        st.sets(NAMES),
        st.sets(NAMES),
    ),
    min_size=1,
)


@given(CASES, st.randoms(use_true_random=False))
def test_nothing_is_named_that_does_not_fit_or_that_as_many_cases_refute_in_whatever_order(
    cases: dict[int, Evidence], random: Any
) -> None:
    decisions = decide_diagnoses(cases)
    for number, each in decisions.items():
        if each.match is not None:
            for name in each.match.name.split(NAME_SEPARATOR):
                assert FITS[name] in cases[number].matches
                refuting = sum(name in found.refuted_names for found in cases.values())
                assert refuting < sum(FITS[name] in found.matches for found in cases.values())
    shuffled = list(cases.items())
    random.shuffle(shuffled)
    assert decide_diagnoses(dict(shuffled)) == decisions


def test_a_mistake_is_said_before_the_size_of_the_error_and_a_convention_alone() -> None:
    judged = DiagnosisColumns(NUMERIC, "3 times the bound", "output")
    for decision, wording in (
        (Decision(A), DiagnosisColumns(NUMERIC, "it is a; 3 times the bound", "masked", "a")),
        (Decision(CONVENTION), DiagnosisColumns(SEMANTIC, "it is convention", "masked", "convention")),
        (NO_DIAGNOSIS, judged),
        (KEEP_OWN_MESSAGE, None),
    ):
        assert apply_decision(decision, judged) == wording


@pytest.mark.parametrize(("cases", "stays"), [(2, False), (3, True)])
def test_an_accuracy_needs_three_cases_while_another_case_has_no_name(cases: int, stays: bool) -> None:
    from attncheck.diagnosis.run import _drop_rare_accuracies

    accuracy = Decision(Match("accuracy-of-float32", "", "output", "numeric", ""))
    decisions = {("kernel", f"case {number}", "float64"): accuracy for number in range(cases)}
    assert _drop_rare_accuracies(decisions) == decisions
    nameless = {("kernel", "another case", "float64"): NO_DIAGNOSIS}
    kept = decisions if stays else dict.fromkeys(decisions, NO_DIAGNOSIS)
    assert _drop_rare_accuracies(decisions | nameless) == kept | nameless
