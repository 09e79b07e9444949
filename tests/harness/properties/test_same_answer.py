"""The further calls of every property have the first call's exact answer: the oracle says so of each bundled case."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from attncheck.backends import numpy_backend
from attncheck.execution.worker import Computed, evaluate_on
from attncheck.properties.judging import Truths, _combined_side, judge_merged, side_of
from attncheck.properties.problem import SessionVariant, StoredProblem, Variant
from attncheck.properties.run import Asking, PropertyQuestion, questions_of
from attncheck.reading.selection import select_cases
from attncheck.spec.properties import PROPERTIES
from attncheck.verdicts import PropertyOutcome

TRUTHS = Truths()


def questions() -> list[PropertyQuestion]:
    """Return what the bundled cases ask in float32, in which NumPy computes as it is."""
    selection = select_cases(["properties"], properties=True)
    assert not selection.faults
    return questions_of(selection.cases, Asking(dtypes=["float32"]))


QUESTIONS = questions()


def variants() -> Iterator[tuple[str, PropertyQuestion, Variant]]:
    for question in QUESTIONS:
        for variant in question.variants:
            if isinstance(variant, Variant) and variant.where == "here":
                yield f"{question.name}: {question.case.id}: {variant.what}", question, variant


VARIANTS = list(variants())


def computed(problem: StoredProblem, stages: tuple[str, ...]) -> dict[str, np.ndarray]:
    outcome = evaluate_on(numpy_backend, problem.task(stages))
    assert isinstance(outcome, Computed), outcome
    return dict(outcome.stages)


@pytest.mark.parametrize("name", sorted({question.name for question in QUESTIONS}))
def test_further_calls_have_the_first_calls_exact_answer(name: str) -> None:
    offenders = [
        what for what, question, variant in VARIANTS if question.name == name and not is_same(question, variant)
    ]
    assert offenders == []


def is_same(question: PropertyQuestion, variant: Variant) -> bool:
    problem, stages = question.problem, variant.stages or question.problem.results
    first = computed(problem, stages)
    if variant.is_merged:
        parts = [computed(call.problem, stages) for call in variant.calls]
        found = judge_merged(variant, problem, first, parts, "native", TRUTHS)
        return found.verdict in (PropertyOutcome.BITWISE, PropertyOutcome.WITHIN_BOUNDS)
    for stage in stages:
        arrays = [computed(call.problem, (stage,))[stage] for call in variant.calls]
        one = side_of("first", TRUTHS.of(problem), stage, first[stage], "native")
        other = _combined_side(variant, stage, arrays, "native", TRUTHS)
        if other.exact.shape != one.exact.shape or not np.allclose(other.exact, one.exact, rtol=1e-12, atol=1e-300):
            return False
    return True


def test_every_property_is_asked_by_a_bundled_case() -> None:
    assert {question.name for question in QUESTIONS} == set(PROPERTIES)


def test_sessions_compare_results_of_one_problem() -> None:
    sessions = [each for question in QUESTIONS for each in question.variants if isinstance(each, SessionVariant)]
    assert sessions
    for variant in sessions:
        for pair in variant.pairs:
            given = variant.session.steps[pair.other].task
            assert variant.session.steps[pair.other].returns
            wanted = pair.problem.task()
            assert given.operation == wanted.operation
            assert {name: each.tobytes() for name, each in given.inputs.items()} == {
                name: each.tobytes() for name, each in wanted.inputs.items()
            }
