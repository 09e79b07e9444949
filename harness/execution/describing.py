"""Read the declarations of a user's implementation in a process, which becomes a worker of the run.

A fresh interpreter with NumPy or a framework takes longer to start than a case takes. So it is started only once, and
as soon as the target is known, while the harness imports its own modules.
Nothing that imports NumPy may be imported at the top: the number of threads has to be set before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attncheck.backends import BACKENDS
from attncheck.common.processors import available_processors
from attncheck.execution.call import START_SECONDS, CallTimeout, RemoteError, WorkerDied, WorkerProcess
from attncheck.execution.user_code import LoadError, Target, UnfitError
from attncheck.execution.worker import limit_threads, redirect_output, to_one_line

if TYPE_CHECKING:
    from attncheck.execution.implementations import UserImplementation

Declarations = dict[str, Any] | str
"""The declarations of a target (``user_call.read_target_declarations``), or why it cannot be used."""


@dataclass(frozen=True)
class DescriptionRequest:
    """A target to load, and the preparation of the process for it.

    Settings that are only known from the loaded target, such as a framework that no option names, are not prepared.
    """

    target: Target
    framework: str | None = None
    threads: int = 1
    compilation_cache: bool = True

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that are set before anything is loaded, as in a run."""
        from attncheck.execution.environment import with_cache_variables

        framework = BACKENDS.get(self.framework or "numpy")
        return {} if framework is None else with_cache_variables(framework, keep=self.compilation_cache).environment

    @property
    def process_key(self) -> tuple[object, ...]:
        """The key of requests that one process answers: targets of one file have the same imports."""
        target = self.target
        place = target if target.pickled or target.program else target.module
        return place, self.framework, self.threads, self.compilation_cache


class _DescribingProcess:
    """A process that loads targets one after the other, and its answers.

    A process of a single target stays until a run takes it. Any other process ends once all targets are loaded.
    """

    def __init__(self, requests: Sequence[DescriptionRequest], seconds: float, *, keeps_process: bool) -> None:
        self.answers: dict[DescriptionRequest, Future[Declarations]] = {request: Future() for request in requests}
        self._seconds, self._stays, self._is_closed = seconds, keeps_process, False
        self._folder = TemporaryDirectory(prefix="attncheck", ignore_cleanup_errors=True)
        self._worker: WorkerProcess | None = None

    def describe_all(self) -> None:
        """Answer all requests; an error is an answer, too."""
        for request, answer in self.answers.items():
            try:
                answer.set_result(self._describe_one(request))
            except BaseException as error:  # raised where the answer is read
                answer.set_exception(error)
        if not self._stays:
            self.close()

    def _describe_one(self, request: DescriptionRequest) -> Declarations:
        """Load a target in the process of the targets before it, or in a new process if that fails."""
        asked = (request.target, dict(request.environment), request.threads, str(Path(self._folder.name) / "log.txt"))
        is_used = self._worker is not None or next(iter(self.answers)).process_key in _spare_workers
        try:
            return self._running_worker().call(load_declarations, *asked, seconds=self._seconds)
        except (CallTimeout, WorkerDied, RemoteError):
            self._end_worker()
            if not is_used or self._is_closed:
                raise
        return self._running_worker().call(load_declarations, *asked, seconds=self._seconds)

    def _running_worker(self) -> WorkerProcess:
        if self._worker is None:
            with suppress(Exception):  # there is none, or it could not be started: another one is started below
                self._worker = _spare_workers.pop(next(iter(self.answers)).process_key).result()
        if self._worker is None or not self._worker.is_alive:
            self._worker = WorkerProcess()
        if self._is_closed:  # closed in the meantime, perhaps before the process was stored
            self._end_worker()
            raise WorkerDied("was ended")
        return self._worker

    def take_worker(
        self, request: DescriptionRequest, environment: Mapping[str, str], threads: int
    ) -> WorkerProcess | None:
        """Return the process once, if it is prepared like a fresh process that has loaded the target; else None."""
        answer = self.answers[request]
        is_fit = answer.done() and answer.exception() is None and isinstance(answer.result(), dict)
        if not (self._stays and is_fit) or (dict(request.environment), request.threads) != (dict(environment), threads):
            return None
        worker, self._worker = self._worker, None
        return worker if worker is not None and worker.is_alive else None

    def close(self) -> None:
        """End the process, unless a run has taken it."""
        self._is_closed = True
        self._end_worker()
        self._folder.cleanup()

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


