"""Tables that the build of the documentation makes of the code, and the pages include from ``build/tables``.

``python docs/site_tables.py NAME`` prints one, such as ``readings`` or ``fields-CaseEntry``; without a name it lists
them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import typer.main
import yaml
from pydantic import BaseModel

from attncheck.asking.conventions import QUESTIONS
from attncheck.backends import ALL_ENTRIES, BACKENDS, Mode
from attncheck.backends.contract import AXES
from attncheck.backends.families import FAMILIES, Family
from attncheck.cli import app
from attncheck.diagnosis.readings import READING_CATALOGUE
from attncheck.judging.alternatives import Reading
from attncheck.reading import array_kinds, model
from attncheck.reading.expected_failures import ExpectedFailureEntry
from attncheck.reports.frames import COLUMN_MEANINGS, NUMBER_COLUMNS, PAIR_COLUMNS, PROPERTY_COLUMNS, RESULT_COLUMNS
from attncheck.reports.json_documents import Document, ErrorDocument, Record, Row, record_fields
from attncheck.reports.survey import findings_document, read_findings
from attncheck.results.format import COLUMNS as ROW_COLUMNS
from attncheck.showing.json_schema import DOCUMENTS, all_records, docstring_summary
from attncheck.spec import OPERATIONS, PROPERTIES, SCORE_INPUTS, STAGES, InputSpec
from attncheck.spec.classes import ROUNDING_PARTS, ROUNDING_PRESETS
from attncheck.spec.quantities import QUANTITIES

CONVENTIONS = Path(__file__).with_name("documented_conventions.yaml")
FINDINGS = Path(__file__).parents[1] / "examples" / "findings"
LAYOUTS = {"BHLD": "(B, H, L, D)", "BLHD": "(B, L, H, D)", "LHD": "(L, H, D), a batch entry to a call"}
MODELS = (model, array_kinds)
_MAPPINGS = {
    "Source": "see Source",
    "Random": "see Random",
    "Options": "see Options",
    "Defaults": "see Defaults",
    "CaseEntry": "see A case",
    "Expectation": "see Expectations",
    "TagEntry": "`probes` and `defect`",
    "UnitsOff": "`units` with `because`",
    "StoredNumbers": "`file`, an array to the last bit",
}
_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
}


def tables() -> Mapping[str, str]:
    """Return the tables by their names."""
    parts = table(("part", "gives up"), *((f"`{name}`", part.meaning) for name, part in ROUNDING_PARTS.items()))
    presets = table(
        ("class", "parts", "source"),
        *((f"`{name}`", f"`{each.parts}`", each.source) for name, each in ROUNDING_PRESETS.items()),
    )
    return {
        **{f"implementations-{framework}": implementations(framework) for framework in BACKENDS},
        "implementations-libraries": implementations(*(name for name in ALL_ENTRIES if name not in BACKENDS)),
        **{"class_parts": parts, "class_presets": presets},
        **{"json": json_fields(), "documented_conventions": documented_conventions(), "commands": commands()},
        "options_by_command": options_by_command(),
        **{"readings": readings(), "questions": questions(), "signatures": signatures(), "properties": properties()},
        **{"findings": findings_document(read_findings(FINDINGS)).partition("\n\n")[2], "columns": columns()},
        **{"operations": operations_table(), "inputs": inputs_table(), "axes": axes_table()},
        **{"quantities": quantities_table(), "fields-ExpectedFailureEntry": fields_table(ExpectedFailureEntry)},
        **{f"fields-{owner.__name__}": fields_table(owner) for owner in models_of_cases()},
        **{f"kinds-{name}": kinds_table(name) for name in ("numbers", "positions")},
    }


def write_tables(folder: Path) -> None:
    """Write the tables into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tables().items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def table(*rows: Iterable[str]) -> str:
    """Return rows as a table of Markdown, whose first row has the names of its columns."""
    heads, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([heads, f"|{' --- |' * (heads.count(' | ') + 1)}", *others, ""])


def json_fields() -> str:
    """Return the fields of every document and record that commands print with ``--json``."""
    kinds: dict[type[Document], list[str]] = {}
    for command, kind in DOCUMENTS.items():
        kinds.setdefault(kind, []).append(command)
    inside = [each for each in all_records().values() if not issubclass(each, Document) and each is not Record]
    sections = [_fields_of("Every document", Document)]
    sections += [_fields_of(", ".join(names), kind) for kind, names in kinds.items()]
    sections += [_fields_of("error", ErrorDocument), *(_fields_of(each.__name__, each) for each in inside)]
    return "\n".join(sections)


