"""Verdicts: their order, and what each makes of a run."""

from __future__ import annotations

from itertools import permutations

import pytest

from attncheck.errors import ExitCode
from attncheck.verdicts import Verdict, worst

HARMLESS_FIRST = [
    "agree",
    "unverified",
    "unsupported",
    "misprint",
    "semantic",
    "numeric",
    "nonfinite",
    "dtype",
    "shape",
    "xpass",
    "untried",
    "error",
    "timeout",
    "crash",
]
EXIT_CODES = {
    0: {"agree", "unverified", "unsupported"},
    1: {"misprint", "semantic", "numeric", "nonfinite", "dtype", "shape", "xpass"},
    3: {"untried", "error", "timeout", "crash"},
}


def test_verdicts_are_written_as_their_words() -> None:
    assert [str(verdict) for verdict in Verdict] == HARMLESS_FIRST
    assert Verdict("numeric") is Verdict.NUMERIC


def test_severity_follows_the_order_from_harmless_to_severe() -> None:
    assert sorted(Verdict, key=lambda verdict: verdict.severity) == [Verdict(word) for word in HARMLESS_FIRST]
    assert len({verdict.severity for verdict in Verdict}) == len(HARMLESS_FIRST)


@pytest.mark.parametrize(
    ("code", "word"), [(code, word) for code, words in EXIT_CODES.items() for word in sorted(words)]
)
def test_each_verdict_has_the_exit_code_of_the_design(code: int, word: str) -> None:
    assert Verdict(word).exit_code == code
    assert isinstance(Verdict(word).exit_code, ExitCode)


def test_no_verdict_is_without_an_exit_code_of_the_design() -> None:
    assert set().union(*EXIT_CODES.values()) == set(HARMLESS_FIRST)


@pytest.mark.parametrize(("milder", "graver"), [("agree", "unsupported"), ("misprint", "numeric"), ("shape", "error")])
def test_the_worst_of_several_wins_in_any_order(milder: str, graver: str) -> None:
    for order in permutations([Verdict(milder), Verdict(graver), Verdict.AGREE]):
        assert worst(list(order)) is Verdict(graver)


def test_the_worst_of_none_is_that_all_agree() -> None:
    assert worst([]) is Verdict.AGREE
