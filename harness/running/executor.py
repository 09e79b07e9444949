"""Worker processes: one per framework (and per dtype that needs its own), side by side, each with a time limit.

Processes are pebble's: it kills a worker that overruns its time, notices one that dies, and starts another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import psutil
from pebble import ProcessExpired, ProcessPool

from attncheck.harness.running.caching import with_cache
from attncheck.harness.running.implementations import Implementation
from attncheck.harness.running.processes import ENDED_ITSELF, WorkerContext, exit_code_of, memory_of
from attncheck.harness.running.turns import Turns
from attncheck.harness.running.worker import Failure, Outcome, Task, clean, evaluate_and_measure, start

Key = TypeVar("Key")
Answer = TypeVar("Answer")

_LOOK_AGAIN_SECONDS = 0.2
_KEPT_OF_LOG = 2**12


@dataclass(frozen=True)
class Limits:
    """Seconds that a framework may take to start, and that one evaluation may take; threads per worker.

    ``workers`` is how many evaluate at the same time; others keep their frameworks loaded and wait for their turn. One
    that holds more than ``memory`` bytes after an evaluation is replaced: compilers keep all that they ever compiled.
    One that holds more than ``most_memory`` during one is stopped, and one that has printed more than ``most_output``.
    With ``compilation_cache``, frameworks keep what they compile for the next run (``caching.py``).
    """

    start_seconds: float = 300.0
    case_seconds: float = 60.0
    threads: int = 1
    workers: int = max(3, os.cpu_count() or 1)
    memory: int = 4 * 2**30
    most_memory: int = field(default_factory=lambda: psutil.virtual_memory().total * 3 // 4)
    most_output: int = 2**26
    compilation_cache: bool = True


@dataclass(frozen=True)
class Group:
    """One worker process: an implementation, and the dtypes that it can serve together."""

    implementation: Implementation
    dtypes: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for logs: the implementation, and its dtype where it has a process of its own."""
        return f"{self.implementation.name}-{'-'.join(self.dtypes)}"


def group_by_process(implementation: Implementation, dtypes: Sequence[str]) -> list[Group]:
    """Split the dtypes of an implementation over the processes that they need."""
    alone = [dtype for dtype in dtypes if dtype in implementation.entry.own_process_for]
    together = tuple(dtype for dtype in dtypes if dtype not in alone)
    groups = [Group(implementation, (dtype,)) for dtype in alone]
    return [*groups, Group(implementation, together)] if together else groups


