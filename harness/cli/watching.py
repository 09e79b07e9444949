"""``attncheck check --watch``: a check that runs again whenever one of its files is saved, and lists what changed.

The files are those of kernels, of what kernels import from their own folders, and of cases. They are looked at again
and again; nothing tells of a save.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import localtime, monotonic, sleep, strftime
from typing import TYPE_CHECKING, Any

import typer

from attncheck.cli.process import has_reader
from attncheck.common.errors import AttncheckError, ExitCode, NothingToRerun, UsageError
from attncheck.execution.user_code import Target, is_user_target
from attncheck.reading.model import TAG_FILE
from attncheck.reading.selection import path_exists
from attncheck.reports.comparison import (
    HARMLESS,
    Evaluation,
    Outcome,
    Outcomes,
    abbreviated_change_lines,
    count_changes_text,
    outcome_changes,
    severity_of_verdict,
)
from attncheck.results.format import Row
from attncheck.results.last_failed import FailedEvaluation, failed_evaluations, read_last_failures
from attncheck.settings.config import read_config

if TYPE_CHECKING:
    from attncheck.cli.parameters import RunRequest
    from attncheck.common.progress import ProgressWatcher
    from attncheck.run import RunSummary


_MAX_NAMED_FILES = 3


def watch(
    request: RunRequest,
    run_request: Callable[..., RunSummary],
    show: Callable[[RunSummary], None],
    write: Callable[..., None],
    prepare: Callable[[], None] = lambda: None,
) -> ExitCode:
    """Run, and run again whenever a file is saved, until Ctrl-C; return the exit code of the last run.

    It also ends when nobody reads the standard output any more.

    Args:
        request: What runs.
        run_request: Runs it; a second argument is what shows a failing evaluation.
        show: Shows the answer of the first run that comes to its end.
        write: Writes the report of each later run after its changes are shown. The keyword ``shows_causes`` is true
            if the causes of failures are to be printed.
        prepare: Starts what the next run needs, while the user edits.

    Raises:
        UsageError: If there is nothing to watch.
    """
    files = watched_files(request)
    runs = _RepeatedRuns(request, run_request, show, write)
    states, told = files.states(), ""
    try:
        runs.run(())
        while has_reader():
            if told != (names := _file_names([path for path, state in states.items() if state])):
                _print_status(f"watching {names}; Ctrl-C ends")
                told = names
            prepare()
            saved, states = files.wait(states)
            runs.run(saved)
    except KeyboardInterrupt:
        _print_status("watching ended")
    except typer.Exit:  # a run was interrupted, and has said so
        pass
    return runs.code


def watched_files(request: RunRequest) -> WatchedFiles:
    """Return the user's files of kernels and cases that a run depends on. Raises ``UsageError`` if there are none."""
    kernels = [
        path for pattern in request.options.implementations if (path := _implementation_file(pattern)) is not None
    ]
    config = read_config()
    cases = [Path(path) for path in request.options.cases or config.cases if path_exists(Path(path))]
    tags = [(path if path.is_dir() else path.parent) / TAG_FILE for path in cases]
    lists = [*config.expected_failure_lists, *request.options.expected_failure_lists]
    if not kernels and not cases:
        raise UsageError("--watch: there is no file to watch; name a kernel as file.py:function, or cases of your own")
    return WatchedFiles(kernels, list(dict.fromkeys([*cases, *tags, *lists])))


def _implementation_file(pattern: str) -> Path | None:
    """Return the file of an implementation; None if it is installed. Raises ``UsageError`` for a missing file."""
    if not is_user_target(pattern):
        return None
    target = Target.parse(pattern)
    module = target.module
    if module.endswith(".py") or target.program:
        return Path(module)
    path = Path.cwd().joinpath(*module.split("."))
    return next(
        (candidate for candidate in (path.with_suffix(".py"), path / "__init__.py") if candidate.is_file()), None
    )


