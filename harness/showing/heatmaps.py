"""Matrices as annotated heatmaps, each with a description in words.

Pictures are SVG with text as text, PNG or PDF, in dark ink on white paper. Colours run from light to dark in one hue,
so that lightness alone distinguishes them; important cells have marks and text, too. The same figure gives the same
bytes.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal
from xml.sax.saxutils import quoteattr

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from attncheck.reports import panels

ImageFormat = Literal["svg", "png", "pdf"]

INK_COLOUR = "#1b1b1d"
RULE_COLOUR = "#85858a"
PAPER_COLOUR = "#fffffe"

_DOTS_PER_INCH = 150
_FONT_SIZE = 8.0
_MAX_DESCRIPTION_LETTERS = 4000
"""Most letters of an accessible name; tables contain every number."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "figure.facecolor": PAPER_COLOUR,
    "axes.facecolor": "none",
    "text.color": INK_COLOUR,
    "axes.labelcolor": INK_COLOUR,
    "axes.edgecolor": RULE_COLOUR,
    "xtick.color": RULE_COLOUR,
    "ytick.color": RULE_COLOUR,
    "xtick.labelcolor": INK_COLOUR,
    "ytick.labelcolor": INK_COLOUR,
    "font.size": _FONT_SIZE,
    "axes.titlesize": _FONT_SIZE,
    "xtick.labelsize": _FONT_SIZE,
    "ytick.labelsize": _FONT_SIZE,
    "axes.labelsize": _FONT_SIZE,
    "image.composite_image": False,
}
_METADATA: dict[ImageFormat, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}


@dataclass(frozen=True)
class Picture:
    """An image's bytes, and its description for readers who do not see it."""

    data: bytes
    alt_text: str


@contextmanager
def drawing_style() -> Iterator[None]:
    """Draw in our style, independent of the user's matplotlibrc."""
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")  # names may be in any script
        yield


def to_picture(figure: Figure, alt_text: str, format: ImageFormat = "svg") -> Picture:  # noqa: A002
    """Return a figure as a picture. Call it inside ``drawing``."""
    buffer = BytesIO()
    # Ids depend on the salt, so that different pictures in one page share none.
    with matplotlib.rc_context({"svg.hashsalt": alt_text}):
        figure.savefig(
            buffer,
            format=format,
            metadata=_METADATA[format],
            dpi=_DOTS_PER_INCH,
            bbox_inches="tight",
            pad_inches=0.06,
        )
    data = buffer.getvalue()
    if format == "svg":  # without its prolog, and with its description as the accessible name
        svg, name = data.decode("utf-8"), quoteattr(panels.safe_text(alt_text, _MAX_DESCRIPTION_LETTERS))
        data = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label={name}', 1).encode("utf-8")
    return Picture(data, alt_text)


_TITLE_INCHES, _CELL_INCHES = 0.064, 0.068
"""Width of a letter, in a title and in a cell."""
_BESIDE, _BAR, _ABOVE = 0.5, 0.65, 0.75
"""Inches next to a matrix for ticks, for a colour bar, and above and below it for titles and ticks."""
Array = NDArray[Any]
_MAX_TITLE_LETTERS = 40
_MAX_WIDTH_INCHES = 9.5
"""Largest width of a page."""


@dataclass(frozen=True)
class _MeasuredPanel:
    """A matrix, the texts of its cells, its title, its width and height, and the width with its ticks."""

    panel: panels.Panel
    texts: list[list[str]] | None
    title: str
    width: float
    height: float
    total_width: float


def _measure_panels(matrices: Sequence[panels.Panel]) -> list[_MeasuredPanel]:
    """Measure the matrices that are not empty, in inches; if one has a colour bar, all have space for one."""
    drawn = [(panel, _cell_texts(panel), _format_title(panel)) for panel in matrices if panel.matrix.size]
    beside = _BESIDE + (_BAR if any(texts is None for _, texts, _ in drawn) else 0)
    measured = []
    for panel, texts, title in drawn:
        width, height = _size_in_inches(panel, texts)
        needed = max(width, _TITLE_INCHES * max(map(len, title.splitlines()), default=0))
        measured.append(_MeasuredPanel(panel, texts, title, width, height, needed + beside))
    return measured


