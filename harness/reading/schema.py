"""The JSON Schemas of case files and tags.yaml, as editors read them: as strict as JSON Schema can be.

They state what the loader checks beyond the form of single fields, of arrays and of printed numbers. Everything follows
from the specification, the kinds of arrays and the generators. What depends on shapes, on names that a file defines, or
on the sizes of numbers stays with the loader; docs/cases.md, section 11, lists it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from attncheck.reading import for_each
from attncheck.reading.array_kinds import COMBINED_KINDS, KINDS, MASK_KINDS
from attncheck.reading.arrays import INT_RANGE
from attncheck.reading.case_maker import MERGED_INPUTS, ONLY_WITH_SOME_SCORES
from attncheck.reading.expectations import DTYPES_OF_NUMBERS
from attncheck.reading.for_each import EACH, FOR_EACH, MAX_LABEL, ROW_NAME
from attncheck.reading.generated_arrays import GENERATORS, distributions
from attncheck.reading.model import CaseFile, TagFile
from attncheck.reading.printed import LEFT_OUT, MAX_AXES
from attncheck.spec import (
    ASKED_BY,
    DEFAULT_DTYPES,
    DEFAULT_SCORE,
    DTYPES,
    MEMORY_LAYOUTS,
    OPERATIONS,
    OPTIONS,
    PACKED_PROJECTIONS,
    PER_HEAD,
    SCORE_INPUTS,
    InputSpec,
    inputs_of,
)
from attncheck.spec.dtypes import numpy_dtype
from attncheck.spec.quantities import QUANTITIES


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
        "properties": {**parts, "blocks": refer("MaskInput"), "values": refer("Truths"), "constant": {"enum": [0, 1]}},
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
    for name, (parameters, *others) in sorted(wanted.items()):
        if not others:
            unknown = absent(*sorted({"low", "high"} - parameters))
            rules.append({"if": has("draw", name), "then": {"allOf": [given(*sorted(parameters)), unknown]}})
    whole = {"type": "integer", "minimum": -INT_RANGE, "maximum": INT_RANGE}
    return [*rules, {"if": has("draw", "randint"), "then": {"properties": {"low": whole, "high": whole}}}]


def rounding_rules() -> list[Schema]:
    """Return what says at most once how printed numbers were rounded."""
    groups = (("exact", "decimals", "significant_digits"), ("exact", "digits"))
    return [
        unless_referred(group, one_of(has("exact", True), *map(given, group[1:]), required=False)) for group in groups
    ]


def expectation_rules() -> list[Schema]:
    """Return what an expectation is about, and where its numbers come from."""
    return [
        unless_referred(("stage", "quantity"), one_of(given("stage"), given("quantity"))),
        {"if": given("quantity"), "then": {"allOf": [given("of"), under("quantity", {"enum": list(QUANTITIES)})]}},
        unless_referred(
            ("printed", "known", "unprinted"), one_of(given("printed"), given("known"), has("unprinted", True))
        ),
        {"if": given("known"), "then": given("because")},
        *rounding_rules(),
    ]


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


def one_of(*conditions: Schema, required: bool = True) -> Schema:
    """Return what holds where one of the conditions does and no other, or also where none does."""
    return {"oneOf": [*conditions, *([] if required else [{"not": {"anyOf": list(conditions)}}])]}


_SCORING = "scoring"
_EITHER_WAY = OPTIONS["alignment"].with_one_of
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
    is_it = has("operation", operation)
    rules = _own_or_shared("operation", is_it, is_it, rule)
    if not unless:
        return rules
    defaults = _default_options({"anyOf": [given(option) for option in unless]})
    return [{"if": {"not": defaults}, "then": each} for each in rules]


def _own_or_shared(field: str, own: Schema, shared: Schema, rule: Schema) -> list[Schema]:
    """Ask something of the cases whose own field says so, or of those without it where what the file says does."""
    unsaid = {"if": {"not": given(field)}, "then": rule}
    return [_cases({"if": own, "then": rule}), {"if": shared, "then": _cases(unsaid)}]


def _cases(rule: Schema) -> Schema:
    return under("cases", {"items": rule})


def _options(condition: Schema) -> Schema:
    return under("options", condition, required=True)


def _defaults(condition: Schema) -> Schema:
    return under("defaults", condition, required=True)


def _default_options(condition: Schema) -> Schema:
    return _defaults(_options(condition))


def _case_of(operation: str) -> Schema:
    entry = OPERATIONS[operation]
    specs = {name: spec for score in SCORE_INPUTS for name, spec in inputs_of(operation, score).items()}
    every_option = {option for each in OPERATIONS.values() for option in each.options}
    stage = {"enum": [*entry.stages, None]}
    layouts: dict[str, Schema] = {}
    for name in (name for name, spec in specs.items() if not spec.for_reading):
        longer = [layout for layout, spec in MEMORY_LAYOUTS.items() if spec.axes > len(specs[name].axes)]
        layouts[name] = {"not": {"enum": longer}} if longer else {}
    fields: dict[str, Schema] = {
        "options": absent(*sorted(every_option - entry.options)),
        "memory_layout": {"propertyNames": {"enum": list(layouts)}, "properties": layouts},
        "stages": {"items": {"enum": list(entry.stages)}},
        "expect": {"items": {"properties": {"stage": stage, "of": stage}}},
    }
    if not entry.has_numbers:
        fields["expect"] = {"maxItems": 0}
    if operation != _SCORING:  # whose inputs follow from the score
        fields["inputs"] = _inputs(specs)
    rules = [
        {"if": under("memory_layout", given(name), required=True), "then": under("inputs", given(name))}
        for name in layouts
    ]
    return {"properties": fields, "allOf": [*rules, *_layout_rules(operation)]}


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
    default = _defaults(under("dtypes", one, required=True))
    if set(dtypes) & set(DEFAULT_DTYPES):
        default = {"anyOf": [default, {"not": _defaults(given("dtypes"))}]}
    return _own_or_shared("dtypes", under("dtypes", one | {"type": "array"}, required=True), default, rule)


def _random_rules() -> list[Schema]:
    """Return rules on what a case draws: with the generator of its own, or the file's, or not at all without one."""
    rules: list[Schema] = []
    for generator in GENERATORS:
        one = under("random", has("generator", generator), required=True)
        rules += _own_or_shared("random", one, _defaults(one), _drawn(sorted(distributions(generator))))
    none = _cases({"if": {"not": given("random")}, "then": _drawn([])})
    return [*rules, {"if": {"not": _defaults(given("random"))}, "then": none}]


