"""Functions called in a process of their own, one after the other, each with a time limit.

Whatever becomes of the process, the caller hears it: nothing that happens in there can keep it waiting. After anything
but an answer the process is of no use any more and has to be ended, with all that it started. It ends with the process
that started it, too.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from multiprocessing import Pipe, current_process, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Lock, Thread
from time import monotonic, perf_counter, sleep
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4
from weakref import WeakSet

import psutil

from attncheck.common.processors import available_processors

_MARK = "ATTNCHECK_WORKER"
"""In the environment of a worker and of all that it starts: by this they are found when nothing else leads to them.

Its value is which harness it is, in three words (``_harness``), and which worker.
"""

_SECONDS_TO_END = 10.0
_PR_SET_PDEATHSIG = 1

_spawning = Lock()


class _Worker(SpawnProcess):
    """A spawned process that does not run the caller's main module again, and leaves Ctrl-C to its parent.

    A script without a main guard would otherwise start its whole run anew in every worker, and a worker that is just
    loading its modules would answer Ctrl-C, which a terminal sends to all, with a traceback.
    """

    mark = ""

    def start(self) -> None:
        self.mark = f"{_harness(os.getpid())} {uuid4().hex}"
        with _spawning, _interrupts_blocked(), _children_allowed():
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            os.environ[_MARK] = self.mark
            try:
                super().start()
            finally:
                del os.environ[_MARK]
                sys.modules["__main__"] = main


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread, and in the processes that it starts meanwhile."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # or it is started now, and unblocks what is blocked here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _children_allowed() -> Iterator[None]:
    """Let a daemonic process, such as a worker of Dask's under its nanny, start a process too.

    ``multiprocessing`` forbids it because such children would be left behind; ours end with their parent by themselves.
    """
    configuration: dict[str, object] = current_process()._config  # type: ignore[attr-defined] # there is no other way
    daemon = configuration.pop("daemon", None)
    try:
        yield
    finally:
        if daemon is not None:
            configuration["daemon"] = daemon


def spawn(function: Callable[..., None], *arguments: object) -> _Worker:
    """Start a process that calls a function."""
    process = _Worker(target=function, args=arguments, name="attncheck worker")
    _spawner(os.getpid()).submit(process.start).result()
    return process


@cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """Return the thread that starts all workers of a process: they end with the thread that started them (below)."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"attncheck spawns for {pid}")


def end_with_parent() -> None:
    """Called in a worker: end it when its parent ends, however that ends and whatever the worker is doing then."""
    parent = parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        import ctypes

        # The kernel's signal reaches a worker that hangs in C and lets no other thread of Python run.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent.pid:  # it had ended before
            os._exit(1)
    Thread(target=_end_after, args=(parent.join,), daemon=True).start()


def _end_after(wait: Callable[[], object]) -> None:
    wait()
    os._exit(1)


def sacrifice() -> None:
    """Called in a worker: where the machine's memory runs out, the kernel ends this process, not the harness."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


def end(process: _Worker) -> None:
    """Kill a worker and everything that it started, whatever they are doing, and wait until they are gone."""
    deadline = monotonic() + _SECONDS_TO_END
    started = _descendants(process)  # while it lives: who loses its parent is only found by the mark
    while True:
        marked = (other for other, mark in _marked() if mark == process.mark)  # also what made itself a daemon
        alive = [other for other in {*started, *marked} if other.pid != process.pid and _is_alive(other)]
        for other in alive:
            with suppress(psutil.Error):
                other.kill()
        if process.exitcode is None:
            process.kill()
            process.join(0.01 if alive else _SECONDS_TO_END)
        if not alive or monotonic() > deadline:
            return
        sleep(0.01)


def end_strays() -> int:
    """Kill what workers have started and left behind, of harnesses that are no more; return how many there were.

    A harness that is killed takes its workers along, and they have no time to look after what they have started.
    """
    here, count = _harness(os.getpid()).split(), 0
    for process, mark in _marked():
        with suppress(psutil.Error, ValueError):
            space, pid, begun, _ = mark.split(" ")
            if space == here[0] and not _is_running(int(pid), float(begun)):
                process.kill()
                count += 1
    return count


@cache
def _harness(pid: int) -> str:
    try:
        space = Path("/proc/self/ns/pid").readlink().name  # process numbers of another container mean nothing here
    except OSError:
        space = "all"
    return f"{space} {pid} {psutil.Process(pid).create_time()}"


def _is_running(pid: int, begun: float) -> bool:
    with suppress(psutil.NoSuchProcess):
        return abs(psutil.Process(pid).create_time() - begun) < 1
    return False


def _descendants(process: _Worker) -> list[psutil.Process]:
    with suppress(psutil.Error):
        if process.exitcode is None:
            return psutil.Process(process.pid).children(recursive=True)
    return []


def _marked() -> Iterator[tuple[psutil.Process, str]]:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if (mark := process.environ().get(_MARK, "")).count(" ") == 3:
                yield process, mark


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def memory_of(pid: int) -> int:
    """Return the bytes of memory that a process and its children hold."""
    held = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for other in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                held += other.memory_info().rss
    return held


Answer = TypeVar("Answer")

START_SECONDS = 300.0
"""The seconds that a framework may take to start."""
_LOOK_AGAIN_SECONDS = 0.2
_NO_WAY_BACK = 113
"""Exit code of a worker whose answer has no way back to the caller."""
_FRAMEWORKS, _OF_EACH = 5, 2**31
"""Workers of the four frameworks, one of which needs two, and bytes that each takes with what it has compiled."""


def _workers() -> int:
    """Return how many workers may be alive: one for each processor, and all of the frameworks' where memory allows."""
    room = psutil.virtual_memory().total * 3 // 4 // _OF_EACH
    return max(3, available_processors(), min(_FRAMEWORKS, room))


