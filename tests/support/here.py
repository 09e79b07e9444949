"""Implementations loaded, evaluated and judged in the process of the tests, where others are not the point.

A process that loads a kernel takes half a second, and a test of several commands starts as many.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer

from attncheck import cli
from attncheck.cli import running
from attncheck.common import progress
from attncheck.execution import user_call
from attncheck.execution.call import START_SECONDS
from attncheck.execution.describing import Declarations, DescribedWorkers, DescriptionRequest
from attncheck.execution.implementations import UserImplementation
from attncheck.execution.runner import GroupRunner
from attncheck.execution.signatures import explain_unfit_function
from attncheck.execution.user_call import read_target_declarations
from attncheck.execution.user_code import LoadError, Target, UnfitError
from attncheck.execution.worker import Outcome, evaluate_on_backend, to_one_line
from attncheck.executors import local
from attncheck.reading.problem import Problem


@contextmanager
def evaluation_here() -> Iterator[None]:
    """Evaluate and judge in this process, all but programs; what tests wrote is forgotten afterwards.

    What an implementation leaves behind is not looked for.
    """
    before, backends, elsewhere = {*sys.modules}, dict[tuple[str, str], Any](), GroupRunner._evaluate_and_retry_alone

    def evaluated(runner: GroupRunner[Any], problem: Problem) -> Outcome:
        implementation = runner.group.implementation
        if isinstance(implementation.entry, UserImplementation) and implementation.entry.target.program:
            return elsewhere(runner, problem)
        key = (implementation.name, implementation.entry.module)
        if key not in backends:
            backends[key] = implementation.entry.load(implementation.mode)
        runner.description = dict(backends[key].describe())
        runner._meanwhile()
        return evaluate_on_backend(backends[key], problem)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupRunner, "_evaluate_and_retry_alone", evaluated)
        patch.setattr(local, "MIN_UNITS_FOR_PROCESSES", sys.maxsize)
        patch.setattr(user_call, "forbid_leaked_threads", nullcontext)  # a run's own threads come and go
        yield
    for name in {*sys.modules} - before:
        if name.endswith("_backend") and "." not in name:  # one that a test has written
            del sys.modules[name]


@contextmanager
def own_code_here() -> Iterator[None]:
    """Load, evaluate and judge what own code does in this process, all but programs; what it is made of is forgotten.

    A file that is written again is loaded anew when this is entered again.
    """
    modules, path, hooks = {*sys.modules}, [*sys.path], [*sys.path_hooks]
    begin_elsewhere, declared_elsewhere = DescribedWorkers.start_loading, DescribedWorkers.wait_for_declarations

    def begin(workers: DescribedWorkers, *questions: DescriptionRequest, seconds: float = START_SECONDS) -> None:
        begin_elsewhere(workers, *(question for question in questions if question.target.program), seconds=seconds)

    def declared(
        workers: DescribedWorkers, question: DescriptionRequest, seconds: float = START_SECONDS
    ) -> Declarations:
        return declared_elsewhere(workers, question, seconds) if question.target.program else _declared(question.target)

    with evaluation_here(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(DescribedWorkers, "start_loading", begin)
        patch.setattr(DescribedWorkers, "wait_for_declarations", declared)
        try:
            yield
        finally:
            sys.path[:], sys.path_hooks[:] = path, hooks
            sys.path_importer_cache.clear()
            for name in {*sys.modules} - modules:
                if _is_below(name, Path.cwd()):
                    del sys.modules[name]


def _declared(target: Target) -> Declarations:
    """Answer as a process does that goes on as a worker (``describing.describe_all``)."""
    try:
        loaded = user_call.load_target(target)
        return read_target_declarations(loaded, target.attribute.rpartition(".")[2], target.signature)
    except UnfitError as error:
        return explain_unfit_function(error, target, loaded)
    except LoadError as error:
        return to_one_line(str(error))


def _is_below(name: str, folder: Path) -> bool:
    """Whether a module lies in a folder, in which somebody wrote it, and belongs to no package that is installed."""
    file = Path(getattr(sys.modules[name], "__file__", None) or "/")
    return file.is_relative_to(folder) and name.partition(".")[0] != "attncheck" and "site-packages" not in file.parts


INSIDE = ("-p", "no:faulthandler", "-p", "no:unraisableexception")
"""Options for pytest inside of pytest: the outer one has these; looking for garbage takes a tenth of a second a run."""

cli.app.load()
COMMANDS: Any = typer.main.get_command(cli.app)
"""All commands, put together once: it takes a tenth of a second, for a line that needs one of them."""


def run_here(words: Iterable[str | Path], folder: Path | None = None) -> int:
    """Run attncheck with some arguments in this process, in a folder if one is given; return its exit code.

    How slow the machine is does not show: nothing is said because time has passed.
    """
    with pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            patch.chdir(folder)
        patch.setattr(sys, "argv", ["attncheck", *map(str, words)])
        patch.setattr(progress, "SECONDS_PER_LINE", 3600.0)
        patch.setattr(running, "_PROGRESS_DELAY", 3600.0)
        patch.setattr(typer.main, "get_command", lambda app: COMMANDS)
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def command_here(words: Iterable[str | Path], folder: Path | None = None) -> tuple[int, str, str]:
    """Do the same, and return what it printed to standard output and to standard error as well."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_here(words, folder)
    return code, out.getvalue(), err.getvalue()
