"""Pools of worker processes for single calls: one process per implementation and dtype, or a new one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import GroupRunner, WorkerGroup, group_by_process


class WorkerPool:
    """Worker processes that are reused until they are closed, and fresh ones."""

    def __init__(self, limits: Limits | None = None, *, probes_state: bool = True) -> None:
        """Make a pool without a process.

        Args:
            limits: Limits of the processes.
            probes_state: Whether a user's function is called around some cases with one option or input changed.
        """
        self.limits = limits or Limits()
        self._probes_state = probes_state
        self._folder = tempfile.TemporaryDirectory()  # its name does not tell a kernel that it is tested
        self._number = 0
        self._kept: dict[tuple[object, ...], GroupRunner[Any]] = {}
        self._fresh: list[GroupRunner[Any]] = []

    def worker_for(self, implementation: Implementation, dtype: str, threads: int | None = None) -> GroupRunner[Any]:
        """Return the worker of an implementation that serves a dtype, with so many threads."""
        group, threads = process_group_for(implementation, dtype), threads or self.limits.threads
        # A user's function may be called in several ways, which a name does not tell apart.
        key = group.name, getattr(implementation.entry, "target", None), threads
        if key not in self._kept:
            self._kept[key] = self._make_runner(group, replace(self.limits, threads=threads))
        return self._kept[key]

    @contextmanager
    def new_process_worker(
        self, implementation: Implementation, dtype: str, *, keep_going: bool = False
    ) -> Iterator[GroupRunner[Any]]:
        """Yield a worker with a new process, which is ended afterwards.

        With ``keep_going``, a process that ends is replaced, without a limit.
        """
        limits = replace(self.limits, keep_going=keep_going or self.limits.keep_going)
        runner = self._make_runner(process_group_for(implementation, dtype), limits)
        self._fresh.append(runner)
        try:
            yield runner
        finally:
            self._fresh.remove(runner)
            runner.close()

    def _make_runner(self, group: WorkerGroup, limits: Limits) -> GroupRunner[Any]:
        self._number += 1
        logs = Path(self._folder.name)
        return GroupRunner(group, limits, logs, number=self._number, probes_state=self._probes_state)

    def kill_running_calls(self) -> None:
        """Kill running calls; the workers run no more."""
        for runner in (*self._kept.values(), *self._fresh):
            runner.stop()

    def close(self) -> None:
        """End the processes."""
        for runner in self._kept.values():
            runner.close()
        self._kept.clear()
        self._folder.cleanup()


def process_group_for(implementation: Implementation, dtype: str) -> WorkerGroup:
    """Return the group of dtypes of an implementation that share one process with a dtype."""
    declared = [name for name in implementation.mode_declarations.classes if implementation.rounding_model(name)]
    return next(group for group in group_by_process(implementation, declared) if dtype in group.dtypes)
