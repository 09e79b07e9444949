"""A design for a kernel: the bundled one, without the options that the kernel lacks, at its widths and its tile.

``cases/designs/kernels.yaml`` lists the options, masks, heads and lengths that meet. A level with an input or an option
for which a kernel has no parameter is left out, then a factor without levels, and names that only they refer to. So an
addition to the bundled design is part of every user's design.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from attncheck.backends.contract import inputs_of
from attncheck.common.errors import OutputError, UsageError
from attncheck.common.wording import join_words, slug
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.operations import Parameters
from attncheck.execution.requirements import Requirements
from attncheck.reading.for_each import DESIGN_KEY, EXCLUDE, FACTORS, ROW_LABEL_KEY, STRENGTH, find_references
from attncheck.reading.loader import load_case_file
from attncheck.reading.written_cases import format_case_file
from attncheck.reading.yaml_reader import read_yaml
from attncheck.spec import DTYPES, OPERATIONS, OPERATIONS_PER_HEAD, OPTIONS, QUERY_KEY_VALUE

_REQUIRED_INPUTS = frozenset({*QUERY_KEY_VALUE, "grad_output"})
DESIGNED_OPERATIONS = tuple(
    operation
    for operation in OPERATIONS_PER_HEAD
    if {name for name, spec in OPERATIONS[operation].inputs.items() if spec.required} <= _REQUIRED_INPUTS
)
"""The operations of the bundled design."""
_BUNDLED_TILE = 64
"""The tile for which the bundled design has its numbers."""
_LENGTH_FACTOR, _WIDTH_FACTOR, _SHARING_FACTOR = "length", "width", "sharing"
"""Its factors whose numbers follow from the tile, and from the requirements of a function."""
# A choice: the widths of a design if neither the user nor the kernel names any; each width adds cases.
_DEFAULT_WIDTHS = (64, 128)

_REFERENCE_WITHOUT_BRACES = re.compile(r"(?<=[\[ ])each: (\w+)(?=[,\]])")
"""A reference to a factor, in a list in which braces were left out."""

LevelValues = dict[str, Any]
"""The values of a level, by name."""


@dataclass(frozen=True)
class DesignRequest:
    """The function of a design, the number of options that meet, its widths and its tile."""

    implementation: Implementation
    strength: int = 3
    widths: tuple[int, ...] = ()
    tile: int = _BUNDLED_TILE

    @property
    def user_implementation(self) -> UserImplementation:
        """The user's function. Raises ``UsageError`` for a bundled implementation."""
        entry = self.implementation.entry
        if not isinstance(entry, UserImplementation):
            raise UsageError(f"{entry.name} is no function of yours; expected one, as my_kernel.py:attention")
        return entry

    @property
    def operation(self) -> str:
        """The operation of the function. Raises ``UsageError`` if there is no design for it."""
        operation = next((name for name in DESIGNED_OPERATIONS if name in self.user_implementation.parameters), None)
        if operation is None:
            has = join_words(self.user_implementation.parameters) or "a program, which says nothing of what it takes"
            raise UsageError(
                f"designs are made for {join_words(DESIGNED_OPERATIONS)}; {self.user_implementation.name} has {has}"
            )
        return operation

    @property
    def parameters(self) -> Parameters:
        """The parameters of the function."""
        return self.user_implementation.parameters[self.operation]

    @property
    def requirements(self) -> Requirements:
        """The shapes that it takes."""
        return Requirements.from_declaration(self.user_implementation.requirements.get(self.operation) or {})

    @property
    def command(self) -> str:
        """The command that makes the design again."""
        widths = f" --widths {','.join(map(str, self.widths))}" if self.widths else ""
        words = " ".join(self.user_implementation.command_words)
        return f"attncheck design {words} --strength {self.strength}{widths} --tile {self.tile}"


