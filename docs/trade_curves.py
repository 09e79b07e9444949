"""What a trade costs: errors of kernels that trade accuracy for speed by width, length, score size and outliers.

    python docs/trade_curves.py FOLDER

Each point is an emulated kernel (``benchmarks/traded_kernels.py``) in float16 against the exact answer: the root of the
mean of squares of what its output is off by, over that of the output. Beside it stands what the class allows for,
likewise: if errors behave like noise, and at most. The build of the documentation draws it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attncheck.judging.truth import find_truth
from attncheck.reading.problem import Problem
from attncheck.showing.heatmaps import Picture, drawing_style, to_picture

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from traded_kernels import KERNELS, declared

_NVFP4 = "float4_e2m1fn per 16 columns scaled in float8_e4m3fn"
CLASSES: Mapping[str, str] = {
    "float16": "fused",
    "FP8, a scale for each head": "flash3_fp8",
    "int8 in blocks, keys less their mean": "sage1",
    "int4 in blocks, keys less their mean": "sage2",
    "four-bit floats in groups of 16": f"fused with query {_NVFP4} and key {_NVFP4} and value {_NVFP4}",
    "four-bit floats and weights, queries and keys less means": "sage3",
}
"""What is compared, by what it is called, and the class that its bound is of."""


class Setting(NamedTuple):
    """A problem to draw: D, Lk, the standard deviation of scores, and what is out of the ordinary in the keys."""

    width: int = 64
    length: int = 128
    scores: float = 1.0
    outliers: str = "none"


OVER: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "width": ("head width", (32, 64, 128, 256)),
    "length": ("keys", (32, 128, 512, 2048)),
    "scores": ("standard deviation of scores", (0.25, 1.0, 4.0, 16.0)),
    "outliers": ("keys", ("none", "common part", "channel of 50")),
}
"""By field of a setting what it is called, and what it is set to; the others stay as they are."""
_LOOKS = dict(zip(CLASSES, (("#0b4fa8", "o"), ("#d9730d", "s"), ("#2f7d4f", "D"), ("#6a0d83", "^"), ("#a8123e", "v"),
                            ("#555555", "P")), strict=True))  # fmt: skip
_COMMON, _CHANNEL = 5.0, 50.0
_QUERIES = 16


def drawn(setting: Setting) -> Problem:
    """Draw a problem of one setting: (1, 2, L, D), in float16."""
    random = np.random.default_rng([setting.width, setting.length])
    size = np.sqrt(setting.scores)
    query = size * random.normal(size=(1, 2, _QUERIES, setting.width))
    key = size * random.normal(size=(1, 2, setting.length, setting.width))
    if setting.outliers == "common part":
        key += _COMMON * random.normal(size=(1, 2, 1, setting.width))
    elif setting.outliers == "channel of 50":
        key[..., 3] *= _CHANNEL
    inputs = {"query": query, "key": key, "value": random.normal(size=key.shape)}
    return Problem("attention", {}, {name: array.astype(np.float16) for name, array in inputs.items()})


def kernels() -> Mapping[str, Callable[..., Any]]:
    """Return the emulated kernel of each class, which returns output and log_sum_exp."""
    own = {name: KERNELS[name] if name in KERNELS else declared(name) for name in CLASSES.values()}
    return {name: kernel.kernel for name, kernel in own.items()}  # type: ignore[attr-defined]


class Point(NamedTuple):
    """The error of a class, what it is if errors behave like noise, and at most; all over the size of the output."""

    error: float
    noise: float
    bound: float


def errors(setting: Setting, of: Mapping[str, Callable[..., Any]]) -> dict[str, Point]:
    """Return a point for each class in one setting."""
    problem = drawn(setting)
    truth = find_truth(replace(problem, dtype="float16", supports_statistics=True), whole=True, returned=("output",))
    exact = truth.exact["output"].high
    found = {}
    for words, name in CLASSES.items():
        output, _ = of[name](**problem.inputs)
        bound = truth.bounds.bounds_by_stage(name)["output"]
        arrays = (output.astype(np.float64) - exact, bound.sigma, bound.max_error)
        found[words] = Point(*(float(np.sqrt(np.mean(each**2) / np.mean(exact**2))) for each in arrays))
    return found


Points = Mapping[str, list[dict[str, Point]]]


def measure() -> Points:
    """Return errors and bounds by what they are drawn over."""
    of = kernels()
    return {over: [errors(Setting(**{over: value}), of) for value in values] for over, (_, values) in OVER.items()}


def plot(points: Points) -> Picture:
    """Draw errors, and beside them what their class allows for."""
    words = "Errors of the output over its size, and what each class allows for: the numbers stand in the table below."
    with drawing_style():
        figure = Figure(figsize=(10.5, 4.2))
        for axes, over in zip(figure.subplots(1, len(OVER), sharey=True), OVER, strict=True):
            _draw(axes, over, points[over])
        figure.axes[0].set_ylabel("error of the output, relative")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper left", ncols=3, frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.86))
        return to_picture(figure, words)


def _draw(axes: Axes, over: str, points: list[dict[str, Point]]) -> None:
    title, values = OVER[over]
    places = np.arange(len(values))
    for words, (colour, marker) in _LOOKS.items():
        found, noise = ([getattr(each[words], part) for each in points] for part in ("error", "noise"))
        look: dict[str, Any] = {"marker": marker, "markersize": 4, "color": colour}
        axes.plot(places, found, **look, linewidth=1.2, label=words)
        axes.plot(places, noise, **look, linewidth=0.8, linestyle=":", fillstyle="none")
    axes.set_yscale("log")
    axes.set_xticks(
        places, [f"{value:g}" if not isinstance(value, str) else value.replace(" ", "\n") for value in values]
    )
    axes.set_xlabel(title)
    axes.grid(visible=True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def table(points: Points) -> str:
    """Return the numbers as a table of Markdown: error, and in brackets what the class allows for."""
    lines = [f"| | {' | '.join(CLASSES)} |", f"| --- |{' ---: |' * len(CLASSES)}"]
    for over, (title, values) in OVER.items():
        for value, each in zip(values, points[over], strict=True):
            cells = (f"{point.error:.1e} ({point.noise:.1e}, {point.bound:.1e})" for point in each.values())
            lines.append(f"| {title} {value} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def write_trades(folder: Path) -> None:
    """Write the picture and the table into a folder."""
    points = measure()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trades.svg").write_bytes(plot(points).data)
    (folder / "trades.md").write_text(table(points), encoding="utf-8")


if __name__ == "__main__":
    write_trades(Path(sys.argv[1]))
