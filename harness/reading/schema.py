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
from attncheck.reading.array_kinds import COMBINED_KINDS, MASK_KINDS, MODEL_OF_KIND
from attncheck.reading.arrays import MAX_INT64
from attncheck.reading.case_maker import MERGED_INPUTS, SCORE_KINDS_OF_OPTION
from attncheck.reading.expectations import COMPARABLE_DTYPES
from attncheck.reading.for_each import FOR_EACH, MAX_LABEL_LENGTH, REFERENCE_KEY, ROW_LABEL_KEY
from attncheck.reading.generated_arrays import GENERATORS, draw_parameters_by_distribution
from attncheck.reading.model import CaseFile, TagFile
from attncheck.reading.printed import ELLIPSIS_PATTERN, MAX_AXES
from attncheck.spec import (
    DEFAULT_DTYPES,
    DEFAULT_SCORE,
    DTYPES,
    MEMORY_LAYOUTS,
    OPERATIONS,
    OPERATIONS_PER_HEAD,
    OPTIONS,
    PACKED_PROJECTIONS,
    REQUESTERS_OF_STAGE,
    SCORE_INPUTS,
    InputSpec,
    input_specs,
)
from attncheck.spec.dtypes import numpy_dtype
from attncheck.spec.quantities import QUANTITIES


def array_definitions() -> dict[str, Schema]:
    """Return, by name, nested numbers and printed rows, and what arrays of counts and of true and false may be."""
    text = {"type": "string", "pattern": r"\S", "not": {"pattern": ELLIPSIS_PATTERN}}
    return {
        "Numbers": _nested_list_schema("Numbers", {"type": ["number", "boolean"]}),
        "Counts": _nested_list_schema("Counts", {"type": "integer", "minimum": 0}),
        "Indices": _nested_list_schema("Indices", {"type": "integer", "minimum": -1}),
        "Truths": _nested_list_schema("Truths", {"enum": [False, True, 0, 1]}),
        "PrintedRows": _nested_list_schema("PrintedRows", text),
        "Parents": _nested_list_schema("Parents", {"type": ["integer", "null"], "minimum": 0}),
        "MaskInput": _mask_schema(),
        "NumberInput": {"anyOf": [schema_requiring("times"), schema_requiring("plus"), schema_forbidding(*MASK_KINDS)]},
        "CountsInput": _counts_schema("Counts"),
        "IndicesInput": _counts_schema("Indices"),
    }


def _nested_list_schema(name: str, scalar: Schema) -> Schema:
    """Return the schema of nested lists: never empty, with no more axes than an array may have."""
    too_deep: Schema = {"type": "array"}
    for _ in range(MAX_AXES):
        too_deep = {"type": "array", "contains": too_deep}
    return {
        "anyOf": [scalar, {"type": "array", "minItems": 1, "items": make_definition_reference(name), "not": too_deep}]
    }


def _mask_schema() -> Schema:
    parts: Schema = {kind: {"items": make_definition_reference("MaskInput")} for kind in COMBINED_KINDS}
    parts |= dict.fromkeys(("sum", "as_bias", "alibi", "relative_buckets"), False)
    floored = {"allOf": [schema_of_field_value("draw", "runif"), schema_of_field_value("floor", True)]}
    drawn = {
        "allOf": [
            {"anyOf": [schema_of_field_value("draw", "randint"), floored]},
            schema_of_field_value("low", 0),
            schema_of_field_value("high", 2),
        ]
    }
    return {
        "properties": {
            **parts,
            "blocks": make_definition_reference("MaskInput"),
            "values": make_definition_reference("Truths"),
            "constant": {"enum": [0, 1]},
        },
        "allOf": [schema_forbidding("times", "plus"), {"if": schema_requiring("draw"), "then": drawn}],
    }


def _counts_schema(numbers: str) -> Schema:
    """Return the schema of counts, or of indices, of which -1 names none: spelled out, or the name of an array."""
    spelled = {
        "anyOf": [schema_requiring("values"), schema_requiring("ref"), schema_requiring("file")],
        "properties": {"values": make_definition_reference(numbers)},
    }
    return {"if": {"type": "object"}, "then": {"allOf": [schema_forbidding("times", "plus"), spelled]}}


