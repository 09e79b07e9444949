"""Numbers, names and elements of arrays as messages write them.

An element is written ``output[0, 2, 8, 4]``; results keep its index as ``0,2,8,4``. Of a document's case an element is
written as the document counts it: without leading axes of length 1, and transposed back if the document writes its
vectors in columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_MAX_COMPARED_LENGTH: Final = 100
"""A choice: no known name is so long, and difflib's time grows with the square of the length."""
_MAX_SUGGESTIONS: Final = 2
"""A choice: with more, the line no longer answers the question; with one, the second of two equal names is missing."""
CONVENTIONS_SEPARATOR = " and "
"""Between names of conventions that a case shows together."""
DESCRIPTIONS_SEPARATOR: Final = "; and "
"""Between their descriptions."""
READ_AS_PREFIX: Final = "read as: "
"""Before the reading by an implementation of a case that declares conventions."""
EXCEPTION_PREFIX: Final = ", but "
"""Between the words of a reading and the cases that it fits, if it does not fit all."""
SINGLE_CASE_PREFIX: Final = "; taken by itself: "
"""Before the diagnosis of one failing case, if all failing cases together have none."""
_MAX_LISTED_NAMES: Final = 12
"""A choice: longer lists fill the terminal; the command that prints all names replaces them."""
WEB_ADDRESS: Final = r"^https?://[A-Za-z0-9._~:/?#@!$&'*+,;=%-]+$"
"""The form of an address of the web: without what would end a link in HTML or Markdown."""
MIN_SIMILARITY: Final = 0.61
_SIMILARITY_MARGIN: Final = 0.1
"""A second name is suggested only if it is nearly as similar as the first: for bflaot16, bfloat16 (0.88) and float16
(0.80), but not float64 (0.67)."""


