"""The plan of a run: every case in every dtype that it declares and that the user chose, one unit each, in order.

Implementations that compile each case separately take seconds per case, so they run a standard set of units by default
(docs/implementations.md). The set should catch nearly everything that all units catch. It has three parts:

1. All documents: a reader looks for them by name.
2. The units that were measured to catch faults of the catalogue (``standard.json``).
3. Further units until every feature of any unit occurs in the set.

A feature is an option, a pair of options, sizes or layouts, a tag, or an operation in a dtype. Pairs matter because a
kernel often has a separate code path for two options together. Each option also occurs both in 16 bits and in more,
because kernels have separate code for them.

The third part is a set cover, computed greedily (``reading/covering.py``): the unit that adds most features is next.
The result depends only on the cases, so two runs of one version choose the same units. A plan of few units is not
reduced.

The choice does not count the programs that units need, because nearly every unit needs its own. In JAX the 2,545 units
of the bundled cases need 2,419 programs, and the 508 standard units 498. Preferring units that share a program saves 1
program, dropping units that later ones made superfluous saves 5, and the smallest third part saves 11. A program
compiles in float64 in 40% of the time that it takes in bfloat16. Still, preferring the faster dtype among equal units
saves less than 1% of the compile time, because the units that are then chosen have larger programs.

An option is anything that a call may have or lack: a named option, an optional input, heads that share keys and values,
values of another width. Most options have one level, their presence. An option with a list of words has a level for
each word. A mask or bias has a level for each axis along which it varies, and one for each along which it is broadcast.
Counts of keys have another level for 0. All levels follow from the specification, so a new option is covered at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.resources import files
from itertools import combinations
from typing import get_args

from attncheck.common.errors import UsageError
from attncheck.reading.case import Case
from attncheck.reading.covering import choose_to_cover_features
from attncheck.reading.inputs import (
    ArrayWithRadius,
    RoundedInputs,
    convert_inputs,
    make_exact_inputs,
    make_inputs,
    make_problem_of_case,
)
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import axis_lengths
from attncheck.spec import (
    DEFAULT_EMPTY_ROWS,
    OPERATIONS,
    OPTIONS,
    REQUESTERS_OF_STAGE,
    SCORE_INPUTS,
    InputSpec,
    Operation,
)
from attncheck.spec.options import SIXTEEN_BIT_DTYPES

_MAX_CACHED_INPUTS = 64
"""Cases whose inputs are kept: workers go through the plan in parallel, and the dtypes of a case share them."""

_MAX_CACHED_CONVERSIONS = 32
"""Units whose converted inputs are kept: a unit is judged soon after it is delivered, while others are."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One case in one dtype, which is judged at once: its ``position`` in the plan, and the ``case_index``.

    ``is_standard`` is true if modes that compile each case separately run it, too.
    """

    position: int
    case_index: int
    dtype: str
    is_standard: bool = True


class Plan:
    """The units of a run, and their inputs, which are made on request."""

    def __init__(self, cases: Sequence[Case], units: Sequence[Unit]) -> None:
        self.cases = cases
        self.units = units
        exact_inputs: Callable[[int], dict[str, ArrayWithRadius]]
        exact_inputs = lru_cache(maxsize=_MAX_CACHED_INPUTS)(lambda case: make_exact_inputs(cases[case]))

        @lru_cache(maxsize=_MAX_CACHED_CONVERSIONS)
        def converted_inputs(case_index: int, dtype: str) -> RoundedInputs:
            inputs = convert_inputs(cases[case_index], exact_inputs(case_index), dtype)
            # Only expected numbers are compared with the radii, which outweigh the inputs in a message.
            return inputs if cases[case_index].expected else replace(inputs, radius={})

        self._converted_inputs: Callable[[int, str], RoundedInputs] = converted_inputs

    @classmethod
    def of(cls, cases: Sequence[Case], dtypes: Sequence[str], *, documents_first: bool = False) -> Plan:
        """Plan cases in some dtypes, by default all. Raises ``UsageError`` if no case declares any of them."""
        asked = [(number, case, dtype) for number, case in enumerate(cases) for dtype in case.dtypes]
        chosen = [unit for unit in asked if not dtypes or unit[2] in dtypes]
        if documents_first:
            chosen.sort(key=lambda unit: not unit[1].is_document)
        units = [Unit(position, number, dtype) for position, (number, _, dtype) in enumerate(chosen)]
        if cases and not units:
            raise UsageError(f"no case is declared for {', '.join(dtypes)}")
        return cls(cases, units)

    def case(self, unit: Unit) -> Case:
        """Return the case of a unit."""
        return self.cases[unit.case_index]

    def inputs(self, unit: Unit) -> RoundedInputs:
        """Return the inputs of a unit in its dtype."""
        return self._converted_inputs(unit.case_index, unit.dtype)

    def problem(self, unit: Unit) -> Problem:
        """Return the problem of a unit, which a worker evaluates."""
        return make_problem_of_case(self.case(unit), self.inputs(unit)).as_call()

    def with_standard_units(self, positions: Collection[int]) -> Plan:
        """Limit modes that compile each case separately to the units at these positions of the plan."""
        units = [replace(unit, is_standard=index in positions) for index, unit in enumerate(self.units)]
        return Plan(self.cases, units)

    def keep_units(self, units: Collection[tuple[str, str]]) -> Plan:
        """Keep these units, by case and dtype."""
        return Plan(self.cases, [unit for unit in self.units if (self.case(unit).id, unit.dtype) in units])

    def drop_units(self, finished: frozenset[tuple[str, str]]) -> Plan:
        """Leave out the units, by case and dtype, that are done."""
        return Plan(self.cases, [unit for unit in self.units if (self.case(unit).id, unit.dtype) not in finished])

    @property
    def standard_case_count(self) -> int:
        """The number of cases for modes that compile each case separately; 0 if these run all units."""
        standard = {unit.case_index for unit in self.units if unit.is_standard}
        return len(standard) if any(not unit.is_standard for unit in self.units) else 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of all units."""
        return tuple(sorted({unit.dtype for unit in self.units}))

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)


