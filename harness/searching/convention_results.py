"""Results of measured conventions, which ``attncheck report`` and ``diff`` read.

Each question is a case, and its file is in the folder of the results. An implementation agrees if it has the convention
of attncheck's cases. Another convention fails only if the implementation declares otherwise. Questions without a
convention in the cases are unverified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attncheck.asking.conventions import QUESTIONS, ConventionQuestion, MeasuredConvention
from attncheck.common.wording import slug
from attncheck.execution.call import Limits
from attncheck.execution.implementations import ImplementationSelection
from attncheck.judging.xfail import make_blank_row
from attncheck.reading.case import Case
from attncheck.reading.problem import Problem
from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter
from attncheck.searching.findings import write_case
from attncheck.searching.results import ProbeResults
from attncheck.spec.verdicts import Verdict


def write_measured_conventions(
    writer: ResultsWriter,
    selection: ImplementationSelection,
    measured_conventions: Mapping[str, Sequence[MeasuredConvention]],
    dtypes: Mapping[str, str],
    limits: Limits,
) -> None:
    """Write the measured conventions of implementations.

    Args:
        writer: The writer of the folder, made before any measurement, so that a bad folder loses no result.
        chosen: The implementations, at least one.
        measured: Their conventions, by name.
        dtypes: The dtype in which each was measured, by name.
        limits: The limits of their processes.

    Raises:
        OutputError: If the folder cannot be written.
    """
    asked_dtypes = tuple(dict.fromkeys(dtypes.values()))
    results = ProbeResults.start(writer, selection, asked_dtypes, limits)
    cases = {question.name: _write_question_case(question, writer.directory, asked_dtypes[0]) for question in QUESTIONS}
    for name, answers in measured_conventions.items():
        for answer in answers:
            case = cases[answer.question.name]
            results.add_evaluation(
                case, [_measured_row(answer, replace(make_blank_row(case, dtypes[name]), implementation=name))]
            )
    results.write()


def _write_question_case(question: ConventionQuestion, folder: Path, dtype: str) -> Case:
    """Write the call of a question as a case file, and return the case."""
    call = question.call
    problem = Problem(call.operation, call.options, call.inputs, dtype, stages=(question.stage,))
    return write_case(
        problem, folder / f"{slug(question.name)}.yaml", f"{question.name}: {question.asks}", "conventions"
    )


def _measured_row(convention: MeasuredConvention, row_template: Row) -> Row:
    means, row = f"it means: {convention.means}", replace(row_template, stage=convention.question.stage)
    if convention.kind in ("unsupported", "failed"):
        verdict = Verdict.UNSUPPORTED if convention.kind == "unsupported" else Verdict.ERROR
        return replace(row_template, verdict=verdict, message=convention.means)
    if convention.contradicts:
        return replace(row, verdict=Verdict.SEMANTIC, message=f"it declares: {convention.declared}; {means}")
    if not convention.question.expected:
        return replace(row, verdict=Verdict.UNVERIFIED, message=means)
    if convention.departs:
        message = f"{means}; attncheck's cases mean: {convention.question.expected}"
        return replace(row, verdict=Verdict.SEMANTIC, message=message, xfail=True, reason=message)
    return replace(row, verdict=Verdict.AGREE, message=means)
