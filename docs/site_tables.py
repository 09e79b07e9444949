"""Tables that the build of the documentation makes of the code, and the pages include from ``build/tables``.

Fields of JSON documents, modes of each framework, and conventions beside what documentations say of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from attncheck.backends import EVERYTHING, Mode
from attncheck.conventions import QUESTIONS
from attncheck.reports.json_schema import reference
from attncheck.spec.rounding import PARTS, PRESETS

CONVENTIONS = Path(__file__).with_name("documented_conventions.yaml")


def tables() -> Mapping[str, str]:
    """Return the tables by the names of their files."""
    modes = {f"implementations-{framework}.md": implementations(framework) for framework in EVERYTHING}
    parts = table(("part", "gives up"), *((f"`{name}`", part.meaning) for name, part in PARTS.items()))
    presets = table(
        ("class", "is", "source"), *((f"`{name}`", f"`{each.parts}`", each.source) for name, each in PRESETS.items())
    )
    classes = {"class_parts.md": parts, "class_presets.md": presets}
    return {"json.md": reference(), "documented_conventions.md": documented_conventions(), **classes, **modes}


def write_tables(folder: Path) -> None:
    """Write the tables into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tables().items():
        (folder / name).write_text(text, encoding="utf-8")


def table(*rows: Iterable[str]) -> str:
    """Return rows as a table of Markdown, whose first row has the names of its columns."""
    heads, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([heads, f"|{' --- |' * (heads.count(' | ') + 1)}", *others, ""])


def implementations(framework: str) -> str:
    """Return every mode of a framework, with the rounding model that it declares in each dtype."""
    entry = EVERYTHING[framework]
    modes = entry.all_modes | {mode.name: mode for mode in entry.device_modes}
    rows = (
        (f"`{framework}.{name}`", mode.description, _models(mode), "the standard ones" if mode.standard_only else "all")
        for name, mode in modes.items()
    )
    return table(("implementation", "is", "rounding models", "cases by default"), *rows)


def _models(mode: Mode) -> str:
    dtypes: dict[str, list[str]] = {}
    for dtype, model in mode.classes.items():
        dtypes.setdefault(model, []).append(dtype)
    return "; ".join(f"`{model}` in {', '.join(own)}" for model, own in dtypes.items())


def documented_conventions() -> str:
    """Return for each function a table of what its documentation says beside what is measured."""
    entries = yaml.safe_load(CONVENTIONS.read_text(encoding="utf-8"))
    lines = []
    for entry in entries.values():
        asked = [question.name for question in QUESTIONS if question.name in entry["measured"]]
        lines += [f"## {entry['title']}", "", f"{entry['package']} {entry['version']}; <{entry['source']}>", ""]
        heads = ("convention", "documented", "measured", "its words")
        lines.append(table(heads, *(_convention(name, entry) for name in asked)))
    return "\n".join(lines)


def _convention(name: str, entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    words, quote = entry["documented"].get(name, ("-", ""))
    means = entry["measured"][name]
    shown = means if words in ("-", means) else f"**{means}**"
    return name, words, shown, quote.replace("|", "\\|").replace("*", "\\*")
