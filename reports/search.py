"""What a search found, and what a case was reduced to, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from attncheck.errors import ExitCode
from attncheck.explain import NUMBERS
from attncheck.reading.case import Case
from attncheck.reading.shapes import show
from attncheck.reports.machine.documents import Failure, opening
from attncheck.reports.machine.other_documents import ReductionDocument, SearchDocument
from attncheck.reports.machine.outcome import failure_of, first_of_each
from attncheck.reports.terminal import plain_console
from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.findings import Finding
from attncheck.searching.search import ReducedCase, Search, element_of

Commands = Mapping[str, Sequence[str]]
"""What to run for each finding, by its file."""


def print_search(search: Search, commands: Commands, console: Console | None = None) -> None:
    """Print how much was searched, and every finding with its case, its script and what to run."""
    console = console or plain_console()
    for line in search_lines(search, commands):
        console.print(line, soft_wrap=True)


def search_lines(search: Search, commands: Commands) -> Iterator[str]:
    """Yield what is printed of a search."""
    for finding in search.folder.findings:
        yield from _finding_lines(finding, search.folder.path, commands[finding.file])
        yield ""
    for finding in search.fixed:
        yield f"No longer fails: {finding.title} ({search.folder.path / finding.file})"
    for reason, count in search.known.most_common():
        yield f"Known, in {count:,} problem{'' if count == 1 else 's'}: {reason}"
    found, name = len(search.folder.findings), search.judge.implementation.name
    refused = f", {search.refused:,} of them unsupported" if search.refused else ""
    interrupted = ", interrupted" if search.is_interrupted else ""
    yield f"{name}: {search.asked:,} problems{refused}{interrupted}; {found or 'no'} finding{'' if found == 1 else 's'}"


def _finding_lines(finding: Finding, folder: Path, commands: Sequence[str]) -> Iterator[str]:
    yield finding.title
    yield f"  {finding.element}"
    if finding.needs_calls:
        yield f"  not in a fresh process: after up to {finding.needs_calls} other calls, or by chance"
    else:
        smallest = "" if finding.is_smallest else ", perhaps not the smallest"
        yield f"  problem {finding.problem} in {finding.dtype}, reduced in {finding.tries} tries{smallest}"
    yield f"  case    {folder / finding.file}"
    if finding.script:
        yield f"  script  {folder / finding.script}"
    yield from (f"  {command}" for command in commands)


def search_document(search: Search, commands: Commands, code: ExitCode) -> SearchDocument:
    """Return a search for programs."""
    failures = [_failure(each, search, commands[each.file]) for each in search.folder.findings]
    return SearchDocument.derive(
        search,
        **opening("search", code, list(search_lines(search, commands))[-1]),
        failures=failures,
        next=first_of_each(failures),
        seconds=round(search.seconds, 1),
        no_longer_failing=[each.file for each in search.fixed],
    )


def _failure(finding: Finding, search: Search, commands: Sequence[str]) -> Failure:
    numbers = dict.fromkeys(NUMBERS) | dict(finding.numbers)
    path = str(search.folder.path / finding.file)
    return Failure(
        implementation=search.judge.implementation.name,
        environment="",
        case=path,
        file=path,
        line=None,
        dtype=finding.dtype,
        verdict=finding.symptom.verdict,
        stage=finding.symptom.stage,
        **{name: numbers[name] for name in NUMBERS},
        message=finding.element,
        shape=" ".join(f"{letter}={length}" for letter, length in finding.lengths.items()),
        tags=[],
        rows=1,
        next=list(commands),
    )


def reduction_lines(reduced: ReducedCase, path: Path, commands: Sequence[str]) -> Iterator[str]:
    """Yield what is printed of a reduction."""
    assert reduced.problem is not None, "there is nothing to say of a case that does not fail"
    if reduced.original is not None:
        yield f"before   {shape_line(reduced.original)}"
    yield f"reduced  {shape_line(reduced.problem)}"
    yield f"  {element_of(reduced.explanation)}"
    smallest = "nothing smaller fails alike" if reduced.is_smallest else "it may not be the smallest"
    yield f"{path}: {reduced.tries} tries; {smallest}"
    yield from (f"  {command}" for command in commands)


def reduction_document(
    case: Case, reduced: ReducedCase, path: Path | None, commands: Sequence[str]
) -> ReductionDocument:
    """Return a reduction for programs; ``path`` is None where the case does not fail."""
    explanation = reduced.explanation
    failure = failure_of(explanation, commands)
    if failure is not None and path is not None:
        failure = replace(failure, case=str(path), file=str(path), line=None)
    of_both = [shape_line(each) if each is not None else "" for each in (reduced.original, reduced.problem)]
    fails = f"reduced in {reduced.tries:,} tr{'y' if reduced.tries == 1 else 'ies'}: {element_of(explanation)}"
    code, answer = (ExitCode.AGREE, "there is nothing to reduce: it does not fail")
    if path is not None:
        code, answer = ExitCode.DISAGREE, fails
    return ReductionDocument.derive(
        reduced,
        **opening("reduce", code, answer),
        failures=[] if failure is None or path is None else [failure],
        next=[] if path is None else list(commands),
        case=case.id,
        file=path,
        before=of_both[0],
        reduced=of_both[1],
    )


def shape_line(problem: ConcreteCase) -> str:
    """Say a problem's operation, shapes and options."""
    shapes = ", ".join(f"{name} {show(array.shape)}" for name, array in problem.inputs.items())
    options = ", ".join(f"{name} = {value}" for name, value in problem.options.items())
    return f"{problem.operation}: {shapes}{f'; {options}' if options else ''}"
