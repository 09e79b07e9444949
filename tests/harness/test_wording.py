"""Numbers and names as messages write them."""

from __future__ import annotations

import pytest

from attncheck.wording import counted, expected, listed, listed_or


@pytest.mark.parametrize(("number", "text"), [(0, "0 cases"), (1, "1 case"), (2, "2 cases"), (2000, "2,000 cases")])
def test_counts(number: int, text: str) -> None:
    assert counted(number, "case") == text


@pytest.mark.parametrize(
    ("names", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_lists(names: list[str], text: str) -> None:
    assert listed(names) == text
    assert listed(iter(names)) == text


@pytest.mark.parametrize(("names", "text"), [([], ""), (["a"], "a"), (["a", "b", "c"], "a, b or c")])
def test_choices(names: list[str], text: str) -> None:
    assert listed_or(names) == text


DTYPES = ["float64", "bfloat16", "int8"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bflaot16", "did you mean bfloat16? (expected float64, bfloat16, int8)"),
        ("Int8", "did you mean int8? (expected float64, bfloat16, int8)"),
        ("complex", "expected float64, bfloat16, int8"),
        ("", "expected float64, bfloat16, int8"),
        ("x" * 100_000, "expected float64, bfloat16, int8"),
    ],
    ids=["letters swapped", "capitals", "nothing near", "nothing", "endless"],
)
def test_what_is_nearly_called_so_is_asked_for(name: str, said: str) -> None:
    assert expected(name, DTYPES, one_of=False) == said


def test_a_command_takes_the_place_of_a_list_where_something_is_near() -> None:
    assert (
        expected("flaot64", DTYPES, "`attncheck list dtypes`")
        == "did you mean float64? (`attncheck list dtypes` lists all)"
    )
    assert expected("word", DTYPES, "`attncheck list dtypes`") == "expected one of float64, bfloat16, int8"
