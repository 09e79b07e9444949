"""Conventions beside what documentations say: what is measured is what ``documented_conventions.yaml`` records.

``python tests/docs/test_documented_conventions.py`` measures what is installed, and writes the file again. The build of
the documentation makes the page of it.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from attncheck import measure_conventions
from attncheck.asking.conventions import QUESTIONS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SOURCE = ROOT / "docs" / "documented_conventions.yaml"
REFUSED = "refused"
LOADED_BY = {"keras": "tensorflow"}
"""The framework by which a library of another name computes here."""

ENTRIES: dict[str, dict[str, Any]] = yaml.load(SOURCE.read_text(encoding="utf-8"), yaml.CSafeLoader)


def measured(function: str) -> dict[str, str]:
    """What each convention that a function has is measured to be; ``refused`` where its call is."""
    file, found = EXAMPLES / ENTRIES[function].get("file", "plain_calls.py"), {}
    for answer in measure_conventions(f"{file}:{function}"):
        if answer.kind in ("measured", "open"):
            found[answer.question.name] = answer.means
        elif answer.kind == "failed":
            found[answer.question.name] = REFUSED
    return found


def test_every_documented_convention_is_one_that_is_asked() -> None:
    asked = {each.name: {meaning.text for meaning in each.meanings} | {REFUSED} for each in QUESTIONS}
    for function, entry in ENTRIES.items():
        for name, (words, quote) in entry["documented"].items():
            assert words in asked[name], (function, name, words)
            assert quote, (function, name)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(name, marks=getattr(pytest.mark, LOADED_BY.get(entry["package"], entry["package"])))
        for name, entry in ENTRIES.items()
    ],
)
def test_it_is_measured_to_be_what_is_recorded(function: str) -> None:
    entry = ENTRIES[function]
    for package in {entry["package"], LOADED_BY.get(entry["package"], entry["package"])}:
        pytest.importorskip(package)
    if version(entry["package"]).partition("+")[0] != entry["version"]:
        pytest.skip(f"measured with {entry['package']} {entry['version']}; this is {version(entry['package'])}")
    assert measured(function) == entry["measured"]


if __name__ == "__main__":
    text = SOURCE.read_text(encoding="utf-8")
    for name, entry in ENTRIES.items():
        if find_spec(entry["package"]) is not None:
            entry["measured"] = measured(name)
            entry["version"] = version(entry["package"]).partition("+")[0]
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    body = yaml.safe_dump(ENTRIES, sort_keys=False, allow_unicode=True, width=120)
    SOURCE.write_text(head + body, encoding="utf-8")