def make_draw_rules() -> list[Schema]:
    """Return the parameters of each distribution, if all generators that have it agree."""
    wanted: dict[str, set[frozenset[str]]] = {}
    for generator in GENERATORS:
        for name, parameters in draw_parameters_by_distribution(generator).items():
            wanted.setdefault(name, set()).add(parameters)
    rules: list[Schema] = []
    for name, (parameters, *others) in sorted(wanted.items()):
        if not others:
            unknown = schema_forbidding(*sorted({"low", "high"} - parameters))
            rules.append(
                {
                    "if": schema_of_field_value("draw", name),
                    "then": {"allOf": [schema_requiring(*sorted(parameters)), unknown]},
                }
            )
    whole = {"type": "integer", "minimum": -MAX_INT64, "maximum": MAX_INT64}
    return [
        *rules,
        {"if": schema_of_field_value("draw", "randint"), "then": {"properties": {"low": whole, "high": whole}}},
    ]


def make_rounding_rules() -> list[Schema]:
    """Return rules that allow at most one declaration of how printed numbers were rounded."""
    groups = (("exact", "decimals", "significant_digits"), ("exact", "digits"))
    return [
        apply_to_values_only(
            group, exactly_one(schema_of_field_value("exact", True), *map(schema_requiring, group[1:]), required=False)
        )
        for group in groups
    ]


def make_expectation_rules() -> list[Schema]:
    """Return rules on the subject of an expectation and the origin of its numbers."""
    return [
        apply_to_values_only(
            ("stage", "quantity"), exactly_one(schema_requiring("stage"), schema_requiring("quantity"))
        ),
        {
            "if": schema_requiring("quantity"),
            "then": {"allOf": [schema_requiring("of"), schema_for_field("quantity", {"enum": list(QUANTITIES)})]},
        },
        apply_to_values_only(
            ("printed", "known", "unprinted"),
            exactly_one(
                schema_requiring("printed"), schema_requiring("known"), schema_of_field_value("unprinted", True)
            ),
        ),
        {"if": schema_requiring("known"), "then": schema_requiring("because")},
        *make_rounding_rules(),
    ]


Schema = dict[str, Any]

