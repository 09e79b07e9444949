"""Documents that commands print with ``--json``, and how they are written.

A document is one JSON object. All of them begin with the fields of ``Document``; ``DOCUMENTS`` says which further ones
a command has. A field is annotated with its type, its description and, where the result that it is read off calls it
otherwise, its path there: documents, the JSON Schema and docs/reference/json.md derive from that. Raise ``SCHEMA`` when
a field is removed, renamed or means something else; a new one leaves it as it is.
Numbers that JSON has not are texts, and every text can be encoded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any, ClassVar, Self, dataclass_transform, get_args, get_origin, get_type_hints

from attncheck.common.errors import AttncheckError, CaseError, ExitCode

SCHEMA_VERSION = 1
Scalar = str | int | float | bool | None
Row = Mapping[str, Scalar]
"""A row of a frame, by column."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Record:
    """Anything inside of a document: fields that are all there, and no others. Every subclass is a frozen dataclass."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def derive(cls, source: object, /, **values: Any) -> Self:
        """Return a record of a result, an object or a mapping, from which each field is read at its path.

        Fields in ``values``, and fields with a default, are not read. Nested records are derived the same way.
        """
        stated = record_fields(cls)
        wanted = [entry.name for entry in fields(cls) if entry.default is MISSING and entry.name not in values]
        read = {name: _value_at_path(source, (*stated[name], name)[2]) for name in wanted}
        return cls(**{name: _convert(stated[name][0], value) for name, value in {**read, **values}.items()})


_FIELDS_BY_RECORD: dict[type[Record], Mapping[str, tuple[Any, ...]]] = {}


def record_fields(kind: type[Record]) -> Mapping[str, tuple[Any, ...]]:
    """Return the annotation of each field of a record: its type, its meaning, and its path if that differs."""
    if kind not in _FIELDS_BY_RECORD:
        hints = get_type_hints(kind, include_extras=True)
        _FIELDS_BY_RECORD[kind] = {entry.name: get_args(hints[entry.name]) for entry in fields(kind)}
    return _FIELDS_BY_RECORD[kind]


def _value_at_path(source: Any, path: str) -> Any:
    for name in path.split("."):
        source = source[name] if isinstance(source, Mapping) else getattr(source, name)
    return source


def _convert(kind: Any, value: Any) -> Any:
    """Convert a value to a type: nested results become the records that the type names."""
    if value is None or isinstance(value, Record) or not _has_records(kind):
        return value
    if get_origin(kind) is Mapping:
        return {name: _convert(get_args(kind)[1], item) for name, item in value.items()}
    if get_origin(kind) is Sequence:
        return [_convert(get_args(kind)[0], item) for item in value]
    if alternatives := [alternative for alternative in get_args(kind) if alternative is not NoneType]:
        return _convert(alternatives[0], value)
    return kind.derive(value)


def _has_records(kind: Any) -> bool:
    arguments = get_args(kind)
    return any(map(_has_records, arguments)) if arguments else isinstance(kind, type) and issubclass(kind, Record)


class Header(Record):
    """The program that printed a document."""

    version: Annotated[str, "The version of attncheck."]
    schema: Annotated[int, "The version of this schema: it changes when a field goes or means something else."]
    command: Annotated[str, "The command, such as check or vectors verify."]


class Failure(Record):
    """One case that fails on one implementation in one dtype. It has the same fields in every document."""

    implementation: Annotated[str, "The implementation; empty where a document prints wrong numbers."]
    environment: Annotated[str, "The label of the run; empty outside of runs."]
    case: Annotated[str, "The case's id, or the path of its file."]
    file: Annotated[str, "The file of the case, as reports write it."]
    line: Annotated[int | None, "The line of the case in that file."]
    dtype: Annotated[str, "The dtype of its inputs; empty where every dtype shows it."]
    verdict: Annotated[str, "One word of docs/reference/verdicts.md."]
    stage: Annotated[str, "The first stage that is wrong; empty where nothing came back."]
    element_stage: Annotated[str | None, "The stage of the element: the first wrong one that came back."]
    element: Annotated[Sequence[int] | None, "The index of the element that is worst; null where none is named."]
    computed: Annotated[float | None, "The implementation's number there."]
    exact: Annotated[
        float | None, "The right number there: the exact answer, or the exact step from the previous stage."
    ]
    error: Annotated[float | None, "The absolute difference of the two."]
    bound: Annotated[float | None, "The largest error that the implementation's roundings can make there."]
    ratio: Annotated[float | None, "The largest error of the stage over its bound; more than 1 proves an error."]
    against: Annotated[str | None, "The reference of computed: exact, or step."]
    diagnosis: Annotated[str | None, "The convention or mistake that gives these numbers: a name of docs/diagnoses.md."]
    message: Annotated[str, "The failure in a sentence."]
    shape: Annotated[str, "The lengths of the case's axes, such as B=1 H=4 Lq=3 Lk=5 D=8."]
    tags: Annotated[Sequence[str], "The features that the case tests: names of `attncheck list tags`."]
    rows: Annotated[int, "The number of failing comparisons of this case."]
    next: Annotated[Sequence[str], "Shell commands that say more of this failure; run them in the folder of the check."]


class Document(Record):
    """The fields of every document."""

    attncheck: Annotated[Header, "The program that printed this."]
    exit_code: Annotated[int, "The exit code: 0 agrees, 1 disagrees, 2 wrong input, 3 not run or too little judged."]
    answer: Annotated[str, "The outcome in one line."]
    failures: Annotated[Sequence[Failure], "The failures, the simplest case first, without expected failures."] = ()
    next: Annotated[Sequence[str], "The commands to run next; empty where nothing is left to do."] = ()
    notes: Annotated[Sequence[str], "Inputs that could not be used or run, a line each."] = ()


class Fault(Record):
    """One thing that is wrong with one case file."""

    file: Annotated[str, "The file."]
    line: Annotated[int | None, "The line in it."]
    case: Annotated[str | None, "The case's name."]
    field: Annotated[str | None, "The field of the case."]
    message: Annotated[str, "The mistake, and what was expected."]


class ErrorRecord(Record):
    """Why a command could not do what it was asked for."""

    kind: Annotated[str, "The kind of the error, such as UsageError or CaseError."]
    message: Annotated[str, "The mistake, what was expected, and the fix."]
    faults: Annotated[Sequence[Fault], "The mistakes in case files, if they are the reason."]


class ErrorDocument(Document):
    """The document of a command that ends before it has an outcome."""

    error: Annotated[ErrorRecord, "Why there is no outcome. No other document has this field."]


class CoverageRecord(Record):
    """The number of requested cases in which one implementation was judged, and the outcome of the others."""

    asked: Annotated[int, "The number of requested cases."]
    judged: Annotated[int, "In how many it was judged."]
    unsupported: Annotated[int, "The number of unsupported cases of operations that it offers.", "lacks.cases"]
    lacks: Annotated[
        Mapping[str, int], "The features that these need, each with its number of cases; a case may need several."
    ]
    not_offered: Annotated[
        int,
        "The number of cases of operations that it lacks, or that exist only in dtypes that it lacks.",
        "lacks.not_offered",
    ]
    covered: Annotated[
        int, "The number of cases that did not run because the standard cases cover them.", "covered_by_standard_cases"
    ]
    unverified: Annotated[int, "The number of cases without an exact answer."]
    stopped: Annotated[int, "The number of cases that raised, crashed or ran out of time."]
    not_run: Annotated[int, "The number of cases without a result."]
    padded: Annotated[int, "The number of cases that were padded, as the implementation requires."]


class InCommon(Record):
    """A feature that the failing cases of an implementation have in common."""

    environment: Annotated[str, "The label of the run.", "column.environment"]
    implementation: Annotated[str, "The implementation.", "column.implementation"]
    text: Annotated[str, "It in words."]
    where: Annotated[str, "The common feature."]
    failing: Annotated[int, "The number of failing cases with the feature."]
    of: Annotated[int, "The number of cases with the feature.", "cases_with_feature"]
    passing_elsewhere: Annotated[int, "The number of passing cases without the feature."]
    counted: Annotated[str, "The unit of the counts: cases, or evaluations."]


class DefectRecord(Record):
    """One thing that is wrong, in however many cases and dtypes it shows."""

    environment: Annotated[
        str, "The label of the run; empty where a document prints wrong numbers.", "first.environment"
    ]
    implementation: Annotated[str, "The implementation; empty where a document is wrong.", "first.implementation"]
    verdict: Annotated[str, "One word of docs/reference/verdicts.md: that of the simplest case.", "first.verdict"]
    stage: Annotated[str, "The first wrong stage of the simplest case; empty where nothing came back.", "first.stage"]
    diagnosis: Annotated[str | None, "The convention or mistake that gives these numbers: a name of docs/diagnoses.md."]
    text: Annotated[str, "The defect in a sentence; without a diagnosis, the message of the simplest case."]
    cases: Annotated[Sequence[str], "The ids of the cases that show it, the simplest first."]
    dtypes: Annotated[Sequence[str], "The dtypes that show it."]
    evaluations: Annotated[int, "The number of evaluations that show it: failures of one case in one dtype."]


class Stopped(Record):
    """The cases that a run left when it was stopped early."""

    failing: Annotated[int, "After how many failing cases it ended."]
    not_run: Annotated[int, "The number of cases that did not run."]
    in_part: Annotated[int, "The number of cases that ran in only some of their dtypes."]


class PropertyRecord(Record):
    """One way in which a property was asked of an implementation."""

    implementation: Annotated[str, "The implementation."]
    property_name: Annotated[str, "The property's name."]
    case: Annotated[str, "The case's id."]
    dtype: Annotated[str, "The dtype of the inputs."]
    variant: Annotated[str, "Which further calls were made."]
    outcome: Annotated[str, "bitwise, within bounds, nan, broken, failed, not judged, unsupported or xpass.", "verdict"]
    claim: Annotated[str, "The implementation's claim about the property; empty if there is none."]
    xfail: Annotated[bool, "True if the failure is expected."]
    stage: Annotated[str, "The stage of the element that is named."]
    index: Annotated[str, "The element that is named."]
    first: Annotated[float | None, "The first call's number there.", "value"]
    second: Annotated[float | None, "The further calls' number there.", "reference"]
    exact: Annotated[float | None, "The exact answer there."]
    first_bound: Annotated[float | None, "The largest permitted distance of the first from it."]
    second_bound: Annotated[float | None, "The largest permitted distance of the second from it."]
    differing: Annotated[int, "In how many elements some bits differ."]
    elements: Annotated[int, "The number of compared elements."]
    message: Annotated[str, "The outcome in a sentence."]
    fails: Annotated[bool, "True if it fails the run.", "fails_run"]
    next: Annotated[Sequence[str], "The command that asks again and explains."]


class Outcome(Document):
    """The outcome of cases: check, report and vectors verify."""

    judged: Annotated[str, "The coverage: judged cases of requested cases."]
    coverage: Annotated[Mapping[str, CoverageRecord], "By implementation, version and run: how much was judged."]
    too_few_judged: Annotated[Sequence[str], "The implementations that were judged in fewer cases than required."]
    numbers: Annotated[Mapping[str, int], "The number of printed numbers of each kind."]
    defects: Annotated[Sequence[DefectRecord], "The defects, once each; failures has every case and dtype."]
    sentences: Annotated[Sequence[str], "The facts behind the answer, in sentences."]
    stopped: Annotated[Mapping[str, Stopped], "By label: runs that were ended early."]
    in_common: Annotated[Sequence[InCommon], "The features that failing cases have in common."]
    verdicts: Annotated[Mapping[str, Mapping[str, str]], "By case and implementation: the worst verdict, in words."]
    properties: Annotated[Mapping[str, Mapping[str, str]], "By property and implementation: the outcome."]
    broken_properties: Annotated[Sequence[PropertyRecord], "Properties that do not hold."]
    report: Annotated[str | None, "The report as Markdown; null where none was written."]
    html: Annotated[str | None, "The report's first page."]
    results: Annotated[str | None, "The folder of the results; null of a report of several."]


class PropertiesDocument(Document):
    """properties: what holds between two calls."""

    properties: Annotated[Sequence[PropertyRecord], "A record for each way in which a property was asked."]


class DifferenceRecord(Record):
    """The changes between two results. The columns of the rows are those of the files of `attncheck diff --output`."""

    before: Annotated[str, "The first results."]
    after: Annotated[str, "The second."]
    compared: Annotated[int, "Evaluations that both have."]
    only: Annotated[Sequence[int], "Evaluations that only the first has, and only the second."]
    sentences: Annotated[Sequence[str], "The changes, the worst first."]
    verdicts: Annotated[Sequence[Row], "Verdicts that changed; change is worse, better or other."]
    errors: Annotated[Sequence[Row], "Errors that grew or shrank by more than rounding explains."]
    expected_failures: Annotated[Sequence[Row], "Expected failures that happened more or less often."]
    cases: Annotated[Sequence[Row], "Cases that only one of the two has, or that are not the same."]
    environments: Annotated[Sequence[Row], "Versions, processors and settings that differ."]


class DifferenceDocument(DifferenceRecord, Document):
    """diff: what changed between two results. Its failures are the verdicts that got worse."""


class ReleaseRecord(Record):
    """The outcome of a release."""

    release: Annotated[str, "Its version."]
    right: Annotated[int, "Evaluations that agree."]
    failing: Annotated[int, "Evaluations that fail."]
    unsupported: Annotated[int, "Evaluations that it does not support."]
    worse: Annotated[int | None, "Verdicts that got worse with it; null of the first."]
    better: Annotated[int | None, "Verdicts that got better."]
    other: Annotated[int | None, "Verdicts that changed otherwise."]


class BisectionDocument(Document):
    """bisect: what several releases gave."""

    distribution: Annotated[str, "The package that was released."]
    releases: Annotated[Sequence[ReleaseRecord], "The outcome of each release, the oldest first."]
    steps: Annotated[Sequence[DifferenceRecord], "The changes from each release to the next."]
    missed: Annotated[Mapping[str, str], "Releases that could not be run, and why."]


NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""Numbers that JSON cannot hold, as texts; float() of Python and Number() of JavaScript read them."""
_SURROGATE_PATTERN = re.compile("[\ud800-\udfff]")


