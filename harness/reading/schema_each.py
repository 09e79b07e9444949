"""``for_each`` in the JSON Schema: ``{each: name}`` may stand for any value of a case, of which no rule knows more."""

from __future__ import annotations

import json
import re
from typing import Any

from attncheck.reading.for_each import MAX_LABEL, NAME, ROW_NAME
from attncheck.reading.repetition import FOR_EACH
from attncheck.reading.schema_conditions import Schema, refer
from attncheck.reading.written_out import EACH

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
    """Let ``{each: name}`` stand for every value inside of a schema, but for fields to ``keep``."""
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