def format_design(request: DesignRequest) -> str:
    """Return the case file of a design. Raises ``UsageError`` if there is none for the function."""
    [case] = read_yaml(Path(str(files("attncheck.cases") / "designs" / "kernels.yaml"))).data["cases"]
    operation, design = request.operation, case[DESIGN_KEY]
    fields = {group: _fields_with_parameter(case[group], request) for group in ("options", "inputs")}
    inputs, has_gradients = fields["inputs"], OPERATIONS[operation].computes_gradients
    if has_gradients:
        inputs["grad_output"] = {
            "draw": "randn",
            "shape": inputs["query"]["shape"][:-1] + inputs["value"]["shape"][-1:],
        }
    factors = {name: _levels_by_name(levels) for name, levels in design[FACTORS].items()}
    factors[_WIDTH_FACTOR], factors[_LENGTH_FACTOR] = (
        _width_levels(request),
        _adapt_lengths_to_tile(factors[_LENGTH_FACTOR], request.tile),
    )
    if request.user_implementation.capabilities.get("grouped_heads") is False:
        factors[_SHARING_FACTOR] = {
            name: level for name, level in factors[_SHARING_FACTOR].items() if len({*level.values()}) == 1
        }
    dropped = {name for group in fields for name in _referenced_names(case[group])} - set(_referenced_names(fields))
    factors = _remove_dropped_names(factors, dropped, set(_referenced_names(fields)))
    bound = {name or factor for factor, levels in factors.items() for level in levels.values() for name in level}
    fields = {
        group: {name: value for name, value in group_fields.items() if bound.issuperset(_referenced_names(value))}
        for group, group_fields in fields.items()
    }
    made = {STRENGTH: min(request.strength, len(factors)), FACTORS: _factors_to_yaml_data(factors)}
    if excluded := [combination for combination in design.get(EXCLUDE, []) if combination.keys() <= factors.keys()]:
        made[EXCLUDE] = excluded
    entry = {"name": "Options meet", DESIGN_KEY: made, **{name: group for name, group in fields.items() if group}}
    dtypes = [dtype for dtype in DTYPES if dtype in request.implementation.mode_declarations.classes]
    head = {
        "title": f"Every {request.strength} of what {request.implementation.name} has"[:200],
        "source": {"kind": "derivation", "title": request.command},
        "operation": operation,
        "defaults": {"random": {"generator": "numpy-legacy", "seed": 1}, "dtypes": dtypes},
    }
    stages = {} if has_gradients else {"stages": ["output"]}
    text = format_case_file({**head, "cases": [{**entry, **stages}]})
    return _REFERENCE_WITHOUT_BRACES.sub(r"{each: \1}", text)


def write_design(request: DesignRequest, path: Path | None = None) -> tuple[Path, int, int]:
    """Write a design; return its path, and the numbers of its cases and factors.

    Raises ``UsageError``, and ``OutputError`` if it cannot be written.
    """
    text = format_design(request)
    path = path or Path(f"design_{slug(request.implementation.name).replace('-', '_')}.yaml")
    with OutputError.convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    [case] = read_yaml(path).data["cases"]
    return path, len(load_case_file(path, path.name, path.stem, ())), len(case[DESIGN_KEY][FACTORS])


def _fields_with_parameter(fields: Mapping[str, Any], request: DesignRequest) -> dict[str, Any]:
    """Keep options and inputs for which a function has a parameter, or that need none."""
    operation, positional = OPERATIONS[request.operation], inputs_of(request.operation)
    asked = {name: value for name, value in fields.items() if name in operation.inputs or name in operation.options}
    accepted = request.parameters.accepted_names(asked)
    kept = {
        name
        for name in asked
        if name in accepted or name in positional or (name in OPTIONS and OPTIONS[name].only_in_files)
    }
    without_required_option = {
        name for name in kept if name in OPTIONS and (needed := OPTIONS[name].requires_one_of) and not kept & {*needed}
    }
    return {name: value for name, value in asked.items() if name in kept - without_required_option}


