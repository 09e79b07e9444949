"""Tables of the documentation that are made of the code, and the examples of case files, which are good cases.

``python tests/docs/test_generated.py`` writes the tables again, and the schema of results.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema_rs
import numpy as np
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parent))
from pages import DOCS, ROOT, all_pages

sys.path.insert(0, str(DOCS))
from site_tables import table, tables
from test_command_line import GROUP, reference

from attncheck import options
from attncheck.backends import numpy_backend
from attncheck.backends.contract import AXES
from attncheck.backends.families import FAMILIES, Family
from attncheck.conventions import QUESTIONS
from attncheck.execution.runner import task_of
from attncheck.execution.signatures import expected_signature
from attncheck.execution.worker import Computed, evaluate_on
from attncheck.judging.alternatives import Reading
from attncheck.judging.compare import absolute_difference, differing_nonfinite
from attncheck.judging.readings import CATALOGUE, declaration_of
from attncheck.quantities import QUANTITIES
from attncheck.reading import array_kinds, model
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailureEntry, load_expected_failures
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.loader import load_case_file, load_tags
from attncheck.reports.build_frames import COLUMNS, NUMBERS, PAIRS, RESULTS
from attncheck.reports.frames import PROPERTIES as PROPERTY_COLUMNS
from attncheck.reports.json_schema import DOCUMENTS, results_schema
from attncheck.results.format import COLUMNS as ROW_COLUMNS
from attncheck.spec import OPERATIONS, PROPERTIES, SCORE_INPUTS, STAGES, InputSpec

SCHEMA = DOCS / "reference" / "results.schema.json"
LAYOUTS = {"BHLD": "(B, H, L, D)", "BLHD": "(B, L, H, D)", "LHD": "(L, H, D), a batch entry to a call"}
REFERENCE = DOCS / "cases.md"
MARKED = re.compile(r"(<!-- (\w+)(?:: (\w+))? -->\n).*?<!-- end -->\n", re.DOTALL)
"""A table with its name, and of what it is."""
EXAMPLE = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
MODULES = (model, array_kinds)
HEAD = """\
title: Examples of the reference
source: {kind: derivation, title: Made for the reference}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
cases:
"""
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
_TYPES = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
}
OF_CASES = ("operations", "quantities", "axes", "inputs")


def questions() -> str:
    """Every question about conventions with its meanings."""
    rows = (
        (
            each.name,
            each.asks,
            ("" if each.expected else "(-) ") + "; ".join(meaning.words for meaning in each.meanings),
        )
        for each in QUESTIONS
    )
    return table(("question", "asks", "meanings"), *rows)


def signatures() -> str:
    """A line for each family of signatures: its call, its layout, and where its causal calls count from."""
    rows = ((f"`{each.name}`", f"`{each.call}`", _layout(each), _corner(each)) for each in FAMILIES.values())
    return table(("`--signature`", "is called as", "arrays", "causal"), *rows)


def _layout(family: Family) -> str:
    return LAYOUTS[family.layout] + (f"; output {LAYOUTS[family.output_layout]}" if family.output_layout else "")


def _corner(family: Family) -> str:
    return f"from the {family.corner}" if family.causal or family.causal_mask else "as a mask"


def properties() -> str:
    """Every property, with what it says."""
    rows = ((f"`{each.name}`", each.says, each.calls) for each in PROPERTIES.values())
    return table(("property", "what must hold", "further calls"), *rows)


def columns() -> str:
    """Every column of the rows and of the frames."""
    frames = {
        "rows": ROW_COLUMNS,
        "results": RESULTS,
        "pairs": PAIRS,
        "numbers": NUMBERS,
        "properties": PROPERTY_COLUMNS,
    }
    meanings = {**COLUMNS, **{name: column.meaning for name, column in ROW_COLUMNS.items()}}
    having = {name: ", ".join(frame for frame, own in frames.items() if name in own) for name in meanings}
    rows = ((f"`{name}`", having[name], meaning) for name, meaning in meanings.items() if having[name])
    return table(("column", "frames", "meaning"), *rows)


def readings() -> str:
    """Every reading with its message, by what it is about."""
    return "\n".join(f"### {subject}\n\n{_readings_of(rows)}" for subject, rows in CATALOGUE.items())


def _readings_of(readings: Sequence[Reading]) -> str:
    rows = ((f"`{each.name}`", re.sub(r"\{(\w+)\}", r"*\1*", each.says), _kind_of(each)) for each in readings)
    return table(("name", "message", "kind"), *dict.fromkeys(rows))


def _kind_of(reading: Reading) -> str:
    kind = "convention" if reading.is_convention else "mistake"
    option = declaration_of(reading.name)
    return kind if option is None else f'{kind}, unless `{{"{option[0]}": "{option[1]}"}}` is declared'


def fields_table(name: str) -> str:
    """The fields of a model of the case format that are its own, as a table."""
    owner = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    inherited = {field for base in owner.__bases__ if issubclass(base, BaseModel) for field in base.model_fields}
    schema = owner.model_json_schema()
    own = schema if "properties" in schema else schema["$defs"][name]
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
    for kind, owner in array_kinds.KINDS.items():
        if (kind in of_positions) != (name == "positions"):
            continue
        first, *beside = _own_fields(owner, kind)
        others = "; ".join(f"`{field}` ({_value(value)})" for field, value in beside)
        rows.append((f"`{kind}`", " ".join((owner.__doc__ or "").split()), _meaning(first[1]), others))
    return table(("kind", "is", "its value", "beside it"), *rows)


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
    return table(("input", "axes", "is", "of"), *rows)


def axes_table() -> str:
    """Every axis letter."""
    return table(("axis", "is"), *AXES.items())


def quantities_table() -> str:
    """Every derived quantity."""
    rows = [(f"`{each.name}`", each.meaning) for each in QUANTITIES.values()]
    return table(("quantity", "is"), *rows)


def _own_fields(owner: type[BaseModel], kind: str) -> list[tuple[str, dict[str, Any]]]:
    bases = (base for base in owner.__bases__ if base is not array_kinds.StoredNumbers)
    inherited = {field for base in bases for field in base.model_fields}  # type: ignore[attr-defined]
    schema = owner.model_json_schema()
    properties = (schema if "properties" in schema else schema["$defs"][owner.__name__])["properties"]
    own = {field: value for field, value in properties.items() if field not in inherited}
    return [(kind, own.pop(kind)), *own.items()]


def _kind(spec: InputSpec) -> str:
    kind = "true and false (true = may attend)" if spec.boolean else "counts" if spec.whole else "numbers"
    spread = ", or 1 along any axis" if spec.broadcast else ""
    return kind + spread + (f"; needs `{spec.needs}`" if spec.needs else "")


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
    return _collection(value) or _TYPES.get(value.get("type", ""), "numbers")


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


def _models(module: ModuleType) -> list[type[BaseModel]]:
    """The models that a module defines."""
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, BaseModel)]
    return [each for each in classes if each.__module__ == module.__name__]


TABLES: Mapping[str, Callable[..., str]] = {
    **{"readings": readings, "questions": questions, "signatures": signatures, "properties": properties},
    **{"columns": columns, "commands": reference, "fields": fields_table, "kinds": kinds_table},
    **{"operations": operations_table, "inputs": inputs_table, "quantities": quantities_table, "axes": axes_table},
}


def anew(text: str) -> str:
    """Return a page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        of = [] if found[3] in (None, "all") else [found[3]]
        return f"{found[1]}{TABLES[found[2]](*of)}<!-- end -->\n"

    return MARKED.sub(made, text)


