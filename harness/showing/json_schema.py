"""The documents of commands without a report, the document of each command, and the JSON Schema of all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from attncheck.reports.json_documents import (
    NOT_FINITE,
    SCHEMA_VERSION,
    BisectionDocument,
    DifferenceDocument,
    Document,
    ErrorDocument,
    Outcome,
    PropertiesDocument,
    Record,
    Row,
    record_fields,
)


class CaseRecord(Record):
    """A case."""

    id: Annotated[str, "Its id."]
    name: Annotated[str, "Its name, a sentence."]
    file: Annotated[str, "Its file."]
    line: Annotated[int, "Its line there."]
    operation: Annotated[str, "The operation that it calls."]
    tags: Annotated[Sequence[str], "What it probes."]
    inputs: Annotated[Mapping[str, Sequence[int]], "The shapes of its inputs."]
    options: Annotated[Mapping[str, Any], "Its options, as its file gives them."]
    dtypes: Annotated[Sequence[str], "The dtypes that it declares."]


class Errors(Record):
    """The errors of a stage."""

    tier: Annotated[str, "within, warning (noisy), statistical or proven (wrong)."]
    ratio: Annotated[float, "The largest error over its bound."]
    element: Annotated[Sequence[int] | None, "The element where that is.", "index"]
    largest_z: Annotated[float, "The largest error in units of the error that noise would make."]
    mean_z: Annotated[float, "The root mean square of the errors in these units."]
    elements: Annotated[int, "How many elements were measured."]


class ConditionRecord(Record):
    """Sizes of a stage's error bounds beside its numbers."""

    median: Annotated[float, "The bound in units of rounding the number itself, in the median."]
    largest: Annotated[float, "The largest."]
    ill: Annotated[int, "How many elements have a bound that is larger than the number."]
    elements: Annotated[int, "Of how many."]


class StageRecord(Record):
    """A stage that an implementation returned."""

    stage: Annotated[str, "Its name."]
    verdict: Annotated[str, "One word of docs/reference/verdicts.md."]
    is_noisy: Annotated[bool, "Whether errors are larger than those of known good implementations, and fail nothing."]
    accumulated: Annotated[Errors | None, "Against the exact answer."]
    introduced: Annotated[Errors | None, "Against the exact step from the implementation's own previous stage."]
    element: Annotated[Sequence[int] | None, "The element that is named.", "index"]
    computed: Annotated[float | None, "The number there.", "value"]
    computed_hex: Annotated[str | None, "The same, exactly."]
    exact: Annotated[float | None, "What is right there, rounded to float64."]
    exact_hex: Annotated[str | None, "The same, exactly."]
    error: Annotated[float | None, "The absolute difference of the two."]
    bound: Annotated[float | None, "The largest error that agrees there."]
    against: Annotated[str | None, "What computed is compared with: exact, or step."]
    condition: Annotated[ConditionRecord | None, "How well the inputs determine the stage."]
    judged_rows: Annotated[int | None, "How many query rows stand for all; null where all were judged."]
    query_rows: Annotated[int | None, "Of how many."]
    unjudged: Annotated[int, "Elements without an exact answer."]
    message: Annotated[str, "What is wrong, in words."]
    expected_failure: Annotated[str, "Why a failure here is expected; empty where it is not."]


class CallRecord(Record):
    """A call that was made before."""

    case: Annotated[str, "The case's id."]
    dtype: Annotated[str, "The dtype."]


class RepeatedRecord(Record):
    """A failure of a check that a fresh process does not show."""

    found: Annotated[str, "What the check found."]
    before: Annotated[int, "How many calls came before it in the check."]
    needed: Annotated[Sequence[CallRecord] | None, "The calls after which it happens again; null where it does not."]
    are_fewest: Annotated[bool, "Whether each of them is needed."]
    remark: Annotated[str, "What may have changed since."]


class ExplanationDocument(Document):
    """explain: one case on one implementation, stage by stage."""

    implementation: Annotated[str, "The implementation."]
    case: Annotated[CaseRecord, "The case."]
    dtype: Annotated[str, "The dtype of the inputs."]
    rounding_model: Annotated[str, "By which roundings it was judged."]
    verdict: Annotated[str, "The verdict of the first stage that is wrong, or of the call; agree where nothing is."]
    begins_at: Annotated[str, "The first stage that is wrong; empty where none is."]
    stages: Annotated[Sequence[StageRecord], "Every stage that came back, in the order of computation."]
    failure: Annotated[str, "Why no stages came back."]
    outside: Annotated[str, "Why there is no exact answer."]
    expected_failures: Annotated[Mapping[str, str], "By stage: why its failure is expected."]
    padded: Annotated[str, "What the call was padded with."]
    lacks: Annotated[Sequence[str], "What the implementation would need to support the case."]
    repeated: Annotated[RepeatedRecord | None, "What became of a failure that a fresh process does not show."]


