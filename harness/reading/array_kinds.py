"""The arrays of a case file: every kind in which numbers can be given, drawn, built or put together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, NonNegativeInt, PositiveInt, Tag

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=60)]
PrintedRows = str | list[Any]
"""Rows of printed numbers as text, or nested lists of such texts for ranks above two."""
Shape = Annotated[list[NonNegativeInt], Field(max_length=4, description="Lengths of the axes, at most four; 0 too.")]


class Strict(BaseModel):
    """A mapping with exactly the fields that are listed.

    What checks it is built when it is first needed: cases that were read before come back as they were.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class Arrangement(Strict):
    """Changes to an array after it is read, drawn or built, applied in this order."""

    rows: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, min_length=1, description="Take these rows (first axis), as an embedding look-up does."
    )
    transpose: bool = Field(default=False, description="Swap the last two axes.")
    times: float | int | None = Field(default=None, description="Multiply each number by this.")
    plus: float | int | None = Field(default=None, description="Add this to each number.")


class UnitsOff(Strict):
    """By how much last digits may be off that were not rounded as they should have been."""

    units: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="The last digit may differ by so many from that of the number rounded to nearest."
    )
    because: Annotated[str, Field(min_length=3, max_length=4000)] = Field(
        description="How it is known that the digits are no better than that."
    )


def _kind_of_digits(source: Any) -> str:
    return "units" if isinstance(source, UnitsOff | dict) else "word"


Digits = Annotated[
    Annotated[Literal["rounded", "truncated"], Tag("word")] | Annotated[UnitsOff, Tag("units")],
    Discriminator(_kind_of_digits),
]


class RoundingFields(Strict):
    """How printed numbers were rounded; by default each to as many decimals as it shows."""

    exact: bool = Field(default=False, description="The printed numbers are exact: integers computed from integers.")
    decimals: Annotated[int, Field(ge=0, le=400)] | None = Field(
        default=None, description="Rounded to so many decimals, of which trailing zeros may not be shown."
    )
    significant_digits: PositiveInt | None = Field(default=None, description="Rounded to so many significant digits.")
    digits: Digits | None = Field(
        default=None,
        description="How the last digit came about. rounded (if absent): to nearest. truncated: the digits behind it "
        "were cut off. {units, because}: it may be off by so many. `rounded` also says that a number with fewer digits "
        "than its neighbours was rounded to the digits that it shows.",
    )


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

    lowest: Annotated[Shape, Field(description="Lengths of the axes, at most four; 0 too.")]


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


KINDS = {
    "values": Values,
    "printed": PrintedInput,
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
}
ARRAY_KINDS = tuple(KINDS)
COMBINED_KINDS = ("concat", "sum", "product")
"""The kinds that are made of other arrays."""


def _kind(source: Any) -> str | None:
    if isinstance(source, BaseModel):
        return next(kind for kind, model in KINDS.items() if isinstance(source, model))
    if not isinstance(source, dict):
        return None
    kinds = [kind for kind in ARRAY_KINDS if kind in source]
    return kinds[0] if len(kinds) == 1 else None


Array = Annotated[
    Annotated[Values, Tag("values")]
    | Annotated[PrintedInput, Tag("printed")]
    | Annotated[Drawn, Tag("draw")]
    | Annotated[Constant, Tag("constant")]
    | Annotated[Lowest, Tag("lowest")]
    | Annotated[Identity, Tag("identity")]
    | Annotated[Ascending, Tag("ascending")]
    | Annotated[Geometric, Tag("geometric")]
    | Annotated[Reference, Tag("ref")]
    | Annotated[Concat, Tag("concat")]
    | Annotated[Sum, Tag("sum")]
    | Annotated[Product, Tag("product")],
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


def parts_of(source: Array) -> tuple[str, list[Array]]:
    """Return the field that holds the arrays of which one is made, and these arrays; none for the other kinds."""
    match source:
        case Concat():
            return "concat", [as_array(part) for part in source.concat]
        case Sum():
            return "sum", [as_array(part) for part in source.sum]
        case Product():
            return "product", [as_array(part) for part in source.product]
    return "", []
