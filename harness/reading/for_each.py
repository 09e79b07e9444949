"""Cases that a file writes once and means for several values, written out before anything else of them is checked.

What ``for_each`` and a ``design`` are stands in docs/cases.md, section 9. A design does not take every combination of
the levels of its factors, but so few that every two or three levels that go together meet in one (``covering.py``).
"""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import product
from operator import getitem
from typing import Any

from attncheck.common.wording import slug, suggest_names
from attncheck.reading.covering import count_combinations, make_covering_rows
from attncheck.reading.diagnostics import CaseFileError, shorten_value
from attncheck.reading.yaml_reader import MAX_DEPTH, MAX_NODES, FieldPath, YamlDocument

REFERENCE_KEY = "each"
# A choice: the characters of a name that a message quotes; valid names have no more.
_MAX_SHOWN = 60


def find_referenced_name(data: Any) -> str | None:
    """Return the name in ``{each: name}``; None for what is anything else."""
    name = data.get(REFERENCE_KEY) if isinstance(data, dict) else None
    return name if isinstance(name, str) else None


def format_reference(name: str) -> str:
    """Write a reference to a name as a file does."""
    return (
        f"{{{REFERENCE_KEY}: {name if name.isidentifier() and len(name) <= _MAX_SHOWN else ascii(name)[:_MAX_SHOWN]}}}"
    )


@dataclass(frozen=True)
class CaseOrigin:
    """The case of the file that one is made of, and the places of the values that its names have."""

    case_number: int
    value_paths: Mapping[str, FieldPath]


@dataclass(frozen=True)
class _ResolvedPath:
    """The end of a path: in the cases as written out, in the file, and perhaps on into a value of ``for_each``."""

    existing: FieldPath
    path: FieldPath
    referenced_name: str | None = None
    path_in_value: FieldPath = ()

    @property
    def source(self) -> FieldPath:
        """The place in the file where what was found stands."""
        return self.path_in_value if self.referenced_name else self.path


@dataclass(frozen=True)
class ExpandedDocument(YamlDocument):
    """``data`` holds the cases as written out, ``lines`` those of the file, whose own data is ``original_data``."""

    original_data: Any = None
    origins: tuple[CaseOrigin, ...] = field(default=())

    def locate(self, path: FieldPath) -> tuple[FieldPath, int | None]:
        """Return the longest part of a path that exists, and its line; for a value, the line of its name."""
        followed = self._resolve_path(path)
        return followed.existing, self.lines.get(followed.path)

    def find_place_in_file(self, path: FieldPath) -> FieldPath:
        """Return the place in the file that a path leads to."""
        return self._resolve_path(path).source

    def referenced_value_at(self, path: FieldPath) -> tuple[str, int | None] | None:
        """Return the name whose value a path leads to, and the line of that value."""
        followed = self._resolve_path(path)
        return (followed.referenced_name, self.lines.get(followed.path_in_value)) if followed.referenced_name else None

    def _resolve_path(self, path: FieldPath) -> _ResolvedPath:
        match path:
            case ("cases", int(number), *rest):
                origin = self.origins[number]
            case _:
                existing, _ = super().locate(path)
                return _ResolvedPath(existing, existing)
        now = self._resolve_names(_ResolvedPath(("cases", number), ("cases", origin.case_number)), origin)
        for part in rest:
            ahead = (*now.source, part)
            if ahead in self.lines:
                path, value = (now.path, ahead) if now.referenced_name else (ahead, ())
                now = self._resolve_names(
                    _ResolvedPath((*now.existing, part), path, now.referenced_name, value), origin
                )
        return now

    def _resolve_names(self, followed: _ResolvedPath, origin: CaseOrigin) -> _ResolvedPath:
        """Follow a name to its value."""
        while (
            name := find_referenced_name(reduce(getitem, followed.source, self.original_data))
        ) is not None and name in origin.value_paths:
            followed = replace(followed, referenced_name=name, path_in_value=origin.value_paths[name])
        return followed


