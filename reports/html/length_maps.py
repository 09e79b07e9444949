"""Maps of lengths on the page: a square for every pair of lengths, and lines where tiles end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from attncheck.reports.frames import Frames
from attncheck.reports.length_map import CAUSALITY, WIDTHS, LengthMap, LengthView, length_maps
from attncheck.wording import counted

_CELL, _LEFT, _TOP = 14, 52, 44
"""Pixels: of a square, and of the room for lengths beside and above them."""


@dataclass(frozen=True)
class DrawnLengths:
    """A map with its title, what it shows in words, its switches, and as SVG.

    A switch has a name, and choices with a class of the style sheet, a text, and whether it is chosen at first.
    """

    title: str
    explained: str
    words: str
    grid: str
    switches: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    picture: Markup


def drawn_lengths(frames: Frames) -> tuple[DrawnLengths, ...]:
    """Return a map for every implementation that fails."""
    many = len(frames.environments) > 1
    return tuple(
        DrawnLengths(
            title=found.column.title(with_environment=many, with_version=False),
            explained=found.explained,
            words=f"{found.failing.sum():,} of {counted(int(found.cases.sum()), 'case')} fail",
            grid=found.grid_words(),
            switches=tuple(_switches(found)),
            picture=_picture(found),
        )
        for found in length_maps(frames)
    )


def _switches(found: LengthMap) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Yield the switches that choose among several views."""
    kinds = [
        (f"c{each.causality}", f"{CAUSALITY[each.causality]}{_of(each)}") for each in found.views if not each.widths
    ]
    widths = [(f"w{each.widths}", f"{_width(each.widths)}{_of(each)}") for each in found.views if not each.causality]
    yield from ((name, tuple(choices)) for name, choices in (("cases", kinds), ("width", widths)) if len(choices) > 1)


def _of(view: LengthView) -> str:
    return f" ({view.failing.sum():,} of {view.cases.sum():,})"


def _width(number: int) -> str:
    """Name a range of widths."""
    if not number:
        return "all"
    if number > len(WIDTHS):
        return f"D > {WIDTHS[-1]}"
    return f"D ≤ {WIDTHS[0]}" if number == 1 else f"{WIDTHS[number - 2] + 1} to {WIDTHS[number - 1]}"


def _picture(found: LengthMap) -> Markup:
    rows, columns = found.cases.shape
    width, height = _LEFT + columns * _CELL + 4, _TOP + rows * _CELL + 4
    label = escape(f"{found.explained + '. ' if found.explained else ''}{found.words()}. {found.grid_words()}")
    views = [f'<g class="v v{each.causality}{each.widths}">{"".join(_squares(each))}</g>' for each in found.views]
    parts = [*_diagonal(found), *views, *_names(found), *_lines(found)]
    return Markup(
        f'<svg class="lengths" role="img" aria-label="{label}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">{"".join(parts)}</svg>'
    )


def _squares(found: LengthView) -> Iterator[str]:
    """Fill the squares by how many fail; what fails is crossed out, all of it or, where some pass, half."""
    some = (found.failing > 0) & (found.failing < found.cases)
    every = (found.failing > 0) & ~some
    side = _CELL - 2
    for name, chosen in (("lp", (found.cases > 0) & (found.failing == 0)), ("ls", some), ("lf", every)):
        if path := "".join(f"M{x} {y}h{side}v{side}h-{side}z" for x, y in _corners(chosen)):
            yield f'<path class="{name}" d="{path}"/>'
    inner = side - 6
    crosses = [f"M{x + 3} {y + 3}l{inner} {inner}" for x, y in _corners(some | every)]
    crosses += [f"M{x + 3 + inner} {y + 3}l-{inner} {inner}" for x, y in _corners(every)]
    if crosses:
        yield f'<path class="lx" d="{"".join(crosses)}"/>'


def _corners(chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Iterator[tuple[int, int]]:
    for row, column in zip(*np.nonzero(chosen), strict=True):
        yield _LEFT + int(column) * _CELL + 1, _TOP + int(row) * _CELL + 1


def _names(found: LengthMap) -> Iterator[str]:
    """Write every length beside its row or above its column."""
    yield f'<text x="2" y="{_TOP - 6}">Lq \N{DOWNWARDS ARROW}</text><text x="2" y="12">Lk \N{RIGHTWARDS ARROW}</text>'
    for row, length in enumerate(found.queries):
        yield f'<text class="r" x="{_LEFT - 5}" y="{_TOP + row * _CELL + 11}">{length}</text>'
    for column, length in enumerate(found.keys):
        x = _LEFT + column * _CELL + 11
        yield f'<text x="{x}" y="{_TOP - 4}" transform="rotate(-90 {x} {_TOP - 4})">{length}</text>'


def _diagonal(found: LengthMap) -> Iterator[str]:
    """Draw where as many queries as keys lie, between the lengths that both have."""
    low, high = (max(found.queries[0], found.keys[0]), min(found.queries[-1], found.keys[-1]))
    lengths = sorted(each for each in {*found.queries, *found.keys, low, high} if low <= each <= high)
    places = (np.interp(lengths, axis, np.arange(len(axis))) for axis in (found.keys, found.queries))
    x, y = (start + (place + 0.5) * _CELL for start, place in zip((_LEFT, _TOP), places, strict=True))
    if len(lengths) > 1:
        points = " ".join(f"{one:.0f},{other:.0f}" for one, other in zip(x, y, strict=True))
        yield f'<polyline class="ld" points="{points}"/>'


def _lines(found: LengthMap) -> Iterator[str]:
    if not found.tile:
        return
    rows, columns = found.cases.shape
    path = "".join(
        f"M{_LEFT + place * _CELL} {_TOP - 4}V{_TOP + rows * _CELL}" for place in _edges(found.keys, found.tile)
    )
    path += "".join(
        f"M{_LEFT - 4} {_TOP + place * _CELL}H{_LEFT + columns * _CELL}" for place in _edges(found.queries, found.tile)
    )
    if path:
        yield f'<path class="lt" d="{path}"/>'


def _edges(lengths: Sequence[int], tile: int) -> Iterator[int]:
    """Yield the places before which a tile ends: lengths up to it stand before, those past it behind."""
    for place in range(1, len(lengths)):
        if -(-lengths[place] // tile) != -(-lengths[place - 1] // tile):
            yield place