class ArrayRecord(Record):
    """An input or an exact stage."""

    name: Annotated[str, "Its name."]
    shape: Annotated[Sequence[int], "Its shape."]
    values: Annotated[Any, "Its numbers as nested lists, row by row; null where there are more than 4,096."]


class NumberRecord(Record):
    """A number that a document prints, beside the exact one."""

    stage: Annotated[str, "The stage that it is of."]
    called: Annotated[str, "The document's own name for it."]
    basis: Annotated[str, "printed, known or exact."]
    element: Annotated[str, "The element."]
    printed: Annotated[str, "The number as it is printed."]
    exact: Annotated[float | None, "The exact one.", "value"]
    difference: Annotated[float | None, "How far off it is."]
    outcome: Annotated[str, "holds, does not hold, erratum or not compared."]


class CaseDocument(Document):
    """show: a case with its inputs, its exact stages, and its printed numbers."""

    case: Annotated[CaseRecord, "The case."]
    source: Annotated[Mapping[str, Any], "Where it is from."]
    remarks: Annotated[Sequence[str], "What the case and its source say besides."]
    dtype: Annotated[str, "The dtype of the inputs."]
    inputs: Annotated[Sequence[ArrayRecord], "Its inputs, as stored in that dtype."]
    stages: Annotated[Sequence[ArrayRecord], "Its exact stages, rounded to float64; NaN in rows not evaluated."]
    numbers: Annotated[Sequence[NumberRecord], "Its printed numbers."]
    outside: Annotated[str, "Why there is no exact answer, of all or of some elements."]
    sampled: Annotated[str, "How many query rows stand for all."]
    saved: Annotated[Sequence[str], "The images that were written."]


class ScriptDocument(Document):
    """repro: a script that reproduces one case."""

    implementation: Annotated[str, "The implementation."]
    case: Annotated[CaseRecord, "The case, or what it was reduced to."]
    dtype: Annotated[str, "The dtype of the inputs."]
    script: Annotated[str, "The script."]
    command: Annotated[str, "The command that runs it: it ends with 1 where it finds an error, else with 0."]
    tries: Annotated[int, "In how many tries the case was reduced; 0 where it was not."]


class DesignDocument(Document):
    """design: cases in which every few of what a function has meet."""

    file: Annotated[str, "The file that was written."]
    cases: Annotated[int, "How many cases it makes."]
    factors: Annotated[int, "How many factors it has."]
    strength: Annotated[int, "How many levels of them meet."]


class ReductionDocument(Document):
    """reduce: the smallest case that fails the same way."""

    implementation: Annotated[str, "The implementation.", "answer.implementation"]
    case: Annotated[str, "The id of the case that was reduced."]
    dtype: Annotated[str, "The dtype of the inputs.", "answer.dtype"]
    file: Annotated[str | None, "The file of the reduced case; null where nothing fails."]
    before: Annotated[str, "The shapes and options of the case."]
    reduced: Annotated[str, "Those of the reduced one."]
    tries: Annotated[int, "How many smaller cases were tried."]
    is_smallest: Annotated[bool, "Whether no smaller case fails the same way."]


class Meaning(Record):
    """The meaning that an implementation has in one question."""

    convention: Annotated[str, "The question.", "question.name"]
    asks: Annotated[str, "It in words.", "question.asks"]
    kind: Annotated[str, "measured, open (none of the meanings, or several), unsupported or failed."]
    means: Annotated[str, "What it means; what came back, or why nothing did, where it is none."]
    cases_mean: Annotated[str, "What attncheck's cases mean.", "question.expected"]
    departs: Annotated[bool, "Whether that is something else."]
    declared: Annotated[str, "What the implementation declares."]
    contradicts: Annotated[bool, "Whether it declares otherwise."]
    declares: Annotated[str, "The convention to declare; empty where nothing has to be declared."]
    declaration: Annotated[str, "Its value."]
    is_exact: Annotated[bool, "Whether what came back is within the error bounds of what it means."]


class ConventionsDocument(Document):
    """conventions: what implementations mean."""

    implementations: Annotated[Mapping[str, Sequence[Meaning]], "By implementation: an answer to each question."]


class ClassRecord(Record):
    """A rounding model, held against what an implementation computed."""

    name: Annotated[str, "The class."]
    used: Annotated[float, "The largest error over what it permits there."]
    wrong: Annotated[Sequence[str], "The cases that are wrong by it."]