def make_header(command: str) -> Header:
    """Return the header of a command's document."""
    from importlib.metadata import version

    return Header(version=version("attncheck"), schema=SCHEMA_VERSION, command=command)


def opening_fields(command: str, code: int, answer: str) -> Mapping[str, Any]:
    """Return the fields that every document begins with."""
    return {"attncheck": make_header(command), "exit_code": int(code), "answer": answer}


def document_to_json(document: Document) -> str:
    """Return a document as JSON, with a line break at its end."""
    # Half of a character, of a file's name that is not Unicode, can only be written as an escape.
    return (
        _SURROGATE_PATTERN.sub(lambda match: f"\\u{ord(match[0]):04x}", _json_text(to_plain_data(document), "\n"))
        + "\n"
    )


def _json_text(value: Any, line_break: str) -> str:
    """Write plain data, indented; a list of numbers and texts is on one line, so that a row is a line."""
    inner = f"{line_break}  "
    if isinstance(value, dict) and value:
        entries = (f"{_scalar_text(key)}: {_json_text(item, inner)}" for key, item in value.items())
        return f"{{{inner}{f',{inner}'.join(entries)}{line_break}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return f"[{inner}{f',{inner}'.join(_json_text(item, inner) for item in value)}{line_break}]"
    return f"[{', '.join(map(_scalar_text, value))}]" if isinstance(value, list) else _scalar_text(value)


def _scalar_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def to_plain_data(value: Any) -> Any:
    """Convert records, mappings and sequences to JSON's types.

    Example:
        >>> to_plain_data({"worst": float("nan"), "shape": (2, 3)})
        {'worst': 'NaN', 'shape': [2, 3]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_plain_data(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return NOT_FINITE[0 if math.isnan(value) else 1 if value > 0 else 2]
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, Sequence):
        return [to_plain_data(item) for item in value]
    return value


def document_of_error(command: str, error: AttncheckError) -> ErrorDocument:
    """Return the document of a command that ends with an error."""
    faults = [Fault.derive(fault) for fault in error.faults] if isinstance(error, CaseError) else []
    return make_error_document(command, type(error).__name__, str(error), error.exit_code, faults)


def make_error_document(
    command: str, kind: str, message: str, code: int = ExitCode.BAD_INPUT, faults: Sequence[Fault] = ()
) -> ErrorDocument:
    """Return the document of a command without an outcome, for an error of any kind."""
    error = ErrorRecord(kind=kind, message=message, faults=faults)
    return ErrorDocument(**opening_fields(command, code, message.split("\n", 1)[0]), error=error)