EMPTY_ROWS, SHARED_HEADS, VALUE_WIDTH = "empty_rows", "shared heads", "width of values"
VALUE_IF_ABSENT = {"score": "scaled_dot", EMPTY_ROWS: DEFAULT_EMPTY_ROWS}
"""The meaning of an absent option, for options of which every word is a level."""

OPTIONS_WITHOUT_PAIRS = {
    "heads": "says how wide arrays are cut into heads; what two calls differ by is how many heads share keys",
    "kv_heads": "says how wide arrays are cut into heads; whether heads share keys is an option of its own here",
    "projections": "says how a file writes weights; the calls are the same",
}
"""Options without pairs, each with the reason."""


@dataclass(frozen=True)
class Level:
    """One way of giving an option, and a function that returns whether it ``is_in_case``."""

    option: str
    description: str
    is_in_case: Callable[[Case], bool] = field(compare=False, repr=False)


def option_levels(operation: Operation) -> dict[str, list[Level]]:
    """Return the options of an operation in the specification, and the levels of each."""
    levels = {
        option: list(_levels_of_option(option)) for option in sorted(operation.options - OPTIONS_WITHOUT_PAIRS.keys())
    }
    inputs = operation.inputs
    if operation.has_score_option:
        inputs = {name: spec for score_inputs in SCORE_INPUTS.values() for name, spec in score_inputs.items()}
    for name, spec in inputs.items():
        # Of two inputs that need each other, one stands for both.
        is_second = (
            spec.required_input is not None
            and inputs[spec.required_input].required_input == name
            and spec.required_input < name
        )
        if not spec.required and not is_second:
            levels[name] = list(_levels_of_input(name, spec))
    letters = {letter for spec in inputs.values() for axis in spec.axes for letter in axis.split("*")}
    if "Hkv" in letters:
        levels[SHARED_HEADS] = [
            Level(
                SHARED_HEADS,
                "some heads share",
                lambda case: 1 < _first_axis_length(case, "Hkv") < _first_axis_length(case, "H"),
            ),
            Level(
                SHARED_HEADS,
                "all heads share",
                lambda case: 1 == _first_axis_length(case, "Hkv") < _first_axis_length(case, "H"),
            ),
        ]
    if {"D", "Dv"} <= letters:
        levels[VALUE_WIDTH] = [
            Level(
                VALUE_WIDTH,
                "values of another width",
                lambda case: _first_axis_length(case, "Dk", "D") != _first_axis_length(case, "Dv"),
            )
        ]
    return levels


@lru_cache
def _levels_of_operation(operation: str) -> tuple[Level, ...]:
    return tuple(level for levels in option_levels(OPERATIONS[operation]).values() for level in levels)


def levels_in_case(case: Case) -> frozenset[Level]:
    """Return the levels that a case gives of its operation's options."""
    return frozenset(level for level in _levels_of_operation(case.operation) if level.is_in_case(case))


def _first_axis_length(case: Case, *letters: str) -> int:
    """Return the length of the first of these axes that a case has."""
    lengths = axis_lengths(case.operation, case.options, case.input_shapes)
    return next(lengths[letter] for letter in letters if letter in lengths)


def _levels_of_option(option: str) -> Iterator[Level]:
    """Yield a level for each word of a Literal, or a single one."""

    def has_option_value(case: Case, word: str) -> bool:
        value = case.options.get(option, VALUE_IF_ABSENT.get(option))
        is_given = value == word if word else value is not None and value is not False
        return is_given and (option != EMPTY_ROWS or _has_fully_masked_rows(case))

    words = [word for word in get_args(getattr(OPTIONS[option], "type", None)) if isinstance(word, str)]
    for word in words or ("",):
        yield Level(option, f"{option} {word}" if word else option, partial(has_option_value, word=word))


