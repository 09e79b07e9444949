"""How much was judged, and whether that is enough: what counts, minima, and what falls short of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attncheck.errors import UsageError
from attncheck.results.coverage import Asked, Minimum, is_judged, shortfalls
from attncheck.results.format import Row


@pytest.mark.parametrize(
    ("given", "judged", "reached"),
    [
        ("5", 5, True),
        (5, 4, False),
        ("20%", 5, True),
        ("20.1%", 5, False),
        ("100%", 25, True),
        ("100 %", 24, False),
        ("0", 0, True),
    ],
)
def test_a_minimum_is_a_number_or_a_share_of_what_was_asked(given: str | int, judged: int, *, reached: bool) -> None:
    assert Minimum.of(given, "--min-judged").is_reached(judged, 25) is reached


@pytest.mark.parametrize("given", ["", "many", "-1", "101%", "1e3", "5 cases", "NaN%", True, 1.5, None, [5]])
def test_what_is_no_minimum_is_a_usage_error_that_names_its_place(given: Any) -> None:
    with pytest.raises(
        UsageError, match=r"^--min-judged: expected a number of cases, such as 20, or a share, .*; got "
    ):
        Minimum.of(given, "--min-judged")


@pytest.mark.parametrize("text", ["20", "80%", "12.5%"])
def test_a_minimum_is_written_as_it_is_read(text: str) -> None:
    assert str(Minimum.of(text, "here")) == text
    assert Minimum.of(str(Minimum.of(text, "here")), "here") == Minimum.of(text, "here")


@pytest.mark.parametrize(
    ("judged", "asked", "lines"),
    [
        ({"a": 25, "b": 1}, Asked(25), []),
        ({"a": 25, "b": 0}, Asked(25), []),  # a mode that supports none of it, which nobody asked for by its name
        ({"a": 25, "b": 0}, Asked(25, ("b",)), ["b was asked for by name and not judged in any of the 25 cases"]),
        ({"a": 0, "b": 0}, Asked(25), ["no implementation was judged in any of the 25 cases"]),
        ({"a": 0}, Asked(1, ("a",)), ["no implementation was judged in the only case"]),
        (
            {"a": 24, "b": 5},
            Asked(25, ("a",), Minimum.of("80%", "")),
            ["b was judged in 5 of 25 cases; at least 80% have to be (min_judged)"],
        ),
        ({}, Asked(25), []),
        ({"a": 0}, Asked(0), []),
    ],
)
def test_what_falls_short_is_told(judged: dict[str, int], asked: Asked, lines: list[str]) -> None:
    assert shortfalls(judged, asked) == lines


@pytest.mark.parametrize(
    ("fields", "judged"),
    [
        ({}, True),
        ({"verdict": "numeric"}, True),
        ({"verdict": "numeric", "xfail": True}, True),
        ({"verdict": "shape"}, True),
        ({"verdict": "unverified"}, False),
        ({"verdict": "unsupported", "stage": ""}, False),
        ({"verdict": "crash", "stage": ""}, False),
        ({"verdict": "xpass", "stage": ""}, False),
        ({"comparison": "pair", "other": "torch.eager"}, False),
        ({"comparison": "printed"}, False),
        ({"comparison": "printed", "verdict": "unverified"}, False),
        ({"comparison": "printed", "verdict": "nonfinite"}, True),
    ],
)
def test_a_case_is_judged_where_a_stage_was_held_against_the_exact_answer(
    fields: dict[str, Any], make_row: Callable[..., Row], *, judged: bool
) -> None:
    assert is_judged(make_row(**fields)) is judged
