"""``attncheck check --watch``: a check that runs again whenever one of its files is saved, and says what changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING

import typer

from attncheck.cli.changes import Changes, Failing, failing_evaluations, remembered
from attncheck.cli.requests import RunRequest, run_request
from attncheck.cli.shared import split
from attncheck.cli.watched_files import WatchedFiles
from attncheck.config import read_config
from attncheck.errors import AttncheckError, ExitCode, NothingFailed, UsageError
from attncheck.execution.user_code import Target, is_own
from attncheck.reading.model import TAG_FILE
from attncheck.reading.selection import exists
from attncheck.results.failed import Evaluation, FailedEvaluation, read_failed

if TYPE_CHECKING:
    from attncheck.progress import Watcher
    from attncheck.run import RunSummary

_MAX_NAMED = 3
Finish = Callable[["RunSummary"], None]


def watch(request: RunRequest, show: Finish, write: Finish) -> ExitCode:
    """Run, and run again whenever a file is saved, until Ctrl-C; return the exit code of the last run.

    Args:
        request: What runs.
        show: Shows the answer of the first run that comes to its end.
        write: Does what is to be done after each of the others, when it has been shown what changed.

    Raises:
        UsageError: If there is nothing to watch.
    """
    files = files_of(request)
    runs = _Runs(request, show, write)
    states, told = files.states(), ""
    try:
        runs.run(())
        while True:
            if told != (names := _named([path for path, state in states.items() if state])):
                _say(f"watching {names}; Ctrl-C ends")
                told = names
            saved, states = files.wait(states)
            runs.run(saved)
    except KeyboardInterrupt:
        _say("watching ended")
    except typer.Exit:  # a run was interrupted, and has said so
        pass
    return runs.code


def files_of(request: RunRequest) -> WatchedFiles:
    """Return the files of kernels and cases of one's own that a run depends on. Raises ``UsageError`` for none."""
    kernels = [path for pattern in split(request.implementation) if (path := _file_of(pattern)) is not None]
    config = read_config()
    cases = [Path(each) for each in request.patterns or config.cases if exists(Path(each))]
    tags = [(path if path.is_dir() else path.parent) / TAG_FILE for path in cases]
    lists = [*config.expected_failures, *(request.expected_failures or ())]
    if not kernels and not cases:
        raise UsageError("--watch: there is no file to watch; name a kernel as file.py:function, or cases of your own")
    return WatchedFiles(kernels, list(dict.fromkeys([*cases, *tags, *lists])))


def _file_of(pattern: str) -> Path | None:
    """Return the file of an implementation; None of one that is installed. Raises ``UsageError`` for a missing file."""
    if not is_own(pattern):
        return None
    target = Target.of(pattern)
    module = target.module
    if module.endswith(".py") or target.program:
        return Path(module)
    path = Path.cwd().joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


@dataclass
class _Runs:
    """Runs one time after the other. What failed before runs first, and is what the next run is compared with."""

    request: RunRequest
    show: Finish
    write: Finish
    code: ExitCode = ExitCode.INTERRUPTED
    failing: Mapping[Evaluation, Failing] | None = None
    """None before the first run that came to its end."""

    def run(self, saved: Sequence[Path]) -> None:
        """Run, and show the answer, or what changed; what cannot be run is a message."""
        try:
            if self.failing is None:
                self._end_first(run_request(self.request))
            else:
                self._end_next(run_request(self._again(), self._show_failure), self.failing, saved)
        except NothingFailed:
            self.request = replace(self.request, iteration=replace(self.request.iteration, failed=False))
            self.run(saved)
        except AttncheckError as error:
            typer.echo(f"attncheck: {error}", err=True)
            self.code = error.exit_code

    def _end_first(self, summary: RunSummary) -> None:
        self.code, self.failing = summary.exit_code, failing_evaluations(summary.failures)
        self.show(summary)

    def _end_next(self, summary: RunSummary, before: Mapping[Evaluation, Failing], saved: Sequence[Path]) -> None:
        failed = read_failed(self.request.output)
        unfinished = failed.evaluations if failed else frozenset()
        now = failing_evaluations(summary.failures)
        changes = Changes.between(before, now, unfinished)
        self.code, self.failing = summary.exit_code, remembered(before, now, unfinished)
        if not (self.request.quiet and changes.is_empty):
            code = f" (exit code {self.code:d})" if self.code else ""
            typer.echo(f"{strftime('%H:%M:%S', localtime())} {_named(saved)}: {changes.headline}{code}")
            for line in changes.lines():
                typer.echo(f"  {line}")
        self.write(summary)

    def _again(self) -> RunRequest:
        first = not self.request.iteration.failed
        return replace(self.request, is_announced=True, iteration=replace(self.request.iteration, failed_first=first))

    def _show_failure(self, progress: Watcher, failed: FailedEvaluation) -> None:
        """Count every failing evaluation; show at once those that did not fail before."""
        progress.fail(str(failed), is_shown=failed.key not in (self.failing or {}))


def _named(paths: Sequence[Path]) -> str:
    """Name files as people do: by their paths below the working directory, in alphabetical order."""
    here = Path.cwd()
    names = sorted(str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths)
    more = len(names) - _MAX_NAMED
    return ", ".join([*names[:_MAX_NAMED], *([f"{more} more"] if more > 0 else [])])


def _say(text: str) -> None:
    typer.echo(f"attncheck: {text}", err=True)
