"""The arrays of a case file: every kind in which numbers can be given, drawn, built, stored or put together.

``arrays.py`` checks them, ``generated_arrays.py`` makes masks and biases, and ``stored_arrays.py`` reads files.

In masks true = may attend. A query stands at position p = ``offset`` + i, and key j at position j. A list of numbers,
or a list of lists, has an entry for each element of the batch; the mask is then (B, 1, Lq, T), and (Lq, T) otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    Tag,
    computed_field,
)

from attncheck.reading.yaml_reader import FieldPath

if TYPE_CHECKING:
    from numpy.typing import NDArray

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=60)]
PrintedRows = str | list[Any]
"""Rows of printed numbers as text, or nested lists of such texts for ranks above two."""
Shape = Annotated[list[NonNegativeInt], Field(max_length=5, description="Lengths of the axes, at most five; 0 too.")]


class StrictModel(BaseModel):
    """A mapping with exactly the fields that are listed.

    What checks it is built when it is first needed: cases that were read before come back as they were.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class Adjustments(StrictModel):
    """Changes to an array after it is read, drawn or built, applied in this order."""

    rows: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, min_length=1, description="Take these rows (first axis), as an embedding look-up does."
    )
    transpose: bool = Field(default=False, description="Swap the last two axes.")
    times: float | int | None = Field(default=None, description="Multiply each number by this.")
    plus: float | int | None = Field(default=None, description="Add this to each number.")

    @property
    def is_scaled(self) -> bool:
        """Return whether its numbers are multiplied, or added to."""
        return self.times is not None or self.plus is not None

    @property
    def is_arranged(self) -> bool:
        """Return whether it is not as it was read, drawn or built."""
        return self.transpose or self.rows is not None or self.is_scaled


class UnitsOff(StrictModel):
    """By how much last digits may be off that were not rounded as they should have been."""

    units: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="The last digit may differ by so many from that of the number rounded to nearest."
    )
    because: Annotated[str, Field(min_length=3, max_length=4000)] = Field(
        description="How it is known that the digits are no better than that."
    )


def _digits_tag(source: Any) -> str:
    return "units" if isinstance(source, UnitsOff | dict) else "word"


Digits = Annotated[
    Annotated[Literal["rounded", "truncated"], Tag("word")] | Annotated[UnitsOff, Tag("units")],
    Discriminator(_digits_tag),
]


class RoundingFields(StrictModel):
    """The rounding of printed numbers; by default each number has as many decimals as it shows."""

    exact: bool = Field(default=False, description="The printed numbers are exact: integers computed from integers.")
    decimals: Annotated[int, Field(ge=0, le=400)] | None = Field(
        default=None, description="Rounded to so many decimals, of which trailing zeros may not be shown."
    )
    significant_digits: PositiveInt | None = Field(default=None, description="Rounded to so many significant digits.")
    digits: Digits | None = Field(
        default=None,
        description="How the last digit came about. rounded (if absent): to nearest. truncated: the digits after it "
        "were cut off. {units, because}: it may be off by so many. `rounded` also says that a number with fewer digits "
        "than its neighbours was rounded to the digits that it shows.",
    )


FOLDER_CONTEXT_KEY = "folder"
"""What a validator's context tells of the case file: the folder that it is in."""
ARRAYS_CONTEXT_KEY = "arrays"
"""In a validator's context, arrays in memory by the names of files that are not there."""


@dataclass(frozen=True)
class StoredContents:
    """A summary of a stored array.

    ``listed_numbers`` are all of them in row order, where they are few and whole, as counts are: ``lists_all_numbers``.
    Otherwise they stand for all: the least and the largest finite one, NaN and infinities that are there, and one that
    is not whole.
    """

    digest: str
    shape: tuple[int, ...]
    listed_numbers: tuple[float, ...]
    lists_all_numbers: bool

    @cached_property
    def distinct_numbers(self) -> tuple[float, ...]:
        """The listed numbers, each once: a mask has two, however long it is."""
        return tuple(dict.fromkeys(self.listed_numbers))


