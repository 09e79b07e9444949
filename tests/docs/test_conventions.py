"""The questions in the documents: those that are asked, in words.

``python tests/docs/test_conventions.py`` writes them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from attncheck.conventions import QUESTIONS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "conventions.md"
MARKED = re.compile(r"<!-- questions -->\n(.*?)<!-- end -->\n", re.DOTALL)


def table() -> str:
    """Every question with its meanings."""
    rows = [
        f"| {each.name} | {each.asks} | {'' if each.expected else '(-) '}"
        f"{'; '.join(meaning.words for meaning in each.meanings)} |"
        for each in QUESTIONS
    ]
    return "\n".join(["| question | asks | meanings |", "| --- | --- | --- |", *rows]) + "\n"


def with_table(text: str) -> str:
    """The page with the table made anew."""
    return MARKED.sub(lambda _: f"<!-- questions -->\n{table()}<!-- end -->\n", text)


def test_the_questions_are_those_that_are_asked() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "python tests/docs/test_conventions.py writes them anew"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