_MIN_MEMORY = 3 * 2**29
"""Bytes. A framework that has done nothing yet holds up to 800 MB, and starting one anew takes seconds."""


@dataclass(frozen=True)
class Limits:
    """Limits of worker processes.

    Attributes:
        start_seconds: How long a framework may take to start.
        case_seconds: How long one evaluation may take; where a mode compiles for seconds, so much longer as it may take
            to start.
        threads: Threads of each worker.
        workers: How many workers are alive at the same time. Those of user functions are as few as processors.
        soft_memory_limit: Bytes. A worker that holds more after an evaluation is replaced, because compilers keep all
            that they ever compiled.
        hard_memory_limit: Bytes. A worker that holds more during an evaluation is stopped.
        max_output: Bytes. A worker that has printed more is stopped.
        compilation_cache: Whether frameworks keep what they compile for later runs.
        keep_going: Whether every case is tried, even after ten equal crashes or timeouts in a row.
    """

    start_seconds: float = START_SECONDS
    case_seconds: float = 60.0
    threads: int = 1
    workers: int = field(default_factory=_workers)
    soft_memory_limit: int = 4 * 2**30
    hard_memory_limit: int = field(default_factory=lambda: psutil.virtual_memory().total * 3 // 4)
    max_output: int = 2**26
    compilation_cache: bool = True
    keep_going: bool = False

    @property
    def memory_of_each(self) -> int:
        """Return the bytes that each worker may hold when as many evaluate at the same time as may."""
        return self.hard_memory_limit // max(self.workers, 1)


def with_memory_per_worker(limits: Limits, workers: int) -> Limits:
    """Limit each of so many workers on this machine; three quarters of its memory are theirs."""
    share = max(_MIN_MEMORY, psutil.virtual_memory().total * 3 // 4 // max(workers, 1))
    return replace(limits, soft_memory_limit=min(limits.soft_memory_limit, share))


class CallTimeout(Exception):
    """A call took longer than it may."""


class CallCancelled(Exception):
    """Whoever watched the call wants it to end; says why."""


class WorkerDied(Exception):
    """The process ended without an answer; says how."""


class RemoteError(Exception):
    """The function raised, or returned what cannot be sent; says what."""


@dataclass(frozen=True)
class _Answer:
    """The answer to a call; ``raised`` says what it raised instead of returning."""

    number: int
    value: Any = None
    raised: str | None = None


class WorkerProcess:
    """A process that waits for calls."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._ending = Lock()
        self._calls = 0
        self._is_over = False
        self.answered = 0.0
        """The time of the last answer, by ``perf_counter``."""
        try:
            self._process = spawn(_serve, theirs)
        finally:
            theirs.close()
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        # Nobody waits for this thread: it hangs for as long as something holds the pipe open and is silent.
        Thread(target=_exchange, args=(self._connection, self._asked), daemon=True).start()
        _living.add(self)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.exitcode is None

    def call(
        self,
        function: Callable[..., Answer],
        *arguments: object,
        seconds: float,
        look: Callable[[], str] = lambda: "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Call a function of a module in the process and return what it returns.

        ``look`` is asked now and then; unless it returns an empty text, the call is over. ``meanwhile`` is done once
        the call is on its way. Raises ``CallTimeout``, ``CallCancelled``, ``WorkerDied`` or ``RemoteError``.
        """
        deadline = monotonic() + seconds
        if self._is_over or self._process.exitcode is not None:
            raise WorkerDied(f"{self._how_it_ended()} before it was asked")
        self._calls += 1
        answered: _Answered = SimpleQueue()
        # Made here and not in the thread: that something of ours cannot be sent is no fault of the process.
        self._asked.put((answered, _pickled((self._calls, function, arguments))))
        meanwhile()
        while (received := _next(answered, min(_LOOK_AGAIN_SECONDS, deadline - monotonic()))) is None:
            if reason := look():
                raise CallCancelled(reason)
            if self._process.exitcode is not None:
                if (received := _next(answered, _LOOK_AGAIN_SECONDS)) is not None:
                    break
                raise WorkerDied(self._how_it_ended())
            if monotonic() >= deadline:
                raise CallTimeout
        self.answered = received.at
        if isinstance(received.error, EOFError | OSError):
            self._is_over = True  # at once: the exit code may come later, to another thread that waits for it
            self._process.join(_LOOK_AGAIN_SECONDS * 5)  # it closes its end a moment before it is gone
            raise WorkerDied(self._how_it_ended())
        if received.error is not None:
            raise WorkerDied(f"sent an answer that cannot be read ({type(received.error).__name__})")
        answer = received.answer
        if not isinstance(answer, _Answer) or answer.number != self._calls:
            raise WorkerDied("answered something that it was not asked")
        if answer.raised is not None:
            raise RemoteError(answer.raised)
        value: Answer = answer.value
        return value

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        if code is None:
            return "closed its connection"
        if code == _NO_WAY_BACK:
            return "could not answer any more: its file descriptors were closed"
        name = ""
        with suppress(ValueError):
            name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return f"died with exit code {code}{name}"

    def end(self) -> None:
        """Kill the process and all that it started; a call that is under way ends, too."""
        self._is_over = True
        with self._ending:
            end(self._process)
        self._asked.put(None)
        _living.discard(self)


@dataclass(frozen=True, eq=False)
class _PendingCall:
    """A call that waits for a process, and what is called here where that fails."""

    function: Callable[..., Any]
    arguments: tuple[object, ...]
    otherwise: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class WorkerProcesses:
    """Calls functions side by side in processes of its own, as many as there are processors; ``close`` ends them.

    A process starts if there is something to call and fewer than ``max_alive()`` are alive. If it dies, for want of
    memory perhaps, or the function raises, the call is made here instead: whatever is wrong shows as it would without
    any.
    """

    def __init__(
        self,
        prepare: Callable[..., None] | None = None,
        *given: object,
        processes: int | None = None,
        during: Callable[[], AbstractContextManager[Any]] = nullcontext,
        max_alive: Callable[[], int] | None = None,
    ) -> None:
        """Every process calls ``prepare`` first, with what is ``given``; ``during`` is entered for every call."""
        self._prepare, self._given, self._during = prepare, given, during
        self._most = processes or available_processors()
        self._max_alive = max_alive or (lambda: self._most)
        self._calls: deque[_PendingCall] = deque()
        self._threads: list[Thread] = []
        self._started: list[WorkerProcess] = []
        self._starting = 0
        self._changed, self._here = Condition(), Lock()
        self._closed = False

    def submit(
        self, function: Callable[..., Answer], *arguments: object, otherwise: Callable[[], Answer] | None = None
    ) -> Future[Answer]:
        """Have a function of a module called; ``otherwise`` is called here where that fails, by default the same."""
        call = _PendingCall(function, arguments, otherwise or partial(function, *arguments))
        with self._changed:
            self._calls.append(call)
            if len(self._threads) < self._most:
                thread = Thread(target=self._serve, name="attncheck calls", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return call.future

    @property
    def alive(self) -> int:
        """Return how many processes are alive."""
        return sum(worker.is_alive for worker in self._started)

    def close(self) -> None:
        """End the processes; what has not been called is dropped."""
        with self._changed:
            self._closed = True
            calls, self._calls = self._calls, deque()
            self._changed.notify_all()
        for call in calls:
            call.future.cancel()
        for worker in self._started:
            worker.end()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Make calls in a process of this thread, which takes none before it has the process."""
        worker: WorkerProcess | None = None
        while self._wait(has_process=worker is not None):
            try:
                worker = worker or self._started_worker()
            except Exception:
                worker = None  # whatever it was, the call below is made here
            with self._changed:
                call = self._calls.popleft() if self._calls else None
            if call is not None and call.future.set_running_or_notify_cancel():
                worker = self._answer(call, worker)

    def _wait(self, *, has_process: bool) -> bool:
        """Wait until there is a call, and a process or leave to start one; return whether there is."""
        with self._changed:
            while not self._closed:
                if self._calls and (has_process or self.alive + self._starting < self._max_alive()):
                    self._starting += not has_process
                    return True
                self._changed.wait(_LOOK_AGAIN_SECONDS)
        return False

    def _started_worker(self) -> WorkerProcess:
        worker = None
        try:
            worker = _taken()
            self._started.append(worker)
            if self._closed:  # while it started; whoever closed may not have seen it
                raise WorkerDied("was closed")
            if self._prepare is not None:
                worker.call(self._prepare, *self._given, seconds=math.inf)
        except BaseException:
            if worker is not None:
                worker.end()
            raise
        finally:
            with self._changed:
                self._starting -= 1
        return worker

    def _answer(self, call: _PendingCall, worker: WorkerProcess | None) -> WorkerProcess | None:
        """Make a call; return the process, None if it is of no use any more."""
        try:
            try:
                if worker is None:
                    raise WorkerDied("did not start")
                with self._during():
                    call.future.set_result(worker.call(call.function, *call.arguments, seconds=math.inf))
                return worker
            except (WorkerDied, RemoteError):
                if worker is not None:
                    worker.end()
                if self._closed:
                    raise
            with self._here:  # one at a time: memory may be what was missing
                call.future.set_result(call.otherwise())
        except BaseException as error:
            call.future.set_exception(error)
        return None


_ahead: deque[Future[WorkerProcess]] = deque()


def start_ahead(count: int, module: str) -> None:
    """Start processes that have imported a module when ``WorkerProcesses`` take them."""
    threads = ThreadPoolExecutor(count, thread_name_prefix="attncheck starts")
    _ahead.extend(threads.submit(_of_one_thread, module) for _ in range(count))
    threads.shutdown(wait=False)


def _taken() -> WorkerProcess:
    """Return a process that was started ahead, or another one."""
    try:
        ahead = _ahead.popleft()
    except IndexError:  # threads take them side by side
        return _of_one_thread()
    return ahead.result()


def _of_one_thread(module: str = "") -> WorkerProcess:
    from attncheck.execution.worker import limit_threads  # which loads what only processes need that compute

    worker = WorkerProcess()
    worker.call(limit_threads, 1, seconds=math.inf)
    if module:
        worker.call(_import, module, seconds=math.inf)
    return worker


def _import(module: str) -> None:
    import_module(module)


@dataclass(frozen=True)
class _Received:
    """A message from the pipe, or the error that came instead."""

    answer: Any = None
    error: BaseException | None = None
    at: float = field(default_factory=perf_counter)


_Answered: TypeAlias = SimpleQueue[_Received]
_Asked: TypeAlias = tuple[_Answered, bytes]


def _exchange(connection: Connection, asked: SimpleQueue[_Asked | None]) -> None:
    """Send what is asked and receive what is answered, until there is no more."""
    while (item := asked.get()) is not None:
        answered, call = item
        try:
            connection.send_bytes(call)
            answered.put(_Received(connection.recv()))
        except BaseException as error:  # handed to the caller, who decides
            answered.put(_Received(error=error))


_living: WeakSet[WorkerProcess] = WeakSet()


@atexit.register
def _end_all() -> None:
    for worker in list(_living):
        worker.end()


def _next(answered: _Answered, seconds: float) -> _Received | None:
    try:
        return answered.get(timeout=max(seconds, 0))
    except Empty:
        return None


def _serve(connection: Connection) -> None:
    """Run in the process: answer calls until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    sacrifice()
    own, descriptor, identity = os.getpid(), connection.fileno(), _identity(connection.fileno())
    while True:
        try:
            number, function, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        answer = _answer(number, function, arguments)
        if os.getpid() != own:  # a forked child came back from the call: its parent answers
            os._exit(0)
        if _identity(descriptor) != identity:  # closed, and perhaps another file has its number by now
            os._exit(_NO_WAY_BACK)
        try:
            connection.send_bytes(_pickled(answer))
        except Exception as error:
            connection.send(_Answer(number, raised=f"what it returned cannot be sent: {type(error).__name__}"))


def _pickled(sent: object) -> bytes:
    """Pickle without what ``Connection.send`` adds for sockets and the like, which makes it several times as slow."""
    return pickle.dumps(sent, pickle.HIGHEST_PROTOCOL)


def _answer(number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Answer:
    try:
        return _Answer(number, function(*arguments))
    except BaseException as error:
        try:
            return _Answer(number, raised=f"{type(error).__name__}: {str(error)[:500]}")
        except BaseException:  # a message that cannot be made
            return _Answer(number, raised=type(error).__name__)


def _identity(descriptor: int) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.fstat(descriptor)
        return status.st_dev, status.st_ino
    return None
