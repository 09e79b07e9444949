"""The arrays of a case file: every kind in which numbers can be given, drawn, built or put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BaseModel, Discriminator, Field, PositiveInt, Tag

from attncheck.reading.array_fields import Arrangement, Name, PrintedRows, RoundingFields, Shape
from attncheck.reading.bias_kinds import Alibi
from attncheck.reading.file_kinds import StoredArray
from attncheck.reading.mask_kinds import (
    MASK_PATTERNS,
    Chunked,
    Dilated,
    DocumentLengths,
    FirstTokens,
    Images,
    ImageSpans,
    Pattern,
    PrefixLM,
    QueriesAndKeys,
    Segments,
    Size,
    SlidingWindow,
    Tree,
)
from attncheck.reading.yaml_scalars import FieldPath


class Values(Arrangement):
    """Numbers given in full."""

    values: Any = Field(description="A number, or nested lists of numbers or booleans; .inf and -.inf are allowed.")


class PrintedInput(Arrangement, RoundingFields):
    """Numbers that a document prints, as text; what rounding took from them is allowed for in everything computed."""

    printed: PrintedRows = Field(description="Text, one row a line; lists of such texts for more than two axes.")


class Drawn(Arrangement):
    """Random numbers from the case's generator."""

    draw: Literal["rand", "randn", "randint", "runif"] = Field(
        description="rand: uniform on [0, 1); randn: standard normal; randint: integers of [low, high); runif: uniform "
        "between low and high."
    )
    shape: Shape
    low: float | int | None = Field(default=None, description="Lower end: of randint (included) or runif.")
    high: float | int | None = Field(default=None, description="Upper end: of randint (excluded) or runif.")
    floor: bool = Field(default=False, description="Round each number down.")


class Constant(Arrangement):
    """The same number everywhere."""

    constant: float | int = Field(description="The number.")
    shape: Shape


class Lowest(Arrangement):
    """The lowest finite number of each dtype that the case is computed in, everywhere, as finfo(dtype).min has it."""

    lowest: Annotated[Shape, Field(description="Lengths of the axes, at most five; 0 too.")]


class Identity(Arrangement):
    """The identity matrix."""

    identity: PositiveInt = Field(description="The number of rows and columns.")


class Ascending(Arrangement):
    """start, start + step, ... in row order."""

    ascending: Annotated[list[float | int], Field(min_length=2, max_length=2, description="[start, step]")]
    shape: Shape


class Geometric(Arrangement):
    """start, start * ratio, ... in row order, each number from the one before it by a single multiplication."""

    geometric: Annotated[list[float | int], Field(min_length=2, max_length=2, description="[start, ratio]")]
    shape: Shape


class Reference(Arrangement):
    """An array of the file or the case, by its name."""

    ref: Name = Field(description="The name.")


class Concat(Arrangement):
    """Arrays put one after another."""

    concat: Annotated[
        list[Input], Field(min_length=1, description="Arrays, or names of arrays, drawn or built in this order.")
    ]
    axis: Annotated[int, Field(ge=-4, le=3)] = Field(
        description="The axis along which they follow each other; -1 is the last one. Their other axes are alike."
    )


class Sum(Arrangement):
    """Arrays added number by number, spread over each other's axes as NumPy does."""

    sum: Annotated[
        list[Input], Field(min_length=1, description="Arrays, or names of arrays, drawn or built in this order.")
    ]


class Product(Arrangement):
    """Arrays multiplied number by number, spread over each other's axes as NumPy does."""

    product: Annotated[
        list[Input], Field(min_length=1, description="Arrays, or names of arrays, drawn or built in this order.")
    ]


class AnyOf(Arrangement):
    """A query sees a key if any of these masks allows it; the masks are spread over each other's axes."""

    any_of: Annotated[list[Input], Field(min_length=1, description="Masks, or names of masks.")]


class AllOf(Arrangement):
    """A query sees a key if all of these masks allow it; the masks are spread over each other's axes."""

    all_of: Annotated[list[Input], Field(min_length=1, description="Masks, or names of masks.")]


