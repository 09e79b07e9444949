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
    DEFAULT_DTYPES,
    DEFAULT_SCORE,
    DTYPES,
    MEMORY_LAYOUTS,
    OPERATIONS,
    OPTIONS,
    PACKED_PROJECTIONS,
    PER_HEAD,
    REQUESTED_BY,
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
    """Return the schema of nested lists: never empty, with no more axes than an array may have."""
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
    """Return the schema of counts: spelled out, or the name of an array."""
    spelled = {"anyOf": [given("values"), given("ref"), given("file")], "properties": {"values": refer("Counts")}}
    return {"if": {"type": "object"}, "then": {"allOf": [absent("times", "plus"), spelled]}}


def draw_rules() -> list[Schema]:
    """Return the parameters of each distribution, if all generators that have it agree."""
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
    """Return rules that allow at most one declaration of how printed numbers were rounded."""
    groups = (("exact", "decimals", "significant_digits"), ("exact", "digits"))
    return [
        unless_referred(group, one_of(has("exact", True), *map(given, group[1:]), required=False)) for group in groups
    ]


def expectation_rules() -> list[Schema]:
    """Return rules on the subject of an expectation and the origin of its numbers."""
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
"""Limits of finite numbers; a JSON Schema cannot exclude NaN."""


def given(*fields: str) -> Schema:
    """Return a schema of objects in which all of these fields are present and not null."""
    return {"required": list(fields), "properties": {field: {"not": {"type": "null"}} for field in fields}}


def absent(*fields: str) -> Schema:
    """Return a schema of objects in which none of these fields is given."""
    return {"properties": {field: {"type": "null"} for field in fields}}


def under(field: str, schema: Schema, *, required: bool = False) -> Schema:
    """Return a schema that applies a rule to a field if it is present, or also requires it."""
    return {"properties": {field: schema}} | ({"required": [field]} if required else {})


def has(field: str, value: object) -> Schema:
    """Return a schema of objects in which a field has this value."""
    return under(field, {"const": value}, required=True)


def refer(name: str) -> Schema:
    """Return a reference to a definition of the schema."""
    return {"$ref": f"#/$defs/{name}"}


def unless_referred(fields: Collection[str], rule: Schema) -> Schema:
    """Apply a rule only if the fields have values, and not names for values."""
    referred = [under(field, {"type": "object", "required": ["each"]}, required=True) for field in fields]
    return {"if": {"not": {"anyOf": referred}}, "then": rule}


def one_of(*conditions: Schema, required: bool = True) -> Schema:
    """Return a schema that is valid if exactly one of the conditions is, or also if none is."""
    return {"oneOf": [*conditions, *([] if required else [{"not": {"anyOf": list(conditions)}}])]}


_SCORING = "scoring"
_EITHER_WAY = OPTIONS["alignment"].with_one_of
"""Options of which ``alignment`` needs one."""


def file_rules() -> list[Schema]:
    """Return the rules on a file's cases by its operation, its defaults and the cases' fields."""
    rules = [rule for operation in OPERATIONS for rule in _rules_for_operation(operation, refer(f"{operation}_case"))]
    return [*rules, *_scoring_rules(), *_needed_options(), *_dtype_rules(), *_random_rules()]


def case_rules() -> list[Schema]:
    """Return the rules on every case, whatever its operation."""
    unbounded = {"type": "array", "items": {"type": "null"}}
    options = {"window": {"not": unbounded}, **{name: FINITE for name, spec in OPTIONS.items() if spec.type is float}}
    prints = under("expect", {"contains": {"anyOf": [given("printed"), given("each")]}}, required=True)
    return [
        under("options", {"properties": options}),
        {"if": {"anyOf": [given("computed_in"), given("digits")]}, "then": prints},
    ]


def case_definitions() -> dict[str, Schema]:
    """Return, by name, the schema of the cases of every operation and of every kind of score."""
    definitions = {f"{operation}_case": _case_of(operation) for operation in OPERATIONS}
    for score in SCORE_INPUTS:
        idle = [option for option, scores in ONLY_WITH_SOME_SCORES.items() if score not in scores]
        inputs = _inputs(inputs_of(_SCORING, score))
        definitions[f"{score}_case"] = {"properties": {"inputs": inputs, "options": absent(*idle)}}
    return definitions


def _rules_for_operation(operation: str, rule: Schema, *, unless: Sequence[str] = ()) -> list[Schema]:
    """Apply a rule to the cases of an operation, by their own field or by the file's.

    The rule does not apply if the file's defaults give one of the options ``unless``.
    """
    is_it = has("operation", operation)
    rules = _own_or_shared("operation", is_it, is_it, rule)
    if not unless:
        return rules
    defaults = _default_options({"anyOf": [given(option) for option in unless]})
    return [{"if": {"not": defaults}, "then": inner} for inner in rules]