def _fields_of(title: str, kind: type[Record]) -> str:
    known = record_fields(Document) if kind is not Document and issubclass(kind, Document) else {}
    own = {name: each[:2] for name, each in record_fields(kind).items() if name not in known}
    rows = ((f"`{name}`", _type_text(of), meaning) for name, (of, meaning) in own.items())
    return f"### {title}\n\n{docstring_summary(kind)}\n\n{table(('field', 'type', 'meaning'), *rows)}"


_TYPES: Mapping[Any, str] = {
    Mapping[str, str | Sequence[str]]: "object",
    Mapping[str, Any]: "object",
    Row: "object",
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Any: "nested lists, or null",
}


def _type_text(kind: Any) -> str:
    """Write a type as people say it: list of texts, number or null."""
    if kind in _TYPES:
        return _TYPES[kind]
    arguments = get_args(kind)
    if NoneType in arguments:
        return f"{_type_text(arguments[0])}, or null"
    if get_origin(kind) is Sequence:
        return f"list of {_type_text(arguments[0])}"
    if get_origin(kind) is Mapping:
        return f"object by name of {_type_text(arguments[1])}"
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def implementations(*frameworks: str) -> str:
    """Return every mode of frameworks, with the rounding model that it declares in each dtype."""
    rows = (
        (
            f"`{framework}.{name}`",
            mode.description,
            _models(mode),
            "standard cases" if mode.runs_only_standard_cases else "all",
        )
        for framework in frameworks
        for name, mode in _modes(framework).items()
    )
    return table(("implementation", "description", "rounding models", "cases by default"), *rows)


def _modes(framework: str) -> Mapping[str, Mode]:
    entry = ALL_ENTRIES[framework]
    return entry.all_modes | {mode.name: mode for mode in entry.device_modes}


def _models(mode: Mode) -> str:
    dtypes: dict[str, list[str]] = {}
    for dtype, rounding in mode.classes.items():
        dtypes.setdefault(rounding, []).append(dtype)
    return "; ".join(f"`{rounding}` in {', '.join(own)}" for rounding, own in dtypes.items())


def documented_conventions() -> str:
    """Return for each function a table of what its documentation says beside what is measured."""
    entries = yaml.safe_load(CONVENTIONS.read_text(encoding="utf-8"))
    lines = []
    for entry in entries.values():
        asked = [question.name for question in QUESTIONS if question.name in entry["measured"]]
        lines += [f"## {entry['title']}", "", f"{entry['package']} {entry['version']}; <{entry['source']}>", ""]
        heads = ("convention", "documented", "measured", "quotation")
        lines.append(table(heads, *(_convention(name, entry) for name in asked)))
    return "\n".join(lines)


