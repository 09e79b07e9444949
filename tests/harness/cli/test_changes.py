"""What is said of two runs in a row: what fails now, what passes, what fails otherwise, and how many there are."""

from __future__ import annotations

import pytest

from attncheck.cli.changes import MAX_LISTED, Changes, Failing, failing_evaluations, remembered
from attncheck.results.failed import Evaluation
from attncheck.results.format import Row

BIG = Failing("numeric", "scores", 312000.0)
SMALL = Failing("numeric", "weights", 3.0)


def key(case: str, dtype: str = "float32", name: str = "mine.attention") -> Evaluation:
    return f"file/{case}", dtype, name


def test_a_failure_says_where_it_begins_and_how_large_it_is() -> None:
    row = Row("file/a", "attention", "float32", "mine.attention", "stage", "output", "numeric", ratio=312000.0)
    assert str(failing_evaluations([row])[key("a")]) == "numeric at output, 3.1e+05 times its bound"
    begun = Row(**{**vars(row), "begins_at": "scores"})
    assert str(failing_evaluations([begun])[key("a")]) == "numeric at scores, 3.1e+05 times its bound"
    infinite = Row(**{**vars(row), "verdict": "nonfinite", "ratio": float("inf")})
    assert str(failing_evaluations([infinite])[key("a")]) == "nonfinite at output"


def test_what_could_not_be_run_says_why_whatever_its_addresses_are() -> None:
    rows = [
        Row("file/a", "attention", "float32", "m.a", "stage", "", "error", message=f"ValueError: <f at {address}>")
        for address in ("0x7fa001", "0x99")
    ]
    found = [failing_evaluations([row])["file/a", "float32", "m.a"] for row in rows]
    assert found[0] == found[1]
    assert str(found[0]) == "error: ValueError: <f at 0x...>"


def test_pairs_that_differ_blame_both() -> None:
    row = Row("file/a", "attention", "float32", "one.a", "pair", "output", "numeric", other="two.a")
    assert set(failing_evaluations([row])) == {key("a", name="one.a"), key("a", name="two.a")}


def test_each_kind_of_change_is_counted_and_listed_with_its_dtypes_together() -> None:
    before = {key("a"): BIG, key("b"): BIG, key("c"): BIG, key("c", "float64"): BIG, key("d"): SMALL, key("e"): SMALL}
    now = {key("b"): SMALL, key("d"): SMALL, key("f", "float64"): BIG, key("f"): BIG}
    changes = Changes.between(before, now, {*now, key("e")})
    assert changes.headline == "2 newly failing, 3 newly passing, 1 failing otherwise, 2 failing as before"
    assert list(changes.lines()) == [
        "newly failing: mine.attention: file/f [float64, float32]: numeric at scores, 3.1e+05 times its bound",
        "newly passing: mine.attention: file/a [float32]: was numeric at scores, 3.1e+05 times its bound",
        "newly passing: mine.attention: file/c [float64, float32]: was numeric at scores, 3.1e+05 times its bound",
        "failing otherwise: mine.attention: file/b [float32]: numeric at weights, 3 times its bound; "
        "was numeric at scores, 3.1e+05 times its bound",
    ]
    assert set(remembered(before, now, {*now, key("e")})) == {*now, key("e")}


@pytest.mark.parametrize(
    ("before", "now", "headline"),
    [
        ({}, {}, "nothing changed, nothing fails"),
        ({key("a"): BIG}, {key("a"): BIG}, "nothing changed, 1 failing as before"),
        ({key("a"): BIG}, {}, "1 newly passing, nothing fails"),
        ({key("a"): BIG}, {key("a"): Failing("numeric", "scores", 312400.0)}, "nothing changed, 1 failing as before"),
        ({key("a"): BIG}, {key("a"): Failing("shape", "scores")}, "1 failing otherwise"),
    ],
)
def test_the_headline_says_whether_anything_changed_and_whether_anything_fails(
    before: dict[Evaluation, Failing], now: dict[Evaluation, Failing], headline: str
) -> None:
    changes = Changes.between(before, now, now)
    assert changes.headline == headline
    assert changes.is_empty is not bool(list(changes.lines()))


def test_of_many_the_first_are_listed_and_the_others_counted() -> None:
    lines = list(Changes.between({}, {key(f"{number:03}"): BIG for number in range(MAX_LISTED + 5)}, ()).lines())
    assert len(lines) == MAX_LISTED + 1
    assert lines[-1] == "newly failing: and 5 more"