FINITE_LIMITS: Schema = {"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}
"""Limits of finite numbers; a JSON Schema cannot exclude NaN."""


def schema_requiring(*fields: str) -> Schema:
    """Return a schema of objects in which all of these fields are present and not null."""
    return {"required": list(fields), "properties": {field: {"not": {"type": "null"}} for field in fields}}


def schema_forbidding(*fields: str) -> Schema:
    """Return a schema of objects in which none of these fields is given."""
    return {"properties": {field: {"type": "null"} for field in fields}}


def schema_for_field(field: str, schema: Schema, *, required: bool = False) -> Schema:
    """Return a schema that applies a rule to a field if it is present, or also requires it."""
    return {"properties": {field: schema}} | ({"required": [field]} if required else {})


def schema_of_field_value(field: str, value: object) -> Schema:
    """Return a schema of objects in which a field has this value."""
    return schema_for_field(field, {"const": value}, required=True)


def make_definition_reference(name: str) -> Schema:
    """Return a reference to a definition of the schema."""
    return {"$ref": f"#/$defs/{name}"}


def apply_to_values_only(fields: Collection[str], rule: Schema) -> Schema:
    """Apply a rule only if the fields have values, and not names for values."""
    referred = [schema_for_field(field, {"type": "object", "required": ["each"]}, required=True) for field in fields]
    return {"if": {"not": {"anyOf": referred}}, "then": rule}


def exactly_one(*conditions: Schema, required: bool = True) -> Schema:
    """Return a schema that is valid if exactly one of the conditions is, or also if none is."""
    return {"oneOf": [*conditions, *([] if required else [{"not": {"anyOf": list(conditions)}}])]}


_SCORING = "scoring"
_POSITION_OPTIONS = OPTIONS["alignment"].requires_one_of
"""Options of which ``alignment`` needs one."""


def make_file_rules() -> list[Schema]:
    """Return the rules on a file's cases by its operation, its defaults and the cases' fields."""
    rules = [
        rule
        for operation in OPERATIONS
        for rule in _rules_for_operation(operation, make_definition_reference(f"{operation}_case"))
    ]
    return [*rules, *_scoring_rules(), *_needed_option_rules(), *_dtype_rules(), *_random_rules()]


def make_case_rules() -> list[Schema]:
    """Return the rules on every case, whatever its operation."""
    unbounded = {"type": "array", "items": {"type": "null"}}
    options = {
        "window": {"not": unbounded},
        **{name: FINITE_LIMITS for name, spec in OPTIONS.items() if spec.type is float},
    }
    prints = schema_for_field(
        "expect", {"contains": {"anyOf": [schema_requiring("printed"), schema_requiring("each")]}}, required=True
    )
    return [
        schema_for_field("options", {"properties": options}),
        {"if": {"anyOf": [schema_requiring("computed_in"), schema_requiring("digits")]}, "then": prints},
    ]


def case_definitions() -> dict[str, Schema]:
    """Return, by name, the schema of the cases of every operation and of every kind of score."""
    definitions = {f"{operation}_case": _case_schema_of_operation(operation) for operation in OPERATIONS}
    for score in SCORE_INPUTS:
        idle = [option for option, scores in SCORE_KINDS_OF_OPTION.items() if score not in scores]
        inputs = _inputs_schema(input_specs(_SCORING, score))
        definitions[f"{score}_case"] = {"properties": {"inputs": inputs, "options": schema_forbidding(*idle)}}
    return definitions


def _rules_for_operation(operation: str, rule: Schema, *, unless: Sequence[str] = ()) -> list[Schema]:
    """Apply a rule to the cases of an operation, by their own field or by the file's.

    The rule does not apply if the file's defaults give one of the options ``unless``.
    """
    is_it = schema_of_field_value("operation", operation)
    rules = _rules_by_case_or_file("operation", is_it, is_it, rule)
    if not unless:
        return rules
    defaults = _with_default_options({"anyOf": [schema_requiring(option) for option in unless]})
    return [{"if": {"not": defaults}, "then": inner} for inner in rules]


def _rules_by_case_or_file(field: str, in_case: Schema, in_file: Schema, rule: Schema) -> list[Schema]:
    """Apply a rule to cases whose own field matches, and to cases without the field if the file's matches."""
    unsaid = {"if": {"not": schema_requiring(field)}, "then": rule}
    return [_for_every_case({"if": in_case, "then": rule}), {"if": in_file, "then": _for_every_case(unsaid)}]


def _for_every_case(rule: Schema) -> Schema:
    return schema_for_field("cases", {"items": rule})


def _with_options(condition: Schema) -> Schema:
    return schema_for_field("options", condition, required=True)


def _with_defaults(condition: Schema) -> Schema:
    return schema_for_field("defaults", condition, required=True)


def _with_default_options(condition: Schema) -> Schema:
    return _with_defaults(_with_options(condition))


def _case_schema_of_operation(operation: str) -> Schema:
    entry = OPERATIONS[operation]
    specs = {name: spec for score in SCORE_INPUTS for name, spec in input_specs(operation, score).items()}
    every_option = {option for known in OPERATIONS.values() for option in known.options}
    stage = {"enum": [*entry.stages, None]}
    layouts: dict[str, Schema] = {}
    for name in (name for name, spec in specs.items() if not spec.only_in_files):
        longer = [layout for layout, spec in MEMORY_LAYOUTS.items() if spec.min_axes > len(specs[name].axes)]
        layouts[name] = {"not": {"enum": longer}} if longer else {}
    fields: dict[str, Schema] = {
        "options": schema_forbidding(*sorted(every_option - entry.options)),
        "memory_layout": {"propertyNames": {"enum": list(layouts)}, "properties": layouts},
        "stages": {"items": {"enum": list(entry.stages)}},
        "expect": {"items": {"properties": {"stage": stage, "of": stage}}},
    }
    if not entry.can_have_expected_numbers:
        fields["expect"] = {"maxItems": 0}
    if operation != _SCORING:  # whose inputs follow from the score
        fields["inputs"] = _inputs_schema(specs)
    rules = [
        {
            "if": schema_for_field("memory_layout", schema_requiring(name), required=True),
            "then": schema_for_field("inputs", schema_requiring(name)),
        }
        for name in layouts
    ]
    if operation in OPERATIONS_PER_HEAD:
        rules += [
            {
                "if": _with_options({"anyOf": [schema_requiring("heads"), schema_requiring("kv_heads")]}),
                "then": schema_of_field_value("layout", "merged"),
            },
            {
                "if": schema_of_field_value("layout", "merged"),
                "then": schema_for_field("memory_layout", schema_forbidding(*sorted(MERGED_INPUTS))),
            },
        ]
    else:
        rules.append(schema_for_field("layout", {"const": "split"}))
    return {"properties": fields, "allOf": rules}


def _inputs_schema(specs: Mapping[str, InputSpec]) -> Schema:
    """Return the schema of an operation's inputs."""
    packed = {name: parts for name, parts in PACKED_PROJECTIONS.items() if specs.keys() >= set(parts)}
    in_parts = {part for parts in packed.values() for part in parts}
    required = [name for name, spec in specs.items() if spec.required and name not in in_parts]
    needs = {name: [spec.required_input] for name, spec in specs.items() if spec.required_input}
    booleans = {name: make_definition_reference("MaskInput") for name, spec in specs.items() if spec.is_boolean}
    counts = {
        name: make_definition_reference("IndicesInput" if spec.min_value < 0 else "CountsInput")
        for name, spec in specs.items()
        if spec.is_count
    }
    numbers = {name: make_definition_reference("NumberInput") for name, spec in specs.items() if spec.is_number}
    known = booleans | counts | numbers | {name: make_definition_reference("NumberInput") for name in packed}
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
        rule = make_definition_reference(f"{score}_case")
        rules += _rules_for_operation(
            _SCORING, {"if": _with_options(schema_of_field_value("score", score)), "then": rule}
        )
        default = _with_default_options(schema_of_field_value("score", score))
        if score == DEFAULT_SCORE:
            default = {"anyOf": [default, {"not": _with_default_options(schema_requiring("score"))}]}
        as_file = {"if": {"not": _with_options(schema_requiring("score"))}, "then": rule}
        rules += [{"if": default, "then": inner} for inner in _rules_for_operation(_SCORING, as_file)]
    return rules


def _needed_option_rules() -> list[Schema]:
    """Return rules on options that a case needs, unless the file's defaults have them."""
    heads = _with_options(schema_requiring("heads"))
    positioned = _with_options({"anyOf": [schema_requiring("window"), schema_of_field_value("is_causal", True)]})
    merged = {"if": schema_of_field_value("layout", "merged"), "then": heads}
    aligned = {"if": _with_options(schema_requiring("alignment")), "then": positioned}
    inputs = [
        name
        for name in OPERATIONS["masking"].inputs
        if name in REQUESTERS_OF_STAGE["masked"] | REQUESTERS_OF_STAGE["biased"]
    ]
    masked = {"anyOf": [positioned, schema_for_field("inputs", {"anyOf": [schema_requiring(name) for name in inputs]})]}
    positions = _with_default_options({"anyOf": [schema_requiring(option) for option in _POSITION_OPTIONS]})
    return [
        *(
            rule
            for name, spec in OPERATIONS.items()
            if spec.has_projections
            for rule in _rules_for_operation(name, heads, unless=["heads"])
        ),
        *(
            rule
            for operation in OPERATIONS_PER_HEAD
            for rule in _rules_for_operation(operation, merged, unless=["heads"])
        ),
        *_rules_for_operation("masking", masked, unless=_POSITION_OPTIONS),
        {"if": {"not": positions}, "then": _for_every_case(aligned)},
    ]


def _dtype_rules() -> list[Schema]:
    """Return rules on dtypes in which numbers can be expected, and on those that storage leaves."""
    rules: list[Schema] = []
    for narrow in [dtype for dtype in DTYPES if dtype not in COMPARABLE_DTYPES]:
        its_own = schema_for_field("computed_in", {"anyOf": [{"const": narrow}, {"type": "object"}]}, required=True)
        rules += _rules_for_dtypes([narrow], {"anyOf": [schema_for_field("expect", {"maxItems": 0}), its_own]})
    for storage in DTYPES:
        size = numpy_dtype(storage).itemsize
        too_narrow = [dtype for dtype in DTYPES if numpy_dtype(dtype).itemsize <= size]
        rules += _rules_for_dtypes(too_narrow, {"not": schema_of_field_value("storage", storage)})
    return rules


def _rules_for_dtypes(dtypes: list[str], rule: Schema) -> list[Schema]:
    """Apply a rule to the cases with one of these dtypes: by their own field, the file's, or the default."""
    one = {"contains": {"enum": dtypes}}
    default = _with_defaults(schema_for_field("dtypes", one, required=True))
    if set(dtypes) & set(DEFAULT_DTYPES):
        default = {"anyOf": [default, {"not": _with_defaults(schema_requiring("dtypes"))}]}
    return _rules_by_case_or_file(
        "dtypes", schema_for_field("dtypes", one | {"type": "array"}, required=True), default, rule
    )


def _random_rules() -> list[Schema]:
    """Return rules on the draws of a case: by its own generator or the file's, and none without a generator."""
    rules: list[Schema] = []
    for generator in GENERATORS:
        one = schema_for_field("random", schema_of_field_value("generator", generator), required=True)
        rules += _rules_by_case_or_file(
            "random", one, _with_defaults(one), _allow_draws(sorted(draw_parameters_by_distribution(generator)))
        )
    none = _for_every_case({"if": {"not": schema_requiring("random")}, "then": _allow_draws([])})
    return [*rules, {"if": {"not": _with_defaults(schema_requiring("random"))}, "then": none}]


def _allow_draws(known: list[str]) -> Schema:
    """Return a schema that allows a case's arrays and inputs to be drawn from only these distributions."""
    array = {"properties": {"draw": {"enum": known} if known else False}}
    return {"properties": {group: {"additionalProperties": array} for group in ("arrays", "inputs")}}


REFERENCE_DEFINITION = "Each"
_FIELDS_WITHOUT_NAMES = ("name", "id", FOR_EACH, for_each.DESIGN_KEY)
"""Fields of a case that no value can be put in place of."""
_UNCHANGED_KEYWORDS = ("if", "not", "contains", "propertyNames", "enum", "const", "required", "default")
"""What is no schema of a value, or only decides whether a rule applies, which a name in a value's place never meets."""
_MAPPING_KEYWORDS = ("properties", "patternProperties")
_SUBSCHEMA_KEYWORDS = ("items", "additionalProperties")
_FILE_SUFFIX = "_of_file"
_DEFINITION_REFERENCE = re.compile(r'"#/\$defs/(\w+)"')


def allow_references(schema: Schema) -> None:
    """Allow ``{each: name}`` instead of values in cases, and define ``for_each`` and ``design``."""
    definitions: dict[str, Any] = schema["$defs"]
    _split_definitions(schema)
    name = {
        "type": "string",
        "pattern": for_each.NAME_PATTERN,
        "maxLength": MAX_LABEL_LENGTH,
        "not": {"const": ROW_LABEL_KEY},
    }
    fields = {REFERENCE_KEY: {**name, "description": "A name of `for_each`, whose value stands here."}}
    definitions[REFERENCE_DEFINITION] = {
        "type": "object",
        "properties": fields,
        "required": [REFERENCE_KEY],
        "additionalProperties": False,
    }
    definitions["ForEachValues"], definitions["ForEachRows"] = _values_and_rows_schemas(name)
    names = {"type": "object", "minProperties": 1, "propertyNames": name}
    definitions["ForEach"] = {
        "anyOf": [
            names | {"additionalProperties": make_definition_reference("ForEachValues")},
            make_definition_reference("ForEachRows"),
        ]
    }
    definitions["Design"] = _design_schema(name)
    case = definitions["CaseEntry"]
    repeated = ((schema, FOR_EACH, "ForEach"), (case, FOR_EACH, "ForEach"), (case, for_each.DESIGN_KEY, "Design"))
    for owner, field, definition in repeated:
        kept = {"description": owner["properties"][field]["description"]}
        owner["properties"][field] = {**kept, **make_definition_reference(definition)}


def _design_schema(name: Schema) -> Schema:
    level = {"type": ["string", "number", "boolean", "null"]}
    levels = {"anyOf": [level, {"type": "array", "items": level}]}
    excluded = {"type": "object", "minProperties": 1, "additionalProperties": levels}
    factor = {"anyOf": [make_definition_reference("ForEachValues"), make_definition_reference("ForEachRows")]}
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


def _values_and_rows_schemas(name: Schema) -> tuple[Schema, Schema]:
    """Return the values of a name, and rows of several names."""
    label = {"type": "string", "maxLength": MAX_LABEL_LENGTH}
    plain = {"anyOf": [{"type": ["number", "boolean", "null"]}, label]}
    values = [
        {"type": "array", "minItems": 1, "items": plain},
        {"type": "object", "minProperties": 1, "propertyNames": label},
    ]
    names = {"anyOf": [name, {"const": ROW_LABEL_KEY}]}
    row = {"type": "object", "propertyNames": names, "properties": {ROW_LABEL_KEY: label}}
    unnamed = {
        "if": {"not": {"required": [ROW_LABEL_KEY]}},
        "then": {"minProperties": 1, "additionalProperties": plain},
    }
    named = {"if": {"required": [ROW_LABEL_KEY]}, "then": {"minProperties": 2}}
    return {"anyOf": values}, {"type": "array", "minItems": 1, "items": row | {"allOf": [unnamed, named]}}


def _allow_references_inside(schema: Any, *, keep: tuple[str, ...] = ()) -> Any:
    """Allow ``{each: name}`` instead of every value inside of a schema, except for fields to ``keep``."""
    if isinstance(schema, list):
        return [_allow_references_inside(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed: Schema = {}
    for keyword, inner in schema.items():
        if keyword in _UNCHANGED_KEYWORDS:
            changed[keyword] = inner
        elif keyword in _MAPPING_KEYWORDS:
            changed[keyword] = {
                name: value if name in keep else _allow_reference(value) for name, value in inner.items()
            }
        elif keyword in _SUBSCHEMA_KEYWORDS and inner is not False:
            changed[keyword] = _allow_reference(inner)
        else:
            changed[keyword] = _allow_references_inside(inner)
    return changed


def _allow_reference(schema: Any) -> Schema:
    if isinstance(schema, dict) and [*schema] == ["not"]:  # a mapping is not what is excluded there
        return schema
    kept = {name: schema[name] for name in ("description", "default") if name in schema} if schema else {}
    return {**kept, "anyOf": [_allow_references_inside(schema), make_definition_reference(REFERENCE_DEFINITION)]}


def _split_definitions(schema: Schema) -> None:
    """Define separately the parts that a file's cases share, in which ``{each: name}`` is not allowed."""
    definitions: dict[str, Any] = schema["$defs"]
    shared = {"arrays": schema["properties"]["arrays"], "Defaults": definitions["Defaults"]}
    pending, reached = set(_DEFINITION_REFERENCE.findall(json.dumps(shared))), set()
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending |= set(_DEFINITION_REFERENCE.findall(json.dumps(definitions[name])))
    copies = {name: _refer_to_file_definitions(definitions[name], reached) for name in sorted(reached)}
    schema["properties"]["arrays"] = _refer_to_file_definitions(shared["arrays"], reached)
    definitions["Defaults"] = _refer_to_file_definitions(shared["Defaults"], reached)
    for name, definition in definitions.items():
        if name not in ("Defaults", "Source"):
            definitions[name] = _allow_references_inside(
                definition, keep=_FIELDS_WITHOUT_NAMES if name == "CaseEntry" else ()
            )
    definitions |= {f"{name}{_FILE_SUFFIX}": copy for name, copy in copies.items()}
    schema["allOf"] = _allow_references_inside(schema["allOf"])


def _refer_to_file_definitions(schema: Any, names: set[str]) -> Any:
    """Return a copy that refers to the definitions of shared parts."""

    def to_file_definition(match: re.Match[str]) -> str:
        return f'"#/$defs/{match[1]}{_FILE_SUFFIX}"' if match[1] in names else match[0]

    return json.loads(_DEFINITION_REFERENCE.sub(to_file_definition, json.dumps(schema)))


_KINDS_OF_COUNTS = ("prefix_lm", "images", "image_spans", "segments", "document_lengths")
"""Kinds of arrays that are told by counts."""
_FINITE_FIELDS = ("times", "plus", "low", "high")
"""Fields of arrays in which infinity means nothing."""


def case_file_schema() -> str:
    """Return the JSON Schema of a case file, as text."""
    schema = _model_schema(CaseFile)
    definitions: dict[str, Any] = schema["$defs"]
    # pydantic lists the kinds of arrays wherever an array may stand: define the list once.
    one_of_them = {"oneOf": [make_definition_reference(kind.__name__) for kind in MODEL_OF_KIND.values()]}
    for part in _nested_mappings(schema):
        if part.get("oneOf") == one_of_them["oneOf"]:
            del part["oneOf"]
            part |= make_definition_reference("Array")
    definitions["Array"] = one_of_them
    _refine_arrays(definitions)
    definitions |= array_definitions() | case_definitions()
    definitions["CaseEntry"]["allOf"] = make_case_rules()
    definitions["Drawn"]["allOf"] = make_draw_rules()
    definitions["Expectation"]["allOf"] = make_expectation_rules()
    definitions["PrintedInput"]["allOf"] = make_rounding_rules()
    schema["allOf"] = make_file_rules()
    allow_references(schema)
    return _as_json(schema)


def tag_file_schema() -> str:
    """Return the JSON Schema of tags.yaml, as text."""
    return _as_json(_model_schema(TagFile))


def _refine_arrays(definitions: dict[str, Any]) -> None:
    """Refine fields of which pydantic knows only that they hold something."""
    definitions["Values"]["properties"]["values"] |= make_definition_reference("Numbers")
    definitions["Tree"]["properties"]["tree"] |= make_definition_reference("Parents")
    for kind in _KINDS_OF_COUNTS:
        definitions[MODEL_OF_KIND[kind].__name__]["properties"][kind] |= make_definition_reference("Counts")
    definitions["Chunked"]["properties"]["left_padding"] |= {
        "anyOf": [make_definition_reference("Counts"), {"type": "null"}]
    }
    for owner, field in (("PrintedInput", "printed"), ("Expectation", "printed"), ("Expectation", "known")):
        content = definitions[owner]["properties"][field]
        files = [part for part in content.pop("anyOf", []) if "$ref" in part]
        content["anyOf"] = [
            make_definition_reference("PrintedRows"),
            *files,
            *([{"type": "null"}] if "default" in content else []),
        ]
    for owner in definitions.values():
        for field in _FINITE_FIELDS:
            for number in owner.get("properties", {}).get(field, {}).get("anyOf", []):
                if number["type"] != "null":
                    number |= FINITE_LIMITS


def _model_schema(model: type[BaseModel]) -> Schema:
    """Return pydantic's schema; if it names the fields of a mapping by a pattern, other fields are refused."""
    schema = model.model_json_schema()
    for part in _nested_mappings(schema):
        if "patternProperties" in part:
            part["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _nested_mappings(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping inside of a schema."""
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _nested_mappings(inner)


def _as_json(schema: Schema) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