def _levels_by_name(levels: Any) -> dict[str, LevelValues]:
    """Return the levels of a factor by name; a factor with one value per level has a mapping of labels to values."""
    if isinstance(levels, list):
        return {
            row[ROW_LABEL_KEY]: {name: value for name, value in row.items() if name != ROW_LABEL_KEY} for row in levels
        }
    return {label: {"": value} for label, value in levels.items()}


def _factors_to_yaml_data(factors: Mapping[str, dict[str, LevelValues]]) -> dict[str, Any]:
    return {
        name: {label: level[""] for label, level in levels.items()}
        if any("" in level for level in levels.values())
        else [{ROW_LABEL_KEY: label, **level} for label, level in levels.items()]
        for name, levels in factors.items()
    }


def _referenced_names(data: Any) -> Iterator[str]:
    return (name for _, name in find_references(data))


def _remove_dropped_names(
    factors: Mapping[str, dict[str, LevelValues]], dropped: set[str], used: set[str]
) -> dict[str, dict[str, LevelValues]]:
    """Leave out levels with a dropped name, then names without a reference, then factors without a value."""
    kept = {
        factor: {
            label: level
            for label, level in levels.items()
            if all(value is None for name, value in level.items() if (name or factor) in dropped)
        }
        for factor, levels in factors.items()
    }
    while True:
        inside = {name for levels in kept.values() for level in levels.values() for name in _referenced_names(level)}
        trimmed = {
            factor: {
                label: {name: value for name, value in level.items() if (name or factor) in used | inside}
                for label, level in levels.items()
            }
            for factor, levels in kept.items()
        }
        trimmed = {
            factor: levels
            for factor, levels in trimmed.items()
            if any(value is not None for level in levels.values() for value in level.values())
        }
        if trimmed == kept:
            return kept
        kept = trimmed


def _width_levels(request: DesignRequest) -> dict[str, LevelValues]:
    """Return the widths that a function takes, and values of another width unless it excludes them."""
    requirements = request.requirements
    wanted: Sequence[int] = request.widths or requirements.widths or _DEFAULT_WIDTHS
    widths = sorted({width for size in wanted if (width := requirements.smallest_accepted_width(size)) is not None})
    if not widths or (request.widths and set(widths) != set(wanted)):
        refused = next(size for size in wanted if requirements.smallest_accepted_width(size) != size)
        larger = requirements.smallest_accepted_width(refused)
        has_limits = requirements.widths or larger is None
        takes = (
            requirements.width_limits_text if has_limits else f"no width of {refused}; the next larger one is {larger}"
        )
        raise UsageError(f"--widths {','.join(map(str, wanted))}: {request.user_implementation.name} takes {takes}")
    levels: dict[str, LevelValues] = {f"width {width}": {"width": width, "value_width": width} for width in widths}
    if requirements.value_width is None and request.user_implementation.capabilities.get("value_width") is not False:
        value_width = (
            widths[0]
            if len(widths) > 1
            else requirements.smallest_accepted_width(widths[0] + 1) or requirements.smallest_accepted_width(1)
        )
        levels["values of another width"] = {"width": widths[-1], "value_width": value_width}
    return {label: level for label, level in levels.items() if label[0] == "w" or len({*level.values()}) == 2}


def _adapt_lengths_to_tile(data: Any, tile: int) -> Any:
    """Return lengths for another tile: the same number of tiles, plus or minus the same number of rows.

    Example:
        >>> _adapt_lengths_to_tile({"Lq": 65, "Lk": [128, 127]}, 48)
        {'Lq': 49, 'Lk': [96, 95]}
    """
    if isinstance(data, dict):
        return {name: value if name == "each" else _adapt_lengths_to_tile(value, tile) for name, value in data.items()}
    if isinstance(data, list):
        return [_adapt_lengths_to_tile(item, tile) for item in data]
    if isinstance(data, int) and not isinstance(data, bool):
        return data + (tile - _BUNDLED_TILE) * round(data / _BUNDLED_TILE)
    return data
