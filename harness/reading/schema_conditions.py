"""The few conditions of which the rules of the JSON Schema are put together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Schema = dict[str, Any]

FINITE: Schema = {"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}
"""What numbers are but for infinity; NaN cannot be told from them."""


def given(*fields: str) -> Schema:
    """Return what holds where all of these fields are there, and are not null."""
    return {"required": list(fields), "properties": {field: {"not": {"type": "null"}} for field in fields}}


def absent(*fields: str) -> Schema:
    """Return what holds where none of these fields is given."""
    return {"properties": {field: {"type": "null"} for field in fields}}


def under(field: str, schema: Schema, *, required: bool = False) -> Schema:
    """Return what asks something of a field where it is there, or also that it is there."""
    return {"properties": {field: schema}} | ({"required": [field]} if required else {})


def has(field: str, value: object) -> Schema:
    """Return what holds where a field has this value."""
    return under(field, {"const": value}, required=True)


def refer(name: str) -> Schema:
    """Return what a definition of the schema asks."""
    return {"$ref": f"#/$defs/{name}"}


def unless_referred(fields: Collection[str], rule: Schema) -> Schema:
    """Ask something only where the fields have values of their own, and not names for some."""
    referred = [under(field, {"type": "object", "required": ["each"]}, required=True) for field in fields]
    return {"if": {"not": {"anyOf": referred}}, "then": rule}


def exactly_one(*conditions: Schema) -> Schema:
    """Return what holds where one of the conditions does, and no other."""
    return {"oneOf": list(conditions)}


def at_most_one(*conditions: Schema) -> Schema:
    """Return what holds where no two of the conditions do."""
    return {"oneOf": [*conditions, {"not": {"anyOf": list(conditions)}}]}
