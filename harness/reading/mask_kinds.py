"""The masks of today's models as kinds of arrays: true = may attend. ``masks.py`` makes them.

A query stands at position p = ``offset`` + i, and key j at position j. A list of numbers, or a list of lists, has an
entry for each element of the batch; the mask is then (B, 1, Lq, T), and (Lq, T) otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from attncheck.reading.array_fields import Arrangement

MAX_POSITION = 2**31
QueriesAndKeys = Annotated[
    list[NonNegativeInt], Field(min_length=2, max_length=2, description="[Lq, T]: how many queries and keys there are.")
]
Bound = Annotated[int, Field(ge=0, le=MAX_POSITION)]
Size = Annotated[PositiveInt, Field(le=MAX_POSITION)]


class Pattern(Arrangement):
    """A mask or bias that follows from the positions of queries and keys."""

    shape: QueriesAndKeys
    offset: Bound = Field(
        default=0, description="The position of the first query: after a past of P keys it is P; 0 if absent."
    )


class SlidingWindow(Pattern):
    """A query at p sees key j if p - left <= j <= p + right. [null, 0] is a causal mask."""

    sliding_window: Annotated[list[Bound | None], Field(min_length=2, max_length=2)] = Field(
        description="[left, right]; null is unbounded."
    )


class PrefixLM(Pattern):
    """A query at p sees key j if j <= p, or if j lies in the prefix."""

    prefix_lm: Any = Field(description="The length of the prefix, or a list of lengths, one for each of the batch.")


class Images(Pattern):
    """A query at p sees key j if j <= p, or if both belong to the same image."""

    images: Any = Field(
        description="For each key the number of its image, 0 for text; or a list of such lists, one for each of the "
        "batch."
    )


class ImageSpans(Pattern):
    """Images in text, as ``images``, by where each image begins and ends."""

    image_spans: Any = Field(
        description="[begin, end] of each image, whose last position is end - 1; or a list of such lists, one for each "
        "of the batch."
    )


class Segments(Pattern):
    """A query at p sees key j if both belong to the same segment, such as a document of a packed sequence."""

    segments: Any = Field(
        description="For each key the number of its segment; or a list of such lists, one for each of the batch."
    )


class DocumentLengths(Pattern):
    """Documents of a packed sequence, as ``segments``, by the length of each."""

    document_lengths: Any = Field(
        description="How many keys each document has, all keys together; or a list of such lists, one for each of the "
        "batch."
    )


class Chunked(Pattern):
    """A query at p sees key j if j <= p and both lie in the same chunk of the sequence."""

    chunked: Size = Field(description="How many positions a chunk has.")
    left_padding: Any = Field(
        default=None, description="Where the first chunk begins: a position, or a list with one for each of the batch."
    )


class FirstTokens(Pattern):
    """A query at p sees key j if j <= p, and j is one of the first tokens or p - left <= j."""

    first_tokens: Bound = Field(description="How many tokens at the beginning are kept.")
    left: Bound = Field(description="How many keys before its own position a query sees besides.")


class Dilated(Pattern):
    """A query at p sees every key j = p + t * dilation with -left <= t <= right."""

    dilated: Size = Field(description="The dilation: 1 is a window without gaps.")
    window: Annotated[list[Bound | None], Field(min_length=2, max_length=2)] = Field(
        description="[left, right] in steps of the dilation; null is unbounded."
    )


class Tree(Arrangement):
    """Nodes of a tree of drafted tokens after a committed prefix: a node sees the prefix, its ancestors and itself."""

    tree: Any = Field(
        description="For each node the number of its parent, which comes before it, or null for a child of the prefix; "
        "or a list of such lists, one for each of the batch."
    )
    committed: Bound = Field(default=0, description="How many keys the committed prefix has; 0 if absent.")


AnyMaskPattern = (
    SlidingWindow | PrefixLM | Images | ImageSpans | Segments | DocumentLengths | Chunked | FirstTokens | Dilated | Tree
)
MASK_PATTERNS = (
    SlidingWindow,
    PrefixLM,
    Images,
    ImageSpans,
    Segments,
    DocumentLengths,
    Chunked,
    FirstTokens,
    Dilated,
    Tree,
)
"""Masks that are told by positions alone."""
