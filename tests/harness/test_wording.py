"""Numbers and names as messages write them."""

from __future__ import annotations

import pytest

from attncheck.wording import counted, listed


@pytest.mark.parametrize(("number", "text"), [(0, "0 cases"), (1, "1 case"), (2, "2 cases"), (2000, "2,000 cases")])
def test_counts(number: int, text: str) -> None:
    assert counted(number, "case") == text


@pytest.mark.parametrize(
    ("names", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_lists(names: list[str], text: str) -> None:
    assert listed(names) == text
    assert listed(iter(names)) == text
