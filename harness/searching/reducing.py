"""Any failing case of any file, reduced: what ``attncheck reduce`` and ``attncheck repro`` do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from attncheck.errors import CaseError
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.explain import Explanation, explain_case
from attncheck.reading.case import Case
from attncheck.searching.concrete import ConcreteCase, concrete_case, read_concrete
from attncheck.searching.judging import WorkerJudge, symptom_of
from attncheck.searching.reduction import MAX_SECONDS, MAX_TRIES, reduce_problem
from attncheck.searching.search import simplest_afresh

MAX_NUMBERS = 1 << 15
"""Of a reduced case that is explained by itself; one of more stays what it was."""


@dataclass(frozen=True)
class ReducedCase:
    """What came of a case: the ``explanation`` of it, or of what it was reduced to; None where it does not fail.

    ``original`` is the case itself as it was reduced, of so many ``tries``.
    """

    explanation: Explanation
    original: ConcreteCase | None = None
    problem: ConcreteCase | None = None
    tries: int = 0
    is_smallest: bool = False


def reduce_case(
    case: Case,
    implementation: Implementation,
    dtype: str,
    limits: Limits,
    tries: int = MAX_TRIES,
    seconds: float = MAX_SECONDS,
) -> ReducedCase:
    """Reduce a case that fails in a fresh process. Raises ``CaseError`` where a list cannot be used."""
    plain = explain_case(case, implementation, dtype, limits)
    if not plain.fails:
        return ReducedCase(plain)
    judge = WorkerJudge(implementation, limits, ())
    try:
        problem = concrete_case(case, dtype)
        wanted = symptom_of(judge.afresh(problem))
        if wanted is None:  # it is not the numbers that make it fail
            return ReducedCase(plain, problem, problem)
        reduced = reduce_problem(problem, lambda each: judge.symptom(each) == wanted, tries, seconds)
        simplest, explanation = simplest_afresh(reduced, judge, wanted)
        if simplest.elements > MAX_NUMBERS:
            return ReducedCase(plain, problem, simplest, reduced.tries, reduced.is_smallest)
        spelled = read_concrete(simplest, Path(), "search/reduced", MAX_NUMBERS)
        explanation = replace(explanation, case=spelled)
    except CaseError:
        return ReducedCase(plain)
    finally:
        judge.close()
    return ReducedCase(explanation, problem, simplest, reduced.tries, reduced.is_smallest)
