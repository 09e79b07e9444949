"""How long, how much and how many: the limits of worker processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import psutil

_MIN_MEMORY = 3 * 2**29
"""Bytes. A framework that has done nothing yet holds up to 800 MB, and starting one anew takes seconds."""


@dataclass(frozen=True)
class Limits:
    """Limits of worker processes.

    Attributes:
        start_seconds: How long a framework may take to start.
        case_seconds: How long one evaluation may take.
        threads: Threads of each worker.
        workers: How many workers evaluate at the same time. Others keep their frameworks loaded and wait.
        soft_memory_limit: Bytes. A worker that holds more after an evaluation is replaced, because compilers keep all
            that they ever compiled.
        hard_memory_limit: Bytes. A worker that holds more during an evaluation is stopped.
        max_output: Bytes. A worker that has printed more is stopped.
        compilation_cache: Whether frameworks keep what they compile for later runs.
        keep_going: Whether every case is tried, even after ten equal crashes or timeouts in a row.
    """

    start_seconds: float = 300.0
    case_seconds: float = 60.0
    threads: int = 1
    workers: int = max(3, os.cpu_count() or 1)
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
