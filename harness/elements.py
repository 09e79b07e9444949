"""How an element of an array is written, everywhere: ``output[0, 2, 8, 4]``.

Results keep an index as ``0,2,8,4``. Of a document's case an element is written as the document counts it: without
leading axes of length 1, and transposed back where the document writes its vectors in columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MIN_DIGITS = 4


@dataclass(frozen=True)
class DocumentLayout:
    """How a document lays an array out that has this shape in a call."""

    shape: tuple[int, ...]
    is_transposed: bool = False

    def index_of(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return an element's index as the document counts it."""
        if len(index) != len(self.shape):  # of an array that has another form
            return tuple(index)
        leading = next((axis for axis, length in enumerate(self.shape[:-1]) if length != 1), len(self.shape) - 1)
        own = tuple(index[max(leading, 0) :])
        return (*own[:-2], own[-1], own[-2]) if self.is_transposed and len(own) > 1 else own


def layout_of(
    stage: str, shape: Sequence[int], transposed: Iterable[tuple[str, bool]], *, is_document: bool
) -> DocumentLayout | None:
    """Return how a stage is laid out in a document's case; None where a case is of no document.

    ``transposed`` are the names of what the document expects, each with whether it writes them in columns.
    """
    return DocumentLayout(tuple(shape), dict(transposed).get(stage, False)) if is_document else None


def index_from(text: str) -> tuple[int, ...]:
    """Read an index as results keep it; that of a single number is empty."""
    return tuple(map(int, filter(None, text.split(","))))


def stored_index(index: Iterable[int]) -> str:
    """Write an index as results keep it."""
    return ",".join(map(str, index))


def written_element(index: Sequence[int] | str, name: str = "", layout: DocumentLayout | None = None) -> str:
    """Write an element behind the name of its array, if it has one; a single number has no index to write."""
    found = index_from(index) if isinstance(index, str) else tuple(index)
    found = found if layout is None else layout.index_of(found)
    return f"{name}[{', '.join(map(str, found))}]" if found or not name else name


def written_ratio(ratio: float) -> str:
    """Write an error over its bound with three digits, or as many as show that it is more than 1."""
    texts = (f"{ratio:.{digits}g}" for digits in range(3, 18))
    return next((text for text in texts if not float(text) <= 1 < ratio), f"{ratio:.17g}")


def told_apart(computed: float, exact: float) -> tuple[str, str]:
    """Write two numbers with as many digits as tell them apart, and no fewer than four."""
    for digits in range(_MIN_DIGITS, 18):
        texts = f"{computed:.{digits}g}", f"{exact:.{digits}g}"
        apart = abs(float(texts[0]) - float(texts[1]))
        if not math.isfinite(apart) or apart >= 0.5 * abs(computed - exact):
            break
    return texts
