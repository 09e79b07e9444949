"""A picture with its text alternative, and how a figure becomes one: the same figure gives the same bytes.

Where things go in a figure: matrices side by side, a colour bar beside one, or nothing but words.
"""

from __future__ import annotations

import re
import warnings
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure

from attncheck.reports.figures.panels import safe_text

Format = Literal["svg", "png", "pdf"]
MEDIA_TYPES: dict[Format, str] = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}

INK = "#1b1b1d"
RULE = "#85858a"
PAPER = "#fffffe"
"""Colours that nothing else has: ``picture_of`` makes classes of them."""

_SVG = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", _SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
_DOTS_PER_INCH = 150
_FONT_SIZE = 8.0
_MAX_LETTERS = 4000
"""What an accessible name may be long; whoever wants every number has them in tables."""
_FONTS = "'DejaVu Sans', Verdana, sans-serif"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "font.size": _FONT_SIZE,
    "axes.titlesize": _FONT_SIZE,
    "xtick.labelsize": _FONT_SIZE,
    "ytick.labelsize": _FONT_SIZE,
    "axes.labelsize": _FONT_SIZE,
    "image.composite_image": False,
}
_METADATA: dict[Format, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}


@dataclass(frozen=True)
class Picture:
    """An image's bytes and what they show, in words, for those who do not see it."""

    data: bytes
    media_type: str
    alternative: str

    @property
    def uri(self) -> str:
        """Return the image as a data URI, for the ``src`` of an image."""
        return f"data:{self.media_type};base64,{b64encode(self.data).decode('ascii')}"

    @property
    def markup(self) -> str:
        """Return an SVG to be put into a page as it is; what it shows is its accessible name."""
        return self.data.decode("utf-8").strip()


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in our style, whatever anybody's matplotlibrc says."""
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")  # names may be in any script
        yield


def picture_of(figure: Figure, alternative: str, format: Format = "svg") -> Picture:  # noqa: A002
    """Return a figure as a picture. Call it inside ``drawing``."""
    buffer = BytesIO()
    # Ids are made of the salt: two pictures in one page that show different things share none.
    with matplotlib.rc_context({"svg.hashsalt": alternative}):
        figure.savefig(
            buffer,
            format=format,
            metadata=_METADATA[format],
            dpi=_DOTS_PER_INCH,
            bbox_inches="tight",
            pad_inches=0.06,
        )
    data = buffer.getvalue()
    if format == "svg":
        data = _tidy(data.decode("utf-8"), alternative).encode("utf-8")
    return Picture(data, MEDIA_TYPES[format], alternative)


def pdf_of(figures: Sequence[Figure]) -> bytes:
    """Return figures as the pages of one PDF. Call it inside ``drawing``."""
    from matplotlib.backends.backend_pdf import PdfPages

    buffer = BytesIO()
    with PdfPages(buffer, metadata=_METADATA["pdf"]) as pages:
        for figure in figures:
            pages.savefig(figure, bbox_inches="tight", pad_inches=0.06)
    return buffer.getvalue()


def _tidy(svg: str, alternative: str) -> str:
    """Leave what is seen, in classes, and nothing more: no prolog, metadata, idle groups or ids without a use."""
    root = ElementTree.fromstring(svg)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    _strip(root)
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)
        _shorten(element)
    name = safe_text(alternative, _MAX_LETTERS)
    fonts = {"font-family": _FONTS, "font-size": f"{_FONT_SIZE:g}px"}
    root.attrib = {"role": "img", "aria-label": name, **fonts, **root.attrib}
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _strip(element: ElementTree.Element) -> None:
    """Leave out what is not seen, and take things out of groups that do nothing."""
    kept: list[ElementTree.Element] = []
    for child in list(element):
        _strip(child)
        name = child.tag.removeprefix(_SVG)
        is_group = name in ("g", "defs")
        if name in ("metadata", "style") or (is_group and not len(child)):
            continue
        kept += list(child) if name == "g" and set(child.attrib) <= {"id"} else [child]
    element[:] = kept
    element.tail, element.text = None, (element.text or "").strip() or None