def _break_into_lines(measured: Sequence[_MeasuredPanel]) -> list[list[_MeasuredPanel]]:
    """Break the sequence of matrices into lines that are not too wide."""
    lines: list[list[_MeasuredPanel]] = [[]]
    for matrix in measured:
        if lines[-1] and sum(previous.total_width for previous in lines[-1]) + matrix.total_width > _MAX_WIDTH_INCHES:
            lines.append([])
        lines[-1].append(matrix)
    return lines


def _line_height(line: Sequence[_MeasuredPanel]) -> float:
    return max(matrix.height for matrix in line) + _ABOVE


def draw_heatmaps(
    matrices: Sequence[panels.Panel],
    *,
    heading: str = "",
    format: ImageFormat = "svg",  # noqa: A002
) -> Picture:
    """Draw matrices as annotated heatmaps, side by side as far as the width goes, below a heading if there is one."""
    with drawing_style():
        figure, words = _draw_figure(matrices, heading)
        return to_picture(figure, words, format)


def draw_heatmap_pdf(pages: Sequence[Sequence[panels.Panel]], headings: Sequence[str]) -> bytes:
    """Draw pages of matrices as one PDF."""
    from matplotlib.backends.backend_pdf import PdfPages

    buffer = BytesIO()
    with drawing_style(), PdfPages(buffer, metadata=_METADATA["pdf"]) as written:
        for page, heading in zip(pages, headings, strict=True):
            written.savefig(_draw_figure(page, heading)[0], bbox_inches="tight", pad_inches=0.06)
    return buffer.getvalue()


def split_into_pages(matrices: Sequence[panels.Panel], most_height: float = 11.0) -> list[list[panels.Panel]]:
    """Split matrices into readable pages; a line that is too high has a separate page, and empty ones come last."""
    pages: list[list[panels.Panel]] = [[]]
    height = 0.0
    for line in filter(None, _break_into_lines(_measure_panels(matrices))):
        if pages[-1] and height + _line_height(line) > most_height:
            pages.append([])
            height = 0.0
        pages[-1] += [matrix.panel for matrix in line]
        height += _line_height(line)
    pages[-1] += [panel for panel in matrices if not panel.matrix.size]
    return pages


def _draw_figure(matrices: Sequence[panels.Panel], heading: str) -> tuple[Figure, str]:
    """Arrange matrices in rows and draw them; return the figure and its description."""
    measured = _measure_panels(matrices)
    if not measured:
        shapes = [" x ".join(map(str, panel.matrix.shape)) for panel in matrices]
        empty = [
            f"{panels.safe_text(panel.title)}: empty, shape {shape}"
            for panel, shape in zip(matrices, shapes, strict=True)
        ]
        words = "; ".join(empty or ["nothing to draw"])
        figure = Figure(figsize=(4, 0.4))
        figure.text(0.02, 0.4, panels.safe_text(words), parse_math=False)
        return figure, words
    lines = _break_into_lines(measured)
    width, height = max(sum(matrix.total_width for matrix in line) for line in lines), sum(map(_line_height, lines))
    figure, top = Figure(figsize=(width, height)), height
    for line in lines:
        left = _BESIDE
        for matrix in line:
            bottom = top - 0.35 - matrix.height
            axes = figure.add_axes((left / width, bottom / height, matrix.width / width, matrix.height / height))
            axes.set_title(matrix.title, loc="left", pad=5, parse_math=False)
            _draw_matrix(figure, axes, matrix.panel, matrix.texts)
            left += matrix.total_width
        top -= _line_height(line)
    if heading:
        broken = "\n".join(textwrap.wrap(panels.safe_text(heading, 400), 110))
        figure.text(0, 1, broken, weight="bold", va="bottom", parse_math=False)
    sentences = [panels.safe_text(heading, 400), *(panels.describe_panel(matrix.panel) for matrix in measured)]
    return figure, " ".join(f"{sentence}." for sentence in sentences if sentence)