def _own_or_shared(field: str, in_case: Schema, in_file: Schema, rule: Schema) -> list[Schema]:
    """Apply a rule to cases whose own field matches, and to cases without the field if the file's matches."""
    unsaid = {"if": {"not": given(field)}, "then": rule}
    return [_cases({"if": in_case, "then": rule}), {"if": in_file, "then": _cases(unsaid)}]


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
    every_option = {option for known in OPERATIONS.values() for option in known.options}
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
    if operation in PER_HEAD:
        rules += [
            {"if": _options({"anyOf": [given("heads"), given("kv_heads")]}), "then": has("layout", "merged")},
            {"if": has("layout", "merged"), "then": under("memory_layout", absent(*sorted(MERGED_INPUTS)))},
        ]
    else:
        rules.append(under("layout", {"const": "split"}))
    return {"properties": fields, "allOf": rules}


def _inputs(specs: Mapping[str, InputSpec]) -> Schema:
    """Return the schema of an operation's inputs."""
    packed = {name: parts for name, parts in PACKED_PROJECTIONS.items() if specs.keys() >= set(parts)}
    in_parts = {part for parts in packed.values() for part in parts}
    required = [name for name, spec in specs.items() if spec.required and name not in in_parts]
    needs = {name: [spec.needs] for name, spec in specs.items() if spec.needs}
    booleans = {name: refer("MaskInput") for name, spec in specs.items() if spec.boolean}
    counts = {name: refer("CountsInput") for name, spec in specs.items() if spec.whole}
    numbers = {name: refer("NumberInput") for name, spec in specs.items() if spec.is_number}
    known = booleans | counts | numbers | {name: refer("NumberInput") for name in packed}
    rule: Schema = {"propertyNames": {"enum": [*specs, *packed]}, "required": required, "properties": known}
    either: list[Schema] = []
    for name, parts in packed.items():  # three inputs are packed in one, or none of them is
        no_part = {"not": {"anyOf": [{"required": [part]} for part in parts]}}
        apart = {"required": [part for part in parts if specs[part].required]}
        either.append({"if": {"required": [name]}, "then": no_part, "else": apart})
    return rule | ({"dependentRequired": needs} if needs else {}) | ({"allOf": either} if either else {})


def _scoring_rules() -> list[Schema]:
    """Return rules on the inputs of scoring, which follow from a case's own score, or else from the file's."""
    rules: list[Schema] = []
    for score in SCORE_INPUTS:
        rule = refer(f"{score}_case")
        rules += _rules_for_operation(_SCORING, {"if": _options(has("score", score)), "then": rule})
        default = _default_options(has("score", score))
        if score == DEFAULT_SCORE:
            default = {"anyOf": [default, {"not": _default_options(given("score"))}]}
        as_file = {"if": {"not": _options(given("score"))}, "then": rule}
        rules += [{"if": default, "then": inner} for inner in _rules_for_operation(_SCORING, as_file)]
    return rules


def _needed_options() -> list[Schema]:
    """Return rules on options that a case needs, unless the file's defaults have them."""
    heads = _options(given("heads"))
    positioned = _options({"anyOf": [given("window"), has("is_causal", True)]})
    merged = {"if": has("layout", "merged"), "then": heads}
    aligned = {"if": _options(given("alignment")), "then": positioned}
    inputs = [name for name in OPERATIONS["masking"].inputs if name in REQUESTED_BY["masked"] | REQUESTED_BY["biased"]]
    masked = {"anyOf": [positioned, under("inputs", {"anyOf": [given(name) for name in inputs]})]}
    positions = _default_options({"anyOf": [given(option) for option in _EITHER_WAY]})
    return [
        *(
            rule
            for name, spec in OPERATIONS.items()
            if spec.has_projections
            for rule in _rules_for_operation(name, heads, unless=["heads"])
        ),
        *(rule for operation in PER_HEAD for rule in _rules_for_operation(operation, merged, unless=["heads"])),
        *_rules_for_operation("masking", masked, unless=_EITHER_WAY),
        {"if": {"not": positions}, "then": _cases(aligned)},
    ]


def _dtype_rules() -> list[Schema]:
    """Return rules on dtypes in which numbers can be expected, and on those that storage leaves."""
    rules: list[Schema] = []
    for narrow in [dtype for dtype in DTYPES if dtype not in DTYPES_OF_NUMBERS]:
        its_own = under("computed_in", {"anyOf": [{"const": narrow}, {"type": "object"}]}, required=True)
        rules += _rules_for_dtypes([narrow], {"anyOf": [under("expect", {"maxItems": 0}), its_own]})
    for storage in DTYPES:
        size = numpy_dtype(storage).itemsize
        too_narrow = [dtype for dtype in DTYPES if numpy_dtype(dtype).itemsize <= size]
        rules += _rules_for_dtypes(too_narrow, {"not": has("storage", storage)})
    return rules