def _has_fully_masked_rows(case: Case) -> bool:
    if not {*case.inputs, *case.options} & (REQUESTERS_OF_STAGE["masked"] | REQUESTERS_OF_STAGE["biased"]):
        return False
    from attncheck.judging.undefined import flag_empty_rows  # which loads what exact answers need

    problem = make_problem_of_case(case, make_inputs(case, "float32"))
    return bool(flag_empty_rows(problem.without_layout()).any())


def _levels_of_input(name: str, spec: InputSpec) -> Iterator[Level]:
    def varies_along_axis(case: Case, axis: str, is_along: bool) -> bool:
        input_spec = case.input_specs.get(name)
        if name not in case.inputs or input_spec is None or not input_spec.is_broadcastable:
            return name in case.inputs  # of another kind of score it has no such axes
        return (case.input_shapes[name][input_spec.axes.index(axis)] > 1) == is_along

    if spec.is_broadcastable:
        for axis in spec.axes:
            yield Level(name, f"{name} along {axis}", partial(varies_along_axis, axis=axis, is_along=True))
            yield Level(name, f"{name} spread over {axis}", partial(varies_along_axis, axis=axis, is_along=False))
        return
    yield Level(name, name, lambda case: name in case.inputs)
    if spec.is_count:
        yield Level(
            name, f"{name} with 0", lambda case: name in case.inputs and 0 in make_exact_inputs(case)[name].array
        )


_SIZE_CLASS_LIMITS = (1, 63, 1023)
"""The largest of each class of sizes, except the last: one, less than a tile, less than the lengths that are split."""
_SIZED_AXES = ("B", "Lq", "Lk", "T", "P", "D", "Dk", "Dv", "C", "S", "Np")
"""Axes whose sizes are paired with options."""


MAX_UNITS_FOR_ALL_MODES = 100
"""The largest number of units in a plan that all modes run, also those that compile each unit."""

RECORDED_UNITS_FILE = "standard.json"
"""Bundled cases that were measured to catch faults, each with dtypes; ``tests/net/catches.py`` writes them."""


def choose_standard_units(plan: Plan) -> Plan:
    """Choose the units of a plan for modes that compile each unit separately, unless the plan is small."""
    if len(plan.units) <= MAX_UNITS_FOR_ALL_MODES:
        return plan
    return plan.with_standard_units(
        frozenset(standard_unit_positions(plan.cases, [(unit.case_index, unit.dtype) for unit in plan]))
    )


def standard_unit_positions(cases: Sequence[Case], case_dtype_pairs: Sequence[tuple[int, str]]) -> list[int]:
    """Choose units, each a case and a dtype; return positions among the units, in their order.

    All documents are chosen, and the units that were measured to catch faults. Further units are added until every
    feature that occurs in any unit occurs in a chosen one.
    """
    recorded = fault_catching_dtypes_by_case()
    of_case = {number: cases[number] for number in dict.fromkeys(case for case, _ in case_dtype_pairs)}
    chosen = {
        position
        for position, (number, dtype) in enumerate(case_dtype_pairs)
        if of_case[number].is_document or dtype in recorded.get(of_case[number].id, ())
    }
    return choose_to_cover_features(unit_features(of_case, case_dtype_pairs), chosen)


def unit_features(cases: Mapping[int, Case], units: Sequence[tuple[int, str]]) -> list[frozenset[Hashable]]:
    """Return the features of each unit: options, pairs of them, tags, sizes, layouts."""
    of_case = {number: list(_case_features(case)) for number, case in cases.items()}
    return [
        frozenset([(cases[case].operation, dtype)]).union(
            (key for key, _ in of_case[case]),
            ((key, dtype in SIXTEEN_BIT_DTYPES) for key, in_both in of_case[case] if in_both),
        )
        for case, dtype in units
    ]


@lru_cache(maxsize=1)
def fault_catching_dtypes_by_case() -> Mapping[str, Sequence[str]]:
    """Return the dtypes in which bundled cases were measured to catch faults, by the id of the case."""
    text = files("attncheck.cases").joinpath(RECORDED_UNITS_FILE).read_text(encoding="utf-8")
    units: Mapping[str, Sequence[str]] = json.loads(text)
    return units


def _case_features(case: Case) -> Iterator[tuple[Hashable, bool]]:
    """Yield the features of a case, each with whether it has to be tried both in 16 bits and in more."""
    operation, levels = case.operation, levels_in_case(case)
    yield from ((tag, False) for tag in case.tags)
    yield from (((operation, level), True) for level in levels)
    lengths = axis_lengths(operation, case.options, case.input_shapes)
    sizes = [
        (axis, sum(lengths[axis] > most for most in _SIZE_CLASS_LIMITS)) for axis in _SIZED_AXES if axis in lengths
    ]
    layouts = [(name, layout) for name, layout in case.memory_layout.items() if name in case.inputs]
    together = [*levels, *sizes, *layouts]
    yield from (((operation, frozenset(pair)), False) for pair in combinations(together, 2))
