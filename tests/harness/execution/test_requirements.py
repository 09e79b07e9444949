"""What a function declares that it requires of shapes: the smallest that meet it, and what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.execution.requirements import Requirements

counts = st.integers(1, 40)


@pytest.mark.parametrize(
    ("declared", "widths"),
    [
        ({}, {1: 1, 7: 7}),
        ({"width_multiple": 8}, {1: 8, 8: 8, 9: 16}),
        ({"widths": [64, 16, 128]}, {3: 16, 16: 16, 17: 64, 128: 128, 129: None}),
        ({"min_width": 16, "max_width": 40}, {3: 16, 39: 39, 41: None}),
        ({"width_multiple": 16, "max_width": 40}, {32: 32, 33: None}),
        ({"width_multiple": 32, "widths": (16, 64)}, {3: 64}),
    ],
)
def test_the_smallest_width_that_is_taken(declared: dict[str, Any], widths: dict[int, int | None]) -> None:
    found = Requirements.of(declared)
    assert {width: found.width(width) for width in widths} == widths


@pytest.mark.parametrize(
    ("declared", "given_lengths", "expected"),
    [
        ({}, (3, 5), (3, 5)),
        ({"query_length_multiple": 4}, (3, 5), (4, 5)),
        ({"key_length_multiple": 4}, (3, 5), (3, 8)),
        ({"lengths": "equal"}, (3, 5), (5, 5)),
        ({"lengths": "equal", "query_length_multiple": 4, "key_length_multiple": 6}, (13, 5), (24, 24)),
        ({"query_length_multiple": 16, "key_length_multiple": 16}, (0, 0), (0, 0)),  # nothing is a whole tile
    ],
)
def test_the_smallest_lengths_that_are_taken(
    declared: dict[str, Any], given_lengths: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert Requirements.of(declared).query_and_key_length(*given_lengths) == expected


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"width_multipel": 8},
            "unknown key 'width_multipel'; expected width_multiple, widths, .*width_multiple is meant",
        ),
        ({"dtype": 8}, "unknown key 'dtype'; expected width_multiple"),
        ({"width_multiple": 0}, "width_multiple: expected a whole number of at least 1; got 0"),
        ({"width_multiple": True}, "width_multiple: expected a whole number of at least 1; got True"),
        ({"max_width": 256.0}, r"max_width: expected a whole number of at least 1; got 256\.0"),
        ({"widths": []}, r"widths: expected a list of whole numbers of at least 1; got \[\]"),
        ({"widths": 64}, "widths: expected a list of whole numbers of at least 1; got 64"),
        ({"value_width": 8}, 'value_width: expected "equal"; got 8'),
        ({"lengths": "same"}, "lengths: expected \"equal\"; got 'same'"),
        ({"min_width": 9, "max_width": 8}, "no width meets all of"),
        ({"widths": [12], "width_multiple": 8}, "no width meets all of"),
        (["width_multiple"], r"expected a dict such as .* got \['width_multiple'\]"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_was_expected(declared: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"requires: {message}"):
        Requirements.of(declared)


@given(counts, counts, counts, st.booleans())
def test_a_width_meets_what_is_required_and_none_that_is_smaller_does(
    multiple: int, least: int, width: int, has_limit: bool
) -> None:
    limit = {"max_width": least + 3 * multiple} if has_limit else {}
    found = Requirements.of({"width_multiple": multiple, "min_width": least, **limit})
    taken = [each for each in range(1, 200) if each % multiple == 0 and least <= each <= limit.get("max_width", 200)]
    assert found.width(width) == next((each for each in taken if each >= width), None)