@dataclass
class _RepeatedRuns:
    """Consecutive runs. Earlier failures run first, and each run is compared with the one before."""

    request: RunRequest
    run_request: Callable[..., RunSummary]
    show: Callable[[RunSummary], None]
    write: Callable[..., None]
    code: ExitCode = ExitCode.INTERRUPTED
    failing: Outcomes | None = None
    """None before the first complete run."""

    def run(self, saved: Sequence[Path]) -> None:
        """Run, and show the answer, the changes or an error."""
        try:
            if self.failing is None:
                summary = self.run_request(self.request)
                self.code, self.failing = summary.exit_code, failing_outcomes(summary.failures)
                self.show(summary)
            else:
                self._show_changes(self.run_request(self._next_request(), self._show_failure), self.failing, saved)
        except NothingToRerun:
            self.request = replace(self.request, options=replace(self.request.options, failed=False))
            self.run(saved)
        except AttncheckError as error:
            typer.echo(f"attncheck: {error}", err=True)
            self.code = error.exit_code

    def _show_changes(self, summary: RunSummary, before: Outcomes, saved: Sequence[Path]) -> None:
        failed = read_last_failures(self.request.options.output)
        unfinished = {evaluation_of(key) for key in failed.failed_evaluations} if failed else set[Evaluation]()
        comparison = RunChanges.compare(before, failing_outcomes(summary.failures), unfinished)
        self.code, self.failing = summary.exit_code, comparison.failing
        if comparison.changes or not self.request.options.quiet:
            code = f" (exit code {self.code:d})" if self.code else ""
            typer.echo(f"{strftime('%H:%M:%S', localtime())} {_file_names(saved)}: {comparison.headline}{code}")
            for line in comparison.lines():
                typer.echo(f"  {line}")
        self.write(shows_causes=bool(comparison.changes and comparison.failing))

    def _next_request(self) -> RunRequest:
        options = self.request.options
        return replace(self.request, is_announced=True, options=replace(options, failed_first=not options.failed))

    def _show_failure(self, progress: ProgressWatcher, failed: FailedEvaluation) -> None:
        """Count every failing evaluation; print it immediately if it did not fail before."""
        progress.report_failure(str(failed), is_shown=evaluation_of(failed.key) not in (self.failing or {}))


def _file_names(paths: Sequence[Path]) -> str:
    """Return the names of files relative to the working directory, in alphabetical order."""
    here = Path.cwd()
    names = sorted(str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths)
    more = len(names) - _MAX_NAMED_FILES
    return ", ".join([*names[:_MAX_NAMED_FILES], *([f"{more} more"] if more > 0 else [])])


def _print_status(text: str) -> None:
    typer.echo(f"attncheck: {text}", err=True)


_ADDRESS_PATTERN = re.compile(r"0x[0-9a-fA-F]+")


def failing_outcomes(rows: Iterable[Row]) -> dict[Evaluation, Outcome]:
    """Return how each evaluation among failing rows fails, with the size of its error or a reason."""
    rows = list(rows)
    rows_of = {(row.case, row.dtype, row.implementation, row.stage): row for row in reversed(rows)}
    outcomes = {}
    for failed in failed_evaluations(rows):
        row = rows_of.get((*failed.key, failed.stage))
        stage = (row.begins_at if row else None) or failed.stage
        reason = _ADDRESS_PATTERN.sub("0x...", " ".join(row.message.split())) if row else ""
        detail = _error_size(row) if stage else f": {reason}" if reason else ""
        evaluation = evaluation_of(failed.key)
        outcomes[evaluation] = Outcome(severity_of_verdict(failed.verdict), failed.verdict, stage, detail)
    return outcomes


def evaluation_of(key: tuple[str, str, str]) -> Evaluation:
    """Return the evaluation of a case, a dtype and an implementation."""
    case, dtype, implementation = key
    return Evaluation("", implementation, case, dtype)


def _error_size(row: Row | None) -> str:
    sizes = [size for size in (row.ratio, row.introduced_ratio) if size is not None] if row else []
    size = next((size for size in sizes if math.isfinite(size)), None)
    return "" if size is None else f", {size:.2g} times its bound"


PASSING_OUTCOME = Outcome(HARMLESS, "passes")


