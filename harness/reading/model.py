"""The case file format, as one pydantic model; its JSON Schema is what ``attncheck schema`` prints.

This is the file's form alone; the kinds of arrays stand in ``array_kinds.py``. What needs several fields at once
(shapes, names, draws) is checked by ``loader.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, create_model

from attncheck import spec
from attncheck.backends.contract import EmptyRows, Window
from attncheck.common.wording import LINES_PATTERN, ONE_LINE_PATTERN, WEB_ADDRESS
from attncheck.reading.array_kinds import (
    Array,
    Digits,
    Input,
    Name,
    PrintedRows,
    RoundingFields,
    StoredNumbers,
    StrictModel,
)
from attncheck.spec import DEFAULT_DTYPES, DTYPES, MEMORY_LAYOUTS, OPERATIONS, PROPERTIES, STAGES, OptionSpec

if TYPE_CHECKING:
    # A type checker cannot follow a Literal that is made from a table.
    OperationName = str
    StageName = str
    Dtype = str
    PropertyName = str
    MemoryLayout = str
else:
    OperationName = Literal[tuple(OPERATIONS)]
    StageName = Literal[STAGES]
    Dtype = Literal[DTYPES]
    PropertyName = Literal[tuple(PROPERTIES)]
    MemoryLayout = Literal[tuple(MEMORY_LAYOUTS)]
TAG_FILE = "tags.yaml"
_MAX_LIST_LENGTH = 200
"""Of lists that every case of a file carries; none that people write comes near it."""
_MAX_OPTION_POSITION = 2**31
Sentence = Annotated[str, Field(min_length=1, max_length=200, pattern=ONE_LINE_PATTERN)]
CaseId = Annotated[str, Field(max_length=120, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
LongText = Annotated[str, Field(min_length=1, max_length=4000, pattern=LINES_PATTERN)]
WebAddress = Annotated[str, Field(max_length=2000, pattern=WEB_ADDRESS)]
Bound = Annotated[int, Field(ge=0, le=_MAX_OPTION_POSITION)]


ForEach = dict[str, Any] | list[Any]
"""Read by ``for_each.py``: cases are written out before they are validated, and have none any more."""
Design = dict[str, Any]
"""Read there, too."""


class Source(StrictModel):
    """The origin of the cases of a file."""

    kind: Literal["document", "paper", "derivation"] = Field(
        description="document: transcribed with its printed numbers; paper: a definition or property stated there; "
        "derivation: worked out by hand, each case says how."
    )
    title: LongText = Field(description="Title of the document or paper, or how the cases were worked out.")
    author: LongText | None = Field(default=None, description="Who wrote it.")
    section: LongText | None = Field(default=None, description="Where in it: a section, page or equation.")
    url: WebAddress | None = Field(default=None, description="Its address, which begins with http:// or https://.")
    computed_in: Dtype | None = Field(
        default=None,
        description="The precision in which the printed numbers were computed. They are then allowed what rounding in "
        "it can move them by; without it they are the exact answer, rounded once when it was printed.",
    )
    notes: list[LongText] = Field(
        default=[], max_length=_MAX_LIST_LENGTH, description="What a reader of the report must know about the source."
    )


class Random(StrictModel):
    """The generator of a case's drawn arrays; all of them are drawn from this one seed, in their order in the file."""

    generator: Literal["numpy-legacy", "r", "torch"] = Field(
        description="numpy-legacy: after `numpy.random.seed`; r: after `set.seed`; torch: on the CPU, after "
        "`torch.manual_seed`. None of them has to be installed."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(description="What the generator is seeded with.")


def _option_type(spec: OptionSpec) -> Any:
    """Return the type of an option's value in a file."""
    if spec.type is float:
        return PositiveFloat | PositiveInt if spec.must_be_positive else float | int
    if spec.type is int:
        return PositiveInt
    return Annotated[list[Bound | None], Field(min_length=2, max_length=2)] if spec.type == Window else spec.type


if TYPE_CHECKING:

    class Options(StrictModel):
        """The options of the specification, as a file gives them."""

        empty_rows: EmptyRows | None = None
        mask_fill: float | None = None
else:
    Options = create_model(
        "Options",
        __base__=StrictModel,
        __doc__=(spec.Options.__doc__ or "").partition("\n")[0],
        **{
            name: (_option_type(option) | None, Field(default=None, description=option.description))
            for name, option in spec.OPTIONS.items()
        },
    )


class Expectation(RoundingFields):
    """The numbers known of one stage or derived quantity; exactly one of printed, known and unprinted."""

    stage: StageName | None = Field(default=None, description="The stage that the numbers are of.")
    quantity: Name | None = Field(default=None, description="A derived quantity, such as row_maxima.")
    of: StageName | None = Field(default=None, description="The stage that the quantity is derived from.")
    called: LongText | None = Field(default=None, description="The source's own name for it.")
    printed: PrintedRows | StoredNumbers | None = Field(
        default=None, description="Numbers as the document prints them, or {file, name} of an array that it gives."
    )
    known: PrintedRows | None = Field(default=None, description="Numbers known by derivation; say how in because.")
    unprinted: bool = Field(default=False, description="The document computes this and prints no number.")
    because: LongText | None = Field(default=None, description="Where known numbers come from.")
    transpose: bool = Field(default=False, description="The numbers are laid out with the last two axes swapped.")
    erratum: LongText | None = Field(
        default=None, description="The printed numbers are wrong here; what they really are. They must then not hold."
    )
    note: LongText | None = Field(
        default=None, description="What a reader of the report must know about these numbers."
    )


class CaseEntry(StrictModel):
    """One case of a file."""

    name: Sentence = Field(description="A sentence that says what holds; the case's id is made of it without an `id`.")
    id: CaseId | None = Field(
        default=None,
        description="What the case is called in lists, results and diffs, after the file's name and a slash: words of "
        "small letters and digits with hyphens between them. It stays when the name is reworded.",
    )
    for_each: ForEach | None = Field(
        default=None, description="Names and their values; the case is repeated for each of them."
    )
    design: Design | None = Field(
        default=None,
        description="Factors, each with its levels; the case is repeated so that every two or three levels meet.",
    )
    operation: OperationName | None = Field(default=None, description="As the file's if absent.")
    random: Random | None = Field(default=None, description="As the file's default if absent.")
    arrays: dict[Name, Array] = Field(
        default={}, max_length=_MAX_LIST_LENGTH, description="Named arrays, for inputs to refer to."
    )
    inputs: dict[Name, Input] = Field(description="The operation's inputs: an array each, or the name of one.")
    options: Options = Field(default=Options(), description="Options of the operation, over the file's defaults.")
    dtypes: list[Dtype] | None = Field(
        default=None,
        min_length=1,
        description="What the case is computed in; float64 and float32 if neither the case nor the defaults say. "
        "Numbers can be expected in these two, and in the one that `computed_in` of the case names.",
    )
    computed_in: Dtype | None = Field(
        default=None,
        description="The precision in which the case's printed numbers were computed; as the source's if absent.",
    )
    digits: Digits | None = Field(
        default=None,
        description="How the last digits of the case's printed numbers came about, where `expect` does not say.",
    )
    storage: Dtype | None = Field(
        default=None, description="The inputs are rounded to this dtype before they are widened to each of `dtypes`."
    )
    layout: Literal["split", "merged"] = Field(
        default="split",
        description="split: inputs have an axis of heads. merged: query, key, value, past and grad_output of attention "
        "come as (B, L, heads*width), and are handed over as views of that.",
    )
    memory_layout: dict[Name, MemoryLayout] = Field(
        default={},
        description="How an input lies in memory where the framework knows strides: "
        f"{'; '.join(f'{name} ({layout.description})' for name, layout in MEMORY_LAYOUTS.items())}.",
    )
    stages: list[StageName] | None = Field(
        default=None, min_length=1, description="Only these stages are judged; all that are returned if absent."
    )
    expect: list[Expectation] = Field(default=[], description="What is known of stages or derived quantities.")
    properties: list[PropertyName] = Field(
        default=[],
        max_length=_MAX_LIST_LENGTH,
        description="What must hold between this call and others that are made of it. A case that has any is judged by "
        "these alone, by `attncheck properties` and `attncheck check --properties`.",
    )
    tags: list[str] = Field(
        default=[], max_length=_MAX_LIST_LENGTH, description="Tags that `tags.yaml` in the same folder defines."
    )
    notes: list[LongText] = Field(
        default=[], max_length=_MAX_LIST_LENGTH, description="What a reader of the report must know about the case."
    )
    allow_nonfinite: bool = Field(default=False, description="NaN and infinity are part of what the case probes.")
    supports_statistics: bool | None = Field(
        default=None,
        description="Whether the inputs are continuous and unstructured, so that rounding errors behave like noise and "
        "statistical tests apply. If absent: true where every number of the computation is drawn by rand, randn or "
        "runif, at most multiplied, referred to, transposed or picked by distinct rows, and there is no `storage`, no "
        "`mask_fill` and no scale of 0; "
        "masks, lengths, and biases of 0 and -inf, do not count.",
    )


class Defaults(StrictModel):
    """The fields that the cases of a file share unless they say otherwise."""

    random: Random | None = Field(default=None, description="The generator of cases that give none.")
    options: Options = Field(default=Options(), description="Options of every case that they fit.")
    dtypes: list[Dtype] = Field(
        default=list(DEFAULT_DTYPES),
        min_length=1,
        max_length=_MAX_LIST_LENGTH,
        description="The dtypes of cases that give none.",
    )
    tags: list[str] = Field(default=[], max_length=_MAX_LIST_LENGTH, description="Tags of every case.")


class CaseFile(StrictModel):
    """A file of attention cases."""

    title: Sentence = Field(description="What the cases are about.")
    source: Source = Field(description="Where they come from.")
    operation: OperationName = Field(description="What is computed, unless a case says otherwise.")
    defaults: Defaults = Field(default=Defaults(), description="What the cases share.")
    arrays: dict[Name, Array] = Field(
        default={}, max_length=_MAX_LIST_LENGTH, description="Named arrays that every case of the file may refer to."
    )
    for_each: ForEach | None = Field(
        default=None, description="Names and their values; a case that has `{each: name}` is repeated for each of them."
    )
    cases: Annotated[list[CaseEntry], Field(min_length=1, description="The cases.")]


class TagEntry(StrictModel):
    """One tag: what it probes, and the bug that it is meant to catch."""

    probes: LongText = Field(description="What cases with the tag probe.")
    defect: LongText = Field(description="The defect that they answer.")


class TagFile(StrictModel):
    """``tags.yaml``: every tag of a folder of cases, defined once."""

    tags: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], TagEntry] = Field(description="Every tag by name.")
