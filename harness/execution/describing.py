"""The declarations of a user's implementation: asked in a process of its own, which goes on as a worker of the run.

A fresh interpreter with NumPy or a framework takes longer to start than a case takes, so that it is started once, and
as early as anybody knows what is to be loaded: the harness imports its own modules meanwhile.
Nothing that imports NumPy may be imported at the top: the number of threads has to be set before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attncheck.backends import BACKENDS
from attncheck.execution.call import START_SECONDS, WorkerProcess
from attncheck.execution.user_code import LoadError, Target, UnfitError
from attncheck.execution.worker import clean, limit_threads, redirect_output

if TYPE_CHECKING:
    from attncheck.execution.implementations import UserImplementation

Declared = dict[str, Any] | str
"""The declarations of a target (``user_call.declarations``), or why it cannot be used."""


@dataclass(frozen=True)
class DescriptionRequest:
    """A target to load, and the preparation of the process for it.

    What is not known before a target says it, such as its framework where no option does, is not prepared.
    """

    target: Target
    framework: str | None = None
    threads: int = 1
    compilation_cache: bool = True

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that are set before anything is loaded: those of a run."""
        from attncheck.execution.environment import with_cache

        framework = BACKENDS.get(self.framework or "numpy")
        return {} if framework is None else with_cache(framework, keep=self.compilation_cache).environment


class _Describing:
    """A process that loads a target, and what it answers."""

    def __init__(self, request: DescriptionRequest, seconds: float) -> None:
        self.environment, self.threads = dict(request.environment), request.threads
        self.answer: Future[Declared] = Future()
        self._folder = TemporaryDirectory(prefix="attncheck", ignore_cleanup_errors=True)
        worker = WorkerProcess()
        self._worker: WorkerProcess | None = worker
        asked = (request.target, self.environment, request.threads, str(Path(self._folder.name) / "log.txt"))

        def ask() -> None:
            try:
                self.answer.set_result(worker.call(describe, *asked, seconds=seconds))
            except BaseException as error:  # handed to whoever waits
                self.answer.set_exception(error)

        Thread(target=ask, name="attncheck describes", daemon=True).start()

    def take(self, environment: Mapping[str, str], threads: int) -> WorkerProcess | None:
        """Hand the process over, if it is as a fresh one would be that has loaded the target; once."""
        is_fit = self.answer.done() and self.answer.exception() is None and isinstance(self.answer.result(), dict)
        if not is_fit or (self.environment, self.threads) != (dict(environment), threads):
            return None
        worker, self._worker = self._worker, None
        return worker if worker is not None and worker.is_alive else None

    def close(self) -> None:
        """End the process, unless somebody has it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()
        self._folder.cleanup()


class DescribedWorkers:
    """The processes in which targets were described, each until a run takes it; as a context, it ends the others."""

    def __init__(self) -> None:
        self._begun: dict[DescriptionRequest, _Describing] = {}

    def begin(self, request: DescriptionRequest, seconds: float = START_SECONDS) -> None:
        """Start to load a target, and do not wait for it."""
        if request not in self._begun:
            self._begun[request] = _Describing(request, seconds)

    def declared(self, request: DescriptionRequest, seconds: float = START_SECONDS) -> Declared:
        """Return what a target declares, or why it cannot be used.

        Raises ``CallTimeout``, ``WorkerDied`` or ``RemoteError``.
        """
        self.begin(request, seconds)
        return self._begun[request].answer.result()

    def take(self, entry: UserImplementation, threads: int) -> WorkerProcess | None:
        """Return a process that has loaded an implementation and is prepared as its workers are; None without one.

        ``entry`` has the variables that a worker would set.
        """
        for request, describing in self._begun.items():
            if request.target == entry.target:
                if (worker := describing.take(entry.environment, threads)) is not None:
                    return worker
                describing.close()  # it will be of no use later either, and may hold a framework
        return None

    def close(self) -> None:
        """End the processes that nobody has taken."""
        begun, self._begun = self._begun, {}
        for each in begun.values():
            each.close()

    def __enter__(self) -> DescribedWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def describe(target: Target, environment: Mapping[str, str], threads: int, log: str) -> Declared:
    """Run in the process: load a target in a worker's surroundings; return what it declares, or why it is of no use."""
    redirect_output(log, passed_on=True)
    limit_threads(threads)
    os.environ.update(environment)
    from attncheck.execution.signatures import unfit_text
    from attncheck.execution.user_call import declarations, keep_loaded, load

    try:
        loaded = load(target)
        declared = declarations(loaded, target.attribute.rpartition(".")[2], target.signature)
    except UnfitError as error:
        return unfit_text(error, target, loaded)
    except LoadError as error:
        return clean(str(error))
    keep_loaded(target, loaded)
    return declared