ROW_LABEL_KEY = "name"
"""The field of a row that says what its case is called."""
NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_]*$"
# A choice: labels become part of names and ids; several labels of this length still fit on a line of a report.
MAX_LABEL_LENGTH = 60
_ACCEPTED_FORMS = "a mapping of names to lists of values, or a list of rows, each a mapping of names to values"


@dataclass(frozen=True)
class LocatedValue:
    """Plain data, its place in the file, and its size and depth."""

    data: Any
    path: FieldPath
    size: int = 1
    depth: int = 0


@dataclass(frozen=True)
class Choice:
    """The values that some names have together, and what a case is called for them."""

    located_values: Mapping[str, LocatedValue]
    label: str


@dataclass(frozen=True)
class VaryingNames:
    """The names that vary together: a single name, or the names of a list of rows."""

    path: FieldPath
    choices: tuple[Choice, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that it gives values."""
        return tuple(self.choices[0].located_values)

    def find_path_of_values(self, name: str) -> FieldPath:
        """Return the place of a name's values in the file; for rows, the place in the first row."""
        return self.path if self.path[-1] == name else self.choices[0].located_values[name].path

    @cached_property
    def references(self) -> Mapping[str, frozenset[str]]:
        """The names that the values of each of its names refer to."""
        return {
            name: frozenset(
                target for choice in self.choices for _, target in find_references(choice.located_values[name].data)
            )
            for name in self.names
        }


def find_references(data: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, str]]:
    """Yield the place and the name of every ``{each: name}`` inside of some data.

    Example:
        >>> list(find_references({"shape": [{"each": "batch"}, 4]}))
        [(('shape', 0), 'batch')]
    """
    name = find_referenced_name(data)
    if name is not None:
        yield path, name
    for part, inner in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from find_references(inner, (*path, part))


def read_for_each(source: Any, path: FieldPath) -> tuple[VaryingNames, ...]:
    """Read a ``for_each``. Raises ``CaseFileError``.

    Example:
        >>> [choice.label for choice in read_for_each({"key_width": [8, None]}, ("for_each",))[0].choices]
        ['key width 8', 'key width none']
    """
    if not isinstance(source, dict | list) or not source:
        raise CaseFileError(path, f"expected {_ACCEPTED_FORMS}, got {shorten_value(source)}")
    if isinstance(source, list):
        return (_read_rows(source, path),)
    return tuple(_read_values_of_name(name, values, (*path, name)) for name, values in source.items())


def _read_values_of_name(name: str, values: Any, path: FieldPath) -> VaryingNames:
    _check_name(name, path)
    if not isinstance(values, dict | list) or not values:
        raise CaseFileError(
            path, f"expected a list of values, or a mapping that names each, got {shorten_value(values)}"
        )
    if isinstance(values, dict):
        labelled = [(_check_label(label, (*path, label)), label, value) for label, value in values.items()]
    else:
        labelled = [
            (_format_value_as_label(value, (*path, position)), position, value) for position, value in enumerate(values)
        ]
    choices = [
        Choice({name: LocatedValue(value, (*path, part))}, f"{_name_to_words(name)} {label}")
        for label, part, value in labelled
    ]
    return _make_varying_names(choices, path)


def _read_rows(rows: list[Any], path: FieldPath) -> VaryingNames:
    choices: list[Choice] = []
    for number, row in enumerate(rows):
        where = (*path, number)
        if not isinstance(row, dict) or not set(row) - {ROW_LABEL_KEY}:
            raise CaseFileError(where, f"expected a mapping of names to values, got {shorten_value(row)}")
        names = [name for name in row if name != ROW_LABEL_KEY]
        for name in names:
            _check_name(name, (*where, name))
        if choices and set(names) != set(choices[0].located_values):
            others = ", ".join(choices[0].located_values)
            raise CaseFileError(where, f"expected the names of the first row ({others}), got {', '.join(names)}")
        values = {name: LocatedValue(row[name], (*where, name)) for name in names}
        label = (
            _check_label(row[ROW_LABEL_KEY], (*where, ROW_LABEL_KEY))
            if ROW_LABEL_KEY in row
            else ", ".join(
                f"{_name_to_words(name)} {_format_value_as_label(row[name], (*where, name), of_row=True)}"
                for name in names
            )
        )
        choices.append(Choice(values, label))
    return _make_varying_names(choices, path)


