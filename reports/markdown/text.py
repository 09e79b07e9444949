"""Markdown that shows any text as it is: tables whose cells come from cases and frameworks."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence

# An ampersand is special only where it begins a character reference, such as &lt;
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#]|&(?=#?\w+;))")


def escape(text: object) -> str:
    """Show a text literally: no markup, no line break."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def code(text: object) -> str:
    """Show a name in monospace; it cannot end the span or the cell."""
    inner = " ".join(str(text).split()).replace("`", "'")
    if "\\|" in inner:  # in a code span neither of the two can be escaped
        return f"<code>{escape(inner)}</code>"
    inner = inner.replace("|", "\\|")
    return f"`{inner}`" if inner else ""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> list[str]:
    """Return a table's lines. Cells are Markdown already; ``align`` has l or r per column, l if it is short."""
    letters = align.ljust(len(headings), "l")
    rule = [("---:" if letter == "r" else "---") for letter in letters[: len(headings)]]
    return [_line(headings), _line(rule), *(_line(row) for row in rows)]


def details(summary: str, lines: Iterable[str]) -> list[str]:
    """Fold lines away behind a summary; without HTML they are simply there."""
    return ["<details>", f"<summary>{html.escape(summary)}</summary>", "", *lines, "", "</details>"]


def commands(lines: Sequence[str]) -> list[str]:
    """Show commands as they are to be pasted; nothing for none. A command has no line break and no backtick in it."""
    return ["See it again, in the folder where the check ran:", "", "```", *lines, "```", ""] if lines else []


def number(value: float | None, digits: int = 3) -> str:
    """Write a number shortly; nothing for no number."""
    return "" if value is None or math.isnan(value) else f"{value:.{digits}g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
