"""Findings of a search, a reduced case, measured conventions, and the gate: for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.asking.conventions import MeasuredConvention
from attncheck.common.errors import ExitCode
from attncheck.common.wording import count_noun
from attncheck.reading.case import Case
from attncheck.reports.document_model import Table
from attncheck.reports.json_documents import Failure, opening_fields
from attncheck.reports.outcome import first_command_of_each
from attncheck.reports.terminal import Line
from attncheck.results.format import FAILURE_NUMBERS
from attncheck.settings.commands import shell_command
from attncheck.showing.explanation import answer_failure, shapes_and_options_line
from attncheck.showing.json_schema import ConventionsDocument, GateDocument, ReductionDocument, SearchDocument

if TYPE_CHECKING:
    from attncheck.gating.run import GateResult
    from attncheck.reading.problem import Problem
    from attncheck.searching.findings import SearchFinding
    from attncheck.searching.search import ReducedCase, Search

CommandsByFinding = Mapping[str, Sequence[str]]
"""Commands to run for each finding, by its file."""


def search_lines(search: Search, commands: CommandsByFinding) -> Iterator[str]:
    """Yield every finding with its case, script and commands, and last the extent of the search."""
    for finding in search.folder.findings:
        yield from _finding_lines(finding, search.folder.path, commands[finding.file])
        yield ""
    for finding in search.fixed_findings:
        yield f"No longer fails: {finding.title} ({search.folder.path / finding.file})"
    for reason, count in search.expected_failure_counts.most_common():
        yield f"Known, in {count_noun(count, 'problem')}: {reason}"
    name, number = search.subject.implementation.name, len(search.folder.findings)
    findings = count_noun(number, "finding") if number else "no findings"
    refused = f", {search.unsupported_count:,} of them unsupported" if search.unsupported_count else ""
    interrupted = ", interrupted" if search.is_interrupted else ""
    if not (search.problem_count or interrupted) and search.seconds_left <= 0:
        interrupted = ": the time was over before a problem was judged"
    yield f"{name}: {count_noun(search.problem_count, 'problem')}{refused}{interrupted}; {findings}"


def _finding_lines(finding: SearchFinding, folder: Path, commands: Sequence[str]) -> Iterator[str]:
    yield finding.title
    yield f"  {finding.element}"
    if finding.diagnosis:
        yield f"  cause   {finding.diagnosis} (docs/diagnoses.md)"
    if finding.needs_calls:
        yield f"  not in a fresh process: after up to {finding.needs_calls} other calls, or by chance"
    else:
        smallest = "" if finding.is_smallest else ", perhaps not the smallest"
        yield f"  problem {finding.problem} in {finding.dtype}, reduced in {finding.tries} tries{smallest}"
    yield f"  case    {folder / finding.file}"
    if finding.script:
        yield f"  script  {folder / finding.script}"
    yield from (f"  {command}" for command in commands)


def search_document(search: Search, commands: CommandsByFinding, code: ExitCode) -> SearchDocument:
    """Return a search for programs."""
    failures = [_failure_record(finding, search, commands[finding.file]) for finding in search.folder.findings]
    return SearchDocument.derive(
        search,
        **opening_fields("search", code, list(search_lines(search, commands))[-1]),
        failures=failures,
        next=first_command_of_each(failures),
        seconds=round(search.elapsed_seconds, 1),
        no_longer_failing=[finding.file for finding in search.fixed_findings],
    )


def _failure_record(finding: SearchFinding, search: Search, commands: Sequence[str]) -> Failure:
    numbers = dict.fromkeys(FAILURE_NUMBERS) | dict(finding.numbers)
    path = str(search.folder.path / finding.file)
    return Failure(
        implementation=search.subject.implementation.name,
        environment="",
        case=path,
        file=path,
        line=None,
        dtype=finding.dtype,
        verdict=finding.symptom.verdict,
        stage=finding.symptom.stage,
        **{name: numbers[name] for name in FAILURE_NUMBERS},
        message=finding.element,
        shape=" ".join(f"{letter}={length}" for letter, length in finding.lengths.items()),
        tags=[],
        rows=1,
        next=list(commands),
    )


def reduction_lines(reduced: ReducedCase, path: Path, commands: Sequence[str]) -> Iterator[str]:
    """Yield the lines about a reduction."""
    from attncheck.searching.search import describe_worst_element

    assert reduced.problem is not None, "there is nothing to say of a case that does not fail"
    if reduced.original is not None:
        yield f"before   {problem_line(reduced.original)}"
    yield f"reduced  {problem_line(reduced.problem)}"
    yield f"  {describe_worst_element(reduced.answer)}"
    smallest = "no smaller case fails the same way" if reduced.is_smallest else "it may not be the smallest"
    yield f"{path}: {reduced.tries} tries; {smallest}"
    yield from (f"  {command}" for command in commands)


def reduction_document(
    case: Case, reduced: ReducedCase, path: Path | None, commands: Sequence[str]
) -> ReductionDocument:
    """Return a reduction for programs; ``path`` is None if the case does not fail."""
    from attncheck.searching.search import describe_worst_element

    answer = reduced.answer
    failure = answer_failure(answer, commands)
    if failure is not None and path is not None:
        failure = replace(failure, case=str(path), file=str(path), line=None)
    of_both = [problem_line(problem) if problem is not None else "" for problem in (reduced.original, reduced.problem)]
    fails = f"reduced in {reduced.tries:,} tr{'y' if reduced.tries == 1 else 'ies'}: {describe_worst_element(answer)}"
    code, line = (ExitCode.AGREE, "there is nothing to reduce: it does not fail")
    if path is not None:
        code, line = ExitCode.DISAGREE, fails
    return ReductionDocument.derive(
        reduced,
        **opening_fields("reduce", code, line),
        failures=[] if failure is None or path is None else [failure],
        next=[] if path is None else list(commands),
        case=case.id,
        file=path,
        before=of_both[0],
        reduced=of_both[1],
    )


def problem_line(problem: Problem) -> str:
    """Return a line with a problem's operation, shapes and options."""
    shapes = {name: array.shape for name, array in problem.inputs.items()}
    return f"{problem.operation}: {shapes_and_options_line(shapes, problem.options)}"


