"""The examples in docstrings run, and give what they show."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import attncheck

PACKAGE = Path(attncheck.__file__).parent
FEWEST = 26
"""The number of modules with examples; it only grows."""


def test_examples_in_docstrings_give_what_they_show() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if ">>> " in file.read_text(encoding="utf-8")]
    names = [".".join(("attncheck", *file.relative_to(PACKAGE).with_suffix("").parts)) for file in files]
    results = {name: doctest.testmod(import_module(name), verbose=False) for name in sorted(names)}
    assert {name: result.failed for name, result in results.items() if result.failed} == {}
    assert sum(result.attempted > 0 for result in results.values()) >= FEWEST