def _rules_for_dtypes(dtypes: list[str], rule: Schema) -> list[Schema]:
    """Apply a rule to the cases with one of these dtypes: by their own field, the file's, or the default."""
    one = {"contains": {"enum": dtypes}}
    default = _defaults(under("dtypes", one, required=True))
    if set(dtypes) & set(DEFAULT_DTYPES):
        default = {"anyOf": [default, {"not": _defaults(given("dtypes"))}]}
    return _own_or_shared("dtypes", under("dtypes", one | {"type": "array"}, required=True), default, rule)


def _random_rules() -> list[Schema]:
    """Return rules on the draws of a case: by its own generator or the file's, and none without a generator."""
    rules: list[Schema] = []
    for generator in GENERATORS:
        one = under("random", has("generator", generator), required=True)
        rules += _own_or_shared("random", one, _defaults(one), _allowed_draws(sorted(distributions(generator))))
    none = _cases({"if": {"not": given("random")}, "then": _allowed_draws([])})
    return [*rules, {"if": {"not": _defaults(given("random"))}, "then": none}]


def _allowed_draws(known: list[str]) -> Schema:
    """Return a schema that allows a case's arrays and inputs to be drawn from only these distributions."""
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
    """Allow ``{each: name}`` instead of values in cases, and define ``for_each`` and ``design``."""
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
    """Allow ``{each: name}`` instead of every value inside of a schema, except for fields to ``keep``."""
    if isinstance(schema, list):
        return [_or_reference(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed: Schema = {}
    for keyword, inner in schema.items():
        if keyword in _AS_THEY_ARE:
            changed[keyword] = inner
        elif keyword in _OF_MAPPINGS:
            changed[keyword] = {name: value if name in keep else _or_each(value) for name, value in inner.items()}
        elif keyword in _OF_FIELDS and inner is not False:
            changed[keyword] = _or_each(inner)
        else:
            changed[keyword] = _or_reference(inner)
    return changed


def _or_each(schema: Any) -> Schema:
    if isinstance(schema, dict) and [*schema] == ["not"]:  # a mapping is not what is excluded there
        return schema
    kept = {name: schema[name] for name in ("description", "default") if name in schema} if schema else {}
    return {**kept, "anyOf": [_or_reference(schema), refer(REFERENCE)]}


def _split_definitions(schema: Schema) -> None:
    """Define separately the parts that a file's cases share, in which ``{each: name}`` is not allowed."""
    definitions: dict[str, Any] = schema["$defs"]
    shared = {"arrays": schema["properties"]["arrays"], "Defaults": definitions["Defaults"]}
    pending, reached = set(_REFERRED.findall(json.dumps(shared))), set()
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending |= set(_REFERRED.findall(json.dumps(definitions[name])))
    copies = {name: _with_file_definitions(definitions[name], reached) for name in sorted(reached)}
    schema["properties"]["arrays"] = _with_file_definitions(shared["arrays"], reached)
    definitions["Defaults"] = _with_file_definitions(shared["Defaults"], reached)
    for name, definition in definitions.items():
        if name not in ("Defaults", "Source"):
            definitions[name] = _or_reference(definition, keep=_AS_IT_IS if name == "CaseEntry" else ())
    definitions |= {f"{name}{_OF_FILE}": copy for name, copy in copies.items()}
    schema["allOf"] = _or_reference(schema["allOf"])


def _with_file_definitions(schema: Any, names: set[str]) -> Any:
    """Return a copy that refers to the definitions of shared parts."""

    def to_file_definition(match: re.Match[str]) -> str:
        return f'"#/$defs/{match[1]}{_OF_FILE}"' if match[1] in names else match[0]

    return json.loads(_REFERRED.sub(to_file_definition, json.dumps(schema)))


_COUNTS = ("prefix_lm", "images", "image_spans", "segments", "document_lengths")
"""Kinds of arrays that are told by counts."""
_FINITE = ("times", "plus", "low", "high")
"""Fields of arrays in which infinity means nothing."""


def case_schema() -> str:
    """Return the JSON Schema of a case file, as text."""
    schema = _model_schema(CaseFile)
    definitions: dict[str, Any] = schema["$defs"]
    # pydantic lists the kinds of arrays wherever an array may stand: define the list once.
    one_of_them = {"oneOf": [refer(kind.__name__) for kind in KINDS.values()]}
    for part in _parts(schema):
        if part.get("oneOf") == one_of_them["oneOf"]:
            del part["oneOf"]
            part |= refer("Array")
    definitions["Array"] = one_of_them
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
    return _text(_model_schema(TagFile))


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


def _model_schema(model: type[BaseModel]) -> Schema:
    """Return pydantic's schema; if it names the fields of a mapping by a pattern, other fields are refused."""
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