def _drawn(known: list[str]) -> Schema:
    """Return what lets a case's arrays and inputs be drawn from these distributions alone."""
    array = {"properties": {"draw": {"enum": known} if known else False}}
    return {"properties": {group: {"additionalProperties": array} for group in ("arrays", "inputs")}}


REFERENCE = "Each"
_AS_IT_IS = ("name", "id", FOR_EACH, for_each.DESIGN)
"""Fields of a case that no value can be put in place of."""
_AS_THEY_ARE = ("if", "not", "contains", "propertyNames", "enum", "const", "required", "default")
"""What is no schema of a value, or only decides whether a rule applies, which a name in a value's place never meets."""
_OF_MAPPINGS = ("properties", "patternProperties")
_OF_FIELDS = ("items", "additionalProperties")
_OF_FILE = "_of_file"
_REFERRED = re.compile(r'"#/\$defs/(\w+)"')


def let_names_stand_for_values(schema: Schema) -> None:
    """Let the cases of a file have names for values, and say what ``for_each`` is."""
    definitions: dict[str, Any] = schema["$defs"]
    _split_definitions(schema)
    name = {"type": "string", "pattern": for_each.NAME, "maxLength": MAX_LABEL, "not": {"const": ROW_NAME}}
    fields = {EACH: {**name, "description": "A name of `for_each`, whose value stands here."}}
    definitions[REFERENCE] = {"type": "object", "properties": fields, "required": [EACH], "additionalProperties": False}
    definitions["ForEachValues"], definitions["ForEachRows"] = _values_and_rows(name)
    names = {"type": "object", "minProperties": 1, "propertyNames": name}
    definitions["ForEach"] = {"anyOf": [names | {"additionalProperties": refer("ForEachValues")}, refer("ForEachRows")]}
    definitions["Design"] = _design(name)
    case = definitions["CaseEntry"]
    repeated = ((schema, FOR_EACH, "ForEach"), (case, FOR_EACH, "ForEach"), (case, for_each.DESIGN, "Design"))
    for owner, field, definition in repeated:
        kept = {"description": owner["properties"][field]["description"]}
        owner["properties"][field] = {**kept, **refer(definition)}


