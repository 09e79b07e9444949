"""The case file format, as one pydantic model; its JSON Schema is what ``attncheck schema`` prints.

This is the file's form alone. What needs several fields at once (shapes, names, draws) is checked by ``case_loader``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PositiveInt, Tag

from attncheck.harness.vocabulary import DTYPES, OPERATIONS, STAGES, ScoreKind

if TYPE_CHECKING:
    # A type checker cannot follow a Literal that is made from a table.
    OperationName = str
    StageName = str
    Dtype = str
else:
    OperationName = Literal[tuple(OPERATIONS)]
    StageName = Literal[STAGES]
    Dtype = Literal[DTYPES]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=60)]
Sentence = Annotated[str, Field(min_length=3, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Text = Annotated[str, Field(min_length=1, max_length=4000)]
PrintedRows = str | list[Any]
"""Rows of printed numbers as text, or nested lists of such texts for ranks above two."""
Shape = Annotated[list[PositiveInt], Field(max_length=4, description="Lengths of the axes; at most four.")]


class Strict(BaseModel):
    """A mapping with exactly the fields that are listed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Source(Strict):
    """Where the cases of a file come from."""

    kind: Literal["document", "paper", "derivation"] = Field(
        description="document: transcribed with its printed numbers; paper: a definition or property stated there; "
        "derivation: worked out by hand, each case says how."
    )
    title: Text
    author: Text | None = None
    section: Text | None = None
    notes: list[Text] = Field(default=[], description="What a reader of the report must know about the source.")


class Random(Strict):
    """The generator of a case's drawn arrays; all of them are drawn from this one seed, in their order in the file."""

    generator: Literal["numpy-legacy", "r", "torch"]
    seed: Annotated[int, Field(ge=0, lt=2**32)]


class Arrangement(Strict):
    """Changes to an array after it is read, drawn or built, applied in this order."""

    rows: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, min_length=1, description="Take these rows (first axis), as an embedding look-up does."
    )
    transpose: bool = Field(default=False, description="Swap the last two axes.")


class RoundingFields(Strict):
    """How printed numbers were rounded; by default each to as many decimals as it shows."""

    exact: bool = Field(default=False, description="The printed numbers are exact: integers computed from integers.")
    decimals: Annotated[int, Field(ge=0, le=400)] | None = Field(
        default=None, description="Rounded to so many decimals, of which trailing zeros may not be shown."
    )
    significant_digits: PositiveInt | None = Field(default=None, description="Rounded to so many significant digits.")


class Values(Arrangement):
    """Numbers given in full."""

    values: Any = Field(description="A number, or nested lists of numbers or booleans; .inf and -.inf are allowed.")


class PrintedInput(Arrangement, RoundingFields):
    """Numbers that a document prints, as text; what rounding took from them is allowed for in everything computed."""

    printed: PrintedRows


class Drawn(Arrangement):
    """Random numbers from the case's generator."""

    draw: Literal["rand", "randn", "randint", "runif"]
    shape: Shape
    low: float | int | None = Field(default=None, description="Lower end: of randint (included) or runif.")
    high: float | int | None = Field(default=None, description="Upper end: of randint (excluded) or runif.")
    floor: bool = Field(default=False, description="Round each number down.")
    times: float | int | None = Field(default=None, description="Multiply each number by this.")


class Constant(Arrangement):
    """The same number everywhere."""

    constant: float | int
    shape: Shape


class Identity(Arrangement):
    """The identity matrix."""

    identity: PositiveInt


class Ascending(Arrangement):
    """start, start + step, ... in row order."""

    ascending: Annotated[list[float | int], Field(min_length=2, max_length=2, description="[start, step]")]
    shape: Shape


class Reference(Arrangement):
    """An array of the file or the case, by its name."""

    ref: Name


_ARRAY_KINDS = {
    "values": Values,
    "printed": PrintedInput,
    "draw": Drawn,
    "constant": Constant,
    "identity": Identity,
    "ascending": Ascending,
    "ref": Reference,
}
ARRAY_KINDS = tuple(_ARRAY_KINDS)


