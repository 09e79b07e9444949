"""The page of conventions beside what documentations say: what is measured is what the page says.

``python tests/docs/test_documented_conventions.py`` measures what is installed, and writes the page again.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from attncheck import measure_conventions
from attncheck.conventions import QUESTIONS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SOURCE = ROOT / "docs" / "documented_conventions.yaml"
PAGE = ROOT / "docs" / "documented_conventions.md"
REFUSED = "refused"
LOADED_BY = {"keras": "tensorflow"}
"""The framework by which a library of another name computes here."""
MARKS = {"torch", "tensorflow", "jax", "onnxruntime", "onnx", "mlx", "openvino"}

ENTRIES: dict[str, dict[str, Any]] = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))


def measured(function: str) -> dict[str, str]:
    """What each convention that a function has is measured to be; ``refused`` where its call is."""
    file, found = EXAMPLES / ENTRIES[function].get("file", "plain_calls.py"), {}
    for answer in measure_conventions(f"{file}:{function}"):
        if answer.kind in ("measured", "open"):
            found[answer.question.name] = answer.means
        elif answer.kind == "failed":
            found[answer.question.name] = REFUSED
    return found


def page(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The page: for each function a table of what is documented beside what is measured."""
    differing = sum(len(differences(entry)) for entry in entries.values())
    silent = sum(len(entry["measured"]) for entry in entries.values()) - sum(
        len(set(entry["documented"]) & set(entry["measured"])) for entry in entries.values()
    )
    lines = [
        "# What documentations say, and what is measured",
        "",
        f"`attncheck conventions` asks functions what they mean. Here are {len(entries)} of them, called in their "
        "libraries'",
        "own words (`examples/plain_calls.py`), beside what their documentations say: "
        f"{differing} answers are other than",
        f"documented (**bold**), and {silent} are documented nowhere that we found (-). What a documentation gives as",
        "code counts as said. Documentations were read in November 2026; the versions are those that were measured.",
        "",
    ]
    for entry in entries.values():
        lines += [f"## {entry['title']}", "", f"{entry['package']} {entry['version']}; <{entry['source']}>", ""]
        lines += ["| convention | documented | measured | its words |", "| --- | --- | --- | --- |"]
        lines += [row(name, entry) for name in order(entry)]
        lines.append("")
    return "\n".join(lines)


def order(entry: Mapping[str, Any]) -> list[str]:
    """The conventions of an entry, as they are asked."""
    return [each.name for each in QUESTIONS if each.name in entry["measured"]]


def row(name: str, entry: Mapping[str, Any]) -> str:
    """One line of a table."""
    words, quote = entry["documented"].get(name, ("-", ""))
    means = entry["measured"][name]
    shown = f"**{means}**" if name in differences(entry) else means
    return f"| {name} | {words} | {shown} | {quote.replace('|', chr(92) + '|').replace('*', chr(92) + '*')} |"


def differences(entry: Mapping[str, Any]) -> list[str]:
    """The conventions that are measured to be other than documented."""
    said = {name: words for name, (words, _) in entry["documented"].items()}
    return [name for name, means in entry["measured"].items() if name in said and said[name] != means]


def test_the_page_is_made_of_the_source() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(ENTRIES)


def test_every_documented_convention_is_one_that_is_asked() -> None:
    asked = {each.name: {meaning.words for meaning in each.meanings} | {REFUSED} for each in QUESTIONS}
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
def test_it_is_measured_to_be_what_the_page_says(function: str) -> None:
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
    PAGE.write_text(page(ENTRIES), encoding="utf-8")