class StoredNumbers(StrictModel):
    """Numbers in a file beside the case file, taken as they are: what a document gives to the last bit."""

    file: Annotated[str, Field(min_length=1, max_length=1000)] = Field(
        description="The path of the file, relative to the folder of the case file and inside of it."
    )
    name: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        default=None, description="The name of the array in the file; .npy holds one without a name."
    )
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        default=None, description="The SHA-256 checksum of the file, which it then has to have."
    )
    _folder: str = PrivateAttr(default="")
    _contents: StoredContents | None = PrivateAttr(default=None)
    _array: NDArray[Any] | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Remember the folder of the case file, or the array in memory that takes the place of the file."""
        self._folder = str((context or {}).get(FOLDER_CONTEXT_KEY, ""))
        self._array = (context or {}).get(ARRAYS_CONTEXT_KEY, {}).get(self.file)

    def __getstate__(self) -> dict[Any, Any]:
        """Leave out an array in memory: a case that another process judges has its inputs beside it."""
        state = super().__getstate__()
        return {**state, "__pydantic_private__": {**state["__pydantic_private__"], "_array": None}}

    @property
    def folder(self) -> str:
        """The folder that the path is relative to; empty where the array is in no file of cases."""
        return self._folder

    @property
    def contents(self) -> StoredContents | None:
        """Return what the file held when the case was read; None before."""
        return self._contents

    @property
    def array(self) -> NDArray[Any] | None:
        """The array in memory that takes the place of the file; None if there is a file."""
        return self._array

    def remember_contents(self, contents: StoredContents) -> StoredContents:
        """State what the file holds, and return it: another content is refused from then on."""
        self._contents = contents
        return contents

    @computed_field(description="What the case is judged by, whatever its file is called.")  # type: ignore[prop-decorator]
    @property
    def content(self) -> str:
        """The digest of the numbers, which is part of the digest of a case."""
        return self._contents.digest if self._contents else ""


class StoredArray(StoredNumbers, Adjustments):
    """An array in a file beside the case file: .npy, .npz or .safetensors. Nothing is unpickled."""


MAX_POSITION = 2**31
QueryAndKeyLengths = Annotated[
    list[NonNegativeInt], Field(min_length=2, max_length=2, description="[Lq, T]: how many queries and keys there are.")
]
Position = Annotated[int, Field(ge=0, le=MAX_POSITION)]
PositiveLength = Annotated[PositiveInt, Field(le=MAX_POSITION)]


class PositionPattern(Adjustments):
    """A mask or bias that follows from the positions of queries and keys."""

    shape: QueryAndKeyLengths
    offset: Position = Field(
        default=0, description="The position of the first query: after a past of P keys it is P; 0 if absent."
    )


class SlidingWindow(PositionPattern):
    """A query at p sees key j if p - left <= j <= p + right. [null, 0] is a causal mask."""

    sliding_window: Annotated[list[Position | None], Field(min_length=2, max_length=2)] = Field(
        description="[left, right]; null is unbounded."
    )


class PrefixLM(PositionPattern):
    """A query at p sees key j if j <= p, or if j lies in the prefix."""

    prefix_lm: Any = Field(description="The length of the prefix, or a list of lengths, one for each of the batch.")


class Images(PositionPattern):
    """A query at p sees key j if j <= p, or if both belong to the same image."""

    images: Any = Field(
        description="For each key the number of its image, 0 for text; or a list of such lists, one for each of the "
        "batch."
    )


class ImageSpans(PositionPattern):
    """Images in text, as ``images``, by where each image begins and ends."""

    image_spans: Any = Field(
        description="[begin, end] of each image, whose last position is end - 1; or a list of such lists, one for each "
        "of the batch."
    )


class Segments(PositionPattern):
    """A query at p sees key j if both belong to the same segment, such as a document of a packed sequence."""

    segments: Any = Field(
        description="For each key the number of its segment; or a list of such lists, one for each of the batch."
    )


class DocumentLengths(PositionPattern):
    """Documents of a packed sequence, as ``segments``, by the length of each."""

    document_lengths: Any = Field(
        description="How many keys each document has, all keys together; or a list of such lists, one for each of the "
        "batch."
    )


class Chunked(PositionPattern):
    """A query at p sees key j if j <= p and both lie in the same chunk of the sequence."""

    chunked: PositiveLength = Field(description="How many positions a chunk has.")
    left_padding: Any = Field(
        default=None, description="Where the first chunk begins: a position, or a list with one for each of the batch."
    )


class FirstTokens(PositionPattern):
    """A query at p sees key j if j <= p, and j is one of the first tokens or p - left <= j."""

    first_tokens: Position = Field(description="How many tokens at the beginning are kept.")
    left: Position = Field(description="How many keys before its own position a query sees besides.")


class Dilated(PositionPattern):
    """A query at p sees every key j = p + t * dilation with -left <= t <= right."""

    dilated: PositiveLength = Field(description="The dilation: 1 is a window without gaps.")
    window: Annotated[list[Position | None], Field(min_length=2, max_length=2)] = Field(
        description="[left, right] in steps of the dilation; null is unbounded."
    )


class Tree(Adjustments):
    """Nodes of a tree of drafted tokens after a committed prefix: a node sees the prefix, its ancestors and itself."""

    tree: Any = Field(
        description="For each node the number of its parent, which comes before it, or null for a child of the prefix; "
        "or a list of such lists, one for each of the batch."
    )
    committed: Position = Field(default=0, description="How many keys the committed prefix has; 0 if absent.")


AnyMaskPattern = (
    SlidingWindow | PrefixLM | Images | ImageSpans | Segments | DocumentLengths | Chunked | FirstTokens | Dilated | Tree
)
MASK_PATTERNS = get_args(AnyMaskPattern)
"""Masks that are told by positions alone."""


class Alibi(PositionPattern):
    """ALiBi: minus the slope of each head times the distance between query and key, (H, Lq, T)."""

    alibi: Annotated[PositiveInt, Field(le=4096)] = Field(
        description="How many heads there are, from which their slopes follow."
    )


class Values(Adjustments):
    """Numbers given in full."""

    values: Any = Field(description="A number, or nested lists of numbers or booleans; .inf and -.inf are allowed.")


class PrintedInput(Adjustments, RoundingFields):
    """Numbers that a document prints, as text; what rounding took from them is allowed for in everything computed."""

    printed: PrintedRows = Field(description="Text, one row a line; lists of such texts for more than two axes.")


class Drawn(Adjustments):
    """Random numbers from the case's generator."""

    draw: Literal["rand", "randn", "randint", "runif"] = Field(
        description="rand: uniform on [0, 1); randn: standard normal; randint: integers of [low, high); runif: uniform "
        "between low and high."
    )
    shape: Shape
    low: float | int | None = Field(default=None, description="Lower end: of randint (included) or runif.")
    high: float | int | None = Field(default=None, description="Upper end: of randint (excluded) or runif.")
    floor: bool = Field(default=False, description="Round each number down.")