class Blocks(Arrangement):
    """A table with an entry for each block of queries and keys, which holds for every query and key of the block."""

    blocks: Input = Field(description="The table: an array whose last two axes are the blocks of queries and keys.")
    block_size: Annotated[list[Size], Field(min_length=2, max_length=2)] = Field(
        description="[queries, keys] of a block; the last ones may be cut off."
    )
    shape: QueriesAndKeys


class AsBias(Arrangement):
    """A mask as a bias: 0 where a query sees a key, and minus infinity where it does not."""

    as_bias: Input = Field(description="The mask, or its name.")


class RelativeBuckets(Pattern):
    """T5's bias: distances j - p fall into buckets, and each bucket has a number for each head; (H, Lq, T)."""

    relative_buckets: Input = Field(description="The table, (buckets, H).")
    max_distance: Size = Field(description="From this distance on, everything falls into the last bucket.")
    bidirectional: bool = Field(description="Whether later keys have half of the buckets, or bucket 0 as the own key.")


KINDS: dict[str, type[Arrangement]] = {
    "values": Values,
    "printed": PrintedInput,
    "file": StoredArray,
    "draw": Drawn,
    "constant": Constant,
    "lowest": Lowest,
    "identity": Identity,
    "ascending": Ascending,
    "geometric": Geometric,
    "ref": Reference,
    "concat": Concat,
    "sum": Sum,
    "product": Product,
    "sliding_window": SlidingWindow,
    "prefix_lm": PrefixLM,
    "images": Images,
    "image_spans": ImageSpans,
    "segments": Segments,
    "document_lengths": DocumentLengths,
    "chunked": Chunked,
    "first_tokens": FirstTokens,
    "dilated": Dilated,
    "tree": Tree,
    "any_of": AnyOf,
    "all_of": AllOf,
    "blocks": Blocks,
    "as_bias": AsBias,
    "alibi": Alibi,
    "relative_buckets": RelativeBuckets,
}
ARRAY_KINDS = tuple(KINDS)
COMBINED_KINDS = ("concat", "sum", "product", "any_of", "all_of")
"""The kinds that are made of a list of other arrays."""
WRAPPING_KINDS = ("blocks", "as_bias", "relative_buckets")
"""The kinds that are made of one other array."""
MASK_KINDS = tuple(kind for kind, model in KINDS.items() if model in (*MASK_PATTERNS, AnyOf, AllOf))
"""The kinds that are masks, whatever they are made of."""


def _kind(source: Any) -> str | None:
    if isinstance(source, BaseModel):
        return next(kind for kind, model in KINDS.items() if isinstance(source, model))
    if not isinstance(source, dict):
        return None
    kinds = [kind for kind in ARRAY_KINDS if kind in source]
    return kinds[0] if len(kinds) == 1 else None


if TYPE_CHECKING:
    # A type checker cannot follow a union that is made from a table.
    Array = Arrangement
else:
    Array = Annotated[
        Union[tuple(Annotated[model, Tag(kind)] for kind, model in KINDS.items())],  # noqa: UP007
        Discriminator(
            _kind,
            custom_error_type="array_kind",
            custom_error_message=f"expected a mapping with exactly one of {', '.join(ARRAY_KINDS)}",
        ),
    ]
Input = Array | Name


def as_array(given: Input) -> Array:
    """Return an array itself, or a reference to the one that is named."""
    return Reference(ref=given) if isinstance(given, str) else given


def parts_of(source: Array) -> list[tuple[FieldPath, Array]]:
    """Return the arrays of which one is made, each with its place inside of it; none for the other kinds."""
    kind = kind_of(source)
    if kind in COMBINED_KINDS:
        return [((kind, number), as_array(part)) for number, part in enumerate(getattr(source, kind))]
    return [((kind,), as_array(getattr(source, kind)))] if kind in WRAPPING_KINDS else []


def kind_of(source: Array) -> str:
    """Return the field by which an array's kind is told."""
    return _KIND_OF[type(source)]


_KIND_OF = {model: kind for kind, model in KINDS.items()}
