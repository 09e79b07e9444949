"""The table of signature families in the documents, and their names in help texts: those of the code.

``python tests/docs/test_families.py`` writes the table anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from attncheck.cli import options
from attncheck.execution.families import FAMILIES, Family

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "kernel.md"
MARKED = re.compile(r"<!-- signatures -->\n(.*?)<!-- end -->\n", re.DOTALL)
LAYOUTS = {"BHLD": "(B, H, L, D)", "BLHD": "(B, L, H, D)", "LHD": "(L, H, D), a batch entry to a call"}


def table() -> str:
    """A line for each family: its call, its layout, and where its causal calls count from."""
    rows = [f"| `{each.name}` | `{each.call}` | {layout(each)} | {corner(each)} |" for each in FAMILIES.values()]
    return "\n".join(["| `--signature` | is called as | arrays | causal |", "| --- | --- | --- | --- |", *rows]) + "\n"


def layout(family: Family) -> str:
    """How inputs and outputs lie."""
    out = f"; output {LAYOUTS[family.output_layout]}" if family.output_layout else ""
    return LAYOUTS[family.layout] + out


def corner(family: Family) -> str:
    """Where a causal call counts from, or that only a mask says it."""
    return f"from the {family.corner}" if family.causal or family.causal_mask else "as a mask"


def with_table(text: str) -> str:
    """The page with the table made anew."""
    return MARKED.sub(lambda _: f"<!-- signatures -->\n{table()}<!-- end -->\n", text)


def test_the_table_is_that_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert MARKED.search(text)
    assert with_table(text) == text, "python tests/docs/test_families.py writes it anew"


def test_help_texts_name_every_family() -> None:
    names = f"{', '.join(list(FAMILIES)[:-1])} or {list(FAMILIES)[-1]}"
    assert names in options.Signature.__metadata__[0].help
    api = " ".join((ROOT / "harness" / "api.py").read_text(encoding="utf-8").split())
    assert names in api


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
