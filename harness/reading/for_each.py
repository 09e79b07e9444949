"""The values of ``for_each``: their names, which of them go together, and what cases are called for them.

for_each: {width: [16, 64], heads: [1, 4]}                       every width with every number of heads
for_each: [{width: 16, heads: 4}, {width: 64, heads: 1}]         row by row
for_each: {window: {one key: [0, 0], the past: [null, 0]}}       values that have names of their own
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attncheck.reading.compressed_cases import referred
from attncheck.reading.diagnostics import CaseFileError, short
from attncheck.reading.yaml_scalars import FieldPath

ROW_NAME = "name"
"""The field of a row that says what its case is called."""
NAME = r"^[A-Za-z][A-Za-z0-9_]*$"
MAX_LABEL = 60
_FORMS = "a mapping of names to lists of values, or a list of rows, each a mapping of names to values"


@dataclass(frozen=True)
class Value:
    """Plain data, where it stands in the file, and how large and deep it is."""

    data: Any
    path: FieldPath
    size: int = 1
    depth: int = 0


@dataclass(frozen=True)
class Choice:
    """The values that some names have together, and what a case is called for them."""

    values: Mapping[str, Value]
    label: str


@dataclass(frozen=True)
class Axis:
    """What is varied at once: a single name, or the names of a list of rows."""

    path: FieldPath
    choices: tuple[Choice, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that it gives values."""
        return tuple(self.choices[0].values)

    def path_of(self, name: str) -> FieldPath:
        """Return where the file gives a name its values: of rows, in the first."""
        return self.path if self.path[-1] == name else self.choices[0].values[name].path

    @cached_property
    def references(self) -> Mapping[str, frozenset[str]]:
        """The names that the values of each of its names refer to."""
        return {
            name: frozenset(other for choice in self.choices for _, other in references(choice.values[name].data))
            for name in self.names
        }


def references(data: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, str]]:
    """Yield every ``{each: name}`` inside of some data: where it stands, and the name."""
    name = referred(data)
    if name is not None:
        yield path, name
    for part, inner in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from references(inner, (*path, part))


def read_axes(source: Any, path: FieldPath) -> tuple[Axis, ...]:
    """Read a ``for_each``. Raises ``CaseFileError``."""
    if not isinstance(source, dict | list) or not source:
        raise CaseFileError(path, f"expected {_FORMS}, got {short(source)}")
    if isinstance(source, list):
        return (_rows(source, path),)
    return tuple(_one_name(name, values, (*path, name)) for name, values in source.items())


def _one_name(name: str, values: Any, path: FieldPath) -> Axis:
    _check_name(name, path)
    if not isinstance(values, dict | list) or not values:
        raise CaseFileError(path, f"expected a list of values, or a mapping that names each, got {short(values)}")
    if isinstance(values, dict):
        labelled = [(_label(label, (*path, label)), label, value) for label, value in values.items()]
    else:
        labelled = [(_text_of(value, (*path, position)), position, value) for position, value in enumerate(values)]
    choices = [
        Choice({name: Value(value, (*path, part))}, f"{_words(name)} {label}") for label, part, value in labelled
    ]
    return _axis(choices, path)


def _rows(rows: list[Any], path: FieldPath) -> Axis:
    choices: list[Choice] = []
    for number, row in enumerate(rows):
        where = (*path, number)
        if not isinstance(row, dict) or not set(row) - {ROW_NAME}:
            raise CaseFileError(where, f"expected a mapping of names to values, got {short(row)}")
        names = [name for name in row if name != ROW_NAME]
        for name in names:
            _check_name(name, (*where, name))
        if choices and set(names) != set(choices[0].values):
            others = ", ".join(choices[0].values)
            raise CaseFileError(where, f"expected the names of the first row ({others}), got {', '.join(names)}")
        values = {name: Value(row[name], (*where, name)) for name in names}
        label = (
            _label(row[ROW_NAME], (*where, ROW_NAME))
            if ROW_NAME in row
            else ", ".join(f"{_words(name)} {_text_of(row[name], (*where, name), of_row=True)}" for name in names)
        )
        choices.append(Choice(values, label))
    return _axis(choices, path)


def _axis(choices: list[Choice], path: FieldPath) -> Axis:
    seen: set[str] = set()
    for choice in choices:
        if choice.label.casefold() in seen:
            where = next(iter(choice.values.values())).path
            raise CaseFileError(where, f"{choice.label!r} is there twice; a case is made of it once")
        seen.add(choice.label.casefold())
    return Axis(path, tuple(choices))


def _check_name(name: str, path: FieldPath) -> None:
    if not re.fullmatch(NAME[1:-1], name) or len(name) > MAX_LABEL or name == ROW_NAME:
        reserved = f", and not {ROW_NAME}" if name == ROW_NAME else ""
        raise CaseFileError(
            path,
            "expected a name of letters, digits and underscores that begins with a letter"
            f"{reserved}, got {short(name)}",
        )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _label(label: Any, path: FieldPath) -> str:
    if not isinstance(label, str) or not label.isprintable() or not re.search(r"[^\W_]", label):
        raise CaseFileError(path, f"expected a name with letters or digits, got {short(label)}")
    if len(label) > MAX_LABEL:
        raise CaseFileError(path, f"expected at most {MAX_LABEL} characters, as they become part of a name")
    return label


def _text_of(value: Any, path: FieldPath, *, of_row: bool = False) -> str:
    """Write a value as it stands in a case's name, and so in its id, from which signs are left out."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case int() | float():
            text = f"{abs(value)!r}".replace("e+", "e")
            return f"minus {text}" if math.copysign(1, value) < 0 else text
        case str():
            return _label(value, path)
    advice = f"give the row a `{ROW_NAME}`" if of_row else "name the values: `window: {one key: [0, 0], ...}`"
    raise CaseFileError(path, f"{short(value)} cannot be part of a case's name; {advice}")
