"""The documents of commands that make no report, and which command has which document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attncheck.reports.machine.documents import Document, Outcome, PropertiesDocument, Record, Row


@dataclass(frozen=True, kw_only=True)
class CaseRecord(Record):
    """A case."""

    id: str
    """Its id."""
    name: str
    """Its name, a sentence."""
    file: str
    """Its file."""
    line: int
    """Its line there."""
    operation: str
    """The operation that it calls."""
    tags: Sequence[str]
    """What it probes."""
    inputs: Mapping[str, Sequence[int]]
    """The shapes of its inputs."""
    options: Mapping[str, Any]
    """Its options, as its file gives them."""
    dtypes: Sequence[str]
    """The dtypes that it declares."""


@dataclass(frozen=True, kw_only=True)
class Errors(Record):
    """The errors of a stage."""

    tier: str
    """within, warning (noisy), statistical or proven (wrong)."""
    ratio: float
    """The largest error over its bound."""
    element: Sequence[int] | None
    """The element where that is."""
    largest_z: float
    """The largest error in units of the error that noise would make."""
    mean_z: float
    """The root mean square of the errors in these units."""
    elements: int
    """How many elements were measured."""


@dataclass(frozen=True, kw_only=True)
class ConditionRecord(Record):
    """How large the error bounds of a stage are beside its numbers."""

    median: float
    """The bound in units of rounding the number itself, in the median."""
    largest: float
    """The largest."""
    ill: int
    """How many elements have a bound that is larger than the number."""
    elements: int
    """Of how many."""


@dataclass(frozen=True, kw_only=True)
class StageRecord(Record):
    """A stage that an implementation returned."""

    stage: str
    """Its name."""
    verdict: str
    """One word of docs/reference/verdicts.md."""
    is_noisy: bool
    """Whether errors are larger than those of known good implementations, and fail nothing."""
    accumulated: Errors | None
    """Against the exact answer."""
    introduced: Errors | None
    """Against the exact step from the implementation's own previous stage."""
    element: Sequence[int] | None
    """The element that is named."""
    computed: float | None
    """The number there."""
    computed_hex: str | None
    """The same, exactly."""
    exact: float | None
    """What is right there, rounded to float64."""
    exact_hex: str | None
    """The same, exactly."""
    error: float | None
    """The absolute difference of the two."""
    bound: float | None
    """The largest error that agrees there."""
    against: str | None
    """What computed is compared with: exact, or step."""
    condition: ConditionRecord | None
    """How well the inputs determine the stage."""
    judged_rows: int | None
    """How many query rows stand for all; null where all were judged."""
    query_rows: int | None
    """Of how many."""
    unjudged: int
    """Elements without an exact answer."""
    message: str
    """What is wrong, in words."""
    expected_failure: str
    """Why a failure here is expected; empty where it is not."""


@dataclass(frozen=True, kw_only=True)
class CallRecord(Record):
    """A call that was made before."""

    case: str
    """The case's id."""
    dtype: str
    """The dtype."""


@dataclass(frozen=True, kw_only=True)
class RepeatedRecord(Record):
    """A failure of a check that a fresh process does not show."""

    found: str
    """What the check found."""
    before: int
    """How many calls came before it in the check."""
    needed: Sequence[CallRecord] | None
    """The calls after which it happens again; null where it does not."""
    are_fewest: bool
    """Whether each of them is needed."""
    remark: str
    """What may have changed since."""


@dataclass(frozen=True, kw_only=True)
class ExplanationDocument(Document):
    """explain: one case on one implementation, stage by stage."""

    implementation: str
    """The implementation."""
    case: CaseRecord
    """The case."""
    dtype: str
    """The dtype of the inputs."""
    rounding_model: str
    """By which roundings it was judged."""
    verdict: str
    """The verdict of the first stage that is wrong, or of the call; agree where nothing is."""
    begins_at: str
    """The first stage that is wrong; empty where none is."""
    stages: Sequence[StageRecord]
    """Every stage that came back, in the order of computation."""
    failure: str
    """Why no stages came back."""
    outside: str
    """Why there is no exact answer."""
    expected_failures: Mapping[str, str]
    """By stage: why its failure is expected."""
    padded: str
    """What the call was padded with."""
    lacks: Sequence[str]
    """What the implementation would need to support the case."""
    repeated: RepeatedRecord | None
    """What became of a failure that a fresh process does not show."""


@dataclass(frozen=True, kw_only=True)
class ArrayRecord(Record):
    """An input or an exact stage."""

    name: str
    """Its name."""
    shape: Sequence[int]
    """Its shape."""
    values: Any
    """Its numbers as nested lists, row by row; null where there are more than 4,096."""


