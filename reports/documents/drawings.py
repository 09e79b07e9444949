"""What is drawn of a document's case: its inputs, and its exact stages, as the document lays them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.elements import index_from
from attncheck.quantities import QUANTITIES
from attncheck.reports.arrays import KeptArrays
from attncheck.reports.figures.panels import BLUE, GREY, ORANGE, PURPLE, Panel, panels_of
from attncheck.results.format import EXACT, INPUTS
from attncheck.spec import LOGITS, MEANS, ON_SCORES, PROJECTIONS, STAGES

Array = NDArray[Any]

MAX_WRITTEN = 64
"""Inputs with more numbers are not spelt out, unless the document prints them."""

_COLOURS = (
    dict.fromkeys(("query", *LOGITS), PURPLE) | dict.fromkeys(MEANS, BLUE) | dict.fromkeys(("mask", "bias"), GREY)
)
_NOT_DRAWN = frozenset({"log_sum_exp"})
_OF_A_TOKEN = frozenset({*PROJECTIONS, *MEANS, "applied_values"})
"""What has a row per token, and a column where a document writes its vectors in columns."""
_KEYS_ACROSS = frozenset({*ON_SCORES, "mask", "bias"})


Printed = Mapping[str, Mapping[str, str]]
"""By stage or quantity, then by an element's index as results keep it: the text that a document prints."""


@dataclass(frozen=True)
class Kept:
    """One case in one dtype as the run kept it: the inputs as delivered, the exact stages in float64."""

    inputs: Mapping[str, Array]
    exact: Mapping[str, Array]


@dataclass(frozen=True)
class Drawing:
    """One picture to draw with ``figures.heatmaps(panels)``.

    ``names`` are the inputs, or the stages and quantities, that it shows: several where they are equal.
    """

    title: str
    names: tuple[str, ...]
    is_input: bool
    panels: tuple[Panel, ...]


def kept_of(arrays: KeptArrays, case: str, dtype: str) -> Kept | None:
    """Return a case's inputs and exact stages, of the first run that kept them; None where no run did."""
    found = arrays.of(case, dtype)
    for environment in dict.fromkeys(key[0] for key in found):
        own = {name: {k[2]: found[k] for k in found if k[:2] == (environment, name)} for name in (INPUTS, EXACT)}
        if own[INPUTS] and own[EXACT]:
            return Kept(own[INPUTS], own[EXACT])
    return None


def exact_value(expected: Mapping[str, Any], kept: Kept) -> Array | None:
    """Return the exact value of a stage, or of the quantity that is derived from it; None where it was not kept."""
    name, stage = expected["name"], kept.exact.get(expected["of"])
    if stage is None or name == expected["of"]:
        return stage
    with np.errstate(all="ignore"):
        return QUANTITIES[name].compute(stage, kept.inputs) if name in QUANTITIES else None


def input_text(case: Mapping[str, Any], name: str, array: Array) -> tuple[tuple[str, ...], ...]:
    """Return an input's numbers as the document prints them, else as short as they can be written, if they are few."""
    printed = case.get("given", {}).get(name, {}).get("printed")
    if printed is not None:
        rows = np.array(printed, dtype=object)
        return tuple(tuple(map(str, row)) for row in rows.reshape(-1, rows.shape[-1] if rows.ndim else 1))
    if array.size > MAX_WRITTEN or not array.ndim:
        return ()
    return tuple(tuple(map(_shortest, row)) for row in array.reshape(-1, array.shape[-1]).tolist())


