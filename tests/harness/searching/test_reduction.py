"""A reduction keeps what makes a problem fail, and leaves everything else out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.mutation.entry import entry_of
from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.judging import Symptom, WorkerJudge, symptom_of
from attncheck.searching.reduction import reduce_problem
from attncheck.searching.search import simplest_afresh
from attncheck.searching.simplicity import measure


def drawn(options: dict[str, object] | None = None) -> ConcreteCase:
    random = np.random.RandomState(5)
    inputs = {
        "query": random.randn(2, 4, 19, 8),
        "key": random.randn(2, 2, 21, 8),
        "value": random.randn(2, 2, 21, 6),
        "bias": random.randn(1, 4, 19, 21),
        "sinks": random.randn(4),
    }
    return ConcreteCase("attention", options or {}, inputs, "float32", {"key": "strided"}, True)


def _needs_seventeen_keys(problem: ConcreteCase) -> bool:
    return problem.lengths["Lk"] >= 17


def _needs_a_bias_with_a_negative_number(problem: ConcreteCase) -> bool:
    return bool((problem.inputs.get("bias", np.zeros(1)) < 0).any())


def _needs_a_window_and_grouped_heads(problem: ConcreteCase) -> bool:
    return "window" in problem.options and problem.lengths["Hkv"] < problem.lengths["H"]


@pytest.mark.parametrize(
    ("fails", "asked", "most"),
    [
        (_needs_seventeen_keys, set(), {"key": 17, "query": 1}),
        (_needs_a_bias_with_a_negative_number, {"bias"}, {"bias": 1, "key": 1}),
        (_needs_a_window_and_grouped_heads, {"window"}, {"query": 2, "key": 1}),
    ],
)
def test_nothing_is_left_but_what_it_takes(
    fails: Callable[[ConcreteCase], bool], asked: set[str], most: dict[str, int]
) -> None:
    reduced = reduce_problem(drawn({"window": (3, 4), "scale": 0.3}), fails)
    problem = reduced.problem
    assert fails(problem)
    assert reduced.is_smallest
    assert {*problem.options, *problem.optional_inputs} == asked
    assert {name: problem.inputs[name].size for name in most} == most
    assert not problem.memory_layout
    assert not problem.supports_statistics
    assert set(np.unique(problem.inputs["query"])) == {0.0}


def test_every_step_fails_and_is_simpler_than_the_one_before() -> None:
    reduced = reduce_problem(drawn({"scale": 0.3}), _needs_a_bias_with_a_negative_number)
    measures = [measure(each) for each in reduced.steps]
    assert len(measures) > 5
    assert measures == sorted(measures, reverse=True)
    assert all(map(_needs_a_bias_with_a_negative_number, reduced.steps))


def test_it_ends_after_so_many_tries() -> None:
    reduced = reduce_problem(drawn(), _needs_seventeen_keys, tries=5)
    assert reduced.tries == 5
    assert not reduced.is_smallest
    assert _needs_seventeen_keys(reduced.problem)


@pytest.mark.parametrize(
    ("name", "verdict", "stage"),
    [("window_or_causal", "numeric", "masked"), ("last_key_of_a_full_tile_of_16_dropped", "numeric", "weights")],
)
def test_a_fault_fails_its_reduced_case_in_a_fresh_process(name: str, verdict: str, stage: str) -> None:
    judge = WorkerJudge(Implementation(entry_of(name), "eager"), Limits(keep_going=True), ())
    random = np.random.RandomState(2)
    inputs = {each: random.randn(1, 2, 32, 4) for each in ("query", "key", "value")}
    problem = ConcreteCase("attention", {"is_causal": True, "window": (3, 9)}, inputs, "float32")
    problem = problem if name.startswith("window") else problem.changed(options={"scale": 0.5})
    try:
        symptom = judge.symptom(problem)
        assert symptom is not None
        reduced = reduce_problem(problem, lambda each: judge.symptom(each) == symptom)
        simplest, found = simplest_afresh(reduced, judge, symptom)
    finally:
        judge.close()
    assert symptom == symptom_of(found)
    assert (symptom.verdict in (verdict, "semantic", "nonfinite"), symptom.stage) == (True, stage)
    assert all(array.size <= 40 for array in simplest.inputs.values())
    assert isinstance(symptom, Symptom)
