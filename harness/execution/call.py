"""Functions called in a process of their own, one after the other, each with a time limit.

Whatever becomes of the process, the caller hears it: nothing that happens in there can keep it waiting. After anything
but an answer the process is of no use any more and has to be ended.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic, perf_counter
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

from attncheck.execution.process_tree import end, end_with_parent, sacrifice, spawn

Answer = TypeVar("Answer")

START_SECONDS = 300.0
"""How long a framework may take to start."""
_LOOK_AGAIN_SECONDS = 0.2
_NO_WAY_BACK = 113
"""Exit code of a worker whose answer has no way back to the caller."""


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
    """What came of a call; ``raised`` says what it raised instead of returning."""

    number: int
    value: Any = None
    raised: str | None = None


class WorkerProcess:
    """A process that waits for calls."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._ending = Lock()
        self._calls = 0
        self.answered = 0.0
        """When the last answer came, by ``perf_counter``."""
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
        """Whether the process has not ended."""
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
        if self._process.exitcode is not None:
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
        answer: Answer = self._taken(received)
        return answer

    def _taken(self, received: _Received) -> Any:
        if isinstance(received.error, EOFError | OSError):
            self._process.join(_LOOK_AGAIN_SECONDS * 5)  # it closes its end a moment before it is gone
            raise WorkerDied(self._how_it_ended())
        if received.error is not None:
            raise WorkerDied(f"sent an answer that cannot be read ({type(received.error).__name__})")
        answer = received.answer
        if not isinstance(answer, _Answer) or answer.number != self._calls:
            raise WorkerDied("answered something that it was not asked")
        if answer.raised is not None:
            raise RemoteError(answer.raised)
        return answer.value

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        if code is None:
            return "closed its connection"
        if code == _NO_WAY_BACK:
            return "could not answer any more: its file descriptors were closed"
        with suppress(ValueError):
            if code < 0:
                return f"died with exit code {code} ({signal.Signals(-code).name})"
        return f"died with exit code {code}"

    def end(self) -> None:
        """Kill the process and all that it started; a call that is under way ends, too."""
        with self._ending:
            end(self._process)
        self._asked.put(None)
        _living.discard(self)


@dataclass(frozen=True)
class _Received:
    """What came over the pipe, or why nothing did."""

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
            received = _Received(connection.recv())
        except BaseException as error:  # handed to the caller, who decides
            received = _Received(error=error)
        answered.put(received)


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
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
