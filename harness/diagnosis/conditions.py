"""Finds the condition under which a reading applies, from passing cases.

For example, a kernel may ignore causality only if it gets a bias. The reading "causality is ignored" explains its
failing cases, but the cases without a bias pass. A passing case refutes a reading if every form of the reading would
change its result by far more than rounding does. If enough passing cases refute the reading, ``find_condition`` looks
for its condition: a fact of the call, or two facts together, that is true in all cases that the reading explains and in
none of the refuting cases. The condition is reported only if every other fact has a counterexample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from attncheck.common.wording import EXCEPTION_PREFIX, count_noun
from attncheck.diagnosis.readings import apply_readings_named
from attncheck.diagnosis.residuals import approximate
from attncheck.reading.lowering import count_queries_and_keys
from attncheck.reading.problem import Problem
from attncheck.spec import OPTIONS, result_stages
from attncheck.spec.rounding import FORMATS

_MIN_CASES, _MIN_CASES_OF_PAIR = 3, 6
"""Minimum number of explained and of refuting cases for a condition; and of explained cases for a pair of facts.

A choice: with fewer cases, more facts separate them by chance; with more, fewer readings get a condition. There are
more pairs than single facts, so pairs need more cases.
"""
_MAX_PASSING_DIFFERENCE = 1e-3
"""A passing case cannot differ by more than this share of its largest element, or by a hundred roundings."""
_TILE_SIZES = (16, 32, 64, 128)
"""Tile sizes of common kernels: a fault may need lengths that are whole tiles, or lengths that are not."""
_OR_MORE_WORDS = "or more"
"""End of the facts that compare a size; they are not combined in pairs."""

Facts = Mapping[str, bool]


@dataclass(frozen=True)
class Condition:
    """The condition of a reading in words, empty if it is not known, and the number of refuting cases."""

    description: str
    refuting_case_count: int

    def insert_into(self, description: str) -> str:
        """Return the description of a reading with the condition after its first part.

        Example:
            >>> Condition("window is set", 3).insert_into("the scale is 1; meant 0.5")
            'the scale is 1, but only where window is set, and not in 3 other cases that would show it; meant 0.5'
        """
        first, semicolon, rest = description.partition("; ")
        others = f"{count_noun(self.refuting_case_count, 'other case')} that would show it"
        condition = (
            f"{EXCEPTION_PREFIX}only where {self.description}, and not in {others}"
            if self.description
            else f"{EXCEPTION_PREFIX}not in {others}"
        )
        return f"{first}{condition}{semicolon}{rest}"


def find_condition(explained: Sequence[Problem], passing: Sequence[Problem]) -> Condition | None:
    """Return the condition of a reading from the cases that it explains and the passing cases that refute it.

    None if too few passing cases refute it.
    """
    if len(passing) < _MIN_CASES:
        return None
    if len(explained) < _MIN_CASES:
        return Condition("", len(passing))
    failing, right = ([describe_call_facts(problem) for problem in problems] for problems in (explained, passing))
    separating = _find_separating_facts(failing, right)
    return Condition(separating[0] if len(separating) == 1 else "", len(passing))


def _find_separating_facts(failing: Sequence[Facts], right: Sequence[Facts]) -> list[str]:
    """Return the facts, or else the pairs of facts, that are true in all failing cases and in no passing one."""
    shared = [words for words, holds in failing[0].items() if holds and all(facts.get(words) for facts in failing)]
    single = [words for words in shared if not any(facts.get(words) for facts in right)]
    if single or len(failing) < _MIN_CASES_OF_PAIR:
        return single
    pairable = [
        words
        for words in shared
        if not words.endswith(_OR_MORE_WORDS) and sum(not facts.get(words) for facts in right) >= _MIN_CASES
    ]
    return [
        f"{first} and {second}"
        for first, second in combinations(pairable, 2)
        if not any(facts.get(first) and facts.get(second) for facts in right)
    ]


def describe_call_facts(problem: Problem) -> Facts:
    """Return the facts of the call of a problem: a description in words -> whether it is true.

    Example:
        >>> inputs = {"query": np.ones((1, 4, 16, 8)), "key": np.ones((1, 2, 32, 8)), "value": np.ones((1, 2, 32, 8))}
        >>> facts = describe_call_facts(Problem("attention", {"is_causal": True}, inputs))
        >>> [facts[words] for words in ("heads share keys", "16 divides Lq and Lk", "32 divides Lq and Lk")]
        [True, True, False]
    """
    return dict(_iterate_call_facts(problem.as_call()))


def _iterate_call_facts(problem: Problem) -> Iterator[tuple[str, bool]]:
    for name in (*OPTIONS, *problem.input_specs):
        is_option = name in OPTIONS
        if not is_option and problem.input_specs[name].required:
            continue
        value = problem.options.get(name) if is_option else problem.inputs.get(name)
        is_there = value is not None and value is not False
        yield f"{name} is {'set' if is_option else 'given'}", is_there
        yield f"{name} is not {'set' if is_option else 'given'}", not is_there
    if not {"query", "key"} <= problem.inputs.keys() or problem.inputs["query"].ndim != problem.inputs["key"].ndim:
        return
    query, key = problem.inputs["query"], problem.inputs["key"]
    queries, keys = count_queries_and_keys(problem.inputs)
    if query.ndim > 3:
        yield "heads share keys", query.shape[-3] != key.shape[-3]
        yield "no heads share keys", query.shape[-3] == key.shape[-3]
        yield "there are several batch entries", len(query) > 1
    yield "there is one query", queries == 1
    yield "there are several queries", queries > 1
    yield from ((f"{tile} divides Lq and Lk", queries % tile == 0 and keys % tile == 0) for tile in _TILE_SIZES)
    yield from ((f"Lk is {least} {_OR_MORE_WORDS}", keys >= least) for least in (64, 128, 256, 512, 1024, 2048, 8192))
    yield from ((f"D is {least} {_OR_MORE_WORDS}", query.shape[-1] >= least) for least in (64, 128, 256))


def is_reading_refuted(name: str, problem: Problem) -> bool | None:
    """Return whether a passing case refutes a reading: all forms of the reading would clearly change its result.

    None if the reading does not apply to the case.
    """
    lowered = problem.without_layout()
    forms = list(apply_readings_named(name, lowered))
    if not forms:
        return None
    right = approximate(lowered)
    return all(_is_clearly_different(lowered, right.stages, approximate(form.problem).stages) for form in forms)


def _is_clearly_different(
    problem: Problem, right: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> bool:
    dtype = next(array.dtype.name for array in problem.inputs.values() if array.dtype.name in FORMATS)
    for stage in result_stages(problem.operation, problem.options, problem.inputs):
        first, second = right.get(stage), expected.get(stage)
        if first is None or second is None or first.shape != second.shape or not first.size:
            continue
        is_finite = np.isfinite(first) & np.isfinite(second)
        far = max(_MAX_PASSING_DIFFERENCE, 100 * FORMATS[dtype].unit_roundoff) * np.abs(first[is_finite]).max(initial=0)
        if (np.abs(first - second)[is_finite] > far).any():
            return True
    return False
