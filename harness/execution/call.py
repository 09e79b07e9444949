"""Functions called in a worker process, one after the other, each with a time limit.

A call always ends: with an answer, or with an exception if the process crashes, hangs or closes its pipe. After any
exception the process is unusable, and the caller has to end it with all that it started. The process also ends with
the process that started it.
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

_MARK_VARIABLE = "PROCESS_GROUP_MARK"
"""Environment variable of a worker and of all that it starts, which finds processes that lost their parent.

Its name does not tell a kernel that it is tested.

Its value is the harness, in three words (``_process_identity``), and the worker.
"""

# A choice: a longer wait delays the run if the kernel cannot end a process; a shorter one may leave it behind.
_MAX_SECONDS_TO_KILL = 10.0
_PR_SET_PDEATHSIG = 1
"""The option of Linux's prctl(2) that sends a signal when the parent ends."""

_spawn_lock = Lock()


class _Worker(SpawnProcess):
    """A spawned process that does not run the caller's main module again, and leaves Ctrl-C to its parent.

    Otherwise every worker of a script without a main guard would run the whole script again. A terminal sends Ctrl-C to
    all processes, and a worker that is loading its modules would print a traceback.
    """

    mark = ""

    def start(self) -> None:
        self.mark = f"{_process_identity(os.getpid())} {uuid4().hex}"
        with _spawn_lock, _block_interrupts(), _allow_children():
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            os.environ[_MARK_VARIABLE] = self.mark
            try:
                super().start()
            finally:
                del os.environ[_MARK_VARIABLE]
                sys.modules["__main__"] = main


@contextmanager
def _block_interrupts() -> Iterator[None]:
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
def _allow_children() -> Iterator[None]:
    """Allow a daemonic process, such as a Dask worker under its nanny, to start a process.

    ``multiprocessing`` forbids it because such children would outlive their parent; workers end with theirs.
    """
    configuration: dict[str, object] = current_process()._config  # type: ignore[attr-defined] # there is no other way
    daemon = configuration.pop("daemon", None)
    try:
        yield
    finally:
        if daemon is not None:
            configuration["daemon"] = daemon


def start_process(function: Callable[..., None], *arguments: object) -> _Worker:
    """Start a process that calls a function."""
    process = _Worker(target=function, args=arguments, name="attncheck worker")
    _starter_thread(os.getpid()).submit(process.start).result()
    return process


@cache
def _starter_thread(pid: int) -> ThreadPoolExecutor:
    """Return the thread that starts all workers of a process: they end with the thread that started them (below)."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"attncheck spawns for {pid}")


def exit_when_parent_exits() -> None:
    """Called in a worker: end it when its parent ends, even if either of them crashes or hangs."""
    parent = parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        import ctypes

        # The kernel's signal reaches a worker that hangs in C and lets no other thread of Python run.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent.pid:  # it had ended before
            os._exit(1)
    Thread(target=_exit_process_after, args=(parent.join,), daemon=True).start()


def _exit_process_after(wait: Callable[[], object]) -> None:
    wait()
    os._exit(1)


def become_first_oom_victim() -> None:
    """Called in a worker: if the machine runs out of memory, the kernel ends this process, not the harness."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


def kill_with_descendants(process: _Worker) -> None:
    """Kill a worker and everything that it started, and wait until they are gone."""
    deadline = monotonic() + _MAX_SECONDS_TO_KILL
    started: list[psutil.Process] = []
    with suppress(psutil.Error):
        if process.exitcode is None:  # while it lives: a process that loses its parent is only found by the mark
            started = psutil.Process(process.pid).children(recursive=True)
    while True:
        # Also finds a process that made itself a daemon.
        marked = (candidate for candidate, mark in _marked_processes() if mark == process.mark)
        alive = [child for child in {*started, *marked} if child.pid != process.pid and _is_alive(child)]
        for child in alive:
            with suppress(psutil.Error):
                child.kill()
        if process.exitcode is None:
            process.kill()
            process.join(0.01 if alive else _MAX_SECONDS_TO_KILL)
        if not alive or monotonic() > deadline:
            return
        sleep(0.01)