class AccuracyDocument(Document):
    """accuracy: which rounding models hold for an implementation."""

    implementation: Annotated[str, "The implementation."]
    computed: Annotated[Mapping[str, int], "By dtype: how many cases it computed."]
    declared: Annotated[Mapping[str, str], "By dtype: the class that it is checked by."]
    wrong_anyhow: Annotated[Mapping[str, Sequence[str]], "By dtype: the cases that no class permits, left out."]
    classes: Annotated[Mapping[str, Sequence[ClassRecord]], "By dtype: each class, the tightest that holds first."]


class FindingRecord(Record):
    """A failure as a search keeps it, besides its record among the failures, which are in the same order."""

    title: Annotated[str, "It in a line."]
    verdict: Annotated[str, "One word of docs/reference/verdicts.md.", "symptom.verdict"]
    stage: Annotated[str, "The first stage that is wrong; empty where nothing came back.", "symptom.stage"]
    operation: Annotated[str, "The operation."]
    asked: Annotated[Sequence[str], "The options and inputs that it takes."]
    lengths: Annotated[Mapping[str, int], "The lengths of its axes."]
    shapes: Annotated[Mapping[str, Sequence[int]], "The shapes of its inputs."]
    problem: Annotated[int, "The number of what was drawn."]
    tries: Annotated[int, "In how many tries it was reduced."]
    is_smallest: Annotated[bool, "Whether no smaller case fails the same way."]
    element: Annotated[str, "Where it is worst, in words."]
    file: Annotated[str, "Its case file, in the folder."]
    script: Annotated[str, "Its script, in the folder."]
    has_nonfinite: Annotated[bool, "Whether it takes NaN or infinity."]
    needs_calls: Annotated[int, "How many other calls came before, where a fresh process does not show it."]
    times: Annotated[int, "How many problems failed alike."]


class SearchDocument(Document):
    """search: what breaks an implementation."""

    implementation: Annotated[str, "The implementation.", "subject.implementation.name"]
    seed: Annotated[int, "What the problems were drawn from.", "request.seed"]
    problems: Annotated[int, "How many were asked.", "problem_count"]
    unsupported: Annotated[int, "How many of them are unsupported.", "unsupported_count"]
    interrupted: Annotated[bool, "Whether the search was ended by hand.", "is_interrupted"]
    seconds: Annotated[float, "How long it took."]
    folder: Annotated[str, "The folder of what was found.", "folder.path"]
    findings: Annotated[Sequence[FindingRecord], "What was found.", "folder.findings"]
    known: Annotated[
        Mapping[str, int],
        "Expected failures, by their reasons, with how many problems showed them.",
        "expected_failure_counts",
    ]
    no_longer_failing: Annotated[Sequence[str], "Files of earlier findings that pass now."]


class GateStepRecord(Record):
    """A step of the gate that was run."""

    name: Annotated[str, "Its name."]
    outcome: Annotated[str, "What it showed, in words."]
    seconds: Annotated[float, "How long it took."]


class GateFindingRecord(Record):
    """Something that speaks against merging a kernel."""

    behaviour: Annotated[str, "The name of the behaviour, of docs/how-to/gate.md."]
    step: Annotated[str, "The step that saw it."]
    text: Annotated[str, "What was seen."]
    call: Annotated[str, "The operation, shapes, options and dtype of the call; empty if it is no single one."]
    count: Annotated[int, "In how many calls it was seen."]
    cause: Annotated[str, "The convention or mistake that gives these numbers; empty if none is known."]


class GateDocument(Document):
    """gate: whether a kernel may be merged."""

    implementation: Annotated[str, "The kernel."]
    seed: Annotated[int, "The seed of the problems."]
    budget: Annotated[float, "The seconds that it was allowed."]
    steps: Annotated[Sequence[GateStepRecord], "The steps that were run."]
    findings: Annotated[Sequence[GateFindingRecord], "What speaks against merging."]
    may_be_merged: Annotated[bool, "The answer."]
    not_judged: Annotated[Sequence[str], "The steps that judged too little for a decision."]
    delegations: Annotated[
        Mapping[str, int], "In how many of the observed calls another attention was called, by its name."
    ]
    observed_calls: Annotated[int, "How many calls were observed for that."]
    results: Annotated[str, "The folder of the standard cases' results."]


class MutantsDocument(Document):
    """mutants: what catches which fault of the catalogue."""

    score: Annotated[float, "The share of faults that are caught in every dtype and seed; NaN of none."]
    naming: Annotated[Mapping[str, int], "How many faults are named rightly, wrongly and not."]
    survivors: Annotated[Sequence[Row], "Faults that some seed does not catch."]
    caught_once: Annotated[Sequence[Row], "Faults that only one case catches."]
    flagged: Annotated[Sequence[Row], "Right variants that are flagged."]
    subjects: Annotated[Sequence[Row], "Every fault and right variant, by dtype."]
    catches: Annotated[Sequence[Row], "Which case catches which fault."]
    rules: Annotated[Sequence[Row], "The same under other rules."]