def _make_varying_names(choices: list[Choice], path: FieldPath) -> VaryingNames:
    seen: set[str] = set()
    for choice in choices:
        if choice.label.casefold() in seen:
            where = next(iter(choice.located_values.values())).path
            raise CaseFileError(where, f"{choice.label!r} is there twice; a case is made of it once")
        seen.add(choice.label.casefold())
    return VaryingNames(path, tuple(choices))


def _check_name(name: str, path: FieldPath) -> None:
    if not re.fullmatch(NAME_PATTERN[1:-1], name) or len(name) > MAX_LABEL_LENGTH or name == ROW_LABEL_KEY:
        reserved = f", and not {ROW_LABEL_KEY}" if name == ROW_LABEL_KEY else ""
        raise CaseFileError(
            path,
            "expected a name of letters, digits and underscores that begins with a letter"
            f"{reserved}, got {shorten_value(name)}",
        )


def _name_to_words(name: str) -> str:
    return name.replace("_", " ")


def _check_label(label: Any, path: FieldPath) -> str:
    if not isinstance(label, str) or not label.isprintable() or not re.search(r"[^\W_]", label):
        raise CaseFileError(path, f"expected a name with letters or digits, got {shorten_value(label)}")
    if len(label) > MAX_LABEL_LENGTH:
        raise CaseFileError(path, f"expected at most {MAX_LABEL_LENGTH} characters, as they become part of a name")
    return label


def _format_value_as_label(value: Any, path: FieldPath, *, of_row: bool = False) -> str:
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
            return _check_label(value, path)
    advice = f"give the row a `{ROW_LABEL_KEY}`" if of_row else "name the values: `window: {one key: [0, 0], ...}`"
    raise CaseFileError(path, f"{shorten_value(value)} cannot be part of a case's name; {advice}")


DESIGN_KEY = "design"
FACTORS, EXCLUDE, STRENGTH = "factors", "exclude", "strength"
STRENGTHS = (2, 3)
MAX_COMBINATIONS = 30_000
"""The most combinations of levels that a design may have to make meet: more would take seconds."""
_PLAIN_LABEL = "plain"
"""The case in which nothing is given that may be left out."""
_DESIGN_FORM = f"{FACTORS}, {STRENGTH} and, where levels do not go together, {EXCLUDE}"


_Factors = dict[str, dict[str, Choice]]
"""The factors of a design with their levels, both by name: the values of some names, and what a case is called."""


def read_design(source: Any, path: FieldPath) -> VaryingNames:
    """Read a ``design``: rows in which every two or three levels that go together meet. Raises ``CaseFileError``.

    Example:
        >>> factors = {"is_causal": [True, None], "softcap": [None, 2.0]}
        >>> [choice.label for choice in read_design({"factors": factors}, ("design",)).choices]
        ['is causal true', 'is causal true, softcap 2.0', 'plain', 'softcap 2.0']
    """
    if not isinstance(source, dict) or not {FACTORS} <= source.keys() <= {FACTORS, EXCLUDE, STRENGTH}:
        raise CaseFileError(path, f"expected {_DESIGN_FORM}, got {shorten_value(source)}")
    factors = _read_factors(source[FACTORS], (*path, FACTORS))
    strength = source.get(STRENGTH, STRENGTHS[0])
    if type(strength) is not int or strength not in STRENGTHS:
        raise CaseFileError((*path, STRENGTH), f"expected 2 or 3, got {shorten_value(strength)}")
    if strength > len(factors):
        where = (*path, STRENGTH) if STRENGTH in source else (*path, FACTORS)
        raise CaseFileError(
            where, f"expected at least {strength} factors for a strength of {strength}, got {len(factors)}"
        )
    sizes = list(map(len, factors.values()))
    if (combinations := count_combinations(sizes, strength)) > MAX_COMBINATIONS:
        message = f"{combinations} combinations of {strength} levels; expected at most {MAX_COMBINATIONS}"
        raise CaseFileError((*path, FACTORS), message)
    excluded = _read_exclusions(source.get(EXCLUDE, []), factors, (*path, EXCLUDE))
    rows = make_covering_rows(sizes, strength, excluded)
    for position, (name, levels) in enumerate(factors.items()):
        for number, level in enumerate(levels):
            if all(row[position] != number for row in rows):
                message = f"leaves no case with {level!r} of {name}" if rows else "leaves no case at all"
                raise CaseFileError((*path, EXCLUDE), message)
    choices = [list(levels.values()) for levels in factors.values()]
    chosen = [[levels[number] for levels, number in zip(choices, row, strict=True)] for row in rows]
    return _make_varying_names([_merge_choices(levels) for levels in chosen], path)


