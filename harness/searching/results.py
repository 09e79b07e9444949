"""The results of a search, which ``attncheck report`` reads like those of a check.

Every problem that was judged is a case, and so is every finding: of several problems that fail alike, the smallest
stands for all. The folder holds what this search asked; what earlier ones found is judged again, and stands there too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attncheck.asking.answer import Answer
from attncheck.common.errors import UsageError
from attncheck.common.wording import counted
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.executors.base import ResultRecorder
from attncheck.judging.xfail import ExpectedFailureRecord
from attncheck.reading.case import Case, case_record
from attncheck.results.coverage import RequestedRun
from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter
from attncheck.run import Settings, environment_record, summarise
from attncheck.searching.findings import STATE


@dataclass
class SearchResults:
    """Writes the answers of one search. ``alike`` counts the problems that a finding stands for."""

    path: Path
    environment: Mapping[str, Any]
    chosen: ImplementationSelection
    recorder: ResultRecorder
    alike: int = 0
    _records: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def begin(cls, path: Path, implementation: Implementation, dtypes: Sequence[str], limits: Limits) -> SearchResults:
        """Empty a folder of the results of an earlier search; its findings stay.

        Raises:
            UsageError: If it holds results of something else.
            OutputError: If it cannot be written.
        """
        if (path / "environment.json").exists() and not (path / STATE).exists():
            raise UsageError(f"{path} holds results that are not of a search; name another --output")
        chosen = ImplementationSelection((implementation,), by_name=(implementation.name,))
        settings = Settings(path, dtypes=tuple(dtypes), limits=limits, command=sys.orig_argv)
        environment = environment_record(chosen, settings)
        writer = ResultsWriter(path, beside=(STATE,))
        writer.write_json("environment.json", environment)
        return cls(path, environment, chosen, ResultRecorder(writer, ExpectedFailureRecord(())))

    def add(self, answer: Answer) -> None:
        """Write the rows of a problem."""
        self._add(answer.case, answer.rows)

    def add_finding(self, case: Case, answer: Answer) -> None:
        """Write the rows of a finding under the id of its file."""
        self._add(case, [replace(row, case=case.id) for row in answer.rows])

    def _add(self, case: Case, rows: Sequence[Row]) -> None:
        self._records[case.id] = case_record(case, {})
        self.recorder.evaluations += 1
        self.recorder.add_rows(rows)

    def write(self, asked: int, seed: int) -> None:
        """Write the cases, and what the search came to, of so many problems of a seed."""
        writer, failures = self.recorder.writer, self.recorder.failures
        like = f", of which {self.alike:,} fail like a finding and are left out" if self.alike else ""
        drawn = [f"{counted(asked, 'problem')} of seed {seed}{like}"]
        environment = {**self.environment, "asked": {**self.environment["asked"], "searched": drawn}}
        writer.flush()
        writer.write_cases(self._records.values())
        writer.write_json("environment.json", environment)
        request = RequestedRun.of(environment, len(self._records))
        summary = summarise(self.chosen, self.recorder, failures, request)
        names = [item.name for item in self.chosen.implementations]
        writer.write_json("summary.json", {**summary.record, "implementations": names, "faults": 0})