class GroupRunner(Generic[Key]):
    """Runs the tasks of one group in its worker, one after the other; a failure is an outcome, not an end."""

    def __init__(self, group: Group, limits: Limits, log_directory: Path) -> None:
        self.group = group
        self.description: dict[str, str] = {}
        self._limits = limits
        self._log = log_directory / f"{group.name}.txt"
        self._pool: ProcessPool | None = None
        self._started = False
        self._pid: int | None = None
        self._given_up: Failure | None = None
        self._stopping = False

    def run(
        self,
        keys: Iterable[Key],
        task_of: Callable[[Key], Task],
        report: Callable[[Key, Outcome], None],
        turns: Turns | None = None,
        place_of: Callable[[Key], int] = lambda key: 0,
    ) -> None:
        """Evaluate every task, each in its turn, and report its outcome; returns early once ``stop`` is called.

        ``place_of`` says where in the plan of all runners a task stands: the turn is that of the earliest.
        """
        try:
            for key in keys:
                if self._stopping:
                    return
                with turns.taken(place_of(key)) if turns else nullcontext():
                    if self._stopping:
                        return
                    outcome = self.evaluate(task_of(key))
                if not self._stopping:
                    report(key, outcome)
        finally:
            self.close()

    def stop(self) -> None:
        """Kill the worker; nothing more is reported."""
        self._stopping = True
        pool = self._pool
        if pool is not None:
            _stop(pool)

    def evaluate(self, task: Task) -> Outcome:
        """Evaluate one task in the worker, which is started if there is none; ``close`` ends it."""
        if not self._started and self._given_up is None:
            self._start()
        if self._given_up is not None:
            return self._given_up
        answer = self._call(self._limits.case_seconds, evaluate_and_measure, task)
        if isinstance(answer, Failure):
            self._started = False
            return answer
        outcome, held = answer
        if held > self._limits.memory:
            self.close()
        return outcome

    def _start(self) -> None:
        implementation, dtype = self.group.implementation, self.group.dtypes[0]
        entry = with_cache(implementation.entry, keep=self._limits.compilation_cache)
        what = (entry, implementation.mode, dtype, self._limits.threads, str(self._log))
        answer = self._call(self._limits.start_seconds, start, *what)
        if isinstance(answer, Failure):
            self._given_up = answer
        else:
            self._pid, self.description, self._started = answer.pid, dict(answer.description), True

    def _call(self, seconds: float, function: Callable[..., Answer], *arguments: object) -> Answer | Failure:
        """Call a function in the worker; what kills it becomes a failure."""
        try:
            if self._pool is None:
                self._pool = ProcessPool(max_workers=1, context=WorkerContext())
            future = self._pool.schedule(function, args=arguments, timeout=seconds)
            while not futures.wait([future], _LOOK_AGAIN_SECONDS).done:
                if self._stopping:  # pebble never completes what is under way when a pool is stopped
                    raise futures.CancelledError
                if reason := self._excess():
                    self.close()
                    self._shorten_log()
                    return Failure("crash", f"{reason}; the worker was stopped")
            return future.result()
        except futures.TimeoutError:
            return Failure("timeout", f"not done after {seconds:g} s; the worker was stopped")
        except ProcessExpired as expired:
            return self._died(0 if expired.exitcode == ENDED_ITSELF else expired.exitcode)
        except (BrokenProcessPool, futures.CancelledError, RuntimeError) as error:
            # The pool itself is gone: its worker died between two calls, or before pebble heard that it had begun; or
            # the run is being stopped.
            code = exit_code_of(self._pid) if self._started and self._pid is not None else None
            self.close()
            return self._died(code, str(error) or type(error).__name__)

    def _died(self, exit_code: int | None, otherwise: str = "") -> Failure:
        how = f"is gone: {otherwise}" if exit_code is None else f"died with exit code {exit_code}"
        return Failure("crash", f"the worker process {how}{self._last_words()}")

    def _excess(self) -> str:
        """Say what the worker has too much of; empty where it has not."""
        held = memory_of(self._pid) if self._started and self._pid is not None else 0
        if held > self._limits.most_memory:
            return f"it held {held / 2**30:.1f} GiB of memory, more than {self._limits.most_memory / 2**30:.1f} GiB"
        printed = self._log.stat().st_size if self._log.is_file() else 0
        if printed > self._limits.most_output:
            return f"it printed {printed / 2**20:.1f} MiB, more than {self._limits.most_output / 2**20:.1f} MiB"
        return ""

    def _shorten_log(self) -> None:
        """Keep the end of a log that grew too long: the next worker writes on."""
        with suppress(OSError):
            if self._log.stat().st_size > self._limits.most_output:
                with self._log.open("rb") as file:
                    file.seek(-_KEPT_OF_LOG, os.SEEK_END)
                    end = file.read()
                self._log.write_bytes(b"[what was printed before is left out]\n" + end)

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"; its last line: {clean(lines[-1][-200:])}" if lines else ""

    def close(self) -> None:
        """End the worker."""
        pool, self._pool, self._started = self._pool, None, False
        if pool is not None:
            _stop(pool)
            pool.join()


def _stop(pool: ProcessPool) -> None:
    """Kill the pool's worker, whatever it is doing."""
    pool.stop()  # type: ignore[no-untyped-call] # pebble leaves this one without types
