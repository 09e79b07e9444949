"""What the loader checks beyond the form of single fields, as far as JSON Schema can say it.

Everything follows from the specification, the kinds of arrays and the generators. What depends on shapes, on names
that a file defines, or on the sizes of numbers stays with the loader; docs/cases.md, section 11, lists it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attncheck.reading.dtypes import numpy_dtype
from attncheck.reading.expectations import DTYPES_OF_NUMBERS
from attncheck.reading.forms import MERGED_INPUTS
from attncheck.reading.generators import GENERATORS, distributions
from attncheck.reading.options import ONLY_WITH_SOME_SCORES
from attncheck.spec import (
    ASKED_BY,
    DEFAULT_DTYPES,
    DEFAULT_SCORE,
    DTYPES,
    OPERATIONS,
    OPTIONS,
    PACKED_PROJECTIONS,
    PER_HEAD,
    SCORE_INPUTS,
    InputSpec,
    inputs_of,
)

Schema = dict[str, Any]

FINITE: Schema = {"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}
"""What numbers are except for infinity; NaN cannot be told from them."""


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


_SCORING = "scoring"
_EITHER_WAY = ("is_causal", "window")
"""Options of which ``alignment`` needs one."""


def file_rules() -> list[Schema]:
    """Return what a file's fields ask of its cases: its operation, its defaults, and what each case says itself."""
    rules = [rule for operation in OPERATIONS for rule in _of_cases(operation, refer(f"{operation}_case"))]
    return [*rules, *_scoring_rules(), *_needed_options(), *_dtype_rules(), *_random_rules()]


def case_rules() -> list[Schema]:
    """Return what a case asks of itself, whatever its operation."""
    unbounded = {"type": "array", "items": {"type": "null"}}
    options = {"window": {"not": unbounded}, **{name: FINITE for name, spec in OPTIONS.items() if spec.type is float}}
    prints = under("expect", {"contains": {"anyOf": [given("printed"), given("each")]}}, required=True)
    return [
        under("options", {"properties": options}),
        {"if": {"anyOf": [given("computed_in"), given("digits")]}, "then": prints},
    ]


def case_definitions() -> dict[str, Schema]:
    """Return, by name, what every operation asks of its cases, and every kind of score."""
    definitions = {f"{operation}_case": _case_of(operation) for operation in OPERATIONS}
    for score in SCORE_INPUTS:
        idle = [option for option, scores in ONLY_WITH_SOME_SCORES.items() if score not in scores]
        inputs = _inputs(inputs_of(_SCORING, score))
        definitions[f"{score}_case"] = {"properties": {"inputs": inputs, "options": absent(*idle)}}
    return definitions


def _of_cases(operation: str, rule: Schema, *, unless: Sequence[str] = ()) -> list[Schema]:
    """Ask something of the cases of an operation, by their own field or by the file's.

    Not where the file's defaults give one of the options ``unless``.
    """
    own = _cases({"if": has("operation", operation), "then": rule})
    as_file = {"if": has("operation", operation), "then": _cases({"if": {"not": given("operation")}, "then": rule})}
    if not unless:
        return [own, as_file]
    defaults = _default_options({"anyOf": [given(option) for option in unless]})
    return [{"if": {"not": defaults}, "then": each} for each in (own, as_file)]


def _cases(rule: Schema) -> Schema:
    return under("cases", {"items": rule})


def _options(condition: Schema) -> Schema:
    return under("options", condition, required=True)


def _default_options(condition: Schema) -> Schema:
    return under("defaults", _options(condition), required=True)


def _case_of(operation: str) -> Schema:
    entry = OPERATIONS[operation]
    specs = {name: spec for score in SCORE_INPUTS for name, spec in inputs_of(operation, score).items()}
    every_option = {option for each in OPERATIONS.values() for option in each.options}
    stage = {"enum": [*entry.stages, None]}
    numbers = [name for name, spec in specs.items() if spec.is_number]
    layouts = {name: {} if _may_be_transposed(name, specs) else {"not": {"const": "transposed"}} for name in numbers}
    fields: dict[str, Schema] = {
        "options": absent(*sorted(every_option - entry.options)),
        "memory_layout": {"propertyNames": {"enum": numbers}, "properties": layouts},
        "stages": {"items": {"enum": list(entry.stages)}},
        "expect": {"items": {"properties": {"stage": stage, "of": stage}}},
    }
    if not entry.has_numbers:
        fields["expect"] = {"maxItems": 0}
    if operation != _SCORING:  # whose inputs follow from the score
        fields["inputs"] = _inputs(specs)
    rules = [
        {"if": under("memory_layout", given(name), required=True), "then": under("inputs", given(name))}
        for name in numbers
    ]
    return {"properties": fields, "allOf": [*rules, *_layout_rules(operation)]}


def _may_be_transposed(name: str, specs: Mapping[str, InputSpec]) -> bool:
    return len(specs[name].axes) == 4


def _layout_rules(operation: str) -> list[Schema]:
    if operation not in PER_HEAD:
        return [under("layout", {"const": "split"})]
    return [
        {"if": _options({"anyOf": [given("heads"), given("kv_heads")]}), "then": has("layout", "merged")},
        {"if": has("layout", "merged"), "then": under("memory_layout", absent(*sorted(MERGED_INPUTS)))},
    ]


