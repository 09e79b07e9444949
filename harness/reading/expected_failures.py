"""Expected failures: where an implementation is known to be wrong, or to mean something else, and why.

One YAML list per backend, bundled beside the backends. An entry names implementations, cases, dtypes and stages by
globs, the verdict that they get, and the reason; what it names is then reported and does not fail a run. A wrong number
may be expected up to a certain size alone (``max_ratio``), so that a larger error still fails. Every entry must still
happen: one that no longer does is a failure of its own, ``xpass`` (``judging/xfail.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from attncheck.backends.contract import EmptyRows
from attncheck.common.errors import CaseError, Diagnostic
from attncheck.common.processors import processor_flags
from attncheck.common.wording import ONE_LINE_PATTERN
from attncheck.reading.array_kinds import StrictModel
from attncheck.reading.diagnostics import (
    diagnostics_of_validation_error,
    diagnostics_of_yaml_fault,
    hide_linked_files,
    make_diagnostic_at,
)
from attncheck.reading.model import Dtype, PropertyName, StageName
from attncheck.reading.yaml_reader import FieldPath, YamlFault, read_yaml
from attncheck.spec.verdicts import Verdict

EXPECTED_FAILURES_FOLDER = "expected_failures"
"""Of the package ``attncheck.backends``: <backend>.yaml."""

_EXPECTABLE_VERDICTS = tuple(
    verdict.value
    for verdict in Verdict
    if verdict.exit_code and verdict not in (Verdict.MISPRINT, Verdict.XPASS, Verdict.UNTRIED)
)
BROKEN_PROPERTY_VERDICT = "broken"
"""The outcome of a property that does not hold."""
if TYPE_CHECKING:
    # A type checker cannot follow a Literal that is made from a table.
    VerdictName = str
else:
    VerdictName = Literal[*_EXPECTABLE_VERDICTS, BROKEN_PROPERTY_VERDICT]
Glob = Annotated[str, Field(min_length=1, max_length=200, pattern=ONE_LINE_PATTERN)]
_LIST_DESCRIPTION = "a list of expected failures, [] for none"
_THREAD_PATTERN = r"^([\w.-]+/[\w.-]+#[0-9]+|https://[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+)$"


class ExpectedFailureEntry(StrictModel):
    """One entry of a list of expected failures."""

    implementation: Glob = Field(description="A glob over implementations, such as torch.sdpa or torch.*.")
    cases: Annotated[list[Glob], Field(min_length=1)] = Field(description="Globs over the ids of cases that fail.")
    dtypes: list[Dtype] | None = Field(default=None, min_length=1, description="All dtypes if absent.")
    stages: list[StageName] | None = Field(default=None, min_length=1, description="All stages if absent.")
    property: PropertyName | None = Field(
        default=None,
        description="With the verdict broken: the property that does not hold. The entry says nothing else.",
    )
    verdict: VerdictName = Field(description="The verdict that they get; broken is that of a property.")
    max_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="With the verdict numeric: how many times what rounding allows an error may be; any if absent.",
    )
    empty_rows: EmptyRows | None = Field(
        default=None,
        description="With the verdict semantic: only that a query without a key gives this, and nothing else.",
    )
    processor: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^(not )?[a-z0-9_]+$")] | None = Field(
        default=None,
        description="Only on processors with this flag of /proc/cpuinfo, such as amx_bf16, or without it: "
        "not amx_bf16; anywhere if absent.",
    )
    reason: Annotated[str, Field(min_length=10, max_length=500, pattern=ONE_LINE_PATTERN)] = Field(
        description="What the implementation does there and why, in a sentence."
    )
    decided: Literal["semantic", "numeric", "crash"] = Field(
        description="What it is, on reflection: another convention, a wrong number, or a failure to answer."
    )
    thread: Annotated[str, Field(max_length=2000, pattern=_THREAD_PATTERN)] | None = Field(
        default=None, description="Where it is discussed: owner/name#number, or a URL."
    )


@dataclass(frozen=True)
class ExpectedFailure:
    """An entry with its file and line."""

    entry: ExpectedFailureEntry
    file: str
    line: int

    @property
    def location(self) -> str:
        """The file and line, for people."""
        return f"{self.file}:{self.line}"

    @property
    def is_for_other_processors(self) -> bool:
        """Return whether it speaks of processors that this machine is known not to have."""
        flags, processor = processor_flags(), self.entry.processor
        if processor is None or flags is None:
            return False
        return (processor.removeprefix("not ") in flags) is processor.startswith("not ")

    @property
    def must_still_happen(self) -> bool:
        """Return whether it is outdated where it does not happen: not where nobody says what processors can."""
        return self.entry.processor is None or processor_flags() is not None

    def applies_to_evaluation(self, implementation: str, case: str, dtype: str, name: str | None = None) -> bool:
        """Return whether it speaks of an implementation in a case and dtype, on this machine.

        It is asked of the property of this ``name``; without one, of the implementation's own call.
        """
        is_of_it = self.entry.property == name and not self.is_for_other_processors
        return is_of_it and self.matches_evaluation(implementation, case, dtype)

    def applies_to_implementation(self, implementation: str) -> bool:
        """Return whether it speaks of an implementation in any case."""
        return fnmatchcase(implementation, self.entry.implementation)

    def matches_evaluation(self, implementation: str, case: str, dtype: str) -> bool:
        """Return whether it speaks of an implementation in a case and dtype, on whatever machine."""
        entry = self.entry
        return (
            self.applies_to_implementation(implementation)
            and any(fnmatchcase(case, glob) for glob in entry.cases)
            and (entry.dtypes is None or dtype in entry.dtypes)
        )

    def matches_verdict(self, stage: str, verdict: str, empty_rows: str | None = None) -> bool:
        """Return whether it names a verdict on a stage; a whole evaluation that failed has the stage ''.

        ``empty_rows`` is what rows without a key give, where that is all that differs.
        """
        entry = self.entry
        if entry.empty_rows is not None and empty_rows != entry.empty_rows:
            return False
        return verdict == entry.verdict and (entry.stages is None or not stage or stage in entry.stages)

    def excuses_error(self, stage: str, verdict: str, ratio: float = math.inf, empty_rows: str | None = None) -> bool:
        """Return whether it explains a verdict, and the error is no larger than it says.

        ``ratio`` is the error over what rounding allows. One below 1 is an error that statistics alone find too large:
        whatever excuses errors that are proved to be wrong excuses that too.
        """
        limit = self.entry.max_ratio
        return self.matches_verdict(stage, verdict, empty_rows) and (limit is None or ratio < 1 or ratio <= limit)


def load_expected_failures(paths: Iterable[Path]) -> tuple[ExpectedFailure, ...]:
    """Read lists of expected failures. Raises ``CaseError`` with every fault of every file."""
    failures: list[ExpectedFailure] = []
    faults: list[Diagnostic] = []
    for path in paths:
        try:
            with hide_linked_files(path, str(path)):
                failures += _load_list(path, str(path))
        except CaseError as error:
            faults += error.faults
    if faults:
        raise CaseError(faults)
    return tuple(failures)


def find_recorded_empty_rows(
    expected_failures: Iterable[ExpectedFailure], implementation: str, case: str, dtype: str
) -> tuple[str, ...]:
    """Return the recorded conventions of an implementation for queries without a key, each once."""
    concerned = (failure for failure in expected_failures if failure.applies_to_evaluation(implementation, case, dtype))
    conventions = (failure.entry.empty_rows for failure in concerned)
    return tuple(dict.fromkeys(value for value in conventions if value is not None))


def load_bundled_expected_failures(backends: Sequence[str]) -> tuple[ExpectedFailure, ...]:
    """Return the expected failures of these backends, each once; a backend without a list has none."""
    root = Path(str(files("attncheck.backends"))) / EXPECTED_FAILURES_FOLDER
    names = [name for name in dict.fromkeys(backends) if (root / f"{name}.yaml").is_file()]
    lists = (_load_list(root / f"{name}.yaml", f"backends/{EXPECTED_FAILURES_FOLDER}/{name}.yaml") for name in names)
    return tuple(failure for failures in lists for failure in failures)


def _load_list(path: Path, name: str) -> list[ExpectedFailure]:
    try:
        document = read_yaml(path, _LIST_DESCRIPTION)
    except YamlFault as fault:
        raise CaseError(diagnostics_of_yaml_fault(fault, name)) from None
    if not isinstance(document.data, list):
        raise CaseError([Diagnostic(name, f"expected {_LIST_DESCRIPTION}", 1)])
    try:
        entries = TypeAdapter(list[ExpectedFailureEntry]).validate_python(document.data)
    except ValidationError as error:
        raise CaseError(
            [_rename_fields_of_entry(fault) for fault in diagnostics_of_validation_error(error, name, document)]
        ) from None
    if faults := list(_find_misplaced_fields(entries)):
        raise CaseError([make_diagnostic_at(path, message, name, document) for path, message in faults])
    return [ExpectedFailure(entry, name, document.lines.get((index,), 1)) for index, entry in enumerate(entries)]


_VERDICT_OF_FIELD = {
    "max_ratio": (Verdict.NUMERIC, "has a size to limit"),
    "empty_rows": (Verdict.SEMANTIC, "has a convention"),
    "property": (BROKEN_PROPERTY_VERDICT, "is of a property"),
}
"""Fields that apply to only one verdict, and the reason for the message."""


def _find_misplaced_fields(entries: Sequence[ExpectedFailureEntry]) -> Iterator[tuple[FieldPath, str]]:
    """Yield faults of fields without meaning for the entry's verdict, and of broken entries without a property."""
    for field, (verdict, has) in _VERDICT_OF_FIELD.items():
        for index, entry in enumerate(entries):
            if getattr(entry, field) is not None and entry.verdict != verdict:
                only = f"only a {verdict} failure {has}, and this one is {entry.verdict}"
                yield (index, field), f"{only}; leave the field out, or say verdict: {verdict}"
    for index, entry in enumerate(entries):
        if entry.verdict == BROKEN_PROPERTY_VERDICT and entry.property is None:
            yield (index, "verdict"), "verdict broken is that of a property; name it with `property`"


def _rename_fields_of_entry(fault: Diagnostic) -> Diagnostic:
    """Name the fields of an entry instead of those of a case."""
    if not fault.message.startswith("unknown field"):
        return fault
    return replace(fault, message=f"unknown field; expected one of {', '.join(ExpectedFailureEntry.model_fields)}")
