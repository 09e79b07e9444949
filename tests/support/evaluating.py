"""A small problem of attention with its answer, and implementations asked for problems in workers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import GroupRunner, WorkerGroup
from attncheck.execution.worker import Outcome
from attncheck.reading.problem import Problem


def attention_problem(keys: int = 4, **options: object) -> Problem:
    """Return attention in float64 of two heads: three queries of width 5, and keys with values of width 6."""
    rng = np.random.default_rng(7)
    shapes = {"query": (1, 2, 3, 5), "key": (1, 2, keys, 5), "value": (1, 2, keys, 6)}
    return Problem("attention", options, {name: rng.normal(size=shape) for name, shape in shapes.items()})


def attention_output(problem: Problem) -> NDArray[np.float64]:
    """Return the output of such a problem."""
    output: NDArray[np.float64] = numpy_backend.attention(**problem.inputs, **problem.options)["output"]
    return output


def own(target: str) -> Implementation:
    """Return somebody's own implementation by its name."""
    (implementation,) = select_implementations(None, [target]).implementations
    return implementation


def in_worker(
    implementation: Implementation, problems: Sequence[Problem], folder: Path, limits: Limits | None = None
) -> list[Outcome]:
    """Return the outcomes of problems, one after the other in a worker, with its log in a folder."""
    dtype = problems[0].inputs["query"].dtype.name
    with closing(GroupRunner[str](WorkerGroup(implementation, (dtype,)), limits or Limits(), folder)) as runner:
        return [runner.evaluate(problem) for problem in problems]