@dataclass(frozen=True, kw_only=True)
class NumberRecord(Record):
    """A number that a document prints, beside the exact one."""

    stage: str
    """The stage that it is of."""
    called: str
    """The document's own name for it."""
    basis: str
    """printed, known or exact."""
    element: str
    """The element."""
    printed: str
    """The number as it is printed."""
    exact: float | None
    """The exact one."""
    difference: float | None
    """How far off it is."""
    outcome: str
    """holds, does not hold, erratum or not compared."""


@dataclass(frozen=True, kw_only=True)
class CaseDocument(Document):
    """show: a case with its inputs, its exact stages, and its printed numbers."""

    case: CaseRecord
    """The case."""
    source: Mapping[str, Any]
    """Where it is from."""
    remarks: Sequence[str]
    """What the case and its source say besides."""
    dtype: str
    """The dtype of the inputs."""
    inputs: Sequence[ArrayRecord]
    """Its inputs, as stored in that dtype."""
    stages: Sequence[ArrayRecord]
    """Its exact stages, rounded to float64; NaN in query rows that were not evaluated."""
    numbers: Sequence[NumberRecord]
    """Its printed numbers."""
    outside: str
    """Why there is no exact answer, of all or of some elements."""
    sampled: str
    """How many query rows stand for all."""
    saved: Sequence[str]
    """The images that were written."""


@dataclass(frozen=True, kw_only=True)
class ScriptDocument(Document):
    """repro: a script that reproduces one case."""

    implementation: str
    """The implementation."""
    case: CaseRecord
    """The case, or what it was reduced to."""
    dtype: str
    """The dtype of the inputs."""
    script: str
    """The script."""
    command: str
    """The command that runs it: it ends with 1 where it finds an error, with 0 where it finds none."""
    tries: int
    """In how many tries the case was reduced; 0 where it was not."""


@dataclass(frozen=True, kw_only=True)
class ReductionDocument(Document):
    """reduce: the smallest case that fails alike."""

    implementation: str
    """The implementation."""
    case: str
    """The id of the case that was reduced."""
    dtype: str
    """The dtype of the inputs."""
    file: str | None
    """The file of the reduced case; null where nothing fails."""
    before: str
    """The shapes and options of the case."""
    reduced: str
    """Those of the reduced one."""
    tries: int
    """How many smaller cases were tried."""
    is_smallest: bool
    """Whether nothing smaller fails alike."""


@dataclass(frozen=True, kw_only=True)
class DifferenceRecord(Record):
    """What changed between two results. The columns of its rows are those of the files of `attncheck diff --output`."""

    before: str
    """The first results."""
    after: str
    """The second."""
    compared: int
    """Evaluations that both have."""
    only: Sequence[int]
    """Evaluations that only the first has, and only the second."""
    sentences: Sequence[str]
    """What changed, the worst first."""
    verdicts: Sequence[Row]
    """Verdicts that changed; change is worse, better or other."""
    errors: Sequence[Row]
    """Errors that grew or shrank by more than rounding explains."""
    expected_failures: Sequence[Row]
    """How often failures happened that are expected, where that changed."""
    cases: Sequence[Row]
    """Cases that only one of the two has, or that are not the same."""
    environments: Sequence[Row]
    """Versions, processors and settings that differ."""


@dataclass(frozen=True, kw_only=True)
class DifferenceDocument(DifferenceRecord, Document):
    """diff: what changed between two results. Its failures are the verdicts that got worse."""


@dataclass(frozen=True, kw_only=True)
class ReleaseRecord(Record):
    """What a release came to."""

    release: str
    """Its version."""
    right: int
    """Evaluations that agree."""
    failing: int
    """Evaluations that fail."""
    unsupported: int
    """Evaluations that it does not support."""
    worse: int | None
    """Verdicts that got worse with it; null of the first."""
    better: int | None
    """Verdicts that got better."""
    other: int | None
    """Verdicts that changed otherwise."""


@dataclass(frozen=True, kw_only=True)
class BisectionDocument(Document):
    """bisect: what several releases gave."""

    distribution: str
    """What was released."""
    releases: Sequence[ReleaseRecord]
    """What each release came to, the oldest first."""
    steps: Sequence[DifferenceRecord]
    """What changed from each to the next."""
    missed: Mapping[str, str]
    """Releases that could not be run, and why."""


@dataclass(frozen=True, kw_only=True)
class Meaning(Record):
    """What an implementation means by one question."""

    convention: str
    """The question."""
    asks: str
    """It in words."""
    kind: str
    """measured, open (none of the meanings, or several), unsupported or failed."""
    means: str
    """What it means; what came back, or why nothing did, where it is none."""
    cases_mean: str
    """What attncheck's cases mean."""
    departs: bool
    """Whether that is something else."""
    declared: str
    """What the implementation declares."""
    contradicts: bool
    """Whether it declares otherwise."""
    declaration: str
    """The value of empty_rows to declare; empty where nothing has to be declared."""
    is_exact: bool
    """Whether what came back is within the error bounds of what it means."""