def _inputs(specs: Mapping[str, InputSpec]) -> Schema:
    """Return what an operation asks of its inputs."""
    packed = {name: parts for name, parts in PACKED_PROJECTIONS.items() if specs.keys() >= set(parts)}
    in_parts = {part for parts in packed.values() for part in parts}
    required = [name for name, spec in specs.items() if spec.required and name not in in_parts]
    needs = {name: [spec.needs] for name, spec in specs.items() if spec.needs}
    booleans = {name: refer("MaskInput") for name, spec in specs.items() if spec.boolean}
    counts = {name: refer("CountsInput") for name, spec in specs.items() if spec.whole}
    numbers = {name: refer("NumberInput") for name, spec in specs.items() if spec.is_number}
    known = booleans | counts | numbers | {name: refer("NumberInput") for name in packed}
    rule: Schema = {"propertyNames": {"enum": [*specs, *packed]}, "required": required, "properties": known}
    either = [_in_parts_or_packed(name, parts, specs) for name, parts in packed.items()]
    return rule | ({"dependentRequired": needs} if needs else {}) | ({"allOf": either} if either else {})


def _in_parts_or_packed(packed: str, parts: Sequence[str], specs: Mapping[str, InputSpec]) -> Schema:
    """Return what holds where three inputs are packed in one, or none of them is."""
    apart: Schema = {"required": [name for name in parts if specs[name].required]}
    return {"if": {"required": [packed]}, "then": {"not": {"anyOf": [{"required": [name]} for name in parts]}}} | {
        "else": apart
    }


def _scoring_rules() -> list[Schema]:
    """Return rules on the inputs of scoring, which follow from a case's own score, or else from the file's."""
    rules: list[Schema] = []
    for score in SCORE_INPUTS:
        rule = refer(f"{score}_case")
        rules += _of_cases(_SCORING, {"if": _options(has("score", score)), "then": rule})
        default = _default_options(has("score", score))
        if score == DEFAULT_SCORE:
            default = {"anyOf": [default, {"not": _default_options(given("score"))}]}
        as_file = {"if": {"not": _options(given("score"))}, "then": rule}
        rules += [{"if": default, "then": each} for each in _of_cases(_SCORING, as_file)]
    return rules


def _needed_options() -> list[Schema]:
    """Return rules on options that a case needs, unless the file's defaults have them."""
    heads = _options(given("heads"))
    positioned = _options({"anyOf": [given("window"), has("is_causal", True)]})
    merged = {"if": has("layout", "merged"), "then": heads}
    aligned = {"if": _options(given("alignment")), "then": positioned}
    inputs = [name for name in OPERATIONS["masking"].inputs if name in ASKED_BY["masked"] | ASKED_BY["biased"]]
    masked = {"anyOf": [positioned, under("inputs", {"anyOf": [given(name) for name in inputs]})]}
    positions = _default_options({"anyOf": [given(option) for option in _EITHER_WAY]})
    return [
        *(
            rule
            for name, own in OPERATIONS.items()
            if own.has_projections
            for rule in _of_cases(name, heads, unless=["heads"])
        ),
        *(rule for operation in PER_HEAD for rule in _of_cases(operation, merged, unless=["heads"])),
        *_of_cases("masking", masked, unless=_EITHER_WAY),
        {"if": {"not": positions}, "then": _cases(aligned)},
    ]


def _dtype_rules() -> list[Schema]:
    """Return rules on dtypes in which numbers can be expected, and on those that storage leaves."""
    rules: list[Schema] = []
    for narrow in [dtype for dtype in DTYPES if dtype not in DTYPES_OF_NUMBERS]:
        its_own = under("computed_in", {"anyOf": [{"const": narrow}, {"type": "object"}]}, required=True)
        rules += _where_dtypes([narrow], {"anyOf": [under("expect", {"maxItems": 0}), its_own]})
    for storage in DTYPES:
        size = numpy_dtype(storage).itemsize
        too_narrow = [dtype for dtype in DTYPES if numpy_dtype(dtype).itemsize <= size]
        rules += _where_dtypes(too_narrow, {"not": has("storage", storage)})
    return rules


def _where_dtypes(dtypes: list[str], rule: Schema) -> list[Schema]:
    """Ask something of the cases that have one of these dtypes: by their own field, the file's, or if neither says."""
    one = {"contains": {"enum": dtypes}}
    own = {"if": under("dtypes", one | {"type": "array"}, required=True), "then": rule}
    as_file = _cases({"if": {"not": given("dtypes")}, "then": rule})
    default = under("defaults", under("dtypes", one, required=True), required=True)
    if set(dtypes) & set(DEFAULT_DTYPES):
        default = {"anyOf": [default, {"not": under("defaults", given("dtypes"), required=True)}]}
    return [_cases(own), {"if": default, "then": as_file}]


def _random_rules() -> list[Schema]:
    """Return rules on what a case draws: with the generator of its own, or the file's, or not at all without one."""
    rules: list[Schema] = []
    for generator in GENERATORS:
        one, drawn = has("generator", generator), _drawn(sorted(distributions(generator)))
        rules.append(_cases({"if": under("random", one, required=True), "then": drawn}))
        as_file = _cases({"if": {"not": given("random")}, "then": drawn})
        rules.append({"if": under("defaults", under("random", one, required=True), required=True), "then": as_file})
    none = _cases({"if": {"not": given("random")}, "then": _drawn([])})
    return [*rules, {"if": {"not": under("defaults", given("random"), required=True)}, "then": none}]


def _drawn(known: list[str]) -> Schema:
    """Return what lets a case's arrays and inputs be drawn from these distributions alone."""
    array = {"properties": {"draw": {"enum": known} if known else False}}
    return {"properties": {group: {"additionalProperties": array} for group in ("arrays", "inputs")}}
