"""Scripts for what failed in a run, kept with its results: a report shows them where nothing can be run again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from attncheck.commands import command, joined, words_again
from attncheck.errors import OutputError, UsageError
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.reading.case import Case
from attncheck.reading.record import case_record
from attncheck.repro.script import repro_script
from attncheck.results.format import SCRIPTS_FOLDER, Row

MAX_SCRIPTS = 50
"""One takes a fraction of a second and some ten kilobytes; after so many, the command that writes one is enough."""

Evaluation = tuple[str, str, str]
"""case, implementation, dtype"""


_FRESH = """
If it finds nothing: a check makes many calls in one process, and this script makes one. This repeats those before it:

    {explain}
"""


def write_scripts(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    failures: Iterable[Row],
    results: Path,
    limits: Limits | None = None,
) -> int:
    """Write a script for failing evaluations, first one of every implementation, and return how many.

    ``limits`` are those of the run. ``scripts/index.json`` names the file of each, under case|implementation|dtype.
    Raises ``OutputError``.
    """
    messages: dict[Evaluation, list[str]] = defaultdict(list)
    for row in failures:
        if row.comparison == "stage":
            messages[row.case, row.implementation, row.dtype].append(f"{row.verdict} {row.stage}: {row.message}")
    failing = {case for case, _, _ in messages}
    known_cases = {case.id: case for case in cases if case.id in failing}  # of a large campaign, few are in memory
    known_implementations = {item.name: item for item in implementations}
    evaluations = [(case, name, dtype) for case, name, dtype in messages if case in known_cases]
    index: dict[str, str] = {}
    folder = results / SCRIPTS_FOLDER
    again = words_again(implementations, limits or Limits(), results)
    for evaluation in _one_of_each_first(evaluations)[:MAX_SCRIPTS]:
        case, name, dtype = evaluation
        if name not in again:  # an object of this process has no file
            continue
        file = f"{len(index):03d}.py"
        explain = command("explain", case_record(known_cases[case], {}), again[name], dtype)
        story = "\n".join([*messages[evaluation], _FRESH.format(explain=explain)])
        runs_it = joined(["python", str(folder / file)])
        try:
            text = repro_script(known_cases[case], known_implementations[name], dtype, (), story, command=runs_it)
        except UsageError:  # some modules cannot be taken apart
            continue
        index["|".join(evaluation)] = _write(folder / file, text)
    if index:
        _write(folder / "index.json", json.dumps(index, indent=2, ensure_ascii=False) + "\n")
    return len(index)


def _one_of_each_first(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Put the first place of every implementation before the second of any."""
    by_name: dict[str, list[Evaluation]] = defaultdict(list)
    for evaluation in evaluations:
        by_name[evaluation[1]].append(evaluation)
    return [evaluation for evaluation in chain.from_iterable(zip_longest(*by_name.values())) if evaluation is not None]


def _write(path: Path, text: str) -> str:
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise OutputError.of(path, error) from None
    return path.name