def _merge_choices(choices: Sequence[Choice]) -> Choice:
    """Merge the levels of a row; the label omits levels whose values are all null."""
    labels = [
        choice.label for choice in choices if any(value.data is not None for value in choice.located_values.values())
    ]
    values = {name: value for choice in choices for name, value in choice.located_values.items()}
    return Choice(values, ", ".join(labels) or _PLAIN_LABEL)


def _read_factors(source: Any, path: FieldPath) -> _Factors:
    if not isinstance(source, dict) or not source:
        raise CaseFileError(path, f"expected a mapping of factors to their levels, got {shorten_value(source)}")
    factors: _Factors = {}
    owners: dict[str, str] = {}
    for factor, levels in source.items():
        where = (*path, factor)
        _check_name(factor, where)
        of_rows = isinstance(levels, list) and levels and isinstance(levels[0], dict)
        axis = _read_rows(levels, where) if of_rows else _read_values_of_name(factor, levels, where)
        begin = "" if of_rows else f"{_name_to_words(factor)} "
        factors[factor] = {choice.label.removeprefix(begin): choice for choice in axis.choices}
        for name in axis.names:
            if name in owners:
                raise CaseFileError(
                    axis.find_path_of_values(name), f"{name!r} has its values from the factor {owners[name]} already"
                )
            owners[name] = factor
    return factors


def _read_exclusions(source: Any, factors: _Factors, path: FieldPath) -> list[dict[int, list[int]]]:
    """Return the excluded levels, by the positions of factors and of their levels."""
    if not isinstance(source, list):
        raise CaseFileError(path, f"expected a list, each a mapping of factors to levels, got {shorten_value(source)}")
    return [_read_exclusion(exclusion, factors, (*path, number)) for number, exclusion in enumerate(source)]


def _read_exclusion(source: Any, factors: _Factors, path: FieldPath) -> dict[int, list[int]]:
    if not isinstance(source, dict) or not source:
        raise CaseFileError(
            path, f"expected a mapping of factors to levels that do not go together, got {shorten_value(source)}"
        )
    excluded: dict[int, list[int]] = {}
    for name, levels in source.items():
        if name not in factors:
            raise CaseFileError(
                (*path, name), f"unknown factor {shorten_value(name)}; {suggest_names(str(name), factors)}"
            )
        known, wanted = list(factors[name]), []
        for level in levels if isinstance(levels, list) else [levels]:
            if isinstance(level, dict | list):
                message = f"expected the name of a level, or a list of them, got {shorten_value(level)}"
                raise CaseFileError((*path, name), message)
            wanted.append(_format_value_as_label(level, (*path, name)))
        if unknown := [level for level in wanted if level not in known]:
            message = f"unknown level {shorten_value(unknown[0])} of {name}; {suggest_names(unknown[0], known)}"
            raise CaseFileError((*path, name), message)
        excluded[list(factors).index(name)] = [known.index(level) for level in wanted]
    return excluded


FOR_EACH = "for_each"
MAX_REPEATED_CASES = 1000
"""The most cases that a file makes of those that it repeats."""
MAX_EXPANDED_VALUES = 5 * MAX_NODES
"""The most values that all of these cases have together."""
_FIELDS_WITHOUT_NAMES = (FOR_EACH, DESIGN_KEY, "name", "id")


