"""How long, how much and how many: the limits of worker processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import psutil

_MIN_MEMORY = 3 * 2**29
"""Bytes. A framework that has done nothing yet holds up to 800 MB, and starting one anew takes seconds."""


@dataclass(frozen=True)
class Limits:
    """Seconds that a framework may take to start, and that one evaluation may take; threads per worker.

    ``workers`` is how many evaluate at the same time; others keep their frameworks loaded and wait for their turn. A
    worker that holds more than ``soft_memory_limit`` bytes after an evaluation is replaced, for compilers keep all that
    they ever compiled. One that holds more than ``hard_memory_limit`` bytes during an evaluation is stopped, and so is
    one that has printed more than ``max_output`` bytes.
    With ``compilation_cache``, frameworks keep what they compile for the next run (``caching.py``); with
    ``keep_going``, what ends its worker is tried again however often it does so (``ends.py``).
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