def _convention(name: str, entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    words, quote = entry["documented"].get(name, ("-", ""))
    means = entry["measured"][name]
    shown = means if words in ("-", means) else f"**{means}**"
    return name, words, shown, quote.replace("|", "\\|").replace("*", "\\*")


def questions() -> str:
    """Every question about conventions with its meanings."""
    rows = (
        (
            each.name,
            each.asks,
            ("" if each.expected else "(-) ") + "; ".join(meaning.text for meaning in each.meanings),
        )
        for each in QUESTIONS
    )
    return table(("name", "question", "meanings"), *rows)


def signatures() -> str:
    """A line for each family of signatures: its call, its layout, and where its causal calls count from."""
    rows = ((f"`{each.name}`", f"`{each.call}`", _layout(each), _corner(each)) for each in FAMILIES.values())
    return table(("`--signature`", "call", "arrays", "causal"), *rows)


def _layout(family: Family) -> str:
    return LAYOUTS[family.layout] + (f"; output {LAYOUTS[family.output_layout]}" if family.output_layout else "")


def _corner(family: Family) -> str:
    return f"from the {family.corner}" if family.causal or family.causal_mask else "as a mask"


def properties() -> str:
    """Every property, with what it says."""
    rows = ((f"`{each.name}`", each.description, each.calls_needed) for each in PROPERTIES.values())
    return table(("property", "relation", "further calls"), *rows)


def columns() -> str:
    """Every column of the rows and of the frames."""
    frames = {
        "rows": ROW_COLUMNS,
        "results": RESULT_COLUMNS,
        "pairs": PAIR_COLUMNS,
        "numbers": NUMBER_COLUMNS,
        "properties": PROPERTY_COLUMNS,
    }
    meanings = {**COLUMN_MEANINGS, **{name: column.meaning for name, column in ROW_COLUMNS.items()}}
    having = {name: ", ".join(frame for frame, own in frames.items() if name in own) for name in meanings}
    rows = ((f"`{name}`", having[name], meaning) for name, meaning in meanings.items() if having[name])
    return table(("column", "frames", "meaning"), *rows)


def readings() -> str:
    """Every reading with its message, by what it is about."""
    return "\n".join(f"### {subject}\n\n{_readings_of(rows)}" for subject, rows in READING_CATALOGUE.items())


def _readings_of(readings: Sequence[Reading]) -> str:
    rows = (
        (f"`{each.name}`", re.sub(r"\{(\w+)\}", r"*\1*", each.message_template), _kind_of(each)) for each in readings
    )
    return table(("name", "message", "kind"), *dict.fromkeys(rows))


def _kind_of(reading: Reading) -> str:
    kind = "convention" if reading.is_convention else "mistake"
    option = reading.declarable_convention
    return kind if option is None else f'{kind}, unless `{{"{option[0]}": "{option[1]}"}}` is declared'


def fields_table(owner: type[BaseModel]) -> str:
    """Return the fields of a model that are its own."""
    inherited = {field for base in owner.__bases__ if issubclass(base, BaseModel) for field in base.model_fields}
    schema = owner.model_json_schema()
    own = schema if "properties" in schema else schema["$defs"][owner.__name__]
    rows = [
        (f"`{field}`{' (needed)' if field in own.get('required', []) else ''}", _value(value), _meaning(value))
        for field, value in own["properties"].items()
        if field not in inherited
    ]
    return table(("field", "value", "meaning"), *rows)


def kinds_table(name: str) -> str:
    """Every kind of array, with the field that it is told by and those beside it: of numbers, or of positions."""
    rows = []
    of_positions = (*array_kinds.MASK_KINDS, *array_kinds.WRAPPING_KINDS, "alibi")
    for kind, owner in array_kinds.MODEL_OF_KIND.items():
        if (kind in of_positions) != (name == "positions"):
            continue
        first, *beside = _own_fields(owner, kind)
        others = "; ".join(f"`{field}` ({_value(value)})" for field, value in beside)
        rows.append((f"`{kind}`", " ".join((owner.__doc__ or "").split()), _meaning(first[1]), others))
    return table(("kind", "description", "value", "further fields"), *rows)


def _inputs() -> Iterator[tuple[str, str, InputSpec]]:
    """Yield every input of every operation, with the operation's name; scoring has those of each kind of score."""
    for operation, own in OPERATIONS.items():
        kinds = SCORE_INPUTS if operation == "scoring" else {"": own.inputs}
        for score, specs in kinds.items():
            yield from ((f"{operation}, {score}" if score else operation, name, spec) for name, spec in specs.items())


def operations_table() -> str:
    """Every operation with its inputs, options and stages; inputs that not every call has are in brackets."""
    rows = []
    for operation, own in OPERATIONS.items():
        kinds = list(SCORE_INPUTS.values()) if operation == "scoring" else [own.inputs]
        names = dict.fromkeys(name for specs in kinds for name in specs)
        needed = [name for name in names if all(name in specs and specs[name].required for specs in kinds)]
        optional = [name for name in names if name not in needed]
        shown = _names(needed, sort=False) + (f" [{_names(optional, sort=False)}]" if optional else "")
        rows.append((f"`{operation}`", shown, _names(own.options, sort=True), _names(own.stages, sort=False)))
    return table(("operation", "inputs [optional ones]", "options", "stages"), *rows)


def inputs_table() -> str:
    """Every input with its axes, and the operations that take it with these."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for operation, name, spec in _inputs():
        found.setdefault((name, ", ".join(spec.axes), _kind(spec)), []).append(operation)
    most = len(OPERATIONS) - 6
    rows = [
        (f"`{name}`", f"({axes})", kind, "most: section 3" if len(operations) > most else "; ".join(operations))
        for (name, axes, kind), operations in sorted(found.items())
    ]
    return table(("input", "axes", "contents", "operations"), *rows)


def axes_table() -> str:
    """Every axis letter."""
    return table(("axis", "meaning"), *AXES.items())


def quantities_table() -> str:
    """Every derived quantity."""
    rows = [(f"`{each.name}`", each.meaning) for each in QUANTITIES.values()]
    return table(("quantity", "meaning"), *rows)


def _own_fields(owner: type[BaseModel], kind: str) -> list[tuple[str, dict[str, Any]]]:
    bases = (base for base in owner.__bases__ if base is not array_kinds.StoredNumbers)
    inherited = {field for base in bases for field in base.model_fields}  # type: ignore[attr-defined]
    schema = owner.model_json_schema()
    properties = (schema if "properties" in schema else schema["$defs"][owner.__name__])["properties"]
    own = {field: value for field, value in properties.items() if field not in inherited}
    return [(kind, own.pop(kind)), *own.items()]


def _kind(spec: InputSpec) -> str:
    kind = "true and false (true = may attend)" if spec.is_boolean else "counts" if spec.is_count else "numbers"
    spread = ", or 1 along any axis" if spec.is_broadcastable else ""
    return kind + spread + (f"; needs `{spec.required_input}`" if spec.required_input else "")


def _names(names: Any, *, sort: bool) -> str:
    return ", ".join(f"`{name}`" for name in (sorted(names) if sort else names))


def _meaning(value: dict[str, Any]) -> str:
    return str(value["description"]).replace("|", "\\|")


def _value(value: dict[str, Any]) -> str:
    """What may stand there, in words."""
    if value.get("title") in ("For Each", "Design"):
        return "see section 9"
    if any("enum" in each for each in value.get("oneOf", [])):
        return " or ".join(map(_value, value["oneOf"]))
    if "$ref" in value or "oneOf" in value:
        return _MAPPINGS.get(value.get("$ref", "").rpartition("/")[2], "an array")
    if "anyOf" in value:
        words = dict.fromkeys(_value(each) for each in value["anyOf"] if each.get("type") != "null")
        return " or ".join(word for word in words if not (word == "a whole number" and "a number" in words))
    if "enum" in value:
        return "a stage" if value["enum"] == list(STAGES) else ", ".join(f"`{each}`" for each in value["enum"])
    return _collection(value) or _WORDS.get(value.get("type", ""), "numbers")


def _collection(value: dict[str, Any]) -> str:
    if value.get("type") == "array":
        return f"a list: {_item(value['items'])}"
    if value.get("type") != "object":
        return ""
    [inner] = value["patternProperties"].values()
    return f"name: {_value(inner)}"


def _item(value: dict[str, Any]) -> str:
    null = any(each.get("type") == "null" for each in value.get("anyOf", []))
    return f"{_value(value)}{' or null' if null else ''}" if value else "anything"


def models_of_cases() -> list[type[BaseModel]]:
    """Return the models of the case format, except those of kinds of arrays, which have a table of their own."""
    of_kinds = {*array_kinds.MODEL_OF_KIND.values(), array_kinds.StrictModel, model.TagFile}
    classes = [each for module in MODELS for each in vars(module).values() if isinstance(each, type)]
    own = [each for each in classes if issubclass(each, BaseModel) and each.__module__ in {m.__name__ for m in MODELS}]
    return list(dict.fromkeys(each for each in own if each not in of_kinds))


def commands() -> str:
    """Return every command with its arguments, options and examples."""
    return "\n".join(_section(name, command) for name, command in typer.main.get_command(app).commands.items())


def options_by_command() -> str:
    """Return which commands that ask an implementation have which options; options of one command are left out."""
    asking = {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        for name, command in typer.main.get_command(app).commands.items()
        if any("--framework" in parameter.opts for parameter in command.params)
    }
    several = [
        option
        for option in dict.fromkeys(option for options in asking.values() for option in sorted(options))
        if sum(option in options for options in asking.values()) > 1
    ]
    rows = [(f"`{option}`", *("yes" if option in asking[name] else "" for name in asking)) for option in several]
    return table(("option", *(f"`{name}`" for name in asking)), *rows)


def examples_of(text: str) -> list[str]:
    """Return the commands at the end of a help text."""
    return [line.strip() for line in text.partition("Examples:\n")[2].splitlines()]


def _section(name: str, command: Any) -> str:
    text = "\n\n".join(" ".join(each.split()) for each in command.help.split("\n\n"))
    shown = [each for each in command.params if each.name != "help" and not getattr(each, "hidden", False)]
    rows = [(_flags(each), _help(each)) for each in shown]
    examples = "\n".join(examples_of(command.epilog))
    return f"## attncheck {name}\n\n{text}\n\n{table(('argument', 'meaning'), *rows)}\n```sh\n{examples}\n```\n"


def _flags(parameter: Any) -> str:
    value = parameter.metavar if parameter.metavar and not getattr(parameter, "is_flag", False) else ""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name} {value}`".replace(" `", "`") for name in names).replace("|", "\\|")


def _help(parameter: Any) -> str:
    text = " ".join(parameter.help.split()).replace("|", "\\|")
    default = parameter.default
    is_shown = isinstance(default, str | int | float | os.PathLike) and not isinstance(default, bool)
    return f"{text} Default: `{default}`." if is_shown and "Default:" not in text else text


if __name__ == "__main__":
    made = tables()
    for name in sys.argv[1:] or [", ".join(made)]:
        print(made.get(name, name))
