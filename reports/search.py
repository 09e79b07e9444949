"""What a search found, and what a case was reduced to, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from attncheck.reading.shapes import show
from attncheck.reports.terminal import plain_console
from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.findings import Finding
from attncheck.searching.reducing import ReducedCase
from attncheck.searching.search import Search, element_of

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
    for finding in search.mended:
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


def record_of_search(search: Search, commands: Commands) -> dict[str, Any]:
    """Return a search as plain data."""
    return {
        "implementation": search.judge.implementation.name,
        "seed": search.request.seed,
        "problems": search.asked,
        "unsupported": search.refused,
        "interrupted": search.is_interrupted,
        "seconds": round(search.seconds, 1),
        "folder": str(search.folder.path),
        "findings": [asdict(each) | {"commands": list(commands[each.file])} for each in search.folder.findings],
        "known": dict(search.known),
        "no_longer_failing": [each.file for each in search.mended],
    }


def reduction_lines(reduced: ReducedCase, path: Path, commands: Sequence[str]) -> Iterator[str]:
    """Yield what is printed of a reduction."""
    assert reduced.problem is not None, "there is nothing to say of a case that does not fail"
    if reduced.original is not None:
        yield f"before   {_shape_line(reduced.original)}"
    yield f"reduced  {_shape_line(reduced.problem)}"
    yield f"  {element_of(reduced.explanation)}"
    smallest = "nothing smaller fails alike" if reduced.is_smallest else "it may not be the smallest"
    yield f"{path}: {reduced.tries} tries; {smallest}"
    yield from (f"  {command}" for command in commands)


def _shape_line(problem: ConcreteCase) -> str:
    shapes = ", ".join(f"{name} {show(array.shape)}" for name, array in problem.inputs.items())
    options = ", ".join(f"{name} = {value}" for name, value in problem.options.items())
    return f"{problem.operation}: {shapes}{f'; {options}' if options else ''}"