def _shorten(element: ElementTree.Element) -> None:
    """Give an element its class, one font for all, and no more digits than a screen shows."""
    style = element.attrib.pop("style", "")
    style = re.sub(r"font: ([\d.]+px)[^;]*|(font-size: [\d.]+px); font-family: [^;]*", _font_size, style)
    for colour, name, attribute in ((INK, "ink", "fill"), (PAPER, "paper", "fill"), (RULE, "rule", "stroke")):
        marked = f"{attribute}: {colour}"
        if marked in style:
            style = "; ".join(part for part in style.split("; ") if part != marked)
            element.attrib |= {"class": name, attribute: colour}
    style = "; ".join(part for part in style.split("; ") if part not in ("", f"font-size: {_FONT_SIZE:g}px"))
    if style:
        element.set("style", style)
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    for attribute in element.attrib.keys() & {"d", "x", "y", "transform", "width", "height"}:
        text = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", element.attrib[attribute])
        element.set(attribute, " ".join(text.split()))


def _font_size(found: re.Match[str]) -> str:
    return found[2] or f"font-size: {found[1]}"


_INCHES_PER_LETTER = 0.064
_BESIDE, _BAR, _ABOVE = 0.5, 0.65, 0.75
"""Inches beside a matrix for ticks, for a colour bar, and above and below it for titles and ticks."""


class _Cell(NamedTuple):
    """A matrix's own width and height, and the width that it takes with what is beside it."""

    width: float
    height: float
    taken: float


def grid(
    sizes: Sequence[tuple[float, float]], titles: Sequence[str], most_inches: float, *, with_bars: bool
) -> tuple[Figure, list[Axes]]:
    """Lay axes of these widths and heights out in rows, with room for their titles and ticks; all in inches."""
    lines = _broken(_cells(sizes, titles, with_bars=with_bars), most_inches)
    width = max(sum(each.taken for each in line) for line in lines)
    height = sum(max(each.height for each in line) + _ABOVE for line in lines)
    figure = Figure(figsize=(width, height))
    axes, top = [], height
    for line in lines:
        left = _BESIDE
        for each in line:
            box = (left, top - 0.35 - each.height, each.width, each.height)
            axes.append(figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height)))
            left += each.taken
        top -= max(each.height for each in line) + _ABOVE
    return figure, axes


def page_lengths(
    sizes: Sequence[tuple[float, float]],
    titles: Sequence[str],
    most_inches: float,
    most_height: float,
    *,
    with_bars: bool,
) -> list[int]:
    """Return how many of these axes, in their order, go on each page of this height; a higher one has its own."""
    pages, height = [0], 0.0
    for line in _broken(_cells(sizes, titles, with_bars=with_bars), most_inches):
        taken = max(each.height for each in line) + _ABOVE
        if pages[-1] and height + taken > most_height:
            pages.append(0)
            height = 0.0
        pages[-1] += len(line)
        height += taken
    return pages


def _cells(sizes: Sequence[tuple[float, float]], titles: Sequence[str], *, with_bars: bool) -> list[_Cell]:
    beside = _BESIDE + (_BAR if with_bars else 0)
    return [
        _Cell(*size, max(size[0], _title_inches(title)) + beside) for size, title in zip(sizes, titles, strict=True)
    ]


def _title_inches(title: str) -> float:
    return _INCHES_PER_LETTER * max(map(len, title.splitlines()), default=0)


def _broken(cells: Sequence[_Cell], most: float) -> list[list[_Cell]]:
    """Break a line of things where it would get too wide."""
    lines: list[list[_Cell]] = [[]]
    for cell in cells:
        if lines[-1] and sum(each.taken for each in lines[-1]) + cell.taken > most:
            lines.append([])
        lines[-1].append(cell)
    return lines


def only_text(words: str) -> Figure:
    """Return a figure that says why there is nothing to see."""
    figure = Figure(figsize=(4, 0.4))
    figure.text(0.02, 0.4, safe_text(words), parse_math=False)
    return figure


def colour_bar(figure: Figure, axes: Axes, norm: Normalize, colours: Colormap) -> Axes:
    """Draw the scale of a matrix beside it, and return its axes."""
    box = axes.get_position()
    inch = 1 / figure.get_figwidth()
    bar = figure.add_axes((box.x1 + 0.1 * inch, box.y0, 0.1 * inch, box.height))
    figure.colorbar(ScalarMappable(norm, colours), cax=bar).outline.set_visible(False)
    return bar
