"""The JSON Schemas of case files and tags.yaml, as editors read them: as strict as JSON Schema can be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from attncheck.reading.array_kinds import KINDS
from attncheck.reading.compressed_cases import EACH
from attncheck.reading.for_each import MAX_LABEL, NAME, ROW_NAME
from attncheck.reading.model import CaseFile, TagFile
from attncheck.reading.repetition import FOR_EACH
from attncheck.reading.schema_arrays import array_definitions, draw_rules, expectation_rules, rounding_rules
from attncheck.reading.schema_cases import FINITE, Schema, case_definitions, case_rules, file_rules, refer

REFERENCE = "Each"
_AS_IT_IS = ("name", "id", FOR_EACH)
"""Fields of a case that no value can be put in place of."""
_CONDITIONS = ("if", "not", "contains", "propertyNames")
"""What only decides whether a rule applies: a name that stands for a value meets none of them."""
_OF_MAPPINGS = ("properties", "patternProperties")
_OF_FIELDS = ("items", "additionalProperties")
_OF_FILE = "_of_file"
_REFERRED = re.compile(r'"#/\$defs/(\w+)"')


def let_names_stand_for_values(schema: Schema) -> None:
    """Let the cases of a file have names for values, and say what ``for_each`` is."""
    definitions: dict[str, Any] = schema["$defs"]
    _split_definitions(schema)
    name = {"type": "string", "pattern": NAME, "maxLength": MAX_LABEL, "not": {"const": ROW_NAME}}
    fields = {EACH: {**name, "description": "A name of `for_each`, whose value stands here."}}
    definitions[REFERENCE] = {
        "type": "object",
        "properties": fields,
        "required": [EACH],
        "additionalProperties": False,
    }
    definitions["ForEach"] = _for_each(name)
    for owner in (schema, definitions["CaseEntry"]):
        kept = {"description": owner["properties"][FOR_EACH]["description"]}
        owner["properties"][FOR_EACH] = {**kept, **refer("ForEach")}


def _for_each(name: Schema) -> Schema:
    label = {"type": "string", "maxLength": MAX_LABEL}
    plain = {"anyOf": [{"type": ["number", "boolean", "null"]}, label]}
    values = [
        {"type": "array", "minItems": 1, "items": plain},
        {"type": "object", "minProperties": 1, "propertyNames": label},
    ]
    names = {"anyOf": [name, {"const": ROW_NAME}]}
    row = {"type": "object", "propertyNames": names, "properties": {ROW_NAME: label}}
    unnamed = {"if": {"not": {"required": [ROW_NAME]}}, "then": {"minProperties": 1, "additionalProperties": plain}}
    named = {"if": {"required": [ROW_NAME]}, "then": {"minProperties": 2}}
    return {
        "anyOf": [
            {"type": "object", "minProperties": 1, "propertyNames": name, "additionalProperties": {"anyOf": values}},
            {"type": "array", "minItems": 1, "items": row | {"allOf": [unnamed, named]}},
        ]
    }


def _or_reference(schema: Any, *, keep: tuple[str, ...] = ()) -> Any:
    """Let ``{each: name}`` stand for every value inside of a schema, except for fields to ``keep``."""
    if isinstance(schema, list):
        return [_or_reference(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed: Schema = {}
    for keyword, inner in schema.items():
        if keyword in _CONDITIONS:
            changed[keyword] = inner
        elif keyword in _OF_MAPPINGS:
            changed[keyword] = {name: each if name in keep else _either(each) for name, each in inner.items()}
        elif keyword in _OF_FIELDS and inner is not False:
            changed[keyword] = _either(inner)
        else:
            changed[keyword] = (
                _or_reference(inner) if keyword not in ("enum", "const", "required", "default") else inner
            )
    return changed


def _either(schema: Any) -> Schema:
    if isinstance(schema, dict) and [*schema] == ["not"]:  # a mapping is not what is excluded there
        return schema
    kept = {name: schema[name] for name in ("description", "default") if name in schema} if schema else {}
    return {**kept, "anyOf": [_or_reference(schema), refer(REFERENCE)]}


def _split_definitions(schema: Schema) -> None:
    """Give what a file's cases share definitions of its own, in which no name can stand for a value."""
    definitions: dict[str, Any] = schema["$defs"]
    shared = {"arrays": schema["properties"]["arrays"], "Defaults": definitions["Defaults"]}
    left, found = set(_REFERRED.findall(json.dumps(shared))), set()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left |= set(_REFERRED.findall(json.dumps(definitions[name])))
    own = {f"{name}{_OF_FILE}": _renamed(definitions[name], found) for name in sorted(found)}
    schema["properties"]["arrays"] = _renamed(shared["arrays"], found)
    definitions["Defaults"] = _renamed(shared["Defaults"], found)
    for name, each in definitions.items():
        if name not in ("Defaults", "Source"):
            definitions[name] = _or_reference(each, keep=_AS_IT_IS if name == "CaseEntry" else ())
    definitions |= own
    schema["allOf"] = _or_reference(schema["allOf"])


