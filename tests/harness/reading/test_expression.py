"""Expressions that select cases: what each form means, how they bind, and how a wrong one is told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import UsageError
from attncheck.reading.case import Case
from attncheck.reading.expression import read_expression
from attncheck.reading.selection import Selection, select_cases

CASES = """
title: Cases of several shapes
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
cases:
  - name: Equal lengths
    tags: [known]
    inputs:
      query: {draw: randn, shape: [2, 4, 8, 16]}
      key: {draw: randn, shape: [2, 2, 8, 16]}
      value: {draw: randn, shape: [2, 2, 8, 5]}
  - name: A causal row
    options: {is_causal: true}
    inputs:
      query: {draw: randn, shape: [3, 4]}
      key: {draw: randn, shape: [65, 4]}
      value: {draw: randn, shape: [65, 4]}
  - name: Scores alone
    operation: softmax
    inputs: {scores: {draw: randn, shape: [3, 8]}}
"""


@pytest.fixture(scope="module")
def cases(load_text: Callable[[str], list[Case]]) -> list[Case]:
    return load_text(CASES)


def matching(cases: list[Case], text: str) -> str:
    """Return the first letters of the names of the cases that match."""
    expression = read_expression(text, "-k")
    return "".join(case.name[0] for case in cases if expression.matches(case))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("causal", "A"),
        ("CAUSAL", "A"),
        ("known", "E"),  # a tag
        ("kno", "E"),
        ("prefix/equal-lengths", "E"),  # an id
        ("'equal lengths'", "E"),
        ('"a causal row" or scores', "AS"),
        ("not causal", "ES"),
        ("not not causal", "A"),
        ("causal or equal and scores", "A"),  # and binds closer than or
        ("(causal or equal) and scores", ""),
        ("not causal and not equal", "S"),  # and not closer than and
        ("Lk=8", "ES"),
        ("Lk == 8", "ES"),
        ("Lk!=8", "A"),
        ("Lk>64", "A"),
        ("Lk>=65 and Lk<=65", "A"),
        ("Lk<65", "ES"),
        ("Lk%8=0", "ES"),
        ("Lk % 8 != 0", "A"),
        ("Lq!=Lk", "AS"),
        ("H!=Hkv", "E"),
        ("Dv<D", "E"),
        ("Lq%3=B", "E"),
        ("Lq%7=B", ""),
        ("Lk%63=B", ""),
        ("Lk%6=B", "E"),
        ("D!=99", "EA"),  # what has no such axis has no length that could differ
        ("not D=99", "EAS"),
        ("P=0", ""),
        ("(((Lk=8)))", "ES"),
        ("-row", "A"),
    ],
)
def test_what_an_expression_matches(cases: list[Case], text: str, names: str) -> None:
    assert matching(cases, text) == names


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("Lk>>8", "expected a whole number or an axis, got '>'", 3),
        ("Lx>8", "unknown axis 'Lx'; expected one of B, H, Hkv, Lq, Lk, ", 0),
        ("Lk=Lx", "unknown axis 'Lx'", 3),
        ("8<Lk", "expected an axis on the left of a comparison, got '8'", 0),
        ("Lk=-1", "expected a whole number or an axis, got '-1'", 3),
        ("Lk=", "expected a whole number or an axis, got the end", 3),
        ("Lk=and", "expected a whole number or an axis, got 'and'", 3),
        ("Lk%0=1", "expected a whole number larger than 0, got '0'", 3),
        ("Lk%8", "expected =, !=, <, <=, > or >=, got the end", 4),
        ("a b", "expected 'and', 'or' or the end, got 'b'", 2),
        ("a and or b", "expected a word, an axis or '(', got 'or'", 6),
        ("not", "expected a word, an axis or '(', got the end", 3),
        ("(a or b", "expected ')', got the end", 7),
        ("a)", "expected 'and', 'or' or the end, got ')'", 1),
        ("a and 'b", 'expected a closing quote, got "\'b"', 6),
        ("a or !b", "expected a word, an axis or a comparison, got '!b'", 5),
        ("a or ''", "expected a text between the quotes", 6),
        ("", "expected a word, an axis or '(', got the end", 0),
        ("(" * 51 + "a" + ")" * 51, "expected at most 50 levels of parentheses and 'not'", 50),
        ("not " * 51 + "a", "expected at most 50 levels", 200),
    ],
)
def test_a_wrong_expression_is_one_error_that_points_at_the_place(text: str, message: str, column: int) -> None:
    with pytest.raises(UsageError) as error:
        read_expression(text, "-k")
    first, shown, pointer = str(error.value).split("\n")
    assert first.startswith(f"-k: {message}")
    assert shown == f"  {text}"
    assert pointer == f"  {' ' * column}^"


def test_what_cannot_be_shown_on_a_line_is_pointed_at_by_its_column() -> None:
    with pytest.raises(UsageError) as error:
        read_expression("a and\n)", "match")
    assert str(error.value) == "match: expected a word, an axis or '(', got ')' (column 7)"
    with pytest.raises(UsageError, match="expected at most 1000 characters, got 1001"):
        read_expression("a" * 1001, "-k")


_PARTS = [*"abLkD()%=!<>'\" 019\x00\n", " and ", " or ", "not ", "Lk", "Lq>", "%8="]


@given(st.lists(st.sampled_from(_PARTS), max_size=30).map("".join))
def test_any_text_is_an_expression_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        assert read_expression(text, "-k").text == text


def test_it_selects_beside_patterns_tags_and_dtypes_and_nothing_is_the_same_error() -> None:
    whole: Selection = select_cases(["attention"])
    causal = select_cases(["attention"], expression=read_expression("causal", "-k"))
    rest = select_cases(["attention"], expression=read_expression("not causal", "-k"))
    assert {case.id for case in whole.cases} == {case.id for case in causal.cases} | {case.id for case in rest.cases}
    assert 0 < len(causal.cases) < len(whole.cases) == len(causal.cases) + len(rest.cases)
    with pytest.raises(UsageError, match="no case matches the paths, globs, tags and dtypes that were given, and the "):
        select_cases(["attention"], expression=read_expression("Lk>99999", "-k"))