class Constant(Adjustments):
    """The same number everywhere."""

    constant: float | int = Field(description="The number.")
    shape: Shape


class Lowest(Adjustments):
    """The lowest finite number of each dtype that the case is computed in, everywhere, as finfo(dtype).min has it."""

    lowest: Annotated[Shape, Field(description="Lengths of the axes, at most five; 0 too.")]


class Identity(Adjustments):
    """The identity matrix."""

    identity: PositiveInt = Field(description="The number of rows and columns.")


class Ascending(Adjustments):
    """start, start + step, ... in row order."""

    ascending: Annotated[list[float | int], Field(min_length=2, max_length=2, description="[start, step]")]
    shape: Shape


class Geometric(Adjustments):
    """start, start * ratio, ... in row order, each number from the one before it by a single multiplication."""

    geometric: Annotated[list[float | int], Field(min_length=2, max_length=2, description="[start, ratio]")]
    shape: Shape


class Reference(Adjustments):
    """An array of the file or the case, by its name."""

    ref: Name = Field(description="The name.")


Parts = Annotated[
    list["Input"], Field(min_length=1, description="Arrays, or names of arrays, drawn or built in this order.")
]
Masks = Annotated[list["Input"], Field(min_length=1, description="Masks, or names of masks.")]


class Concat(Adjustments):
    """Arrays put one after another."""

    concat: Parts
    axis: Annotated[int, Field(ge=-4, le=3)] = Field(
        description="The axis along which they follow each other; -1 is the last one. Their other axes are alike."
    )


class Sum(Adjustments):
    """Arrays added number by number, spread over each other's axes as NumPy does."""

    sum: Parts


class Product(Adjustments):
    """Arrays multiplied number by number, spread over each other's axes as NumPy does."""

    product: Parts


