"""What the loader checks of single arrays and printed numbers, as far as JSON Schema can say it."""

from __future__ import annotations

from attncheck.quantities import QUANTITIES
from attncheck.reading.array_kinds import COMBINED_KINDS, MASK_KINDS
from attncheck.reading.arrays import INT_RANGE
from attncheck.reading.generators import GENERATORS, distributions
from attncheck.reading.printed_text import LEFT_OUT, MAX_AXES
from attncheck.reading.schema_cases import (
    Schema,
    absent,
    at_most_one,
    exactly_one,
    given,
    has,
    refer,
    under,
    unless_referred,
)

_PARAMETERS = ("low", "high")
_BASES = ("printed", "known")


def array_definitions() -> dict[str, Schema]:
    """Return, by name, nested numbers and printed rows, and what arrays of counts and of true and false may be."""
    text = {"type": "string", "pattern": r"\S", "not": {"pattern": LEFT_OUT}}
    return {
        "Numbers": _nested("Numbers", {"type": ["number", "boolean"]}),
        "Counts": _nested("Counts", {"type": "integer", "minimum": 0}),
        "Truths": _nested("Truths", {"enum": [False, True, 0, 1]}),
        "PrintedRows": _nested("PrintedRows", text),
        "Parents": _nested("Parents", {"type": ["integer", "null"], "minimum": 0}),
        "MaskInput": _mask(),
        "NumberInput": {"anyOf": [given("times"), given("plus"), absent(*MASK_KINDS)]},
        "CountsInput": _counts(),
    }


def _nested(name: str, scalar: Schema) -> Schema:
    """Return what nested lists are: never empty, and of no more axes than an array has."""
    too_deep: Schema = {"type": "array"}
    for _ in range(MAX_AXES):
        too_deep = {"type": "array", "contains": too_deep}
    return {"anyOf": [scalar, {"type": "array", "minItems": 1, "items": refer(name), "not": too_deep}]}


def _mask() -> Schema:
    parts: Schema = {kind: {"items": refer("MaskInput")} for kind in COMBINED_KINDS}
    parts |= dict.fromkeys(("sum", "as_bias", "alibi", "relative_buckets"), False)
    floored = {"allOf": [has("draw", "runif"), has("floor", True)]}
    drawn = {"allOf": [{"anyOf": [has("draw", "randint"), floored]}, has("low", 0), has("high", 2)]}
    return {
        "properties": {
            **parts,
            "blocks": refer("MaskInput"),
            "values": refer("Truths"),
            "constant": {"enum": [0, 1]},
        },
        "allOf": [absent("times", "plus"), {"if": given("draw"), "then": drawn}],
    }


def _counts() -> Schema:
    """Return what counts are: spelled out, or an array that is named."""
    spelled = {"anyOf": [given("values"), given("ref"), given("file")], "properties": {"values": refer("Counts")}}
    return {"if": {"type": "object"}, "then": {"allOf": [absent("times", "plus"), spelled]}}


def draw_rules() -> list[Schema]:
    """Return which parameters each distribution takes, where all generators that know it agree."""
    wanted: dict[str, set[frozenset[str]]] = {}
    for generator in GENERATORS:
        for name, parameters in distributions(generator).items():
            wanted.setdefault(name, set()).add(parameters)
    rules: list[Schema] = []
    for name, [*found] in sorted(wanted.items()):
        if len(found) == 1:
            others = sorted(set(_PARAMETERS) - found[0])
            rules.append({"if": has("draw", name), "then": {"allOf": [given(*sorted(found[0])), absent(*others)]}})
    whole = {"type": "integer", "minimum": -INT_RANGE, "maximum": INT_RANGE}
    return [*rules, {"if": has("draw", "randint"), "then": {"properties": dict.fromkeys(_PARAMETERS, whole)}}]


def rounding_rules() -> list[Schema]:
    """Return what says at most once how printed numbers were rounded."""
    one = at_most_one(has("exact", True), given("decimals"), given("significant_digits"))
    other = at_most_one(has("exact", True), given("digits"))
    return [
        unless_referred(("exact", "decimals", "significant_digits"), one),
        unless_referred(("exact", "digits"), other),
    ]


def expectation_rules() -> list[Schema]:
    """Return what an expectation is about, and where its numbers come from."""
    return [
        unless_referred(("stage", "quantity"), exactly_one(given("stage"), given("quantity"))),
        {"if": given("quantity"), "then": {"allOf": [given("of"), under("quantity", {"enum": list(QUANTITIES)})]}},
        unless_referred((*_BASES, "unprinted"), exactly_one(*map(given, _BASES), has("unprinted", True))),
        {"if": given("known"), "then": given("because")},
        *rounding_rules(),
    ]