def _pages() -> Iterator[tuple[Path, str, str]]:
    for path in all_pages():
        text = path.read_text(encoding="utf-8")
        yield path, text, anew(text)
    yield SCHEMA, SCHEMA.read_text(encoding="utf-8"), results_schema()


def test_a_signature_that_a_document_shows_is_the_contracts() -> None:
    signature = re.compile(r"attention\(query, key, value, \*, mask=None, bias=None[^)]*\)")
    for path in (ROOT / "README.md", *DOCS.rglob("*.md")):
        shown = {
            " ".join(each.split()).replace('"', "'") for each in signature.findall(path.read_text(encoding="utf-8"))
        }
        assert shown <= {expected_signature("attention")}, path


def test_every_table_is_that_of_the_code_and_every_field_says_what_it_means() -> None:
    stale = [path.name for path, text, made in _pages() if text != made]
    assert stale == [], "python tests/docs/test_generated.py writes them again"
    jsonschema_rs.meta.validate(json.loads(results_schema()))
    text = "".join(page.read_text(encoding="utf-8") for page in all_pages())
    made = tables()
    assert sorted(re.findall(r"^```{include} (?:\.\./)+build/tables/(\S+)$", text, re.MULTILINE)) == sorted(made)
    assert [name for name, each in made.items() if each.count("\n| ") < 2] == []
    models = [each for module in MODULES for each in _models(module)]
    told_by_kind = {each.__name__ for each in array_kinds.KINDS.values()} | {"Strict", "TagFile"}
    wanted = [("fields", each.__name__) for each in models if each.__name__ not in told_by_kind]
    wanted += [("kinds", "numbers"), ("kinds", "positions"), *((name, "all") for name in OF_CASES)]
    wanted += [(name, "") for name in TABLES.keys() - {"fields", "kinds", *OF_CASES}]
    assert sorted(found[1:] for found in MARKED.findall(text)) == sorted(wanted)
    for each in models:
        each.model_rebuild()  # fields of models that name each other are complete from then on
        assert [field for field, value in each.model_fields.items() if not value.description] == [], each.__name__