def kill_orphans() -> int:
    """Kill processes that workers of ended harnesses have started and left behind; return how many there were.

    If a harness is killed, its workers end at once, before they can end the processes that they started.
    """
    here, count = _process_identity(os.getpid()).split(), 0
    for process, mark in _marked_processes():
        with suppress(psutil.Error, ValueError):
            space, pid, begun, _ = mark.split(" ")
            if space == here[0] and not _is_process_running(int(pid), float(begun)):
                process.kill()
                count += 1
    return count


@cache
def _process_identity(pid: int) -> str:
    try:
        space = Path("/proc/self/ns/pid").readlink().name  # process numbers of another container mean nothing here
    except OSError:
        space = "all"
    return f"{space} {pid} {psutil.Process(pid).create_time()}"


def _is_process_running(pid: int, begun: float) -> bool:
    with suppress(psutil.NoSuchProcess):
        return abs(psutil.Process(pid).create_time() - begun) < 1
    return False


def _marked_processes() -> Iterator[tuple[psutil.Process, str]]:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if (mark := process.environ().get(_MARK_VARIABLE, "")).count(" ") == 3:
                yield process, mark


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def process_tree_memory(pid: int, mark: str = "") -> int:
    """Return the bytes of memory that a process, its children and the processes with a mark hold."""
    held = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        marked = (candidate for candidate, other in _marked_processes() if other == mark) if mark else ()
        for member in {process, *process.children(recursive=True), *marked}:
            with suppress(psutil.Error):
                held += member.memory_info().rss
    return held


Answer = TypeVar("Answer")

START_SECONDS = 300.0
"""The seconds that a framework may take to start.

A choice: a larger number waits longer for a framework that hangs, a smaller one fails frameworks on slow machines.
"""
# A choice: a longer pause notices exceeded limits later; a shorter one lists the processes of a worker more often.
_POLL_SECONDS = 0.2
# A choice: any code works that programs and shells do not use.
_PIPE_CLOSED_EXIT_CODE = 113
"""Exit code of a worker whose answer has no way back to the caller."""
_FRAMEWORKS, _BYTES_PER_WORKER = 5, 2**31
"""Workers of the four frameworks, one of which needs two, and bytes that each takes with what it has compiled."""


def _max_workers() -> int:
    """Return how many workers may be alive: one for each processor, and all of the frameworks' if memory allows."""
    room = psutil.virtual_memory().total * 3 // 4 // _BYTES_PER_WORKER
    return max(3, available_processors(), min(_FRAMEWORKS, room))


_MIN_MEMORY = 3 * 2**29
"""Bytes. A framework that has computed nothing yet holds up to 800 MB, and starting another worker takes seconds."""


