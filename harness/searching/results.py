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
from attncheck.judging.xfail import ExpectedFailureRecord, make_blank_row
from attncheck.reading.case import Case, make_case_record
from attncheck.results.coverage import RequestedRun
from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter
from attncheck.run import Settings, environment_record, summarise
from attncheck.searching.findings import SearchFolder, read_written_case
from attncheck.spec.verdicts import Verdict


@dataclass
class ProbeResults:
    """Writes the answers of implementations, case by case; ``environment`` is written first."""

    selection: ImplementationSelection
    environment: Mapping[str, Any]
    recorder: ResultRecorder
    _cases: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def start(
        cls, writer: ResultsWriter, selection: ImplementationSelection, dtypes: Sequence[str], limits: Limits
    ) -> ProbeResults:
        """Write environment.json to the folder of a writer. Raises ``OutputError``."""
        settings = Settings(
            writer.directory, dtypes=tuple(dtypes), limits=limits, command=sys.orig_argv, keeps_results=False
        )
        environment = environment_record(selection, settings)
        writer.write_json("environment.json", environment)
        return cls(selection, environment, ResultRecorder(writer, ExpectedFailureRecord(())))

    def add_evaluation(self, case: Case, rows: Sequence[Row]) -> None:
        """Write the rows of one evaluation."""
        self._cases[case.id] = make_case_record(case, {})
        self.recorder.evaluations += 1
        self.recorder.add_rows(rows)

    def write(self, search_descriptions: Sequence[str] = ()) -> None:
        """Write the cases and the summary. ``search_descriptions`` describe the problems that a search drew."""
        writer, names = self.recorder.writer, [item.name for item in self.selection.implementations]
        picked = {"searched": list(search_descriptions)} if search_descriptions else {}
        environment = {**self.environment, "asked": {**self.environment["asked"], **picked}}
        writer.flush()
        writer.write_cases(self._cases.values())
        writer.write_json("environment.json", environment)
        request = RequestedRun.from_environment(environment, len(self._cases))
        summary = summarise(self.selection, self.recorder, self.recorder.failures, request)
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
    probe_results: ProbeResults
    left_out_problems: int = 0
    _written_files: set[str] = field(default_factory=set)

    @classmethod
    def start(
        cls, folder: SearchFolder, implementation: Implementation, dtypes: Sequence[str], limits: Limits
    ) -> SearchResults:
        """Remove the results of an earlier search from a folder, but not its findings.

        Raises:
            OutputError: If it contains results of another command, or cannot be written.
        """
        chosen = ImplementationSelection((implementation,), requested_by_name=(implementation.name,))
        writer = ResultsWriter(folder.path, is_search=True)
        folder.write()  # first, so that the folder is known as a search's however the search ends
        return cls(folder, ProbeResults.start(writer, chosen, dtypes, limits))

    def add_answer(self, answer: Answer) -> None:
        """Write the rows of a problem."""
        self.probe_results.add_evaluation(answer.case, answer.rows)

    def add_finding(self, path: Path, answer: Answer) -> None:
        """Write the rows of the case in a file of the folder."""
        case = read_written_case(path)
        self._written_files.add(path.name)
        self.probe_results.add_evaluation(case, [replace(row, case=case.id) for row in answer.rows])

    def write(self, problem_count: int, seed: int, *, is_interrupted: bool) -> None:
        """Write the cases, findings that were not run again, and the number of problems of the seed."""
        for finding in self.folder.findings:
            if finding.file in self._written_files:
                continue
            try:
                case = read_written_case(self.folder.path / finding.file)
            except AttncheckError:  # the user removed the file
                continue
            row = replace(
                make_blank_row(case, finding.dtype),
                implementation=self.folder.implementation,
                stage=finding.symptom.stage,
                verdict=Verdict(finding.symptom.verdict),
                message=f"{finding.element} (as it was found)",
            )
            self.probe_results.add_evaluation(case, [row])
        left_out = (
            f", of which {self.left_out_problems:,} fail like a finding or as expected"
            if self.left_out_problems
            else ""
        )
        interrupted = "; the search was interrupted" if is_interrupted else ""
        drawn = f"{count_noun(problem_count, 'problem')} of seed {seed}{left_out}{interrupted}"
        self.probe_results.write([drawn])
