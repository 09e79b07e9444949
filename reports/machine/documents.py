"""Documents that commands print with ``--json``, and how they are written.

A document is one JSON object. All of them begin with the fields of ``Document``; ``DOCUMENTS`` says which further ones
a command has. The JSON Schema and the reference derive from them: a field's docstring is its description in the schema
and in docs/reference/json.md. Raise ``SCHEMA`` when a field is removed, renamed or means something else; a new one
leaves it as it is. Numbers that JSON has not are texts, and every text can be encoded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self

from attncheck.errors import AttncheckError, CaseError, ExitCode

SCHEMA = 1
Scalar = str | int | float | bool | None
Row = Mapping[str, Scalar]
"""A row of a frame, by column."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Anything inside of a document: fields that are all there, and no others."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    @classmethod
    def from_object(cls, source: object, **given: Any) -> Self:
        """Return a record of what a source has under the record's own names, besides what is given."""
        own = (each.name for each in fields(cls) if each.name not in given)
        return cls(**{name: getattr(source, name) for name in own}, **given)


@dataclass(frozen=True, kw_only=True)
class Header(Record):
    """What printed a document."""

    version: str
    """The version of attncheck."""
    schema: int
    """The version of this schema. It changes when a field is removed, renamed or means something else."""
    command: str
    """The command, such as check or vectors verify."""


@dataclass(frozen=True, kw_only=True)
class Failure(Record):
    """One case that fails on one implementation in one dtype. It has the same fields in every document."""

    implementation: str
    """The implementation; empty where a document prints wrong numbers, whoever computes them."""
    environment: str
    """The label of the run; empty outside of runs."""
    case: str
    """The case's id, or the path of its file."""
    file: str
    """The file of the case, as reports write it."""
    line: int | None
    """The line of the case in that file."""
    dtype: str
    """The dtype of its inputs; empty where every dtype shows it."""
    verdict: str
    """One word of docs/reference/verdicts.md."""
    stage: str
    """The first stage that is wrong; empty where nothing came back."""
    element_stage: str | None
    """The stage of the element: the first wrong one, or the first after it that the implementation returns."""
    element: Sequence[int] | None
    """The index of the element that is worst; null where none is named."""
    computed: float | None
    """What the implementation gave there."""
    exact: float | None
    """What is right there: the exact answer, or the exact step from the implementation's own previous stage."""
    error: float | None
    """The absolute difference of the two."""
    bound: float | None
    """The largest error that the implementation's roundings can make there."""
    ratio: float | None
    """The largest error of the stage over its bound; more than 1 proves an error."""
    against: str | None
    """What computed is compared with: exact, or step."""
    diagnosis: str | None
    """The convention or mistake that gives these numbers: a name of docs/diagnoses.md."""
    message: str
    """What is wrong, in words."""
    shape: str
    """The lengths of the case's axes, such as B=1 H=4 Lq=3 Lk=5 D=8."""
    tags: Sequence[str]
    """What the case probes: names of `attncheck list tags`."""
    rows: int
    """How many comparisons of this case fail."""
    next: Sequence[str]
    """Commands for a shell that say more of this failure; run them in the folder of the check."""


@dataclass(frozen=True, kw_only=True)
class Document(Record):
    """What every document has."""

    attncheck: Header
    """What printed this."""
    exit_code: int
    """The exit code of the command: 0 agrees, 1 disagrees, 2 wrong input, 3 not run or too little judged."""
    answer: str
    """The outcome in one line."""
    failures: Sequence[Failure] = ()
    """What fails, the simplest case first; expected failures are none."""
    next: Sequence[str] = ()
    """The commands to run next; empty where nothing is left to do."""
    notes: Sequence[str] = ()
    """What could not be used or run, a line each."""


@dataclass(frozen=True, kw_only=True)
class Fault(Record):
    """One thing that is wrong with one case file."""

    file: str
    """The file."""
    line: int | None
    """The line in it."""
    case: str | None
    """The case's name."""
    field: str | None
    """The field of the case."""
    message: str
    """What is wrong, and what was expected."""


