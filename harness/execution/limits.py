"""How long, how much and how many: the limits of worker processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import psutil

from attncheck.backends import Mode
from attncheck.execution.call import START_SECONDS
from attncheck.execution.worker import Failure, Task
from attncheck.processors import available_processors
from attncheck.reading.shapes import score_elements
from attncheck.spec import ON_SCORES, computed_stages

_MIN_HELD = 2
"""Scores, and the weights that are made of them."""


def scores_too_large(mode: Mode, task: Task, most: int) -> Failure | None:
    """Return why a mode is not asked for a task: score matrices that it holds take more than ``most`` bytes.

    Counted are the stages of their shape that the operation computes, each of which modular code returns. Scores that
    are given as inputs are there already.
    """
    if not mode.holds_scores or "query" not in task.inputs:
        return None
    elements = score_elements(task.operation, task.options, task.inputs)
    computed = set(ON_SCORES).intersection(computed_stages(task.operation, task.options, task.inputs))
    stages = max(len(computed), _MIN_HELD)
    size = elements * task.inputs["query"].dtype.itemsize * stages
    if size <= most:
        return None
    needed = f"would hold {elements:,} scores in {stages} stages, {size / 2**30:.1f} GiB"
    limit = f"a worker's share of the memory limit is {most / 2**30:.1f} GiB"
    return Failure("unsupported", f"{needed}; {limit}", ("more memory",))


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
        workers: How many workers are alive at the same time.
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
