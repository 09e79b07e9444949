"""The JSON Schema of what commands print with ``--json``, and the same as tables for the reference."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from attncheck.reports.machine.documents import NOT_FINITE, SCHEMA, Document, ErrorDocument, Record
from attncheck.reports.machine.other_documents import DOCUMENTS

ERROR = "error"
"""The name of the document of a command without an outcome."""
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]}
_REFERENCE = "#/$defs/"


def results_schema() -> str:
    """Return the JSON Schema of all documents."""
    from pydantic import TypeAdapter

    definitions: dict[str, Any] = {}
    for kind in (*dict.fromkeys(DOCUMENTS.values()), ErrorDocument):
        schema = TypeAdapter(kind).json_schema()
        definitions |= schema.pop("$defs", {})
        definitions[kind.__name__] = schema
    described = {name: _described(name, each) for name, each in sorted(definitions.items())}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"What attncheck prints with --json, version {SCHEMA}",
        "oneOf": [
            *(_of_command(*each) for each in DOCUMENTS.items()),
            {"$ref": f"{_REFERENCE}{ErrorDocument.__name__}"},
        ],
        "$defs": {**described, "Number": _NUMBER},
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _of_command(command: str, kind: type[Document]) -> dict[str, Any]:
    header = {"properties": {"command": {"const": command}}}
    return {"title": command, "properties": {"attncheck": header}, "$ref": f"{_REFERENCE}{kind.__name__}"}


def _described(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Give every field its description; all of them are there, and numbers may be texts."""
    descriptions = descriptions_of(_records()[name])
    properties = {
        field: {"description": descriptions[field], **_without_titles(each)}
        for field, each in schema["properties"].items()
    }
    if name == "Header":
        properties["schema"] = {"description": descriptions["schema"], "const": SCHEMA}
    found = {"description": summary_of(_records()[name]), "properties": properties, "required": list(properties)}
    return {**schema, **found}


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _without_titles(each) for key, each in schema.items() if key not in ("title", "default")}
    return {"$ref": f"{_REFERENCE}Number"} if found == {"type": "number"} else found


@cache
def _records() -> Mapping[str, type[Record]]:
    """Return every record by its name."""
    return {each.__name__: each for each in _below(Record)}


def _below(kind: type[Record]) -> Iterator[type[Record]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _below(each)


def descriptions_of(kind: type[Record]) -> Mapping[str, str]:
    """Return the docstring of each field, of the record's own and of those that it has from others."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, Record):
            found |= _own_descriptions(each)
    return found


def _own_descriptions(kind: type[Record]) -> dict[str, str]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    pairs = zip(definition.body, definition.body[1:], strict=False)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def summary_of(kind: type[Record]) -> str:
    """Return the first paragraph of a record's docstring."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def reference() -> str:
    """Return the fields of every document and record as Markdown."""
    kinds: dict[type[Document], list[str]] = {}
    for command, kind in DOCUMENTS.items():
        kinds.setdefault(kind, []).append(command)
    inside = [each for each in _records().values() if not issubclass(each, Document) and each is not Record]
    sections = [_section("Every document", Document, Document)]
    sections += [_section(", ".join(names), kind, Document) for kind, names in kinds.items()]
    sections += [_section(ERROR, ErrorDocument, Document)]
    sections += [_section(each.__name__, each, None) for each in inside]
    return "\n".join(sections)


def _section(title: str, kind: type[Record], base: type[Record] | None) -> str:
    known = {each.name for each in fields(base)} if base is not None and base is not kind else set()
    types = {each.name: str(each.type) for each in fields(kind) if each.name not in known}
    descriptions = descriptions_of(kind)
    rows = [f"| `{name}` | {_type_text(types[name])} | {descriptions[name]} |" for name in types]
    table = "\n".join(["| field | is | meaning |", "| --- | --- | --- |", *rows])
    return f"### {title}\n\n{summary_of(kind)}\n\n{table}\n"


_WORDS = (
    ("Mapping[str, str | Sequence[str]]", "object"),
    ("Mapping[str, Any]", "object"),
    ("Row", "object"),
    ("int", "whole number"),
    ("float", "number"),
    ("str", "text"),
    ("bool", "true or false"),
    ("Any", "nested lists, or null"),
)


def _type_text(annotation: str) -> str:
    """Write a type as people say it: list of texts, number or null."""
    for written, said in _WORDS:
        if annotation == written:
            return said
    if annotation.endswith(" | None"):
        return f"{_type_text(annotation.removesuffix(' | None'))}, or null"
    if annotation.startswith("Sequence["):
        return f"list of {_type_text(annotation[9:-1])}"
    if annotation.startswith("Mapping[str, "):
        return f"object by name of {_type_text(annotation[13:-1])}"
    return f"[{annotation}](#{annotation.lower()})"
