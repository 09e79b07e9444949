"""The list of implementations in the documents: the table of backends, in words.

``python tests/docs/test_implementations.py`` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from attncheck.backends import EVERYTHING, BackendEntry, Mode

PAGE = Path(__file__).parents[2] / "docs" / "implementations.md"
MARKED = re.compile(r"<!-- implementations: (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)


def table(entry: BackendEntry) -> str:
    """Every mode of a framework, with the rounding model that it declares in each dtype."""
    rows = [
        f"| `{entry.name}.{name}` | {mode.description} | {models(mode)} | "
        f"{'the standard ones' if mode.standard_only else 'all'} |"
        for name, mode in (entry.all_modes | {mode.name: mode for mode in entry.device_modes}).items()
    ]
    heads = ["| implementation | is | rounding models | cases by default |", "| --- | --- | --- | --- |"]
    return "\n".join([*heads, *rows]) + "\n"


def models(mode: Mode) -> str:
    """The rounding models of a mode, and the dtypes that have each."""
    dtypes: dict[str, list[str]] = {}
    for dtype, model in mode.classes.items():
        dtypes.setdefault(model, []).append(dtype)
    return "; ".join(f"`{model}` in {', '.join(own)}" for model, own in dtypes.items())


def with_tables(text: str) -> str:
    """The page with every table made anew."""
    return MARKED.sub(
        lambda found: f"<!-- implementations: {found[1]} -->\n{table(EVERYTHING[found[1]])}<!-- end -->\n", text
    )


def test_the_tables_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "python tests/docs/test_implementations.py writes them anew"


def test_every_framework_and_library_has_its_table() -> None:
    assert [name for name, _ in MARKED.findall(PAGE.read_text(encoding="utf-8"))] == list(EVERYTHING)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