ConventionsByImplementation = Mapping[str, Sequence[MeasuredConvention]]
"""Answers of each implementation, by its name and dtype, in the order of the questions."""


def convention_lines(measured: ConventionsByImplementation) -> Iterator[Line]:
    """Yield a row for each question, and below it wrong and missing declarations."""
    rows = []
    for answers in zip(*measured.values(), strict=True):
        question = answers[0].question
        expected = " or ".join(dict.fromkeys(answer.question.expected for answer in answers)) or "-"
        rows.append((f"{question.name}: {question.asks}", expected, *map(_meaning_cell, answers)))
    yield Table("Conventions", ("convention", "attncheck's cases mean", *measured), rows)
    yield from _notes_by_name(measured)


def _notes_by_name(measured: ConventionsByImplementation) -> list[str]:
    return [f"{name}: {line}" for name, answers in measured.items() for line in _convention_notes(answers)]


def conventions_document(
    measured: ConventionsByImplementation, code: ExitCode, missing: Sequence[str]
) -> ConventionsDocument:
    """Return measured conventions for programs."""
    answers = [answer for by_question in measured.values() for answer in by_question]
    counts = {
        "answers": sum(answer.kind in ("measured", "open") for answer in answers),
        "unlike attncheck's cases": sum(answer.departs for answer in answers),
        "unlike what is declared": sum(answer.contradicts for answer in answers),
    }
    return ConventionsDocument.derive(
        {"implementations": measured},
        **opening_fields("conventions", code, ", ".join(f"{count:,} {what}" for what, count in counts.items())),
        notes=[*(f"{name} is not installed" for name in missing), *_notes_by_name(measured)],
    )


def _meaning_cell(answer: MeasuredConvention) -> str:
    if answer.kind in ("unsupported", "failed"):
        return answer.kind
    if not answer.departs:
        return answer.means
    return f"{answer.means} ({'declared' if answer.declared == answer.means else 'differs'})"


def _convention_notes(answers: Sequence[MeasuredConvention]) -> Iterator[str]:
    for answer in answers:
        if answer.contradicts:
            yield f"it declares {answer.declared} for {answer.question.name}, and gives {answer.means}"
    if declared := {answer.declares: answer.declaration for answer in answers if answer.declaration}:
        yield f"declare what it does: attention.conventions = {json.dumps(declared)}"
    departing = [answer for answer in answers if answer.departs and not (answer.declaration or answer.declared)]
    if departing:
        yield f"attncheck's cases mean otherwise: {_convention_names(departing)}"
    if inexact := [answer for answer in answers if not answer.is_exact]:
        yield f"less accurate than it declares, and recognised all the same: {_convention_names(inexact)}"
    for answer in answers:
        if answer.kind == "failed":
            yield f"{answer.question.name} failed: {answer.means}"
    unsupported = [answer for answer in answers if answer.kind == "unsupported"]
    for reason in dict.fromkeys(answer.means for answer in unsupported):
        without = [answer for answer in unsupported if answer.means == reason]
        yield f"not asked ({reason})" + ("" if len(without) == len(answers) else f": {_convention_names(without)}")


def _convention_names(answers: Sequence[MeasuredConvention]) -> str:
    return "; ".join(answer.question.name for answer in answers)


def gate_lines(result: GateResult, report: Path, words: Sequence[str]) -> Iterator[str]:
    """Yield the outcome of the gate.

    ``report`` is its page, and ``words`` are those of the command without a seed.
    """
    yield from str(result).splitlines()
    yield ""
    yield f"Report: {report}"
    yield f"The same problems again: {shell_command([*words, '--seed', str(result.seed)])}"


def gate_document(result: GateResult, results: Path) -> GateDocument:
    """Return the outcome of the gate for programs."""
    return GateDocument.derive(result, **opening_fields("gate", result.exit_code, result.answer), results=str(results))