@dataclass(frozen=True, kw_only=True)
class ErrorRecord(Record):
    """Why a command could not do what it was asked for."""

    kind: str
    """The kind of the error, such as UsageError or CaseError."""
    message: str
    """What was wrong, what was expected, and what to do."""
    faults: Sequence[Fault]
    """What is wrong with case files, where that is why."""


@dataclass(frozen=True, kw_only=True)
class ErrorDocument(Document):
    """What any command prints that ends before it has an outcome."""

    error: ErrorRecord
    """Why there is no outcome. No other document has this field."""


@dataclass(frozen=True, kw_only=True)
class CoverageRecord(Record):
    """How many of the cases that were asked one implementation was judged in, and what became of the others."""

    asked: int
    """How many cases were asked."""
    judged: int
    """In how many it was judged."""
    unsupported: int
    """How many are unsupported, of operations that it offers."""
    lacks: Mapping[str, int]
    """What these need, each lack with how many cases have it; a case may have several."""
    not_offered: int
    """How many are of operations that it does not offer."""
    covered: int
    """How many were not asked, because the standard cases cover them."""
    unverified: int
    """How many have no exact answer."""
    stopped: int
    """How many raised, crashed or ran out of time."""
    not_run: int
    """How many have no result."""
    padded: int
    """How many were padded, as the implementation requires."""


@dataclass(frozen=True, kw_only=True)
class InCommon(Record):
    """What the failing cases of an implementation have in common."""

    environment: str
    """The label of the run."""
    implementation: str
    """The implementation."""
    text: str
    """It in words."""
    where: str
    """What they have in common."""
    failing: int
    """How many fail that have it."""
    of: int
    """How many have it."""
    passing_elsewhere: int
    """How many pass that have it not."""
    counted: str
    """What is counted: cases, or evaluations."""


@dataclass(frozen=True, kw_only=True)
class DefectRecord(Record):
    """One thing that is wrong, in however many cases and dtypes it shows."""

    environment: str
    """The label of the run; empty where a document prints wrong numbers."""
    implementation: str
    """The implementation; empty where a document prints wrong numbers."""
    verdict: str
    """One word of docs/reference/verdicts.md: that of the simplest case."""
    stage: str
    """The first stage that is wrong in the simplest case; empty where nothing came back."""
    diagnosis: str | None
    """The convention or mistake that gives these numbers: a name of docs/diagnoses.md."""
    text: str
    """What is wrong, in a sentence; without a diagnosis, what happened in the simplest case."""
    cases: Sequence[str]
    """The ids of the cases that show it, the simplest first."""
    dtypes: Sequence[str]
    """The dtypes that show it."""
    evaluations: int
    """How many evaluations show it: failures of one case in one dtype."""


@dataclass(frozen=True, kw_only=True)
class Stopped(Record):
    """What a run that was ended early has left."""

    failing: int
    """After how many failing cases it ended."""
    not_run: int
    """How many cases did not run."""
    in_part: int
    """How many cases ran in only some of their dtypes."""


@dataclass(frozen=True, kw_only=True)
class PropertyRecord(Record):
    """One way in which a property was asked of an implementation."""

    implementation: str
    """The implementation."""
    property_name: str
    """The property's name."""
    case: str
    """The case's id."""
    dtype: str
    """The dtype of the inputs."""
    variant: str
    """Which further calls were made."""
    outcome: str
    """bitwise, within bounds, nan, broken, failed, not judged, unsupported or xpass."""
    claim: str
    """What the implementation claims of the property; empty where it claims nothing."""
    xfail: bool
    """Whether a failure is expected."""
    stage: str
    """The stage of the element that is named."""
    index: str
    """The element that is named."""
    first: float | None
    """What the first call gave there."""
    second: float | None
    """What the further calls gave there."""
    exact: float | None
    """The exact answer there."""
    first_bound: float | None
    """How far the first may be from it."""
    second_bound: float | None
    """How far the second may be from it."""
    differing: int
    """In how many elements some bits differ."""
    elements: int
    """How many elements were compared."""
    message: str
    """What happened, in a sentence."""
    fails: bool
    """Whether it fails the run."""
    next: Sequence[str]
    """The command that asks again and explains."""


