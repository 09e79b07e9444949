"""Maps of lengths on the page: a square for every pair of lengths, and lines where tiles end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from attncheck.reports.frames import Frames
from attncheck.reports.length_map import LengthMap, length_maps

_CELL, _LEFT, _TOP = 14, 52, 44
"""Pixels: of a square, and of the room for lengths beside and above them."""


@dataclass(frozen=True)
class DrawnLengths:
    """A map with its title, what it shows in words, and as SVG."""

    title: str
    explained: str
    words: str
    grid: str
    picture: Markup


def drawn_lengths(frames: Frames) -> tuple[DrawnLengths, ...]:
    """Return a map for every implementation that fails."""
    many = len(frames.environments) > 1
    return tuple(
        DrawnLengths(
            title=found.column.title(with_environment=many, with_version=False),
            explained=found.explained,
            words=found.words(),
            grid=found.grid_words(),
            picture=_picture(found),
        )
        for found in length_maps(frames)
    )


def _picture(found: LengthMap) -> Markup:
    rows, columns = found.cases.shape
    width, height = _LEFT + columns * _CELL + 4, _TOP + rows * _CELL + 4
    label = escape(f"{found.explained + '. ' if found.explained else ''}{found.words()}. {found.grid_words()}")
    parts = [*_squares(found), *_names(found), *_lines(found)]
    return Markup(
        f'<svg class="lengths" role="img" aria-label="{label}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">{"".join(parts)}</svg>'
    )


def _squares(found: LengthMap) -> Iterator[str]:
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