def expand_cases(document: YamlDocument) -> tuple[YamlDocument, list[CaseFileError]]:
    """Return a file with each of its repeated cases written out, and the faults of their repetition."""
    data = document.data
    if not isinstance(data, dict) or not isinstance(data.get("cases"), list):
        return document, []
    entries = data["cases"]
    repeated = any({FOR_EACH, DESIGN_KEY} & part.keys() for part in (data, *entries) if isinstance(part, dict))
    if not repeated and not any(find_references(data)):
        return document, []
    shared = {name: value for name, value in data.items() if name not in ("cases", FOR_EACH)}
    for path, name in find_references(shared):
        message = f"{format_reference(name)} stands in cases alone; what they share is the same for all"
        return document, [CaseFileError(path, message)]
    try:
        writing = _CaseWriter(read_for_each(data[FOR_EACH], (FOR_EACH,)) if FOR_EACH in data else ())
    except CaseFileError as fault:
        return document, [fault]
    for number, entry in enumerate(entries):
        if not writing.is_full:
            writing.add_case(number, entry)
    if not writing.faults:
        writing.faults += _find_unused_names(writing.shared, writing.used, "no case has")
    if writing.faults:
        return document, writing.faults
    rest = {name: value for name, value in data.items() if name != FOR_EACH}
    made = {**rest, "cases": [case for case, _ in writing.cases]}
    return ExpandedDocument(made, document.lines, data, tuple(origin for _, origin in writing.cases)), []


def _find_unused_names(axes: Sequence[VaryingNames], used: set[str], lacking: str) -> list[CaseFileError]:
    message = "{} {}; leave the name out, or put it where its values belong"
    unused = ((axis, name) for axis in axes for name in axis.names if name not in used)
    return [
        CaseFileError(axis.find_path_of_values(name), message.format(lacking, format_reference(name)))
        for axis, name in unused
    ]


class _CaseWriter:
    """The cases that have been written out so far."""

    def __init__(self, shared: tuple[VaryingNames, ...]) -> None:
        self.shared = shared
        self._positions = _map_names_to_axis_numbers(shared)
        self.cases: list[tuple[Any, CaseOrigin]] = []
        self.used: set[str] = set()
        self.faults: list[CaseFileError] = []
        self.is_full = False
        """True once a limit was passed; later cases are ignored."""
        self._repeated_count = self._value_count = 0

    def add_case(self, number: int, entry: Any) -> None:
        """Write one case out, once for each combination of its choices."""
        try:
            if not isinstance(entry, dict):
                self.cases.append((entry, CaseOrigin(number, {})))
                return
            axes, used = self._read_varying_names(number, entry)
            for choices in product(*(axis.choices for axis in axes)):
                values = {
                    name: value for choice in choices for name, value in choice.located_values.items() if name in used
                }
                origin = CaseOrigin(number, {name: value.path for name, value in values.items()})
                case = self._write_case(number, entry, values, [choice.label for choice in choices])
                self.cases.append((case, origin))
        except CaseFileError as fault:
            self.faults.append(fault)

    def _read_varying_names(self, number: int, entry: Mapping[str, Any]) -> tuple[list[VaryingNames], set[str]]:
        """Return the axes that a case is repeated over, of its own and of the file, and the names that it uses."""
        where: FieldPath = ("cases", number)
        case_axes = read_for_each(entry[FOR_EACH], (*where, FOR_EACH)) if FOR_EACH in entry else ()
        case_axes += (read_design(entry[DESIGN_KEY], (*where, DESIGN_KEY)),) if DESIGN_KEY in entry else ()
        for name, position in _map_names_to_axis_numbers(case_axes).items():
            if name in self._positions:
                path = case_axes[position].find_path_of_values(name)
                raise CaseFileError(path, f"{name!r} has its values from the file's {FOR_EACH} already")
        every = (*self.shared, *case_axes)
        positions = ChainMap(_map_names_to_axis_numbers(case_axes, len(self.shared)), self._positions)
        used = _collect_reachable_names(
            {name for _, name in find_references(_repeatable_fields(entry))}, positions, every
        )
        self.used |= used
        for fault in _find_unused_names(case_axes, used, "the case has no"):
            raise fault
        axes = [every[position] for position in sorted({positions[name] for name in used if name in positions})]
        cases = math.prod(len(axis.choices) for axis in axes)
        if axes and self._repeated_count + cases > MAX_REPEATED_CASES:
            self.is_full = True
            before = f" and {self._repeated_count} before them" if self._repeated_count else ""
            message = f"this makes {cases} cases{before}; expected at most {MAX_REPEATED_CASES} in a file"
            raise CaseFileError(axes[-1].path, message)
        self._repeated_count += cases if axes else 0
        return axes, used

    def _write_case(
        self, number: int, entry: Mapping[str, Any], unfilled: Mapping[str, LocatedValue], labels: Sequence[str]
    ) -> dict[str, Any]:
        values: dict[str, LocatedValue] = {}
        for name, value in unfilled.items():
            filled = _substitute_names(value.data, values, value.path)
            values[name] = replace(filled, path=value.path)
        where: FieldPath = ("cases", number)
        filled = _substitute_names(_repeatable_fields(entry), values, where)
        self._value_count += filled.size + len(values)
        if self._value_count > MAX_EXPANDED_VALUES:
            self.is_full = True
            raise CaseFileError(
                where, f"the cases of this file have more than {MAX_EXPANDED_VALUES} values, written out"
            )
        case: dict[str, Any] = {field: entry[field] for field in ("name", "id") if field in entry}
        if labels and isinstance(case.get("name"), str):
            case["name"] += f" ({', '.join(labels)})"
        if isinstance(case.get("id"), str):
            case["id"] = "-".join((case["id"], *filter(None, map(slug, labels))))
        case |= filled.data
        return case