@dataclass(frozen=True)
class Limits:
    """Limits of worker processes.

    Attributes:
        start_seconds: How long a framework may take to start.
        case_seconds: How long one evaluation may take. A mode that compiles for seconds gets ``start_seconds`` more.
        threads: Threads of each worker.
        workers: How many workers are alive at the same time; of user functions, at most one for each processor.
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
    workers: int = field(default_factory=_max_workers)
    soft_memory_limit: int = 4 * 2**30
    hard_memory_limit: int = field(default_factory=lambda: psutil.virtual_memory().total * 3 // 4)
    max_output: int = 2**26
    compilation_cache: bool = True
    keep_going: bool = False

    @property
    def memory_of_each(self) -> int:
        """Return the bytes that each worker may hold when all evaluate at the same time."""
        return self.hard_memory_limit // max(self.workers, 1)


def divide_memory_between_workers(limits: Limits, workers: int) -> Limits:
    """Divide three quarters of this machine's memory between so many workers."""
    share = max(_MIN_MEMORY, psutil.virtual_memory().total * 3 // 4 // max(workers, 1))
    return replace(limits, soft_memory_limit=min(limits.soft_memory_limit, share))


class CallTimeout(Exception):
    """A call took longer than it may."""


class CallCancelled(Exception):
    """The caller cancelled the call; the message gives the reason."""


class WorkerDied(Exception):
    """The process ended without an answer; the message says how."""


class RemoteError(Exception):
    """The function raised an exception, or returned a value that cannot be sent."""


@dataclass(frozen=True)
class _Answer:
    """The answer to a call; ``error_text`` is the text of the exception if it did not return."""

    number: int
    value: Any = None
    error_text: str | None = None


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
            self._process = start_process(_serve_calls, theirs)
        finally:
            theirs.close()
        self._asked: SimpleQueue[_SentCall | None] = SimpleQueue()
        # A daemon that is never joined: it hangs for as long as a process keeps the pipe open and sends nothing.
        Thread(target=_exchange_messages, args=(self._connection, self._asked), daemon=True).start()
        _live_workers.add(self)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid or 0

    @property
    def mark(self) -> str:
        """The mark that all processes of this one have, those without a parent, too."""
        return self._process.mark

    @property
    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.exitcode is None

    def call(
        self,
        function: Callable[..., Answer],
        *arguments: object,
        seconds: float,
        cancel_reason: Callable[[], str] = lambda: "",
        on_wait: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Call a function of a module in the process and return what it returns.

        ``cancel_reason`` is asked now and then; unless it returns an empty text, the call is over. ``on_wait`` is done
        once the call is on its way. Raises ``CallTimeout``, ``CallCancelled``, ``WorkerDied`` or ``RemoteError``.
        """
        deadline = monotonic() + seconds
        if self._is_over or self._process.exitcode is not None:
            raise WorkerDied(f"{self._describe_end()} before it was asked")
        self._calls += 1
        answered: _ReceivedQueue = SimpleQueue()
        # Pickled here and not in the thread: if an argument cannot be sent, the process is not at fault.
        self._asked.put((answered, _pickle_with_default_reducers((self._calls, function, arguments))))
        on_wait()
        while (received := _receive_within(answered, min(_POLL_SECONDS, deadline - monotonic()))) is None:
            if reason := cancel_reason():
                raise CallCancelled(reason)
            if self._process.exitcode is not None:
                if (received := _receive_within(answered, _POLL_SECONDS)) is not None:
                    break
                raise WorkerDied(self._describe_end())
            if monotonic() >= deadline:
                raise CallTimeout
        self.answered = received.received_at
        if isinstance(received.error, EOFError | OSError):
            self._is_over = True  # at once: the exit code may come later, to another thread that waits for it
            self._process.join(_POLL_SECONDS * 5)  # it closes its end a moment before it is gone
            raise WorkerDied(self._describe_end())
        if received.error is not None:
            raise WorkerDied(f"sent an answer that cannot be read ({type(received.error).__name__})")
        answer = received.answer
        if not isinstance(answer, _Answer) or answer.number != self._calls:
            raise WorkerDied("answered something that it was not asked")
        if answer.error_text is not None:
            raise RemoteError(answer.error_text)
        value: Answer = answer.value
        return value

    def _describe_end(self) -> str:
        code = self._process.exitcode
        if code is None:
            return "closed its connection"
        if code == _PIPE_CLOSED_EXIT_CODE:
            return "could not answer any more: its file descriptors were closed"
        name = ""
        with suppress(ValueError):
            name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return f"died with exit code {code}{name}"

    def kill(self) -> None:
        """Kill the process and all that it started; a call that is under way ends, too."""
        self._is_over = True
        with self._ending:
            kill_with_descendants(self._process)
        self._asked.put(None)
        _live_workers.discard(self)


@dataclass(frozen=True, eq=False)
class _PendingCall:
    """A call that waits for a process, and the function that is called here if that fails."""

    function: Callable[..., Any]
    arguments: tuple[object, ...]
    fallback: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class WorkerProcesses:
    """Calls functions in parallel in worker processes, as many as there are processors; ``close`` ends them.

    A process starts if a call waits and fewer than ``max_alive()`` are alive. If the process dies, perhaps because
    memory ran out, or the function raises, the call is made here instead, so that an error shows as without processes.
    """

    def __init__(
        self,
        prepare: Callable[..., None] | None = None,
        *prepare_arguments: object,
        processes: int | None = None,
        call_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        max_alive: Callable[[], int] | None = None,
    ) -> None:
        """Every process calls ``prepare`` first, with its arguments; ``call_context`` is entered for every call."""
        self._prepare, self._prepare_arguments, self._enter_during_call = prepare, prepare_arguments, call_context
        self._max_processes = processes or available_processors()
        self._max_alive = max_alive or (lambda: self._max_processes)
        self._calls: deque[_PendingCall] = deque()
        self._threads: list[Thread] = []
        self._started: list[WorkerProcess] = []
        self._starting = 0
        self._changed, self._call_here_lock = Condition(), Lock()
        self._closed = False

    def submit(
        self, function: Callable[..., Answer], *arguments: object, fallback: Callable[[], Answer] | None = None
    ) -> Future[Answer]:
        """Call a function of a module in a process; if that fails, call ``fallback`` here, by default the same."""
        call = _PendingCall(function, arguments, fallback or partial(function, *arguments))
        with self._changed:
            self._calls.append(call)
            if len(self._threads) < self._max_processes:
                thread = Thread(target=self._make_calls, name="attncheck calls", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return call.future

    @property
    def alive_count(self) -> int:
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
            worker.kill()
        for thread in self._threads:
            thread.join()

    def _make_calls(self) -> None:
        """Make calls in this thread's process; a thread takes no call before it has its process."""
        worker: WorkerProcess | None = None
        while self._wait_for_call(has_process=worker is not None):
            try:
                worker = worker or self._start_worker()
            except Exception:
                worker = None  # whatever it was, the call below is made here
            with self._changed:
                call = self._calls.popleft() if self._calls else None
            if call is not None and call.future.set_running_or_notify_cancel():
                worker = self._make_call(call, worker)

    def _wait_for_call(self, *, has_process: bool) -> bool:
        """Wait until there is a call, and a process or room to start one; return False once closed."""
        with self._changed:
            while not self._closed:
                if self._calls and (has_process or self.alive_count + self._starting < self._max_alive()):
                    self._starting += not has_process
                    return True
                self._changed.wait(_POLL_SECONDS)
        return False

    def _start_worker(self) -> WorkerProcess:
        worker = None
        try:
            worker = _take_or_start_worker()
            self._started.append(worker)
            if self._closed:  # while it started; whoever closed may not have seen it
                raise WorkerDied("was closed")
            if self._prepare is not None:
                worker.call(self._prepare, *self._prepare_arguments, seconds=math.inf)
        except BaseException:
            if worker is not None:
                worker.kill()
            raise
        finally:
            with self._changed:
                self._starting -= 1
        return worker

    def _make_call(self, call: _PendingCall, worker: WorkerProcess | None) -> WorkerProcess | None:
        """Make a call; return the process, or None if it is no longer usable."""
        try:
            try:
                if worker is None:
                    raise WorkerDied("did not start")
                with self._enter_during_call():
                    call.future.set_result(worker.call(call.function, *call.arguments, seconds=math.inf))
                return worker
            except (WorkerDied, RemoteError):
                if worker is not None:
                    worker.kill()
                if self._closed:
                    raise
            with self._call_here_lock:  # one at a time: the process may have run out of memory
                call.future.set_result(call.fallback())
        except BaseException as error:
            call.future.set_exception(error)
        return None


_prestarted_workers: deque[Future[WorkerProcess]] = deque()


def start_workers_ahead(count: int, *modules: str) -> None:
    """Start processes until so many idle ones wait for ``WorkerProcesses``; new ones import the modules."""
    if (missing := count - len(_prestarted_workers)) > 0:
        threads = ThreadPoolExecutor(missing, thread_name_prefix="attncheck starts")
        _prestarted_workers.extend(threads.submit(start_single_threaded, *modules) for _ in range(missing))
        threads.shutdown(wait=False)


def _take_or_start_worker() -> WorkerProcess:
    """Return a process that was started ahead, or another one."""
    while True:
        try:
            ahead = _prestarted_workers.popleft()
        except IndexError:  # another thread may have taken the last one
            return start_single_threaded()
        with suppress(Exception):  # one that could not be started, or has ended, is none
            if (worker := ahead.result()).is_alive:
                return worker


def start_single_threaded(*modules: str) -> WorkerProcess:
    """Start a process in which NumPy has one thread, and which has imported some modules."""
    from attncheck.execution.worker import limit_threads  # loads modules that only computing processes need

    worker = WorkerProcess()
    try:
        worker.call(limit_threads, 1, seconds=math.inf)
        worker.call(_import_modules, *modules, seconds=math.inf)
    except BaseException:
        worker.kill()
        raise
    return worker


def _import_modules(*names: str) -> None:
    for name in names:
        import_module(name)


@dataclass(frozen=True)
class _Received:
    """A message from the pipe, or the error that came instead."""

    answer: Any = None
    error: BaseException | None = None
    received_at: float = field(default_factory=perf_counter)


_ReceivedQueue: TypeAlias = SimpleQueue[_Received]
_SentCall: TypeAlias = tuple[_ReceivedQueue, bytes]


def _exchange_messages(connection: Connection, calls: SimpleQueue[_SentCall | None]) -> None:
    """Send calls and receive answers, until there are no more."""
    while (item := calls.get()) is not None:
        answered, call = item
        try:
            connection.send_bytes(call)
            answered.put(_Received(connection.recv()))
        except BaseException as error:  # passed to the caller, which decides
            answered.put(_Received(error=error))


_live_workers: WeakSet[WorkerProcess] = WeakSet()


@atexit.register
def _end_all_workers() -> None:
    for worker in list(_live_workers):
        worker.kill()


def _receive_within(answered: _ReceivedQueue, seconds: float) -> _Received | None:
    try:
        return answered.get(timeout=max(seconds, 0))
    except Empty:
        return None


def _serve_calls(connection: Connection) -> None:
    """Run in the process: answer calls until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_when_parent_exits()
    become_first_oom_victim()
    pid, descriptor, identity = os.getpid(), connection.fileno(), _file_identity(connection.fileno())
    while True:
        try:
            number, function, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        answer = _call_and_catch(number, function, arguments)
        if os.getpid() != pid:  # a forked child came back from the call: its parent answers
            os._exit(0)
        if _file_identity(descriptor) != identity:  # closed, and another file may have its number now
            os._exit(_PIPE_CLOSED_EXIT_CODE)
        try:
            connection.send_bytes(_pickle_with_default_reducers(answer))
        except Exception as error:
            connection.send(_Answer(number, error_text=f"what it returned cannot be sent: {type(error).__name__}"))


def _pickle_with_default_reducers(value: object) -> bytes:
    """Pickle without the reducers for sockets that ``Connection.send`` adds, which make it several times as slow."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _call_and_catch(number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Answer:
    try:
        return _Answer(number, function(*arguments))
    except BaseException as error:
        try:
            return _Answer(number, error_text=f"{type(error).__name__}: {str(error)[:500]}")
        except BaseException:  # a message that cannot be made
            return _Answer(number, error_text=type(error).__name__)


def _file_identity(descriptor: int) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.fstat(descriptor)
        return status.st_dev, status.st_ino
    return None
