"""Conditions of a reading: features that the cases it explains have, and that passing cases which could show it lack.

A kernel may forget causality beside a bias and be right without one. The reading explains the failing cases; that the
others pass says where it does not hold. A case that passes says so if every form of the reading gives it another
answer, by far more than rounding does. The condition is told if one fact, or two together, hold in all that the reading
explains and in none of those, and no other fact does as well: then each other explanation has a counter-example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from attncheck.common.wording import BUT, counted
from attncheck.diagnosis.readings import readings_named
from attncheck.diagnosis.residuals import approximate
from attncheck.reading.lowering import queries_and_keys
from attncheck.reading.problem import Problem
from attncheck.spec import OPTIONS, result_stages
from attncheck.spec.rounding import FORMATS

_LEAST, _LEAST_OF_PAIRS = 3, 6
"""Cases on either side; and cases that a reading explains of which two facts together are told."""
_FAR = 1e-3
"""Of the largest number of a result: what a case that is right cannot be off by, beside a hundred roundings."""
_TILES = (16, 32, 64, 128)
_OR_MORE = "or more"

Facts = Mapping[str, bool]


@dataclass(frozen=True)
class Condition:
    """The words in which it is told where a reading holds; empty where that is not known. ``passing`` cases refute it.

    ``text(description)`` says it.
    """

    words: str
    passing: int

    def text(self, description: str) -> str:
        """Return the description of a reading with its condition, in front of what a description adds."""
        said, semicolon, more = description.partition("; ")
        others = f"{counted(self.passing, 'other case')} that would show it"
        where = f"{BUT}only where {self.words}, and not in {others}" if self.words else f"{BUT}not in {others}"
        return f"{said}{where}{semicolon}{more}"


def condition_of(explained: Sequence[Problem], passing: Sequence[Problem]) -> Condition | None:
    """Return where a reading holds, given the cases that it explains and those that pass though it would show.

    None where too few pass to say that it does not hold everywhere.
    """
    if len(passing) < _LEAST:
        return None
    if len(explained) < _LEAST:
        return Condition("", len(passing))
    failing, right = ([facts_of(problem) for problem in problems] for problems in (explained, passing))
    found = _separating(failing, right)
    return Condition(found[0] if len(found) == 1 else "", len(passing))


def _separating(failing: Sequence[Facts], right: Sequence[Facts]) -> list[str]:
    """Return the facts, or else the pairs of facts, that hold in all failing cases and in no other."""
    shared = [words for words, holds in failing[0].items() if holds and all(facts.get(words) for facts in failing)]
    single = [words for words in shared if not any(facts.get(words) for facts in right)]
    if single or len(failing) < _LEAST_OF_PAIRS:
        return single
    telling = [
        words
        for words in shared
        if not words.endswith(_OR_MORE) and sum(not facts.get(words) for facts in right) >= _LEAST
    ]
    return [
        f"{first} and {second}"
        for first, second in combinations(telling, 2)
        if not any(facts.get(first) and facts.get(second) for facts in right)
    ]


def facts_of(problem: Problem) -> Facts:
    """Return what may be said of the call that a problem is handed over as, in words, each true or false."""
    return dict(_facts(problem.as_call()))


def _facts(problem: Problem) -> Iterator[tuple[str, bool]]:
    for name in (*OPTIONS, *problem.specs):
        is_option = name in OPTIONS
        if not is_option and problem.specs[name].required:
            continue
        value = problem.options.get(name) if is_option else problem.inputs.get(name)
        is_there = value is not None and value is not False
        yield f"{name} is {'set' if is_option else 'given'}", is_there
        yield f"{name} is not {'set' if is_option else 'given'}", not is_there
    if not {"query", "key"} <= problem.inputs.keys() or problem.inputs["query"].ndim != problem.inputs["key"].ndim:
        return
    query, key = problem.inputs["query"], problem.inputs["key"]
    queries, keys = queries_and_keys(problem.inputs)
    if query.ndim > 3:
        yield "heads share keys", query.shape[-3] != key.shape[-3]
        yield "no heads share keys", query.shape[-3] == key.shape[-3]
        yield "there are several batch entries", len(query) > 1
    yield "there is one query", queries == 1
    yield "there are several queries", queries > 1
    yield from ((f"{tile} divides Lq and Lk", queries % tile == 0 and keys % tile == 0) for tile in _TILES)
    yield from ((f"Lk is {least} {_OR_MORE}", keys >= least) for least in (64, 128, 256, 512, 1024, 2048, 8192))
    yield from ((f"D is {least} {_OR_MORE}", query.shape[-1] >= least) for least in (64, 128, 256))


def is_refuted_by(name: str, problem: Problem) -> bool | None:
    """Return whether a case that passes refutes a reading: each of its forms gives it quite another answer.

    None where the case has nothing of what the reading is about.
    """
    lowered = problem.without_layout()
    forms = list(readings_named(name, lowered))
    if not forms:
        return None
    right = approximate(lowered)
    return all(_differ(lowered, right.stages, approximate(form.problem).stages) for form in forms)


def _differ(problem: Problem, right: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    dtype = next(array.dtype.name for array in problem.inputs.values() if array.dtype.name in FORMATS)
    for stage in result_stages(problem.operation, problem.options, problem.inputs):
        one, another = right.get(stage), other.get(stage)
        if one is None or another is None or one.shape != another.shape or not one.size:
            continue
        is_finite = np.isfinite(one) & np.isfinite(another)
        far = max(_FAR, 100 * FORMATS[dtype].unit_roundoff) * np.abs(one[is_finite]).max(initial=0)
        if (np.abs(one - another)[is_finite] > far).any():
            return True
    return False