def _design(name: Schema) -> Schema:
    level = {"type": ["string", "number", "boolean", "null"]}
    levels = {"anyOf": [level, {"type": "array", "items": level}]}
    excluded = {"type": "object", "minProperties": 1, "additionalProperties": levels}
    factor = {"anyOf": [refer("ForEachValues"), refer("ForEachRows")]}
    fields = {
        for_each.FACTORS: {
            "description": "The levels of each factor: values as in `for_each`, or rows of values.",
            **{"type": "object", "minProperties": 2, "propertyNames": name, "additionalProperties": factor},
        },
        for_each.STRENGTH: {
            "description": "How many levels meet, every two or every three; 2 if absent.",
            "enum": list(for_each.STRENGTHS),
        },
        for_each.EXCLUDE: {
            "description": "Levels that do not go together, each a mapping of factors to a level or several.",
            **{"type": "array", "items": excluded},
        },
    }
    return {"type": "object", "properties": fields, "required": [for_each.FACTORS], "additionalProperties": False}


def _values_and_rows(name: Schema) -> tuple[Schema, Schema]:
    """Return the values of a name, and rows of several names."""
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
    return {"anyOf": values}, {"type": "array", "minItems": 1, "items": row | {"allOf": [unnamed, named]}}


def _or_reference(schema: Any, *, keep: tuple[str, ...] = ()) -> Any:
    """Let ``{each: name}`` stand for every value inside of a schema, except for fields to ``keep``."""
    if isinstance(schema, list):
        return [_or_reference(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed: Schema = {}
    for keyword, inner in schema.items():
        if keyword in _AS_THEY_ARE:
            changed[keyword] = inner
        elif keyword in _OF_MAPPINGS:
            changed[keyword] = {name: each if name in keep else _either(each) for name, each in inner.items()}
        elif keyword in _OF_FIELDS and inner is not False:
            changed[keyword] = _either(inner)
        else:
            changed[keyword] = _or_reference(inner)
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


_COUNTS = ("prefix_lm", "images", "image_spans", "segments", "document_lengths")
"""Kinds of arrays that are told by counts."""
_FINITE = ("times", "plus", "low", "high")
"""Fields of arrays in which infinity means nothing."""


def case_schema() -> str:
    """Return the JSON Schema of a case file, as text."""
    schema = _generated(CaseFile)
    definitions: dict[str, Any] = schema["$defs"]
    _name_the_kinds(schema)
    _refine_arrays(definitions)
    definitions |= array_definitions() | case_definitions()
    definitions["CaseEntry"]["allOf"] = case_rules()
    definitions["Drawn"]["allOf"] = draw_rules()
    definitions["Expectation"]["allOf"] = expectation_rules()
    definitions["PrintedInput"]["allOf"] = rounding_rules()
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
    """Refine fields of which pydantic knows only that they hold something."""
    definitions["Values"]["properties"]["values"] |= refer("Numbers")
    definitions["Tree"]["properties"]["tree"] |= refer("Parents")
    for kind in _COUNTS:
        definitions[KINDS[kind].__name__]["properties"][kind] |= refer("Counts")
    definitions["Chunked"]["properties"]["left_padding"] |= {"anyOf": [refer("Counts"), {"type": "null"}]}
    for owner, field in (("PrintedInput", "printed"), ("Expectation", "printed"), ("Expectation", "known")):
        content = definitions[owner]["properties"][field]
        files = [part for part in content.pop("anyOf", []) if "$ref" in part]
        content["anyOf"] = [refer("PrintedRows"), *files, *([{"type": "null"}] if "default" in content else [])]
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
