"""The results of probes, which ``attncheck report`` and ``diff`` read like those of a check.

Each problem of the last search is a case, and so is each finding on disk, from any search. A problem that fails like a
finding, or as expected, gets no rows: no file contains it, so no command could show it. The results contain the number
of such problems.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attncheck.asking.answer import Answer
from attncheck.common.errors import AttncheckError
from attncheck.common.wording import count_noun
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.executors.base import ResultRecorder
from attncheck.judging.xfail import ExpectedFailureRecord, blank_row
from attncheck.reading.case import Case, case_record
from attncheck.results.coverage import RequestedRun
from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter
from attncheck.run import Settings, environment_record, summarise
from attncheck.searching.findings import SearchFolder, read_written_case
from attncheck.spec.verdicts import Verdict


@dataclass
class ProbeResults:
    """Writes the answers of implementations, case by case; ``environment`` is written first."""

    chosen: ImplementationSelection
    environment: Mapping[str, Any]
    recorder: ResultRecorder
    _cases: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, writer: ResultsWriter, chosen: ImplementationSelection, dtypes: Sequence[str], limits: Limits
    ) -> ProbeResults:
        """Write environment.json to the folder of a writer. Raises ``OutputError``."""
        settings = Settings(
            writer.directory, dtypes=tuple(dtypes), limits=limits, command=sys.orig_argv, keeps_results=False
        )
        environment = environment_record(chosen, settings)
        writer.write_json("environment.json", environment)
        return cls(chosen, environment, ResultRecorder(writer, ExpectedFailureRecord(())))

    def add(self, case: Case, rows: Sequence[Row]) -> None:
        """Write the rows of one evaluation."""
        self._cases[case.id] = case_record(case, {})
        self.recorder.evaluations += 1
        self.recorder.add_rows(rows)

    def write(self, searched: Sequence[str] = ()) -> None:
        """Write the cases and the summary. ``searched`` describes the problems that a search drew."""
        writer, names = self.recorder.writer, [item.name for item in self.chosen.implementations]
        picked = {"searched": list(searched)} if searched else {}
        environment = {**self.environment, "asked": {**self.environment["asked"], **picked}}
        writer.flush()
        writer.write_cases(self._cases.values())
        writer.write_json("environment.json", environment)
        request = RequestedRun.from_environment(environment, len(self._cases))
        summary = summarise(self.chosen, self.recorder, self.recorder.failures, request)
        writer.write_json("summary.json", {**summary.record, "implementations": names, "faults": 0})


@dataclass
class SearchResults:
    """Writes the answers of one search.

    Attributes:
        folder: The folder of the search.
        written: The answers.
        left_out: How many problems failed like a finding, or as was expected.
    """

    folder: SearchFolder
    written: ProbeResults
    left_out: int = 0
    _files: set[str] = field(default_factory=set)

    @classmethod
    def begin(
        cls, folder: SearchFolder, implementation: Implementation, dtypes: Sequence[str], limits: Limits
    ) -> SearchResults:
        """Remove the results of an earlier search from a folder, but not its findings.

        Raises:
            OutputError: If it contains results of another command, or cannot be written.
        """
        chosen = ImplementationSelection((implementation,), requested_by_name=(implementation.name,))
        writer = ResultsWriter(folder.path, is_search=True)
        folder.write()  # first, so that the folder is known as a search's however the search ends
        return cls(folder, ProbeResults.begin(writer, chosen, dtypes, limits))

    def add(self, answer: Answer) -> None:
        """Write the rows of a problem."""
        self.written.add(answer.case, answer.rows)

    def add_finding(self, path: Path, answer: Answer) -> None:
        """Write the rows of the case in a file of the folder."""
        case = read_written_case(path)
        self._files.add(path.name)
        self.written.add(case, [replace(row, case=case.id) for row in answer.rows])

    def write(self, asked: int, seed: int, *, is_interrupted: bool) -> None:
        """Write the cases, findings that were not run again, and the number of problems of the seed."""
        for finding in self.folder.findings:
            if finding.file in self._files:
                continue
            try:
                case = read_written_case(self.folder.path / finding.file)
            except AttncheckError:  # the user removed the file
                continue
            row = replace(
                blank_row(case, finding.dtype),
                implementation=self.folder.implementation,
                stage=finding.symptom.stage,
                verdict=Verdict(finding.symptom.verdict),
                message=f"{finding.element} (as it was found)",
            )
            self.written.add(case, [row])
        left_out = f", of which {self.left_out:,} fail like a finding or as expected" if self.left_out else ""
        interrupted = "; the search was interrupted" if is_interrupted else ""
        drawn = f"{count_noun(asked, 'problem')} of seed {seed}{left_out}{interrupted}"
        self.written.write([drawn])
