"""Results of what implementations mean by each question, which ``attncheck report`` and ``diff`` read.

Each question is a case, and its file lies beside the results. An implementation agrees if it means what attncheck's
cases mean. That it means something else fails only if it declares otherwise. What the cases never ask is unverified.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attncheck.asking.conventions import QUESTIONS, ConventionQuestion, MeasuredConvention
from attncheck.common.wording import slug
from attncheck.execution.call import Limits
from attncheck.execution.implementations import ImplementationSelection
from attncheck.executors.base import ResultRecorder
from attncheck.judging.xfail import ExpectedFailureRecord, blank_row
from attncheck.reading.case import Case, case_record
from attncheck.reading.problem import Problem
from attncheck.results.coverage import RequestedRun
from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter
from attncheck.run import Settings, environment_record, summarise
from attncheck.searching.findings import write_case
from attncheck.spec.verdicts import Verdict


def write_conventions(
    writer: ResultsWriter,
    chosen: ImplementationSelection,
    measured: Mapping[str, Sequence[MeasuredConvention]],
    dtypes: Mapping[str, str],
    limits: Limits,
) -> None:
    """Write what implementations mean.

    Args:
        writer: The writer of the folder, made before anything was asked, so that no answer is lost to a bad folder.
        chosen: The implementations, at least one.
        measured: Their answers, by name.
        dtypes: The dtype in which each was asked, by name.
        limits: The limits of their processes.

    Raises:
        OutputError: If the folder cannot be written.
    """
    output, own = writer.directory, tuple(dict.fromkeys(dtypes.values()))
    settings = Settings(output, dtypes=own, limits=limits, command=sys.orig_argv, keeps_results=False)
    environment = environment_record(chosen, settings)
    writer.write_json("environment.json", environment)
    cases = {question.name: _case_of(question, output, own[0]) for question in QUESTIONS}
    recorder = ResultRecorder(writer, ExpectedFailureRecord(()))
    for name, answers in measured.items():
        recorder.add_rows(_rows(name, answers, cases, dtypes[name]))
        recorder.evaluations += len(answers)
    writer.flush()
    writer.write_cases(case_record(case, {}) for case in cases.values())
    summary = summarise(chosen, recorder, recorder.failures, RequestedRun.of(environment, len(cases)))
    names = [item.name for item in chosen.implementations]
    writer.write_json("summary.json", {**summary.record, "implementations": names, "faults": 0})


def _case_of(question: ConventionQuestion, folder: Path, dtype: str) -> Case:
    """Write the call of a question as a case file, and return the case."""
    call = question.call
    problem = Problem(call.operation, call.options, call.inputs, dtype, stages=(question.stage,))
    return write_case(
        problem, folder / f"{slug(question.name)}.yaml", f"{question.name}: {question.asks}", "conventions"
    )


def _rows(name: str, answers: Sequence[MeasuredConvention], cases: Mapping[str, Case], dtype: str) -> Iterator[Row]:
    for answer in answers:
        question = answer.question
        blank = replace(blank_row(cases[question.name], dtype), implementation=name, stage=question.stage)
        if answer.kind in ("unsupported", "failed"):
            verdict = Verdict.UNSUPPORTED if answer.kind == "unsupported" else Verdict.ERROR
            yield replace(blank, stage="", verdict=verdict, message=answer.means)
        elif answer.contradicts:
            message = f"it declares: {answer.declared}; it means: {answer.means}"
            yield replace(blank, verdict=Verdict.SEMANTIC, message=message)
        elif not question.expected:
            yield replace(blank, verdict=Verdict.UNVERIFIED, message=f"it means: {answer.means}")
        elif answer.departs:
            message = f"it means: {answer.means}; attncheck's cases mean: {question.expected}"
            yield replace(blank, verdict=Verdict.SEMANTIC, message=message, xfail=True, reason=message)
        else:
            yield replace(blank, verdict=Verdict.AGREE, message=f"it means: {answer.means}")
