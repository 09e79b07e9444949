"""The reference of case files: its tables are those of the code, and its examples are good cases.

``python tests/docs/test_cases.py`` writes the tables again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from pydantic import BaseModel

from attncheck.backends import numpy_backend
from attncheck.backends.contract import AXES
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Computed, evaluate_on
from attncheck.judging.compare import absolute_difference, differing_nonfinite
from attncheck.quantities import QUANTITIES
from attncheck.reading import array_kinds, model
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.loader import load_case_file, load_tags
from attncheck.spec import OPERATIONS, SCORE_INPUTS, STAGES, InputSpec

REFERENCE = Path(__file__).parents[2] / "docs" / "cases.md"
MARKED = re.compile(r"<!-- (\w+): (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)
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


# The tables


def fields_table(name: str) -> str:
    """The fields of a model of the case format that are its own, as a table."""
    owner = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    inherited = {field for base in owner.__bases__ if issubclass(base, BaseModel) for field in base.model_fields}
    schema = owner.model_json_schema()
    own = schema if "properties" in schema else schema["$defs"][name]
    rows = [
        _row(f"`{field}`{' (needed)' if field in own.get('required', []) else ''}", _value(value), _meaning(value))
        for field, value in own["properties"].items()
        if field not in inherited
    ]
    return _table(("field", "value", "meaning"), rows)


def kinds_table(name: str) -> str:
    """Every kind of array, with the field that it is told by and those beside it: of numbers, or of positions."""
    rows = []
    of_positions = (*array_kinds.MASK_KINDS, *array_kinds.WRAPPING_KINDS, "alibi")
    for kind, owner in array_kinds.KINDS.items():
        if (kind in of_positions) != (name == "positions"):
            continue
        first, *beside = _own_fields(owner, kind)
        others = "; ".join(f"`{field}` ({_value(value)})" for field, value in beside)
        rows.append(_row(f"`{kind}`", " ".join((owner.__doc__ or "").split()), _meaning(first[1]), others))
    return _table(("kind", "is", "its value", "beside it"), rows)


def _inputs() -> Iterator[tuple[str, str, InputSpec]]:
    """Yield every input of every operation, with the operation's name; scoring has those of each kind of score."""
    for operation, own in OPERATIONS.items():
        kinds = SCORE_INPUTS if operation == "scoring" else {"": own.inputs}
        for score, specs in kinds.items():
            yield from ((f"{operation}, {score}" if score else operation, name, spec) for name, spec in specs.items())


def operations_table(_: str) -> str:
    """Every operation with its inputs, options and stages; inputs that not every call has are in brackets."""
    rows = []
    for operation, own in OPERATIONS.items():
        kinds = list(SCORE_INPUTS.values()) if operation == "scoring" else [own.inputs]
        names = dict.fromkeys(name for specs in kinds for name in specs)
        needed = [name for name in names if all(name in specs and specs[name].required for specs in kinds)]
        optional = [name for name in names if name not in needed]
        shown = _names(needed, sort=False) + (f" [{_names(optional, sort=False)}]" if optional else "")
        rows.append(_row(f"`{operation}`", shown, _names(own.options, sort=True), _names(own.stages, sort=False)))
    return _table(("operation", "inputs [optional ones]", "options", "stages"), rows)


def inputs_table(_: str) -> str:
    """Every input with its axes, and the operations that take it with these."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for operation, name, spec in _inputs():
        found.setdefault((name, ", ".join(spec.axes), _kind(spec)), []).append(operation)
    most = len(OPERATIONS) - 6
    rows = [
        _row(f"`{name}`", f"({axes})", kind, "most: section 3" if len(operations) > most else "; ".join(operations))
        for (name, axes, kind), operations in sorted(found.items())
    ]
    return _table(("input", "axes", "is", "of"), rows)


def axes_table(_: str) -> str:
    """Every axis letter."""
    return _table(("axis", "is"), [_row(letter, meaning) for letter, meaning in AXES.items()])


def quantities_table(_: str) -> str:
    """Every derived quantity."""
    rows = [_row(f"`{each.name}`", each.meaning) for each in QUANTITIES.values()]
    return _table(("quantity", "is"), rows)


TABLES: dict[str, Callable[[str], str]] = {
    "fields": fields_table,
    "kinds": kinds_table,
    "operations": operations_table,
    "inputs": inputs_table,
    "quantities": quantities_table,
    "axes": axes_table,
}


def with_tables(text: str) -> str:
    """The reference with every table made anew."""
    return MARKED.sub(
        lambda found: f"<!-- {found[1]}: {found[2]} -->\n{TABLES[found[1]](found[2])}<!-- end -->\n", text
    )


def _table(heads: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([_row(*heads), _row(*["---"] * len(heads)), *rows]) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


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


def test_every_table_that_can_be_made_is_there_is_that_of_the_code_and_every_field_says_what_it_means() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "python tests/docs/test_cases.py writes them again"
    models = [each for module in MODULES for each in _models(module)]
    told_by_kind = {each.__name__ for each in array_kinds.KINDS.values()}
    wanted = {("fields", each.__name__) for each in models} - {("fields", name) for name in told_by_kind}
    wanted |= {("kinds", "numbers"), ("kinds", "positions")}
    wanted |= {(name, "all") for name in ("operations", "quantities", "axes", "inputs")}
    found = {(kind, name) for kind, name, _ in MARKED.findall(text)}
    assert found == wanted - {("fields", "Strict"), ("fields", "TagFile")}
    for each in models:
        each.model_rebuild()  # fields of models that name each other are complete from then on
        assert [field for field, value in each.model_fields.items() if not value.description] == [], each.__name__


if __name__ == "__main__":
    REFERENCE.write_text(with_tables(REFERENCE.read_text(encoding="utf-8")), encoding="utf-8")