def _shortest(value: float) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def drawings_of(
    case: Mapping[str, Any], kept: Kept, *, in_columns: bool, printed: Printed = MappingProxyType({})
) -> tuple[Drawing, ...]:
    """Return the inputs, then the stages in the order of computation; ``in_columns`` vectors are drawn as columns.

    ``printed`` is what the document prints otherwise than it is.
    """
    given = case.get("given", {})
    names = {name: given.get(name, {}).get("called", "") for name in kept.inputs}
    called = {expected["name"]: expected["called"] for expected in case["expected"] if "called" in expected}
    stages = {stage: kept.exact[stage] for stage in STAGES if stage in kept.exact and stage not in _NOT_DRAWN}
    derived = {expected["name"]: expected for expected in case["expected"] if expected["name"] != expected["of"]}
    for name, expected in derived.items():
        value = exact_value(expected, kept)
        if value is not None:
            stages = _after(stages, expected["of"], name, value)
    return tuple(
        drawing
        for arrays, titles, is_input in ((kept.inputs, names, True), (stages, called, False))
        for drawing in _drawings(arrays, titles, is_input, in_columns, {} if is_input else printed)
    )


def _after(stages: Mapping[str, Array], before: str, name: str, value: Array) -> dict[str, Array]:
    """Put a derived quantity behind the stage that it comes from."""
    placed: dict[str, Array] = {}
    for stage, array in stages.items():
        placed[stage] = array
        if stage == before:
            placed[name] = value
    return placed


def _drawings(
    arrays: Mapping[str, Array], called: Mapping[str, str], is_input: bool, in_columns: bool, printed: Printed
) -> Sequence[Drawing]:
    """Draw each array once: those that are equal share a picture."""
    together: dict[str, list[str]] = {}
    for name, array in arrays.items():
        same = next((first for first in together if _are_equal(arrays[first], array)), name)
        together.setdefault(same, []).append(name)
    drawings = []
    for first, names in together.items():
        title = title_of(names, dict.fromkeys(text for name in names if (text := called.get(name))))
        panels = panels_of(_laid_out(arrays[first], first, in_columns), title, **_look(first, in_columns))
        marked = [_marked(panels, arrays[name], printed[name], first, in_columns) for name in names if name in printed]
        drawings.append(Drawing(title, tuple(names), is_input, marked[0] if marked else panels))
    return drawings


def _marked(
    panels: tuple[Panel, ...], array: Array, printed: Mapping[str, str], name: str, in_columns: bool
) -> tuple[Panel, ...]:
    """Say in the panels of an array what is printed otherwise."""
    found: dict[int, dict[tuple[int, int], str]] = {}
    for text, number in printed.items():
        index = index_from(text)
        if len(index) != array.ndim or any(place >= length for place, length in zip(index, array.shape, strict=True)):
            continue  # of results that somebody else wrote
        *leading, row, column = (0, *index) if array.ndim == 1 else index
        place = (column, row) if in_columns and name in _OF_A_TOKEN and array.ndim > 1 else (row, column)
        panel = int(np.ravel_multi_index(leading, array.shape[:-2])) if leading else 0
        found.setdefault(panel, {})[place] = number
    return tuple(replace(panel, printed=found.get(number, {})) for number, panel in enumerate(panels))


def title_of(names: Sequence[str], documents: Collection[str]) -> str:
    """Name a matrix as the document does, and as stages and inputs are called here where that is another name."""
    words, own = ", ".join(names), ", ".join(documents)
    return f"{own} ({words})" if own and own != words else words


def _are_equal(first: Array, second: Array) -> bool:
    """Whether two arrays look the same: leading axes of length 1 are not seen."""
    shapes = [
        array.shape[next((i for i, n in enumerate(array.shape) if n != 1), array.ndim) :] for array in (first, second)
    ]
    return shapes[0] == shapes[1] and np.array_equal(first.ravel(), second.ravel(), equal_nan=True)


def _laid_out(array: Array, name: str, in_columns: bool) -> Array:
    return np.swapaxes(array, -1, -2) if in_columns and name in _OF_A_TOKEN and array.ndim > 1 else array


def _look(name: str, in_columns: bool) -> dict[str, str]:
    """Return a matrix's colour and what its rows and columns are."""
    look = {"colour": _COLOURS.get(name, GREY if "_" in name and name.endswith(("weight", "bias")) else ORANGE)}
    if name in _KEYS_ACROSS:
        return look | {"row_axis": "query", "column_axis": "key"}
    return look