class RuleRecord(Record):
    """A rule of the protocol."""

    rule: Annotated[str, "It in words."]
    outcome: Annotated[str, "ok, broken or not tried."]
    message: Annotated[str, "What is malformed, or why it was not tried."]


class ProtocolDocument(Document):
    """protocol: whether a program speaks the protocol."""

    program: Annotated[str, "The program."]
    rules: Annotated[Sequence[RuleRecord], "Every rule that was tried."]


class ListDocument(Document):
    """list: what can be chosen."""

    listed: Annotated[str, "cases, backends, implementations or tags."]
    items: Annotated[Sequence[Mapping[str, str | Sequence[str]]], "A record of each."]


class ExportDocument(Document):
    """vectors export: cases as files for other languages."""

    folder: Annotated[str, "The folder of the vectors."]
    written: Annotated[int, "How many cases were written, each in each dtype."]
    left_out: Annotated[Mapping[str, int], "By reason: how many were not."]


class TestDataDocument(Document):
    """export and import: cases as test data of others, and back."""

    folder: Annotated[str, "The folder that was written."]
    written: Annotated[int, "How many tests, or cases, were written."]
    left_out: Annotated[Mapping[str, Sequence[str]], "By reason: the cases, or tests, that were not."]


class PublishedDocument(Document):
    """publish and survey: what a repository keeps of its results."""

    path: Annotated[str, "What was written, or compared with the run with --check."]
    checked: Annotated[bool, "Whether it was compared with the run, and nothing written."]
    compared: Annotated[int, "How many verdicts, or implementations, the run has."]
    differences: Annotated[Sequence[str], "Where the run differs, a line each."]


DOCUMENTS: Mapping[str, type[Document]] = {
    "check": Outcome,
    "report": Outcome,
    "diff": DifferenceDocument,
    "bisect": BisectionDocument,
    "publish": PublishedDocument,
    "survey": PublishedDocument,
    "gate": GateDocument,
    "explain": ExplanationDocument,
    "repro": ScriptDocument,
    "search": SearchDocument,
    "design": DesignDocument,
    "reduce": ReductionDocument,
    "conventions": ConventionsDocument,
    "accuracy": AccuracyDocument,
    "properties": PropertiesDocument,
    "protocol": ProtocolDocument,
    "vectors export": ExportDocument,
    "vectors verify": Outcome,
    "export": TestDataDocument,
    "import": TestDataDocument,
    "show": CaseDocument,
    "mutants": MutantsDocument,
    "list": ListDocument,
}
"""By command: what it prints with --json."""


_NUMBER_SCHEMA = {"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]}
_REFERENCE_PREFIX = "#/$defs/"


def results_schema() -> str:
    """Return the JSON Schema of all documents."""
    from pydantic import TypeAdapter

    kinds = (*DOCUMENTS.values(), ErrorDocument)
    _, schemas = TypeAdapter.json_schemas([(kind, "serialization", TypeAdapter(kind)) for kind in kinds])
    commands = [
        {
            "title": command,
            "properties": {"attncheck": {"properties": {"command": {"const": command}}}},
            **_schema_reference(kind),
        }
        for command, kind in DOCUMENTS.items()
    ]
    definitions = {name: _with_descriptions(name, fields) for name, fields in sorted(schemas["$defs"].items())}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"What attncheck prints with --json, version {SCHEMA_VERSION}",
        "oneOf": [*commands, _schema_reference(ErrorDocument)],
        "$defs": {**definitions, "Number": _NUMBER_SCHEMA},
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _schema_reference(kind: type[Document]) -> dict[str, str]:
    return {"$ref": f"{_REFERENCE_PREFIX}{kind.__name__}"}


def _with_descriptions(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Add the description of every field; numbers may be texts."""
    fields = {
        field: {"description": meaning, **_without_titles(schema["properties"][field])}
        for field, (_, meaning, *_) in record_fields(all_records()[name]).items()
    }
    if name == "Header":
        fields["schema"]["const"] = SCHEMA_VERSION
    said = {"description": docstring_summary(all_records()[name]), "properties": fields, "required": list(fields)}
    return {**schema, **said}


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _without_titles(item) for key, item in schema.items() if key not in ("title", "default")}
    return {"$ref": f"{_REFERENCE_PREFIX}Number"} if plain == {"type": "number"} else plain


@cache
def all_records() -> Mapping[str, type[Record]]:
    """Return every record by its name."""
    return {record.__name__: record for record in _all_subclasses(Record)}


def _all_subclasses(kind: type[Record]) -> Iterator[type[Record]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _all_subclasses(subclass)


def docstring_summary(kind: type[Record]) -> str:
    """Return the first paragraph of a record's docstring."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())