def count_noun(number: int, noun: str) -> str:
    """Write 1 case, or 2,000 cases.

    Example:
        >>> count_noun(1, "case"), count_noun(2000, "case")
        ('1 case', '2,000 cases')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def join_words(names: Iterable[str], word: str = "and") -> str:
    """Write one, or one and two, or one, two and three; nothing for no name.

    Example:
        >>> join_words(["query", "key", "value"]), join_words(["query"]), join_words([])
        ('query, key and value', 'query', '')
    """
    *first, last = list(names) or [""]
    return f"{', '.join(first)} {word} {last}" if first else last


def truncate_list(most: int, texts: Sequence[str], more: str = "and {:,} more") -> list[str]:
    """Return the first ``most`` texts, followed by the number of the others.

    Example:
        >>> truncate_list(2, ["numpy", "torch", "jax", "tinygrad"])
        ['numpy', 'torch', 'and 2 more']
    """
    return [*texts[:most], *([more.format(len(texts) - most)] if len(texts) > most else [])]


def format_at_stage(word: str, stage: str) -> str:
    """Write a verdict with the stage at which it begins, if there is one."""
    return f"{word} at {stage}" if stage else word


def join_words_or(names: Iterable[str]) -> str:
    """Write one, or one or two, or one, two or three; nothing for no name."""
    return join_words(names, "or")


def suggest_names(name: str, known: Iterable[str], lists_all: str = "", *, one_of: bool = True) -> str:
    """Suggest names for a ``name`` that is not ``known``: similar ones, and all known names.

    If there are many names or one is similar, the command that ``lists_all`` replaces the list.

    Example:
        >>> suggest_names("sofcap", ["softcap", "scale", "window"])
        'did you mean softcap? (expected one of softcap, scale, window)'
        >>> suggest_names("heads", ["softcap", "scale", "window"])
        'expected one of softcap, scale, window'
    """
    import difflib

    names = list(known)
    lower = {candidate.lower(): candidate for candidate in reversed(names)}
    asked = name[:_MAX_COMPARED_LENGTH].lower()
    likeness = {
        candidate: difflib.SequenceMatcher(None, candidate, asked).ratio()
        for candidate in difflib.get_close_matches(asked, lower, _MAX_SUGGESTIONS, MIN_SIMILARITY)
    }
    close = [
        lower[candidate]
        for candidate, alike in likeness.items()
        if alike >= max(likeness.values()) - _SIMILARITY_MARGIN
    ]
    everything = f"expected {'one of ' if one_of else ''}{', '.join(names)}"
    if lists_all and (close or len(names) > _MAX_LISTED_NAMES):
        everything = f"{lists_all} lists all"
    return f"did you mean {join_words_or(close)}? ({everything})" if close else everything


ESCAPED_CHARACTERS: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    r"\ufdd0-\ufdef\ufeff\uffa0\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e0fff\ud800-\udfff]"
)
"""Characters that move or hide others: control characters, line breaks, direction marks, tags, half surrogate pairs."""
_HIDING = r"\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
ONE_LINE_PATTERN: Final = rf"^[^\x00-\x1f{_HIDING}]+$"
"""A text of one line, as a pattern that is valid in JSON Schema, too, and so without characters beyond U+FFFF."""
LINES_PATTERN: Final = rf"^[^\x00-\x08\x0b-\x1f{_HIDING}]+$"
"""The same on several lines."""
MAX_TEXT_LENGTH: Final = 4000
"""Characters. A choice: about 50 lines of a terminal; longer texts are cut."""


def escape_to_one_line(text: str, most: int = MAX_TEXT_LENGTH) -> str:
    r"""Return a text that some file holds as one line that a terminal shows as it is: ``a\x1b[31mb``, ``a\nb``.

    Characters that move or hide others are written as escapes, and no more than ``most`` characters are kept.

    Example:
        >>> print(escape_to_one_line("first\nsecond"), escape_to_one_line("attention", 4))
        first\nsecond att…
    """
    shown = text if len(text) <= most else f"{text[: most - 1]}…"
    return ESCAPED_CHARACTERS.sub(
        lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), shown
    )


def slug(name: str) -> str:
    """Return a case's name, or a suffix of it, in the form of an id.

    Example:
        >>> slug("A causal row, if Lq < Lk")
        'a-causal-row-if-lq-lk'
    """
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


_MIN_DIGITS = 4
"""A choice: fewer digits do not show the size of a number; more make messages longer, and digits that differ are shown
anyway."""


@dataclass(frozen=True)
class DocumentLayout:
    """The form in which a document prints an array of a call."""

    shape: tuple[int, ...]
    is_transposed: bool = False

    def document_index(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return an element's index as the document counts it.

        Example:
            >>> DocumentLayout((1, 1, 4, 2)).document_index((0, 0, 3, 1))
            (3, 1)
            >>> DocumentLayout((1, 1, 4, 2), is_transposed=True).document_index((0, 0, 3, 1))
            (1, 3)
        """
        if len(index) != len(self.shape):  # of an array that has another form
            return tuple(index)
        leading = next((axis for axis, length in enumerate(self.shape[:-1]) if length != 1), len(self.shape) - 1)
        trimmed = tuple(index[max(leading, 0) :])
        return (*trimmed[:-2], trimmed[-1], trimmed[-2]) if self.is_transposed and len(trimmed) > 1 else trimmed


def stage_layout(
    stage: str, shape: Sequence[int], transposed: Iterable[tuple[str, bool]], *, is_document: bool
) -> DocumentLayout | None:
    """Return the layout of a stage in a document's case; None if a case is not from a document.

    ``transposed`` are the stages that the document prints, each with whether it writes vectors in columns.
    """
    return DocumentLayout(tuple(shape), dict(transposed).get(stage, False)) if is_document else None


def parse_index(text: str) -> tuple[int, ...]:
    """Read an index as results keep it; that of a single number is empty."""
    return tuple(map(int, filter(None, text.split(","))))


def format_index(index: Iterable[int]) -> str:
    """Write an index as results keep it."""
    return ",".join(map(str, index))


def format_element(index: Sequence[int] | str, name: str = "", layout: DocumentLayout | None = None) -> str:
    """Write an element after the name of its array, if it has one; a single number has no index.

    Example:
        >>> format_element((0, 2, 8), "output"), format_element("0,2,8"), format_element((), "sum")
        ('output[0, 2, 8]', '[0, 2, 8]', 'sum')
    """
    place = parse_index(index) if isinstance(index, str) else tuple(index)
    place = place if layout is None else layout.document_index(place)
    return f"{name}[{', '.join(map(str, place))}]" if place or not name else name


def format_ratio(ratio: float) -> str:
    """Write an error over its bound with three digits, or as many as it takes to show that it is more than 1.

    Example:
        >>> format_ratio(2.3456), format_ratio(1.00004)
        ('2.35', '1.00004')
    """
    texts = (f"{ratio:.{digits}g}" for digits in range(3, 18))
    return next((text for text in texts if not float(text) <= 1 < ratio), f"{ratio:.17g}")


def format_distinct(computed: float, exact: float) -> tuple[str, str]:
    """Write two numbers with as many digits as distinguish them, and no fewer than four.

    Example:
        >>> format_distinct(1.5, 1.25), format_distinct(1.000012, 1.00001)
        (('1.5', '1.25'), ('1.000012', '1.00001'))
    """
    for digits in range(_MIN_DIGITS, 18):
        texts = f"{computed:.{digits}g}", f"{exact:.{digits}g}"
        apart = abs(float(texts[0]) - float(texts[1]))
        if not math.isfinite(apart) or apart >= 0.5 * abs(computed - exact):
            break
    return texts


def format_judged_rows(judged: int, queries: int) -> str:
    """Write the number of judged query rows, which represent all."""
    return f"{judged:,} of {queries:,} query rows judged"
