"""The declarations of a user's implementation: asked in a process of its own, which goes on as a worker of the run.

A fresh interpreter with NumPy or a framework takes longer to start than a case takes, so that it is started once, and
as early as anybody knows what is to be loaded: the harness imports its own modules meanwhile.
Nothing that imports NumPy may be imported at the top: the number of threads has to be set before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attncheck.backends import BACKENDS
from attncheck.common.processors import available_processors
from attncheck.execution.call import START_SECONDS, CallTimeout, RemoteError, WorkerDied, WorkerProcess
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

    @property
    def process(self) -> tuple[object, ...]:
        """The key of requests that one process answers: those of one file, whose imports are the same."""
        target = self.target
        place = target if target.pickled or target.program else target.module
        return place, self.framework, self.threads, self.compilation_cache


class _Describing:
    """A process that loads targets one after the other, and what it answers.

    One of a single target ``stays`` until somebody takes it. Any other has no further use once all are answered, and
    ends.
    """

    def __init__(self, requests: Sequence[DescriptionRequest], seconds: float, *, stays: bool) -> None:
        self.answers: dict[DescriptionRequest, Future[Declared]] = {request: Future() for request in requests}
        self._seconds, self._stays, self._is_closed = seconds, stays, False
        self._folder = TemporaryDirectory(prefix="attncheck", ignore_cleanup_errors=True)
        self._worker: WorkerProcess | None = None

    def describe(self) -> None:
        """Answer all requests; what goes wrong is an answer, too."""
        for request, answer in self.answers.items():
            try:
                answer.set_result(self._declared(request))
            except BaseException as error:  # handed to whoever waits
                answer.set_exception(error)
        if not self._stays:
            self.close()

    def _declared(self, request: DescriptionRequest) -> Declared:
        """Load a target in the process of those before it, and in one of its own where that fails."""
        asked = (request.target, dict(request.environment), request.threads, str(Path(self._folder.name) / "log.txt"))
        is_used = self._worker is not None
        try:
            return self._process().call(describe, *asked, seconds=self._seconds)
        except (CallTimeout, WorkerDied, RemoteError):
            self._end()
            if not is_used or self._is_closed:
                raise
        return self._process().call(describe, *asked, seconds=self._seconds)

    def _process(self) -> WorkerProcess:
        self._worker = self._worker or WorkerProcess()
        if self._is_closed:  # meanwhile; whoever closed may not have seen it
            self._end()
            raise WorkerDied("was ended")
        return self._worker

    def take(self, request: DescriptionRequest, environment: Mapping[str, str], threads: int) -> WorkerProcess | None:
        """Hand the process over, if it is as a fresh one would be that has loaded the target; once."""
        answer = self.answers[request]
        is_fit = answer.done() and answer.exception() is None and isinstance(answer.result(), dict)
        if not (self._stays and is_fit) or (dict(request.environment), request.threads) != (dict(environment), threads):
            return None
        worker, self._worker = self._worker, None
        return worker if worker is not None and worker.is_alive else None

    def close(self) -> None:
        """End the process, unless somebody has it."""
        self._is_closed = True
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


class DescribedWorkers:
    """The processes in which targets were described, each until a run takes it; as a context, it ends the others.

    No more of them are there than processors. If as many targets are begun, or more, those of one file share a process,
    and none is kept for the run, unless there is a single one.
    """

    def __init__(self, processes: int | None = None) -> None:
        self._most = processes or available_processors()
        self._begun: dict[DescriptionRequest, _Describing] = {}
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="attncheck describes")

    def begin(self, *requests: DescriptionRequest, seconds: float = START_SECONDS) -> None:
        """Start to load targets, and do not wait for it."""
        new = [request for request in dict.fromkeys(requests) if request not in self._begun]
        stays = len(self._begun) + len(new) <= max(1, self._most - 1)
        together: dict[object, list[DescriptionRequest]] = {}
        for request in new:
            together.setdefault(request if stays else request.process, []).append(request)
        for these in together.values():
            describing = _Describing(these, seconds, stays=stays)
            self._begun.update(dict.fromkeys(these, describing))
            self._threads.submit(describing.describe)

    def declared(self, request: DescriptionRequest, seconds: float = START_SECONDS) -> Declared:
        """Return what a target declares, or why it cannot be used.

        Raises ``CallTimeout``, ``WorkerDied`` or ``RemoteError``.
        """
        self.begin(request, seconds=seconds)
        return self._begun[request].answers[request].result()

    @property
    def has_failed(self) -> bool:
        """Return whether a target is known to be of no use by now."""
        answers = [answer for request, each in self._begun.items() if (answer := each.answers[request]).done()]
        return any(answer.exception() is not None or isinstance(answer.result(), str) for answer in answers)

    def take(self, entry: UserImplementation, threads: int) -> WorkerProcess | None:
        """Return a process that has loaded an implementation and is prepared as its workers are; None without one.

        ``entry`` has the variables that a worker would set.
        """
        for request, describing in self._begun.items():
            if request.target == entry.target:
                if (worker := describing.take(request, entry.environment, threads)) is not None:
                    return worker
                describing.close()  # it will be of no use later either, and may hold a framework
        return None

    def close(self) -> None:
        """End the processes that nobody has taken."""
        begun, self._begun = self._begun, {}
        self._threads.shutdown(wait=False, cancel_futures=True)
        for each in dict.fromkeys(begun.values()):
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
