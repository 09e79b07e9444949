"""A soundness campaign in curves: how the error of an implementation grows with lengths, widths and scores.

Errors are those of the survey's table of accuracy: the largest of a stage, in units of the largest that rounding
allows there. Problems are put together by powers of two of what they are drawn over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attncheck.showing.heatmaps import INK_COLOUR, Picture, drawing_style, to_picture
from attncheck.spec import DTYPES
from attncheck.spec.verdicts import Verdict

OVER = {"keys": "sequence length (keys)", "width": "head width", "largest_score": "largest score"}
"""The columns that errors are drawn over, and what they are called."""
_LOOKS = dict(zip(DTYPES, (("#0b4fa8", "o"), ("#d9730d", "s"), ("#6a0d83", "^"), ("#2f7d4f", "D")), strict=True))
_MIN_ROWS = 3
"""Of which a middle is shown."""
_LEAST_POWER = -10
"""Scores below 2**-10 make one place: beside them all weights are equal."""
_LEAST = 1e-4
"""Smaller errors, and none at all, are drawn here."""


@dataclass(frozen=True)
class Curve:
    """Errors of one dtype by powers of two: at ``places`` the middle one, and the largest."""

    dtype: str
    places: tuple[float, ...]
    middle: tuple[float, ...]
    largest: tuple[float, ...]


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that were held against the exact answer and agree, with the number of keys."""
    kept = rows[(rows["stage"] != "") & rows["verdict"].eq(Verdict.AGREE) & (rows["tier"] != "")]
    keys = [int(shape.rpartition("x")[2] or 0) for shape in kept["scores"].astype(str)]
    return kept.assign(keys=keys)


def curves(rows: pd.DataFrame, over: str) -> list[Curve]:
    """Return a curve for each dtype of these rows; what is not known of a problem (0) has no place."""
    found = []
    for dtype in DTYPES:
        own = rows[rows["dtype"].eq(dtype) & (rows[over] > 0)]
        by_power = own["ratio"].groupby(np.round(np.log2(own[over])).clip(lower=_LEAST_POWER))
        kept = [
            (2.0 ** float(power), float(part.median()), float(part.max()))  # type: ignore[arg-type]
            for power, part in by_power
            if len(part) >= _MIN_ROWS
        ]
        if kept:
            found.append(Curve(dtype, *(tuple(column) for column in zip(*kept, strict=True))))
    return found


def plot(name: str, rows: pd.DataFrame) -> Picture:
    """Draw the errors of one implementation over everything that is measured."""
    of_each = {over: curves(rows, over) for over in OVER}
    words = " ".join(_sentences(name, of_each))
    with drawing_style():
        figure = Figure(figsize=(10.5, 3.4))
        for axes, (over, found) in zip(figure.subplots(1, len(OVER), sharey=True), of_each.items(), strict=True):
            _draw(axes, found, OVER[over])
        figure.axes[0].set_ylabel("largest error of a stage\nin units of the largest that rounding allows")
        figure.suptitle(name, x=0.01, ha="left", weight="bold", parse_math=False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper right", ncols=len(labels) or 1, frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.93))
        return to_picture(figure, words)


def _draw(axes: Axes, found: list[Curve], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(title)
    axes.axhline(1, color=INK_COLOUR, linewidth=1, label="bound")
    for curve in found:
        colour, marker = _LOOKS[curve.dtype]
        middle, largest = (np.maximum(values, _LEAST) for values in (curve.middle, curve.largest))
        look: dict[str, Any] = {"marker": marker, "markersize": 4, "color": colour}
        axes.plot(curve.places, middle, **look, label=f"{curve.dtype}, middle")
        axes.plot(curve.places, largest, **look, linewidth=0.8, linestyle=":", label=f"{curve.dtype}, largest")
    axes.grid(visible=True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _sentences(name: str, of_each: dict[str, list[Curve]]) -> Iterator[str]:
    """Say what the curves show: where each begins and ends."""
    yield f"{name}: largest error of a stage in units of the largest that rounding allows."
    yield "Solid lines are the error in the middle, dotted lines the largest."
    for over, found in of_each.items():
        for each in found:
            span = f"from {each.middle[0]:.2g} at {each.places[0]:g} to {each.middle[-1]:.2g} at {each.places[-1]:g}"
            yield f"Over {OVER[over]} in {each.dtype}, {span}, at most {max(each.largest):.2g}."


def write_plots(rows: pd.DataFrame, folder: Path) -> list[Path]:
    """Write an SVG for each implementation; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = measured(rows)
    written = []
    for name, own in kept.groupby("implementation"):
        path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', str(name))}.svg"
        path.write_bytes(plot(str(name), own).data)
        written.append(path)
    return written