@dataclass(frozen=True, kw_only=True)
class Outcome(Document):
    """What cases came to: check, report and vectors verify."""

    judged: str
    """How much was judged of what was asked."""
    coverage: Mapping[str, CoverageRecord]
    """By implementation, with its version and the label of its run: how much was judged."""
    too_few_judged: Sequence[str]
    """Where less was judged than was required."""
    numbers: Mapping[str, int]
    """How many printed numbers there are of each kind."""
    defects: Sequence[DefectRecord]
    """What is wrong, once each; failures has every case and dtype of it."""
    sentences: Sequence[str]
    """What the answer rests on, in sentences."""
    stopped: Mapping[str, Stopped]
    """By label: runs that were ended early."""
    in_common: Sequence[InCommon]
    """What failing cases have in common."""
    verdicts: Mapping[str, Mapping[str, str]]
    """By case and implementation: the worst verdict, in words."""
    properties: Mapping[str, Mapping[str, str]]
    """By property and implementation: what it comes to; empty where properties were not asked."""
    broken_properties: Sequence[PropertyRecord]
    """Properties that do not hold."""
    report: str | None
    """The report as Markdown; null where none was written."""
    html: str | None
    """The report's first page."""
    results: str | None
    """The folder of the results; null of a report of several."""


@dataclass(frozen=True, kw_only=True)
class PropertiesDocument(Document):
    """properties: what holds between two calls."""

    properties: Sequence[PropertyRecord]
    """A record for each way in which a property was asked."""


NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""Numbers that JSON cannot hold, as texts; float() of Python and Number() of JavaScript read them."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def header(command: str) -> Header:
    """Say what prints a document."""
    from importlib.metadata import version

    return Header(version=version("attncheck"), schema=SCHEMA, command=command)


def document_text(document: Document) -> str:
    """Return a document as JSON, with a line break at its end."""
    # Half of a character, of a file's name that is no Unicode: nothing but an escape can hold it.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", _written(plain(document), "\n")) + "\n"


def _written(value: Any, line_break: str) -> str:
    """Write plain data, indented; numbers and texts of one list stand on one line, so that a row is a line."""
    inner = f"{line_break}  "
    if isinstance(value, dict) and value:
        entries = (f"{_scalar(key)}: {_written(each, inner)}" for key, each in value.items())
        return f"{{{inner}{f',{inner}'.join(entries)}{line_break}}}"
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return f"[{inner}{f',{inner}'.join(_written(each, inner) for each in value)}{line_break}]"
    return f"[{', '.join(map(_scalar, value))}]" if isinstance(value, list) else _scalar(value)


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Return records, mappings and sequences as JSON has them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, float):
        return plain_number(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    return value


def plain_number(value: float) -> float | str:
    """Return a number, as a text where it is not finite."""
    if math.isfinite(value):
        return value
    return NOT_FINITE[0] if math.isnan(value) else NOT_FINITE[1 if value > 0 else 2]


def error_document(command: str, error: AttncheckError) -> ErrorDocument:
    """Return what a command prints that ends with an error."""
    faults = [Fault.from_object(each) for each in error.faults] if isinstance(error, CaseError) else []
    return error_of(command, type(error).__name__, str(error), error.exit_code, faults)


def error_of(
    command: str, kind: str, message: str, code: int = ExitCode.BAD_INPUT, faults: Sequence[Fault] = ()
) -> ErrorDocument:
    """Return what a command prints that has no outcome, of an error of any kind."""
    return ErrorDocument(
        attncheck=header(command),
        exit_code=int(code),
        answer=message.split("\n", 1)[0],
        error=ErrorRecord(kind=kind, message=message, faults=faults),
    )