@dataclass(frozen=True)
class RunChanges:
    """Differences from the run before, and the known failures now."""

    changes: Sequence[Mapping[str, Any]]
    failing: Mapping[Evaluation, Outcome]

    @classmethod
    def compare(cls, before: Outcomes, now: Outcomes, unfinished: Collection[Evaluation]) -> RunChanges:
        """Compare two runs.

        Args:
            before: The failures of the run before.
            now: The failures of this run.
            unfinished: The evaluations that are known to fail, including those that this run did not reach.
        """
        failing = {**{key: outcome for key, outcome in before.items() if key in unfinished}, **now}
        return cls(outcome_changes(before, failing, PASSING_OUTCOME), failing)

    @property
    def headline(self) -> str:
        """The numbers of changed and of failing evaluations."""
        summary = count_changes_text(change["change"] for change in self.changes) if self.changes else "nothing changed"
        count = len(self.failing)
        return f"{summary}; {'nothing fails' if not count else f'{count:,} fails' if count == 1 else f'{count:,} fail'}"

    def lines(self) -> Iterator[str]:
        """Yield a line for each case on an implementation that changed, with its dtypes together."""
        yield from abbreviated_change_lines("verdicts", self.changes)


POLL_SECONDS = 0.2
"""The pause between two checks of the files."""
SETTLE_SECONDS = 0.1
"""The time without a change after which a save counts as done: editors write in several steps."""
MISSING_FILE_SECONDS = 5.0
"""The longest time that a file may be missing: some editors rename it before they write it again."""
_MAX_FILES = 500
_CASE_FILES = ("*.yaml", "*.yml")

FileState = tuple[int, int, int] | None
"""The modification time, the size and the inode of a file; None if it does not exist."""
FileStates = Mapping[Path, FileState]


def file_state(path: Path) -> FileState:
    """Return the state of a file without opening it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def changed_files(before: FileStates, now: FileStates) -> list[Path]:
    """Return the files that are new, removed or changed."""
    return sorted(path for path in {*before, *now} if before.get(path) != now.get(path))


@dataclass
class WatchedFiles:
    """The files of kernels, their imports from their folders, and files and folders of cases."""

    kernels: Sequence[Path]
    cases: Sequence[Path] = ()
    _imported: dict[Path, tuple[FileState, tuple[Path, ...]]] = field(default_factory=dict)

    def states(self) -> FileStates:
        """Return the states of all files; the set of files may have changed, too."""
        states = {path: file_state(path) for path in self._case_files()}
        for kernel in self.kernels:
            waiting = [kernel]
            while waiting and len(states) < _MAX_FILES:
                path = waiting.pop()
                if path not in states:
                    states[path] = file_state(path)
                    waiting += self._imports_of_kernel(path, states[path], kernel.parent)
        return states

    def wait(self, before: FileStates, pause: Callable[[float], None] = sleep) -> tuple[list[Path], FileStates]:
        """Wait for a complete change from the states ``before``; return the changed files and all states."""
        while not changed_files(before, now := self.states()):
            pause(POLL_SECONDS)
        begun = monotonic()
        while True:
            pause(SETTLE_SECONDS)
            earlier, now = now, self.states()
            is_away = any(now.get(path) is None and before.get(path) is not None for path in self.kernels)
            if earlier == now and not (is_away and monotonic() - begun < MISSING_FILE_SECONDS):
                # A file that was written back unchanged is no change.
                return (changed, now) if (changed := changed_files(before, now)) else self.wait(before, pause)

    def _case_files(self) -> Iterator[Path]:
        for path in self.cases:
            if path.is_dir():
                yield from (case_file for pattern in _CASE_FILES for case_file in path.rglob(pattern))
            else:
                yield path

    def _imports_of_kernel(self, path: Path, state: FileState, folder: Path) -> tuple[Path, ...]:
        """Return the files below a kernel's folder that a file imports; the earlier ones if it cannot be read."""
        known = self._imported.get(path)
        if known is not None and known[0] == state:
            return known[1]
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return known[1] if known else ()
        imported = tuple(dict.fromkeys(_imported_files(tree, path, folder)))
        self._imported[path] = (state, imported)
        return imported


def _imported_files(tree: ast.AST, path: Path, folder: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            start = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _module_files(start, [*parts, alias.name])


def _module_files(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files that an import of a dotted name reads below a folder; the last part may be no module."""
    for part in parts:
        yield from (
            candidate for candidate in (folder / f"{part}.py", folder / part / "__init__.py") if candidate.is_file()
        )
        folder /= part