def _repeatable_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a case in which names may replace values."""
    return {field: value for field, value in entry.items() if field not in _FIELDS_WITHOUT_NAMES}


def _map_names_to_axis_numbers(axes: Sequence[VaryingNames], first: int = 0) -> dict[str, int]:
    """Return the number of the axis that gives each name its values, counted from ``first``."""
    return {name: position for position, axis in enumerate(axes, start=first) for name in axis.names}


def _collect_reachable_names(names: set[str], positions: Mapping[str, int], axes: Sequence[VaryingNames]) -> set[str]:
    """Return the names and all names that their values refer to, directly or not."""
    reached: set[str] = set()
    pending = [*names]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += axes[positions[name]].references[name] if name in positions else ()
    return reached


def _substitute_names(data: Any, values: Mapping[str, LocatedValue], path: FieldPath) -> LocatedValue:
    """Replace names with their values; a field whose value is null is left out."""
    if (name := find_referenced_name(data)) is not None:
        return _look_up_referenced_value(name, data, values, path)
    if not isinstance(data, dict | list):
        return LocatedValue(data, path)
    parts = [
        (part, inner, _substitute_names(inner, values, (*path, part)))
        for part, inner in (data.items() if isinstance(data, dict) else enumerate(data))
    ]
    size = 1 + sum(filled.size for *_, filled in parts)
    depth = 1 + max((filled.depth for *_, filled in parts), default=0)
    if size > MAX_NODES or depth > MAX_DEPTH:
        what = f"more than {MAX_NODES} values" if size > MAX_NODES else f"nested more than {MAX_DEPTH} levels deep"
        raise CaseFileError(path, f"{what}, written out")
    if isinstance(data, list):
        return LocatedValue([filled.data for *_, filled in parts], path, size, depth)
    kept = {
        part: filled.data
        for part, inner, filled in parts
        if filled.data is not None or find_referenced_name(inner) is None
    }
    return LocatedValue(kept, path, size, depth)


def _look_up_referenced_value(
    name: str, data: Mapping[str, Any], values: Mapping[str, LocatedValue], path: FieldPath
) -> LocatedValue:
    if len(data) > 1:
        others = ", ".join(shorten_value(field) for field in data if field != REFERENCE_KEY)
        raise CaseFileError(
            path, f"{format_reference(name)} stands for a whole value, alone; put {others} into the value"
        )
    if name not in values:
        known = ", ".join(values) or "none"
        raise CaseFileError(
            path, f"no {FOR_EACH} gives {shorten_value(name)} a value; names that have one here: {known}"
        )
    return values[name]