@dataclass(frozen=True, kw_only=True)
class ConventionsDocument(Document):
    """conventions: what implementations mean."""

    implementations: Mapping[str, Sequence[Meaning]]
    """By implementation: an answer to each question."""


@dataclass(frozen=True, kw_only=True)
class FindingRecord(Record):
    """What a search keeps of a failure, besides its record among the failures, which are in the same order."""

    title: str
    """It in a line."""
    verdict: str
    """One word of docs/reference/verdicts.md."""
    stage: str
    """The first stage that is wrong; empty where nothing came back."""
    operation: str
    """The operation."""
    asked: Sequence[str]
    """The options and inputs that it takes."""
    lengths: Mapping[str, int]
    """The lengths of its axes."""
    shapes: Mapping[str, Sequence[int]]
    """The shapes of its inputs."""
    problem: int
    """The number of what was drawn."""
    tries: int
    """In how many tries it was reduced."""
    is_smallest: bool
    """Whether nothing smaller fails alike."""
    element: str
    """Where it is worst, in words."""
    file: str
    """Its case file, in the folder."""
    script: str
    """Its script, in the folder."""
    has_nonfinite: bool
    """Whether it takes NaN or infinity."""
    needs_calls: int
    """How many other calls came before, where a fresh process does not show it."""
    times: int
    """How many problems failed alike."""


@dataclass(frozen=True, kw_only=True)
class SearchDocument(Document):
    """search: what breaks an implementation."""

    implementation: str
    """The implementation."""
    seed: int
    """What the problems were drawn from."""
    problems: int
    """How many were asked."""
    unsupported: int
    """How many of them are unsupported."""
    interrupted: bool
    """Whether the search was ended by hand."""
    seconds: float
    """How long it took."""
    folder: str
    """The folder of what was found."""
    findings: Sequence[FindingRecord]
    """What was found."""
    known: Mapping[str, int]
    """Expected failures, by their reasons, with how many problems showed them."""
    no_longer_failing: Sequence[str]
    """Files of earlier findings that pass now."""


@dataclass(frozen=True, kw_only=True)
class MutantsDocument(Document):
    """mutants: what catches which fault of the catalogue."""

    score: float
    """The share of faults that are caught in every dtype and seed; NaN of none."""
    naming: Mapping[str, int]
    """How many faults are named rightly, wrongly and not."""
    survivors: Sequence[Row]
    """Faults that some seed does not catch."""
    caught_once: Sequence[Row]
    """Faults that only one case catches."""
    flagged: Sequence[Row]
    """Right variants that are flagged."""
    subjects: Sequence[Row]
    """Every fault and right variant, by dtype."""
    catches: Sequence[Row]
    """Which case catches which fault."""
    rules: Sequence[Row]
    """The same under other rules."""


@dataclass(frozen=True, kw_only=True)
class RuleRecord(Record):
    """A rule of the protocol."""

    rule: str
    """It in words."""
    outcome: str
    """ok, broken or not tried."""
    message: str
    """What is malformed, or why it was not tried."""


@dataclass(frozen=True, kw_only=True)
class ProtocolDocument(Document):
    """protocol: whether a program speaks the protocol."""

    program: str
    """The program."""
    rules: Sequence[RuleRecord]
    """Every rule that was tried."""


@dataclass(frozen=True, kw_only=True)
class ListDocument(Document):
    """list: what can be chosen."""

    listed: str
    """cases, backends, implementations or tags."""
    items: Sequence[Mapping[str, str | Sequence[str]]]
    """A record of each."""


@dataclass(frozen=True, kw_only=True)
class ExportDocument(Document):
    """vectors export: cases as files for other languages."""

    folder: str
    """The folder of the vectors."""
    written: int
    """How many cases were written, each in each dtype."""
    left_out: Mapping[str, int]
    """By reason: how many were not."""


@dataclass(frozen=True, kw_only=True)
class TestDataDocument(Document):
    """export and import: cases as test data of others, and back."""

    folder: str
    """The folder that was written."""
    written: int
    """How many tests, or cases, were written."""
    left_out: Mapping[str, Sequence[str]]
    """By reason: the cases, or tests, that were not."""


@dataclass(frozen=True, kw_only=True)
class PublishedDocument(Document):
    """publish and survey: what a repository keeps of its results."""

    path: str
    """What was written, or compared with the run with --check."""
    checked: bool
    """Whether it was compared with the run, and nothing written."""
    compared: int
    """How many verdicts, or implementations, the run has."""
    differences: Sequence[str]
    """Where the run differs, a line each."""


DOCUMENTS: Mapping[str, type[Document]] = {
    "check": Outcome,
    "report": Outcome,
    "diff": DifferenceDocument,
    "bisect": BisectionDocument,
    "publish": PublishedDocument,
    "survey": PublishedDocument,
    "explain": ExplanationDocument,
    "repro": ScriptDocument,
    "search": SearchDocument,
    "reduce": ReductionDocument,
    "conventions": ConventionsDocument,
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
