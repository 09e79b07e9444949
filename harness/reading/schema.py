"""The JSON Schemas of case files and tags.yaml, as editors read them: as strict as JSON Schema can be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from attncheck.reading.array_kinds import KINDS
from attncheck.reading.model import CaseFile, TagFile
from attncheck.reading.schema_arrays import array_definitions, draw_rules, expectation_rules, rounding_rules
from attncheck.reading.schema_cases import case_definitions, case_rules, file_rules
from attncheck.reading.schema_conditions import FINITE, Schema, refer
from attncheck.reading.schema_each import let_names_stand_for_values

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
    rows = [("PrintedInput", "printed"), ("Expectation", "printed"), ("Expectation", "known")]
    for owner, field in rows:
        content = definitions[owner]["properties"][field]
        optional = "default" in content
        definitions[owner]["properties"][field] = {
            **{name: value for name, value in content.items() if name != "anyOf"},
            "anyOf": [refer("PrintedRows"), *([{"type": "null"}] if optional else [])],
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
