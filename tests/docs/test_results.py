"""The reference of results: its columns are those of the code.

``python tests/docs/test_results.py`` writes them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from attncheck.reports.columns import COLUMNS, NUMBERS, PAIRS, RESULTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "results.md"
MARKED = re.compile(r"<!-- columns -->\n.*<!-- end -->\n", re.DOTALL)
_FRAMES = {"results": RESULTS, "pairs": PAIRS, "numbers": NUMBERS}


def with_columns(text: str) -> str:
    """Return the page with its table of columns made anew."""
    rows = [
        f"| `{name}` | {', '.join(frame for frame, columns in _FRAMES.items() if name in columns)} | {meaning} |"
        for name, meaning in COLUMNS.items()
        if any(name in columns for columns in _FRAMES.values())
    ]
    table = "\n".join(["| column | frames | meaning |", "| --- | --- | --- |", *rows])
    return MARKED.sub(lambda _: f"<!-- columns -->\n{table}\n<!-- end -->\n", text)


def test_the_columns_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert MARKED.search(text)
    assert with_columns(text) == text, "python tests/docs/test_results.py writes them anew"


if __name__ == "__main__":
    PAGE.write_text(with_columns(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
