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


CONVENTION = fit("convention", SEMANTIC)
SQUARE, INVERSE = (fit(name, answer="1/4", unsure="it is 1/4, a^2 or 1/D") for name in ("square", "inverse"))
FITTED = replace(fit("fitted"), is_fitted=True)
ELSEWHERE = replace(FITTED, stage="scores")
ACCURACY = replace(fit("accuracy-of-float32"), stage="", is_fitted=True)


SHARED = replace(SQUARE, shared="the default is 1/4")
OF_TWO, OF_THREE = (
    replace(FITTED, description=f"it is {number}", shared="the default is a third") for number in (2, 3)
)


def several(number: int, found: Evidence) -> list[Evidence]:
    return [found] * number


SITUATIONS: dict[str, tuple[list[Evidence], list[Decision]]] = {
    "what alone fits is named": ([case(A)], [Decision(A)]),
    "of two that fit one case none is": ([case(A, B)], [NAMELESS]),
    "another case refutes one of two": ([case(A, B), case(A, refuted=("b",))], [Decision(A), Decision(A)]),
    "what one case refutes is named nowhere": ([case(A), case(refuted=("a",))], [NAMELESS, NAMELESS]),
    "a case of another operation refutes nothing": (
        [case(A), case(refuted=("a",), failing="grad_key", operation="gradients")],
        [Decision(A), NAMELESS],
    ),
    "what explains more cases is named": ([case(A, B), case(A)], [Decision(A), Decision(A)]),
    "another case tells names of one answer apart": (
        [case(SQUARE, INVERSE), case(fit("inverse", answer="1/9"), refuted=("square",))],
        [Decision(INVERSE), Decision(fit("inverse", answer="1/9"))],
    ),
    "a convention that fits beside others stays": ([case(CONVENTION, B)], [STANDS]),
    "a convention that another case refutes is none": (
        [case(CONVENTION), case(refuted=("convention",))],
        [NAMELESS, NAMELESS],
    ),
    "what explains fewer cases than nothing does is not named": ([case(A), case(), case()], 3 * [NAMELESS]),
    "nor refuted by failures of another stage": (
        [case(A), *several(2, case(failing="scores"))],
        [Decision(A), NAMELESS, NAMELESS],
    ),
    "what many cases say is named whatever else is wrong": (
        [*several(CERTAIN, case(A)), *several(2 * CERTAIN, case())],
        CERTAIN * [Decision(A)] + 2 * CERTAIN * [NAMELESS],
    ),
    "one case fewer is not enough": (
        [*several(CERTAIN - 1, case(A)), *several(2 * CERTAIN, case())],
        (3 * CERTAIN - 1) * [NAMELESS],
    ),
    "nor is it where one refutes it": (
        [*several(CERTAIN, case(A)), *several(2 * CERTAIN, case()), case(refuted=("a",))],
        (3 * CERTAIN + 1) * [NAMELESS],
    ),
    "two faults have each their name": (
        [case(A, failing="masked"), case(B, failing="biased")],
        [Decision(A), Decision(B)],
    ),
    "a case of both refutes neither where each explains more": (
        [*several(3, case(A)), *several(3, case(B)), *several(2, case(refuted=("a", "b")))],
        [*3 * [Decision(A)], *3 * [Decision(B)], NAMELESS, NAMELESS],
    ),
    "as many cases of both refute both": (
        [*several(3, case(A)), *several(3, case(B)), *several(3, case(refuted=("a", "b")))],
        9 * [NAMELESS],
    ),
    "a case that refutes one of two faults alone refutes it": (
        [*several(3, case(A)), *several(3, case(B)), case(refuted=("a", "b")), case(refuted=("a",))],
        8 * [NAMELESS],
    ),
    "what explains most is named beside an exception": (
        [*several(3, case(A)), case(refuted=("a",))],
        [*3 * [Decision(A)], NAMELESS],
    ),
    "and not beside two": ([*several(3, case(A)), *several(2, case(refuted=("a",)))], 5 * [NAMELESS]),
    "a fitted number is not named beside a cause of its stage": ([case(A), case(FITTED)], [Decision(A), NAMELESS]),
    "but beside one of another stage": ([case(A), case(ELSEWHERE)], [Decision(A), Decision(ELSEWHERE)]),
    "what all cases share is told": (
        several(2, case(SHARED)),
        2 * [Decision(replace(SHARED, description="the default is 1/4"))],
    ),
    "and not where one case does not": ([case(SHARED), case(SQUARE)], [Decision(SHARED), Decision(SQUARE)]),
    "a ratio is shared by cases that mean different numbers": (
        [case(OF_TWO), case(OF_THREE)],
        [Decision(replace(fit, description="the default is a third")) for fit in (OF_TWO, OF_THREE)],
    ),
    "and by no single one": ([case(OF_TWO)], [Decision(OF_TWO)]),
    "an accuracy is named beside nameless cases": (
        [case(ACCURACY), *several(3, case())],
        [Decision(ACCURACY), *3 * [NAMELESS]],
    ),
    "unless some case refutes it, of whatever operation": (
        [case(ACCURACY), case(refuted=("accuracy-of-float32",), operation="softmax")],
        [NAMELESS, NAMELESS],
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_several_cases_decide(situation: str) -> None:
    cases, decisions = SITUATIONS[situation]
    found = decide(dict(enumerate(cases)))
    assert [found[number] for number in range(len(cases))] == decisions


def test_names_of_one_answer_are_told_together() -> None:
    (together,) = decide({"D = 4": case(SQUARE, INVERSE)}).values()
    assert together.fit is not None
    assert (together.fit.name, together.fit.description) == (f"inverse{OR}square", "it is 1/4, a^2 or 1/D")


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