_spare_workers: dict[object, Future[WorkerProcess]] = {}


def start_spare_worker(request: DescriptionRequest) -> None:
    """Start a process for a later request with the same key.

    It imports NumPy and the loader, but no other framework: a kernel may set environment variables before it imports
    one.
    """
    if request.process_key not in _spare_workers:
        threads = ThreadPoolExecutor(1, thread_name_prefix="attncheck starts")
        _spare_workers[request.process_key] = threads.submit(_make_spare_worker, request)
        threads.shutdown(wait=False)


def _make_spare_worker(request: DescriptionRequest) -> WorkerProcess:
    worker = WorkerProcess()
    try:
        worker.call(prepare_to_load, dict(request.environment), request.threads, seconds=START_SECONDS)
    except BaseException:
        worker.kill()
        raise
    return worker


class DescribedWorkers:
    """The processes in which targets were described, each until a run takes it; as a context, it ends the others.

    There are at most as many processes as processors. If there are at least as many targets, targets of one file share
    a process, and no process is kept for the run, unless there is only one.
    """

    def __init__(self, processes: int | None = None) -> None:
        self._max_processes = processes or available_processors()
        self._processes_by_request: dict[DescriptionRequest, _DescribingProcess] = {}
        self._threads = ThreadPoolExecutor(self._max_processes, thread_name_prefix="attncheck describes")

    def start_loading(self, *requests: DescriptionRequest, seconds: float = START_SECONDS) -> None:
        """Start to load targets without waiting for them."""
        new = [request for request in dict.fromkeys(requests) if request not in self._processes_by_request]
        stays = len(self._processes_by_request) + len(new) <= max(1, self._max_processes - 1)
        together: dict[object, list[DescriptionRequest]] = {}
        for request in new:
            together.setdefault(request if stays else request.process_key, []).append(request)
        for these in together.values():
            describing = _DescribingProcess(these, seconds, keeps_process=stays)
            self._processes_by_request.update(dict.fromkeys(these, describing))
            self._threads.submit(describing.describe_all)

    def wait_for_declarations(self, request: DescriptionRequest, seconds: float = START_SECONDS) -> Declarations:
        """Return the declarations of a target, or why it cannot be used.

        Raises ``CallTimeout``, ``WorkerDied`` or ``RemoteError``.
        """
        self.start_loading(request, seconds=seconds)
        return self._processes_by_request[request].answers[request].result()

    @property
    def has_failed(self) -> bool:
        """Return whether a target is already known to be unusable."""
        answers = [
            answer
            for request, process in self._processes_by_request.items()
            if (answer := process.answers[request]).done()
        ]
        return any(answer.exception() is not None or isinstance(answer.result(), str) for answer in answers)

    def take_worker(self, entry: UserImplementation, threads: int) -> WorkerProcess | None:
        """Return a process that has loaded an implementation and is prepared as its workers are; None without one.

        ``entry`` has the variables that a worker would set.
        """
        for request, describing in self._processes_by_request.items():
            if request.target == entry.target:
                if (worker := describing.take_worker(request, entry.environment, threads)) is not None:
                    return worker
                describing.close()  # no later call can use it, and it may hold a framework in memory
        return None

    def close(self) -> None:
        """End the processes that no run has taken."""
        begun, self._processes_by_request = self._processes_by_request, {}
        self._threads.shutdown(wait=False, cancel_futures=True)
        for describing in dict.fromkeys(begun.values()):
            describing.close()

    def __enter__(self) -> DescribedWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prepare_to_load(environment: Mapping[str, str], threads: int) -> None:
    """Run in the process: limit the threads, and import what loads targets."""
    limit_threads(threads)
    os.environ.update(environment)
    import_module("attncheck.execution.user_call")  # imports NumPy, which reads the variables


def load_declarations(target: Target, environment: Mapping[str, str], threads: int, log: str) -> Declarations:
    """Run in the process: load a target as a worker would; return its declarations, or why it is unusable."""
    redirect_output(log, passed_on=True)
    prepare_to_load(environment, threads)
    from attncheck.execution.signatures import explain_unfit_function
    from attncheck.execution.user_call import load_target, read_target_declarations, remember_loaded_target

    try:
        loaded = load_target(target)
        declared = read_target_declarations(loaded, target.attribute.rpartition(".")[2], target.signature)
    except UnfitError as error:
        return explain_unfit_function(error, target, loaded)
    except LoadError as error:
        return to_one_line(str(error))
    remember_loaded_target(target, loaded)
    return declared
