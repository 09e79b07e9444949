"""The case file format, as one pydantic model; its JSON Schema is what ``attncheck schema`` prints.

This is the file's form alone; the kinds of arrays stand in ``array_kinds.py``. What needs several fields at once
(shapes, names, draws) is checked by ``loader.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from attncheck.harness.reading.array_kinds import Array, Input, Name, PrintedRows, RoundingFields, Strict
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
Sentence = Annotated[str, Field(min_length=3, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Text = Annotated[str, Field(min_length=1, max_length=4000)]


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
    expect: list[Expectation] = Field(default=[])
    tags: list[str] = Field(default=[])
    notes: list[Text] = Field(default=[])
    allow_nonfinite: bool = Field(default=False, description="NaN and infinity are part of what the case probes.")
    generic: bool | None = Field(
        default=None,
        description="Whether the inputs are continuous and unstructured, so that rounding errors behave like noise and "
        "statistical tests apply. If absent: true where every number of the computation is drawn by rand, randn or "
        "runif, at most multiplied, referred to, transposed or picked by distinct rows; masks, and biases of 0 and "
        "-inf, do not count.",
    )


class Defaults(Strict):
    """What the cases of a file share unless they say otherwise."""

    random: Random | None = None
    options: Options = Options()
    dtypes: list[Dtype] = Field(default=list(DTYPES), min_length=1)
    tags: list[str] = Field(default=[])


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
