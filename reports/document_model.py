"""The document model: a page has sections, a section has blocks, and a block has texts with marks.

``sections`` and other files make the blocks once; the terminal, Markdown and the page are writers that render each of
them as well as they can. Figures are the page's alone, and say in words what they show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class Mark:
    """A part of a text that is set apart: ``code``, ``strong``, ``small``, a ``case`` of the report, or a verdict.

    Of a verdict ``kind`` is a ``State``. ``address`` is where a link leads; ``case`` the id of the case that is linked
    to, where the text is another, and ``column`` the environment and the implementation that it is linked to as.
    """

    text: str
    kind: str = "code"
    address: str = ""
    column: tuple[str, str] = ("", "")
    case: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture as markup of the page, and what it shows in words, for formats that draw nothing."""

    words: str
    markup: str


@dataclass(frozen=True)
class Coloured:
    """A cell of a table that has the colour of a state."""

    content: Inline
    state: str


Inline = str | Mark | Figure | Coloured | tuple["Inline", ...]
LINE_BREAK = Mark("\n", "break")


@dataclass(frozen=True)
class Text:
    """A paragraph; ``kind`` is its class on the page."""

    content: Inline
    kind: str = ""


@dataclass(frozen=True)
class Nested:
    """An item of a list that has items of its own."""

    content: Inline
    items: Sequence[Inline]


@dataclass(frozen=True)
class Items:
    """A list; ``kind`` is its class on the page."""

    items: Sequence[Inline | Nested]
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """A table; ``align`` has l or r for each column, l where it is short. The first column names the rows.

    ``kind`` is its class on the page; one that has a class says its caption to screen readers alone.
    """

    caption: str
    headings: Sequence[Inline]
    rows: Sequence[Sequence[Inline]]
    align: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Code:
    """Commands, a line each."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Details:
    """Blocks behind a summary; on the page that may be a heading of a level, with a note, and ``kind`` is their class.

    Of many the ``late`` ones are laid out only when they come into view. An ``anchor`` is where links lead.
    """

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False
    note: Inline = ""
    kind: str = "plain"
    level: int = 0
    anchor: str = ""
    late: Sequence[Block] = ()


@dataclass(frozen=True)
class Subsection:
    """Blocks below a heading of a level from 3 to 6."""

    title: Inline
    blocks: Sequence[Block]
    level: int


@dataclass(frozen=True)
class PageOnly:
    """Blocks that the page alone has, and those that stand for them in formats that draw nothing."""

    blocks: Sequence[Block]
    in_words: Sequence[Block]


@dataclass(frozen=True)
class Entries:
    """A numbered list whose entries are blocks, each with a state."""

    entries: Sequence[tuple[str, Sequence[Block]]]


Key = tuple[str, str, str, str]
"""An environment, an implementation, a case and a dtype."""
Block = Text | Items | Table | Code | Details | Figure | Subsection | PageOnly | Entries


@dataclass(frozen=True)
class Section:
    """A title, an anchor that links lead to, and blocks."""

    title: str
    anchor: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A document of its own: a title, blocks below it, and sections."""

    title: str
    opening: Sequence[Block]
    sections: Sequence[Section]


def plain_text(part: Inline) -> str:
    """Return a text without its marks.

    Example:
        >>> plain_text(("see ", Mark("scale", "code")))
        'see scale'
    """
    if isinstance(part, tuple):
        return "".join(map(plain_text, part))
    if isinstance(part, Coloured):
        return plain_text(part.content)
    return part.words if isinstance(part, Figure) else part if isinstance(part, str) else part.text


def more_in_files(more: str, *files: str, kind: str = "") -> Text:
    """Return a paragraph with how much more there is, and in which files."""
    named: list[Inline] = [part for file in files for part in (" and ", Mark(file))]
    return Text((f"And {more}, in ", *named[1:], "."), kind)


def anchor_of(kind: str, *names: str) -> str:
    """Return the id of a part of the page, such as a case, of which no other has the same names.

    Example:
        >>> anchor_of("case", "attention/a b", "float32")
        'case:attention/a%20b:float32'
    """
    return ":".join([kind, *(quote(name, safe="/") for name in names)])