def _array_kind(source: Any) -> str | None:
    if isinstance(source, BaseModel):
        return next(kind for kind, model in _ARRAY_KINDS.items() if isinstance(source, model))
    if not isinstance(source, dict):
        return None
    kinds = [kind for kind in ARRAY_KINDS if kind in source]
    return kinds[0] if len(kinds) == 1 else None


Array = Annotated[
    Annotated[Values, Tag("values")]
    | Annotated[PrintedInput, Tag("printed")]
    | Annotated[Drawn, Tag("draw")]
    | Annotated[Constant, Tag("constant")]
    | Annotated[Identity, Tag("identity")]
    | Annotated[Ascending, Tag("ascending")]
    | Annotated[Reference, Tag("ref")],
    Discriminator(
        _array_kind,
        custom_error_type="array_kind",
        custom_error_message=f"expected a mapping with exactly one of {', '.join(ARRAY_KINDS)}",
    ),
]
Input = Array | Name


class Options(Strict):
    """Everything that changes what an operation computes; which options apply depends on the operation."""

    score: ScoreKind | None = Field(
        default=None, description="Kind of score (operation scoring); scaled_dot if absent."
    )
    scale: float | int | None = Field(
        default=None, description="Factor on the raw scores; 1 for dot, otherwise 1/sqrt(D), if absent."
    )
    is_causal: bool | None = Field(default=None, description="Query i attends to key j only if j <= i.")
    heads: PositiveInt | None = Field(default=None, description="Number of heads (multi_head_attention).")


class Expectation(RoundingFields):
    """What is known of one stage or derived quantity; exactly one of printed, known and unprinted."""

    stage: StageName | None = None
    quantity: Name | None = Field(default=None, description="A derived quantity, such as row_maxima.")
    of: StageName | None = Field(default=None, description="The stage that the quantity is derived from.")
    called: Text | None = Field(default=None, description="The source's own name for it.")
    printed: PrintedRows | None = Field(default=None, description="Numbers as the document prints them.")
    known: PrintedRows | None = Field(default=None, description="Numbers known by derivation; say how in because.")
    unprinted: bool = Field(default=False, description="The document computes this and prints no number.")
    because: Text | None = Field(default=None, description="Where known numbers come from.")
    transpose: bool = Field(default=False, description="The numbers are laid out with the last two axes swapped.")
    erratum: Text | None = Field(
        default=None, description="The printed numbers are wrong here; what they really are. They must then not hold."
    )
    note: Text | None = None


class CaseEntry(Strict):
    """One case of a file."""

    name: Sentence
    operation: OperationName | None = None
    random: Random | None = None
    arrays: dict[Name, Array] = Field(default={}, description="Named arrays, for inputs to refer to.")
    inputs: dict[Name, Input]
    options: Options = Options()
    dtypes: list[Dtype] | None = Field(default=None, min_length=1)
    expect: list[Expectation] = []
    tags: list[str] = []
    notes: list[Text] = []
    allow_nonfinite: bool = Field(default=False, description="NaN and infinity are part of what the case probes.")


class Defaults(Strict):
    """What the cases of a file share unless they say otherwise."""

    random: Random | None = None
    options: Options = Options()
    dtypes: Annotated[list[Dtype], Field(min_length=1)] = list(DTYPES)
    tags: list[str] = []


class CaseFile(Strict):
    """A file of attention cases."""

    title: Sentence
    source: Source
    operation: OperationName
    defaults: Defaults = Defaults()
    arrays: dict[Name, Array] = Field(default={}, description="Named arrays that every case of the file may refer to.")
    cases: Annotated[list[CaseEntry], Field(min_length=1)]


class TagEntry(Strict):
    """One tag: what it probes, and the defect that it answers."""

    probes: Text
    defect: Text


class TagFile(Strict):
    """``tags.yaml``: every tag of a folder of cases, defined once."""

    tags: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], TagEntry]
