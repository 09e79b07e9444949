"""The documents of all other commands, and which command has which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attncheck.reports.machine.case_documents import (
    CaseDocument,
    ExplanationDocument,
    ReductionDocument,
    ScriptDocument,
)
from attncheck.reports.machine.documents import Document, Outcome, PropertyRecord, Record, Row


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
class PropertiesDocument(Document):
    """properties: what holds between two calls."""

    properties: Sequence[PropertyRecord]
    """A record for each way in which a property was asked."""


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