class AnyOf(Adjustments):
    """A query sees a key if any of these masks allows it; the masks are spread over each other's axes."""

    any_of: Masks


class AllOf(Adjustments):
    """A query sees a key if all of these masks allow it; the masks are spread over each other's axes."""

    all_of: Masks


class Blocks(Adjustments):
    """A table with an entry for each block of queries and keys, which holds for every query and key of the block."""

    blocks: Input = Field(description="The table: an array whose last two axes are the blocks of queries and keys.")
    block_size: Annotated[list[PositiveLength], Field(min_length=2, max_length=2)] = Field(
        description="[queries, keys] of a block; the last ones may be cut off."
    )
    shape: QueryAndKeyLengths


class AsBias(Adjustments):
    """A mask as a bias: 0 where a query sees a key, and minus infinity where it does not."""

    as_bias: Input = Field(description="The mask, or its name.")


class RelativeBuckets(PositionPattern):
    """T5's bias: distances j - p fall into buckets, and each bucket has a number for each head; (H, Lq, T)."""

    relative_buckets: Input = Field(description="The table, (buckets, H).")
    max_distance: PositiveLength = Field(description="From this distance on, everything falls into the last bucket.")
    bidirectional: bool = Field(description="Whether later keys have half of the buckets, or bucket 0 as the own key.")


_PLAIN_MODELS = (Drawn, Constant, Lowest, Identity, Ascending, Geometric, Reference, Concat, Sum, Product)
_MODELS_OF_MASKS = (AnyOf, AllOf, Blocks, AsBias)
MODEL_OF_KIND: dict[str, type[Adjustments]] = {
    "values": Values,
    "printed": PrintedInput,
    "file": StoredArray,
    **{next(iter(model.__annotations__)): model for model in (*_PLAIN_MODELS, *MASK_PATTERNS, *_MODELS_OF_MASKS)},
    "alibi": Alibi,
    "relative_buckets": RelativeBuckets,
}
"""By the field that a kind is told by, which is the first of its own."""
ARRAY_KINDS = tuple(MODEL_OF_KIND)
COMBINED_KINDS = ("concat", "sum", "product", "any_of", "all_of")
"""The kinds that are made of a list of other arrays."""
WRAPPING_KINDS = ("blocks", "as_bias", "relative_buckets")
"""The kinds that are made of one other array."""
MASK_KINDS = tuple(kind for kind, model in MODEL_OF_KIND.items() if model in (*MASK_PATTERNS, AnyOf, AllOf))
"""The kinds that are masks, whatever they are made of."""


def _find_kind(source: Any) -> str | None:
    if isinstance(source, BaseModel):
        return next(kind for kind, model in MODEL_OF_KIND.items() if isinstance(source, model))
    if not isinstance(source, dict):
        return None
    kinds = [kind for kind in ARRAY_KINDS if kind in source]
    return kinds[0] if len(kinds) == 1 else None


if TYPE_CHECKING:
    # A type checker cannot follow a union that is made from a table.
    Array = Adjustments
else:
    Array = Annotated[
        Union[tuple(Annotated[model, Tag(kind)] for kind, model in MODEL_OF_KIND.items())],  # noqa: UP007
        Discriminator(
            _find_kind,
            custom_error_type="array_kind",
            custom_error_message=f"expected a mapping with exactly one of {', '.join(ARRAY_KINDS)}",
        ),
    ]
Input = Array | Name


def array_or_reference(value: Input) -> Array:
    """Return an array itself, or a reference to the one that is named."""
    return Reference(ref=value) if isinstance(value, str) else value


def array_parts_with_paths(source: Array) -> list[tuple[FieldPath, Array]]:
    """Return the arrays of which one is made, each with its place inside of it; none for the other kinds."""
    kind = kind_of(source)
    if kind in COMBINED_KINDS:
        return [((kind, number), array_or_reference(part)) for number, part in enumerate(getattr(source, kind))]
    return [((kind,), array_or_reference(getattr(source, kind)))] if kind in WRAPPING_KINDS else []


def kind_of(source: Array) -> str:
    """Return the field by which an array's kind is told."""
    return _KIND_OF_MODEL[type(source)]


_KIND_OF_MODEL = {model: kind for kind, model in MODEL_OF_KIND.items()}
