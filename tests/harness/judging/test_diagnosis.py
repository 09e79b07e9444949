"""Several failing cases decide together what is named of each; a wrong name is worse than none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.judging.diagnosis import (
    CERTAIN,
    NAMELESS,
    OR,
    STANDS,
    Decision,
    Evidence,
    Fit,
    Plain,
    decide,
    pack,
    reworded,
    unpack,
)
from attncheck.verdicts import Verdict

NUMERIC, SEMANTIC = Verdict.NUMERIC.value, Verdict.SEMANTIC.value


def fit(name: str, verdict: str = NUMERIC, answer: str = "", stage: str = "masked", unsure: str = "") -> Fit:
    return Fit(name, f"it is {name}", stage, verdict, answer or name, unsure)


def case(*fits: Fit, refuted: tuple[str, ...] = (), failing: str = "output", operation: str = "attention") -> Evidence:
    return Evidence(fits, frozenset(refuted), failing, operation)


A, B = fit("a"), fit("b")


def test_what_alone_fits_is_named() -> None:
    assert decide({"first": case(A)}) == {"first": Decision(A)}


def test_of_two_that_fit_one_case_none_is_named() -> None:
    assert decide({"first": case(A, B)}) == {"first": NAMELESS}


def test_another_case_refutes_one_of_two() -> None:
    decisions = decide({"one query": case(A, B), "many queries": case(A, refuted=("b",))})
    assert decisions == {"one query": Decision(A), "many queries": Decision(A)}


def test_what_one_case_refutes_is_named_nowhere() -> None:
    assert decide({"first": case(A), "second": case(refuted=("a",))}) == {"first": NAMELESS, "second": NAMELESS}


def test_a_case_of_another_operation_refutes_nothing() -> None:
    decisions = decide(
        {"forward": case(A), "backward": case(refuted=("a",), failing="grad_key", operation="gradients")}
    )
    assert decisions["forward"] == Decision(A)


def test_what_explains_a_part_of_the_cases_gives_way_to_what_explains_more() -> None:
    assert decide({"first": case(A, B), "second": case(A)})["first"] == Decision(A)


def test_names_of_one_answer_are_told_together_unless_another_case_tells_them_apart() -> None:
    square, inverse = (fit(name, answer="1/4", unsure="it is 1/4, a^2 or 1/D") for name in ("square", "inverse"))
    (together,) = decide({"D = 4": case(square, inverse)}).values()
    assert together.fit is not None
    assert (together.fit.name, together.fit.description) == (f"inverse{OR}square", "it is 1/4, a^2 or 1/D")
    apart = decide({"D = 4": case(square, inverse), "D = 9": case(fit("inverse", answer="1/9"), refuted=("square",))})
    assert apart["D = 4"] == Decision(inverse)


def test_a_convention_that_fits_beside_others_stays_as_its_case_says_it() -> None:
    assert decide({"first": case(fit("convention", SEMANTIC), B)}) == {"first": STANDS}


def test_a_convention_that_another_case_refutes_is_none() -> None:
    decisions = decide({"first": case(fit("convention", SEMANTIC)), "second": case(refuted=("convention",))})
    assert decisions["first"] == NAMELESS


def test_what_explains_fewer_cases_than_nothing_does_is_not_named() -> None:
    nameless = {f"case {number}": case() for number in range(2)}
    assert decide({"first": case(A), **nameless})["first"] == NAMELESS
    elsewhere = {name: replace(found, failing="scores") for name, found in nameless.items()}
    assert decide({"first": case(A), **elsewhere})["first"] == Decision(A)


def test_what_many_cases_say_and_none_refutes_is_named_whatever_else_is_wrong() -> None:
    softcap = {f"softcap {number}": case(A) for number in range(CERTAIN)}
    others = {f"case {number}": case() for number in range(2 * CERTAIN)}
    assert {decide(softcap | others)[name] for name in softcap} == {Decision(A)}
    fewer = dict(list(softcap.items())[1:])
    assert {decide(fewer | others)[name] for name in fewer} == {NAMELESS}
    refuted = {"refuted": case(refuted=("a",))}
    assert {decide(softcap | others | refuted)[name] for name in softcap} == {NAMELESS}


def test_two_faults_have_each_their_name() -> None:
    decisions = decide({"causal": case(A, failing="masked"), "biased": case(B, failing="biased")})
    assert decisions == {"causal": Decision(A), "biased": Decision(B)}


def both(number: int) -> dict[str, Evidence]:
    """Return cases of a first fault, of a second one, and so many of both."""
    alone = {f"{fit.name} {place}": case(fit) for fit in (A, B) for place in range(3)}
    return alone | {f"both {place}": case(refuted=("a", "b")) for place in range(number)}


def test_a_case_of_two_faults_refutes_neither_where_each_explains_more() -> None:
    decisions = decide(both(2))
    assert {name: decision.fit for name, decision in decisions.items()} == {
        **{f"a {place}": A for place in range(3)},
        **{f"b {place}": B for place in range(3)},
        **{f"both {place}": None for place in range(2)},
    }
    assert set(decide(both(3)).values()) == {NAMELESS}


def test_cases_that_refute_one_of_two_faults_alone_refute_it() -> None:
    decisions = decide(both(1) | {"not a": case(refuted=("a",))})
    assert set(decisions.values()) == {NAMELESS}


def test_what_explains_most_is_named_beside_the_exceptions() -> None:
    """A second fault may meet the first in a few cases, and have no name itself."""
    for exceptions, names in ((1, {A, None}), (2, {None})):
        cases = {f"a {place}": case(A) for place in range(3)}
        decisions = decide(cases | {f"both {place}": case(refuted=("a",)) for place in range(exceptions)})
        assert {decision.fit for decision in decisions.values()} == names


def test_a_fitted_number_is_not_named_beside_a_cause_of_its_stage() -> None:
    fitted = replace(fit("fitted"), is_fitted=True)
    assert decide({"first": case(A), "second": case(fitted)})["second"] == NAMELESS
    elsewhere = replace(fitted, stage="scores")
    assert decide({"first": case(A), "second": case(elsewhere)})["second"] == Decision(elsewhere)


def test_an_accuracy_is_named_unless_some_case_refutes_it() -> None:
    accuracy = replace(fit("accuracy-of-float32"), stage="", is_fitted=True)
    small = {f"too small {number}": case() for number in range(3)}
    assert decide({"first": case(accuracy), **small})["first"] == Decision(accuracy)
    assert (
        decide({"first": case(accuracy), "large": case(refuted=("accuracy-of-float32",), operation="softmax")})["first"]
        == NAMELESS
    )


NAMES = st.sampled_from("abcd")
CASES = st.dictionaries(
    st.integers(0, 9),
    st.builds(
        lambda fits, refuted: case(*(fit(name) for name in sorted(fits)), refuted=tuple(refuted - fits)),
        st.sets(NAMES),
        st.sets(NAMES),
    ),
    min_size=1,
)


@given(CASES)
def test_nothing_is_named_that_does_not_fit_or_that_as_many_cases_refute(cases: dict[int, Evidence]) -> None:
    for number, decision in decide(cases).items():
        if decision.fit is not None:
            assert decision.fit in cases[number].fits
            refuting = sum(decision.fit.name in found.refuted for found in cases.values())
            explaining = sum(decision.fit in found.fits for found in cases.values())
            assert refuting < explaining


@given(CASES, st.randoms(use_true_random=False))
def test_the_order_of_cases_does_not_matter(cases: dict[int, Evidence], random: object) -> None:
    shuffled = list(cases.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide(dict(shuffled)) == decide(cases)


PLAIN = Plain(NUMERIC, "3 times the bound", "output", "as written")


def test_a_mistake_is_said_before_the_size_of_the_error_and_keeps_what_stands_behind() -> None:
    wording = reworded(Decision(A), PLAIN, "as written; beyond what is known")
    assert wording is not None
    assert (wording.verdict, wording.begins_at, wording.diagnosis) == (NUMERIC, "masked", "a")
    assert wording.message == "it is a; 3 times the bound; beyond what is known"


def test_a_convention_is_said_alone() -> None:
    wording = reworded(Decision(fit("convention", SEMANTIC)), PLAIN, "as written")
    assert wording is not None
    assert (wording.verdict, wording.message) == (SEMANTIC, "it is convention")


def test_a_row_without_a_name_reads_plainly_and_one_that_stands_stays() -> None:
    wording = reworded(NAMELESS, PLAIN, "as written")
    assert wording is not None
    assert (wording.verdict, wording.message, wording.begins_at, wording.diagnosis) == (
        NUMERIC,
        PLAIN.message,
        "output",
        None,
    )
    assert reworded(STANDS, PLAIN, "as written") is None


def test_a_number_follows_a_convention_and_no_mistake() -> None:
    wording = reworded(Decision(fit("convention", SEMANTIC)), PLAIN, "as written", follows=True)
    assert wording is not None
    assert (wording.verdict, wording.message) == (SEMANTIC, "3 times the bound; it is convention")
    assert reworded(Decision(A), PLAIN, "as written", follows=True) == reworded(NAMELESS, PLAIN, "as written")


def test_evidence_survives_being_written_and_damage_is_no_evidence() -> None:
    written = pack(case(A, B, refuted=("c",)), PLAIN)
    assert unpack(written) == (case(A, B, refuted=("c",)), PLAIN)


@pytest.mark.parametrize(
    "damaged", ["", "{", "[]", "null", "{}", '{"fits": 3, "refuted": [], "failing": "", "plain": {}}']
)
def test_damaged_evidence_is_none(damaged: str) -> None:
    assert unpack(damaged) is None
    assert unpack(pack(case(A), replace(PLAIN, verdict="no verdict"))) is None