def _renamed(schema: Any, names: set[str]) -> Any:
    """Return a copy that refers to the definitions of what is shared."""

    def other(found: re.Match[str]) -> str:
        return f'"#/$defs/{found[1]}{_OF_FILE}"' if found[1] in names else found[0]

    return json.loads(_REFERRED.sub(other, json.dumps(schema)))


_COUNTS = (
    ("PrefixLM", "prefix_lm"),
    ("Images", "images"),
    ("ImageSpans", "image_spans"),
    ("Segments", "segments"),
    ("DocumentLengths", "document_lengths"),
)
_FINITE = ("times", "plus", "low", "high")
"""Fields of arrays in which infinity means nothing."""


def case_schema() -> str:
    """Return the JSON Schema of a case file, as text."""
    schema = _generated(CaseFile)
    definitions: dict[str, Any] = schema["$defs"]
    _name_the_kinds(schema)
    _refine_arrays(definitions)
    definitions |= array_definitions() | case_definitions()
    rules = {
        "CaseEntry": case_rules(),
        "Drawn": draw_rules(),
        "Expectation": expectation_rules(),
        "PrintedInput": rounding_rules(),
    }
    for name, rule in rules.items():
        definitions[name]["allOf"] = rule
    schema["allOf"] = file_rules()
    let_names_stand_for_values(schema)
    return _text(schema)


def tag_schema() -> str:
    """Return the JSON Schema of tags.yaml, as text."""
    return _text(_generated(TagFile))


def _name_the_kinds(schema: Schema) -> None:
    """Define once what an array is: one of its kinds, which pydantic lists wherever an array may stand."""
    one_of_them = {"oneOf": [refer(each.__name__) for each in KINDS.values()]}
    for part in _parts(schema):
        if part.get("oneOf") == one_of_them["oneOf"]:
            del part["oneOf"]
            part |= refer("Array")
    schema["$defs"]["Array"] = one_of_them


def _refine_arrays(definitions: dict[str, Any]) -> None:
    """Say of fields of which pydantic knows only that they hold something what the loader wants there."""
    definitions["Values"]["properties"]["values"] |= refer("Numbers")
    definitions["Tree"]["properties"]["tree"] |= refer("Parents")
    for owner, field in _COUNTS:
        definitions[owner]["properties"][field] |= refer("Counts")
    definitions["Chunked"]["properties"]["left_padding"] |= {"anyOf": [refer("Counts"), {"type": "null"}]}
    rows = [("PrintedInput", "printed"), ("Expectation", "printed"), ("Expectation", "known")]
    for owner, field in rows:
        content = definitions[owner]["properties"][field]
        optional = "default" in content
        definitions[owner]["properties"][field] = {
            **{name: value for name, value in content.items() if name != "anyOf"},
            "anyOf": [
                refer("PrintedRows"),
                *(part for part in content.get("anyOf", []) if "$ref" in part),
                *([{"type": "null"}] if optional else []),
            ],
        }
    for owner in definitions.values():
        for field in _FINITE:
            for number in owner.get("properties", {}).get(field, {}).get("anyOf", []):
                if number["type"] != "null":
                    number |= FINITE


def _generated(model: type[BaseModel]) -> Schema:
    """Return pydantic's own schema; where it names the fields of a mapping by a pattern, there are no others."""
    schema = model.model_json_schema()
    for part in _parts(schema):
        if "patternProperties" in part:
            part["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping inside of a schema."""
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _parts(inner)


def _text(schema: Schema) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
