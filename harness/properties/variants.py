"""What a property asks: further calls, and how their results are mapped back to what the first call gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.sessions import Session
from attncheck.properties.problem import Problem

Array = NDArray[Any]
Combine = Callable[[str, Sequence[Array]], Array]
"""Lays the results of calls out as the first call's, stage by stage: it moves elements, and computes nothing."""


def only_one(stage: str, results: Sequence[Array]) -> Array:
    """Map the result of the only call: it lies as the first call's does."""
    (result,) = results
    return result


@dataclass(frozen=True, eq=False)
class Call:
    """One further call; ``truth`` is the problem whose exact answer it has to give, by default its own."""

    what: str
    problem: Problem
    truth: Problem | None = None

    @property
    def exact_problem(self) -> Problem:
        """The problem whose exact answer counts."""
        return self.truth or self.problem


@dataclass(frozen=True, eq=False)
class Variant:
    """One way in which a property is asked: calls, and what becomes of their results.

    What is combined times ``factor``, a power of two, is compared with what the ``first`` call gave (by default the
    case's own), where ``compared`` says so. Where it ``is_merged``, every call is of a part of the keys, and the
    outputs are merged by their log-sum-exps. Where ``nan_may_spread``, NaN from the further calls is a convention. The
    calls are made ``where`` it says, with so many ``threads``.
    """

    what: str
    calls: tuple[Call, ...]
    combine: Combine = only_one
    factor: float = 1.0
    compared: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    stages: tuple[str, ...] | None = None
    is_merged: bool = False
    nan_may_spread: bool = False
    where: Literal["here", "fresh process", "threads"] = "here"
    threads: int = 1
    first: Problem | None = None


@dataclass(frozen=True, eq=False)
class Pair:
    """Two results of a session, by the numbers of their steps, that are to be the same; the truth is the problem's.

    Without a number, the first result is that of a process that has done nothing else.
    """

    what: str
    one: int | None
    other: int
    problem: Problem


@dataclass(frozen=True, eq=False)
class SessionVariant:
    """Calls one after the other in one process, and which of their results are to be the same.

    ``watched`` are steps whose inputs, and whose kept results, may not change.
    """

    what: str
    session: Session
    pairs: tuple[Pair, ...] = ()
    problem: Problem | None = None


AnyVariant = Variant | SessionVariant
