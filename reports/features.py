"""What can be said of a case that other cases may have in common with it: its options, inputs, axes, dtype and tags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reports.simplest import given_of, lengths_of
from attncheck.spec import AXES, DTYPES, HEADS, OPTIONS

Holds = NDArray[np.bool_]
Record = Mapping[str, Any]

_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
TILES = (16, 32, 64, 128, 256)
"""Tiles that kernels have."""
_ALONG = {"Lk": "keys", "Lq": "queries"}
_COUNTS = ("B", "H", "Hkv")
"""Axes of which no kernel has tiles."""
_PAIRS = (("H", "Hkv"), ("Lq", "Lk"), ("Lq", "T"), ("D", "Dv"), ("D", "Dk"))
_SPREAD = {"B": "the batch", "H": "heads", "Lq": "queries", "T": "keys"}
_MAX_BORDERS = 64
"""Of one axis; of many different lengths some are taken."""
_MAX_VALUES = 12
"""Different values of one option, or of one width, that are told apart."""


@dataclass(frozen=True)
class Feature:
    """A predicate: its words, behind *where*, and of which cases it holds. Features come simplest first."""

    text: str
    holds: Holds
    tile: int = 0
    """The tile that it is about, where it is about one."""


def dtype_features(dtypes: Sequence[str]) -> Iterator[Feature]:
    """Yield what can be said of the dtypes of evaluations."""
    given = np.array(dtypes)
    for dtype in DTYPES:
        yield Feature(f"the dtype is {dtype}", given == dtype)
    yield Feature("the dtype has 16 bits", np.isin(given, ("bfloat16", "float16")))
    yield Feature("the dtype is float64 or float32", np.isin(given, ("float64", "float32")))
    for dtype in DTYPES:
        yield Feature(f"the dtype is not {dtype}", given != dtype)


def case_features(cases: Sequence[Record]) -> Iterator[Feature]:
    """Yield what can be said of case records: what needs fewer words and says more of a kernel comes first."""
    lengths = [lengths_of(case) for case in cases]
    axes = {
        letter: np.array([each.get(letter, -1) for each in lengths])
        for letter in AXES
        if any(letter in each for each in lengths)
    }
    yield from _given(cases)
    yield from _pairs(axes)
    for letter, values in axes.items():
        for number in (1, 0):
            yield Feature(f"{letter} is {number}", values == number)
    yield from _past_tiles(axes)
    yield from _multiples(axes)
    yield from _widths(axes)
    yield from _borders(axes)
    yield from _values(cases)
    yield from _spread(cases, lengths)
    yield from _words(cases)


def _given(cases: Sequence[Record]) -> Iterator[Feature]:
    """Options that are set, and inputs that need not be given."""
    given = [frozenset(given_of(case)) for case in cases]
    for name in sorted(frozenset().union(*given) - set(HEADS)):
        holds = np.array([name in each for each in given])
        is_option = name in OPTIONS
        verb = "set" if is_option else "given"
        yield Feature(f"{name} is {verb}", holds)
        yield Feature(f"{name} is not {verb}", ~holds)


def _pairs(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    for one, other in _PAIRS:
        if one in axes and other in axes:
            first, second = axes[one], axes[other]
            known = (first >= 0) & (second >= 0)
            yield Feature(f"{one} differs from {other}", known & (first != second))
            yield Feature(f"{one} equals {other}", known & (first == second))
            yield Feature(f"{one} is smaller than {other}", known & (first < second))
            yield Feature(f"{one} is larger than {other}", known & (first > second))


def past_last_full(lengths: NDArray[Any], tile: int | NDArray[Any]) -> Holds:
    """Whether there are full tiles, and some elements past the last of them."""
    past: Holds = (lengths > tile) & (lengths % tile != 0)
    return past


def _past_tiles(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    """What a kernel that handles full tiles alone gets wrong."""
    for letter, what in _ALONG.items():
        for tile in TILES if letter in axes else ():
            text = f"{what} lie past the last full tile of {tile}"
            yield Feature(text, past_last_full(axes[letter], tile), tile)
        if {letter, "D"} <= axes.keys():
            width = np.maximum(axes["D"], 1)
            yield Feature(f"{what} lie past the last full tile of D", past_last_full(axes[letter], width))


def _multiples(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    for letter, values in axes.items():
        known = values >= 0
        for divisor in () if letter in _COUNTS else _MULTIPLES:
            whole = values % divisor == 0
            said, other = ("is even", "is odd") if divisor == 2 else (f"is a multiple of {divisor}", "")
            yield Feature(f"{letter} {other or f'is no multiple of {divisor}'}", known & ~whole)
            yield Feature(f"{letter} {said}", known & whole)


def _widths(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    """Yield what kernels are compiled for: a width."""
    for letter in ("D", "Dv", "Dk"):
        for width in np.unique(axes.get(letter, np.zeros(0)))[-_MAX_VALUES:]:
            yield Feature(f"{letter} is {width}", axes[letter] == width)


def _borders(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    """What is above a length that occurs, and what is below one."""
    for letter, values in axes.items():
        known = values >= 0
        found = np.unique(values[known])
        if len(found) > _MAX_BORDERS:
            found = found[np.linspace(0, len(found) - 1, _MAX_BORDERS).astype(int)]
        for value in found:
            yield Feature(f"{letter} > {value}", known & (values > value))
            yield Feature(f"{letter} < {value}", known & (values < value))


def _values(cases: Sequence[Record]) -> Iterator[Feature]:
    """What options are set to: one of a few words or numbers, a sign, a window that is open."""
    for name in OPTIONS:
        given = [case["options"].get(name) for case in cases]
        words = sorted({each for each in given if isinstance(each, str)})
        for word in words[:_MAX_VALUES]:
            yield Feature(f"{name} is {word}", np.array([each == word for each in given]))
        numbers = np.array([_number(each) for each in given])
        yield Feature(f"{name} is 0", numbers == 0)
        yield Feature(f"{name} is negative", numbers < 0)
        for side, index in (("left", 0), ("right", 1)):
            is_open = [isinstance(each, list) and len(each) == 2 and each[index] is None for each in given]
            yield Feature(f"the {name} is open to the {side}", np.array(is_open))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan


def _spread(cases: Sequence[Record], lengths: Sequence[Mapping[str, int]]) -> Iterator[Feature]:
    """Along which axes a mask or bias has one slice for all."""
    for name in ("mask", "bias"):
        shapes = [case["inputs"].get(name, ()) for case in cases]
        for position, (letter, called) in enumerate(_SPREAD.items()):
            holds = [
                len(shape) == len(_SPREAD) and shape[position] == 1 and of.get(letter, 0) > 1
                for shape, of in zip(shapes, lengths, strict=True)
            ]
            yield Feature(f"the {name} is spread over {called}", np.array(holds))


def _words(cases: Sequence[Record]) -> Iterator[Feature]:
    """The operation, how inputs are kept and lie in memory, and the tags."""
    operations = [str(case["operation"]) for case in cases]
    storages = [case.get("storage") for case in cases]
    layouts = [dict(case.get("memory_layout") or {}).values() for case in cases]
    tags = [frozenset(case["tags"]) for case in cases]
    for operation in sorted(set(operations)):
        yield Feature(f"the operation is {operation}", np.array([each == operation for each in operations]))
    for storage in DTYPES:
        yield Feature(f"storage is {storage}", np.array([each == storage for each in storages]))
    for layout in ("strided", "transposed", "broadcast"):
        yield Feature(f"an input is {layout} in memory", np.array([layout in each for each in layouts]))
    yield Feature("heads come side by side", np.array([bool(case.get("merged")) for case in cases]))
    for tag in sorted(frozenset().union(*tags)):
        yield Feature(f"the tag is {tag}", np.array([tag in each for each in tags]))