def test_help_names_every_family_and_every_command_with_an_outcome_has_a_document_and_the_option() -> None:
    names = f"{', '.join(list(FAMILIES)[:-1])} or {list(FAMILIES)[-1]}"
    assert names in options.options_of(options.RunOptions)["signature"].flag.help
    of_texts = {"schema"}  # which is JSON anyway
    assert {name.split()[0] for name in DOCUMENTS} == set(GROUP.commands) - of_texts
    for name, command in GROUP.commands.items():
        assert ("--json" in {option for each in command.params for option in each.opts}) == (name not in of_texts), name


def test_the_page_on_expected_failures_has_every_field_as_the_code_explains_it_and_a_good_list(tmp_path: Path) -> None:
    page = (DOCS / "expected_failures.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows.keys() == ExpectedFailureEntry.model_fields.keys()
    for name, field in ExpectedFailureEntry.model_fields.items():
        assert str(field.description) in rows[name]
        assert ("(needed)" in rows[name]) == field.is_required()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "known.yaml").write_text(text, encoding="utf-8")
    found = load_expected_failures([tmp_path / "known.yaml"])
    assert set().union(*(each.entry.model_fields_set for each in found)) == ExpectedFailureEntry.model_fields.keys()


def _examples() -> list[str]:
    return EXAMPLE.findall(REFERENCE.read_text(encoding="utf-8"))


def _loaded(text: str, folder: Path) -> list[Case]:
    numbers = np.random.default_rng(7)
    np.savez(folder / "dump.npz", **{name: numbers.normal(size=(2, 3, 4)) for name in ("query", "key", "value")})
    np.save(folder / "scores.npy", np.arange(6.0).reshape(2, 3))
    np.save(folder / "weights.npy", np.full(4, 0.25, np.float16))
    path = folder / "examples.yaml"
    path.write_text(text if text.startswith("title:") else HEAD + text, encoding="utf-8")
    return load_case_file(path, "examples.yaml", "examples", ["uniform"])


def _cases(folder: Path) -> Iterator[Case]:
    for text in _examples():
        if not text.startswith("tags:"):
            yield from _loaded(text, folder)


def test_every_option_input_and_field_has_an_example(tmp_path: Path) -> None:
    cases = list(_cases(tmp_path))
    assert {option for case in cases for option in case.options} == {
        option for operation in OPERATIONS.values() for option in operation.options
    }
    assert {case.operation for case in cases} == set(OPERATIONS)
    text = "\n".join(_examples())
    models = (model.CaseFile, model.CaseEntry, model.Expectation, model.Defaults, model.TagEntry, model.Source)
    fields = {field for each in (*models, model.Random, *array_kinds.KINDS.values()) for field in each.model_fields}
    fields |= {name for operation in OPERATIONS.values() for name in operation.inputs} | {"score_vector", "weight"}
    assert [field for field in sorted(fields) if not re.search(rf"\b{field}:", text)] == []
    [tags] = [text for text in _examples() if text.startswith("tags:")]
    (tmp_path / "tags.yaml").write_text(tags, encoding="utf-8")
    assert list(load_tags(tmp_path, "tags.yaml")) == ["uniform"]


def test_every_example_runs_and_the_numbers_that_it_knows_hold(tmp_path: Path) -> None:
    for case in _cases(tmp_path):
        dtype = "float64" if "float64" in case.dtypes else "float32"
        outcome = evaluate_on(numpy_backend, task_of(case, convert_inputs(case, make_exact_inputs(case), dtype)))
        assert isinstance(outcome, Computed), outcome
        for expected in case.expected:
            if expected.numbers is None or expected.erratum or expected.name != expected.of:
                continue
            given, known = expected.numbers.given, expected.numbers
            computed = outcome.stages[expected.of]
            rounding = 2.0**-20 if case.computed_in == "float32" else 1e-12
            off = absolute_difference(computed, known.value)[given]
            assert not differing_nonfinite(computed, known.value)[given].any()
            assert (off <= known.open_towards(computed)[given] + rounding).all(), (case.name, expected.name, computed)


if __name__ == "__main__":
    for path, _, made in _pages():
        path.write_text(made, encoding="utf-8")
