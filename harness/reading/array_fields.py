"""What kinds of arrays in a case file have in common: names, shapes, changes, and how numbers were rounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, NonNegativeInt, PositiveInt, Tag

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=60)]
PrintedRows = str | list[Any]
"""Rows of printed numbers as text, or nested lists of such texts for ranks above two."""
Shape = Annotated[list[NonNegativeInt], Field(max_length=5, description="Lengths of the axes, at most five; 0 too.")]


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