def _format_title(panel: panels.Panel) -> str:
    """Break a long title into two lines; for a large matrix, state which rows and columns are shown."""
    lines = textwrap.wrap(panels.safe_text(panel.title, 2 * _MAX_TITLE_LETTERS), _MAX_TITLE_LETTERS)[:2]
    rows, columns = (math.ceil(length / panels.MAX_CELLS) for length in panel.matrix.shape)
    if (rows, columns) != (1, 1):
        lines = [*lines[:1], f"1 of {rows} rows, 1 of {columns} columns"]
    return "\n".join(lines)


def _cell_texts(panel: panels.Panel) -> list[list[str]] | None:
    """Return the texts of cells, with the printed number if it differs; None for a large matrix."""
    if max(panel.matrix.shape) > panels.MAX_ANNOTATED:
        return None
    rows, columns = map(range, panel.matrix.shape)
    texts = [[panels.cell_text(panel, row, column) for column in columns] for row in rows]
    return [
        [f"{text}\nprinted {panels.safe_text(printed, 12)}" if printed else text for text, printed in line]
        for line in texts
    ]


def _size_in_inches(panel: panels.Panel, texts: list[list[str]] | None) -> tuple[float, float]:
    """Return a matrix's width and height: cells fit their longest number, and are small squares without numbers."""
    rows, columns = (min(length, panels.MAX_CELLS) for length in panel.matrix.shape)
    if texts is None:
        cell = min(0.16, 4.5 / max(rows, columns))
        return max(columns * cell, 0.5), max(rows * cell, 0.5)
    longest = max(len(line) for row in texts for text in row for line in text.split("\n"))
    return columns * max(0.34, 0.12 + _CELL_INCHES * longest), rows * 0.3


def _draw_matrix(figure: Figure, axes: Axes, panel: panels.Panel, texts: list[list[str]] | None) -> None:
    step = (math.ceil(panel.matrix.shape[0] / panels.MAX_CELLS), math.ceil(panel.matrix.shape[1] / panels.MAX_CELLS))
    pixels = panels.cell_colours(panel)[:: step[0], :: step[1]]
    _draw_cells(axes, pixels)
    _label_axes(axes, panel, pixels.shape, step)
    low, high = panels.value_range(panel.matrix)
    if texts is None and math.isfinite(high - low):
        palette = LinearSegmentedColormap.from_list(panel.colour, [panels.LIGHTEST, panel.colour])
        box, inch = axes.get_position(), 1 / figure.get_figwidth()
        bar = figure.add_axes((box.x1 + 0.1 * inch, box.y0, 0.1 * inch, box.height))
        scale = ScalarMappable(Normalize(low, high if high > low else low + 1), palette)
        figure.colorbar(scale, cax=bar).outline.set_visible(False)
    for row, column in np.ndindex(pixels.shape[:2]) if texts is not None else ():
        text, ink = texts[row][column], panels.contrasting_ink(pixels[row, column])  # type: ignore[index]
        axes.text(column, row, text, ha="center", va="center", color=ink, in_layout=False)
    for row, column in panel.printed if texts is not None else ():
        place = (column - 0.48, row - 0.47)
        for colour, width in (("white", 3.2), (panels.MISPRINT, 1.8)):
            axes.add_patch(Rectangle(place, 0.96, 0.94, fill=False, edgecolor=colour, linewidth=width))


def _draw_cells(axes: Axes, pixels: panels.Pixels) -> None:
    """Fill the cells and rule white lines between them."""
    # A cell is one pixel, without interpolation at any size.
    axes.imshow(pixels, interpolation="none", aspect="auto")
    axes.set_xticks(np.arange(-0.5, pixels.shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, pixels.shape[0]), minor=True)
    if max(pixels.shape) <= panels.MAX_ANNOTATED:
        axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _label_axes(axes: Axes, panel: panels.Panel, shape: tuple[int, ...], step: tuple[int, int]) -> None:
    """Number the rows and columns from 0, or every eighth of many."""
    for axis, length, distance in zip((axes.yaxis, axes.xaxis), shape, step, strict=False):
        ticks = range(0, length, 1 if length <= panels.MAX_ANNOTATED else 8)
        axis.set_ticks(list(ticks), [str(tick * distance) for tick in ticks])
    axes.set_ylabel(panels.safe_text(panel.row_axis, 40), parse_math=False)
    axes.set_xlabel(panels.safe_text(panel.column_axis, 40), parse_math=False)
