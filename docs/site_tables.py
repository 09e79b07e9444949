"""Tables that the build of the documentation makes of the code, and the pages include from ``build/tables``.

Fields of JSON documents, modes of each framework, and conventions beside what documentations say of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml

from attncheck.backends import EVERYTHING, Mode
from attncheck.conventions import QUESTIONS
from attncheck.reports.json_documents import Document, ErrorDocument, Record, Row, annotations_of
from attncheck.reports.json_schema import DOCUMENTS, records, summary_of
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
    return {"json.md": json_fields(), "documented_conventions.md": documented_conventions(), **classes, **modes}


def write_tables(folder: Path) -> None:
    """Write the tables into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tables().items():
        (folder / name).write_text(text, encoding="utf-8")


def table(*rows: Iterable[str]) -> str:
    """Return rows as a table of Markdown, whose first row has the names of its columns."""
    heads, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([heads, f"|{' --- |' * (heads.count(' | ') + 1)}", *others, ""])


def json_fields() -> str:
    """Return the fields of every document and record that commands print with ``--json``."""
    kinds: dict[type[Document], list[str]] = {}
    for command, kind in DOCUMENTS.items():
        kinds.setdefault(kind, []).append(command)
    inside = [each for each in records().values() if not issubclass(each, Document) and each is not Record]
    sections = [_fields_of("Every document", Document)]
    sections += [_fields_of(", ".join(names), kind) for kind, names in kinds.items()]
    sections += [_fields_of("error", ErrorDocument), *(_fields_of(each.__name__, each) for each in inside)]
    return "\n".join(sections)


def _fields_of(title: str, kind: type[Record]) -> str:
    known = annotations_of(Document) if kind is not Document and issubclass(kind, Document) else {}
    own = {name: get_args(each)[:2] for name, each in annotations_of(kind).items() if name not in known}
    rows = ((f"`{name}`", _type_text(of), meaning) for name, (of, meaning) in own.items())
    return f"### {title}\n\n{summary_of(kind)}\n\n{table(('field', 'is', 'meaning'), *rows)}"


_TYPES: Mapping[Any, str] = {
    Mapping[str, str | Sequence[str]]: "object",
    Mapping[str, Any]: "object",
    Row: "object",
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Any: "nested lists, or null",
}


def _type_text(kind: Any) -> str:
    """Write a type as people say it: list of texts, number or null."""
    if kind in _TYPES:
        return _TYPES[kind]
    arguments = get_args(kind)
    if NoneType in arguments:
        return f"{_type_text(arguments[0])}, or null"
    if get_origin(kind) is Sequence:
        return f"list of {_type_text(arguments[0])}"
    if get_origin(kind) is Mapping:
        return f"object by name of {_type_text(arguments[1])}"
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


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
