"""Score matrices that would not fit into memory: said beforehand, where trying would take the whole machine along."""

from __future__ import annotations

from attncheck.backends import Mode
from attncheck.execution.worker import Failure, Task
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
