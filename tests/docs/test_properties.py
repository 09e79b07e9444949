"""The page of properties: its table is that of the specification.

``python tests/docs/test_properties.py`` writes the table anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from attncheck.properties.table import ASKED_BY
from attncheck.spec.properties import PROPERTIES

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "properties.md"
MARKED = re.compile(r"<!-- properties -->\n.*<!-- end -->\n", re.DOTALL)


def table() -> str:
    """Return the properties with what they say as Markdown."""
    rows = [f"| `{each.name}` | {each.says} | {each.calls} |" for each in PROPERTIES.values()]
    return "\n".join(["| property | what must hold | further calls |", "| --- | --- | --- |", *rows, ""])


def with_table(text: str) -> str:
    """Return the page with its table made anew."""
    return MARKED.sub(lambda _: f"<!-- properties -->\n{table()}<!-- end -->\n", text)


def test_the_table_is_that_of_the_specification() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert MARKED.search(text)
    assert with_table(text) == text, "python tests/docs/test_properties.py writes it anew"


def test_every_property_has_a_function() -> None:
    assert list(ASKED_BY) == list(PROPERTIES)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
