"""What a kernel lacks for a case is known beforehand, and is what its call would have said."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from attncheck.backends import BACKENDS
from attncheck.execution.implementations import Implementation
from attncheck.execution.lacks import lack_known_beforehand
from attncheck.execution.runner import task_of
from attncheck.execution.user_call import declarations, own_backend
from attncheck.execution.user_code import Target, UserImplementation, entry_of
from attncheck.execution.worker import Failure, evaluate_on
from attncheck.plan import Plan
from attncheck.reading.selection import select_cases
from attncheck.spec import OPERATIONS


class Called(Exception):
    """The call came as far as somebody's code."""


def plain(query: Any, key: Any, value: Any) -> None:
    raise Called


def usual(query: Any, key: Any, value: Any, *, mask: Any = None, is_causal: bool = False, scale: Any = None) -> None:
    raise Called


def without_mask(query: Any, key: Any, value: Any, *, is_causal: bool = False, window: Any = None) -> None:
    raise Called


def anything(query: Any, key: Any, value: Any, **options: Any) -> None:
    raise Called


def softmax(scores: Any) -> None:
    raise Called


def attention_gradients(query: Any, key: Any, value: Any, grad_output: Any, *, is_causal: bool = False) -> None:
    raise Called


TARGETS = {
    "plain": plain,
    "usual": usual,
    "without_mask": without_mask,
    "anything": anything,
    "several": SimpleNamespace(attention=usual, softmax=softmax, attention_gradients=attention_gradients),
}


def implementation_of(target: Any) -> Implementation:
    entry = entry_of(Target("kernels", "attention"), declarations(target, "attention"), None)
    assert isinstance(entry, UserImplementation)
    return Implementation(entry)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.of(select_cases([]).cases, ("float32", "float16"))


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_what_the_call_says(name: str, plan: Plan) -> None:
    target = TARGETS[name]
    implementation, backend = implementation_of(target), own_backend(target, "attention", BACKENDS["numpy"])
    known, left_to_the_call = 0, 0
    for unit in plan.units[:: 3 if name == "usual" else 11]:
        case = plan.case(unit)
        found = lack_known_beforehand(implementation, case, unit.dtype)
        task = task_of(case, plan.inputs(unit))
        outcome = evaluate_on(backend, task)  # type: ignore[arg-type] # it has those functions that the target has
        assert isinstance(outcome, Failure)
        if found is not None:
            assert found == outcome, case.id
            known += 1
        elif outcome.verdict == "unsupported" and not OPERATIONS[case.operation].is_folded:
            assert not outcome.lacks, case.id
        else:
            left_to_the_call += 1
    assert left_to_the_call
    assert known


def test_what_is_padded_is_left_to_the_padded_call(plan: Plan) -> None:
    def restricted(query: Any, key: Any, value: Any) -> None:
        raise Called

    restricted.requires = {"width_multiple": 8}  # type: ignore[attr-defined]
    implementation = implementation_of(restricted)
    asked = [unit for unit in plan if plan.case(unit).operation == "attention"]
    assert {lack_known_beforehand(implementation, plan.case(unit), unit.dtype) for unit in asked} == {None}


@pytest.mark.parametrize("target", [plain, usual])
def test_no_numbers_are_drawn_for_it(target: Callable[..., Any], plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(*_: Any) -> Any:
        raise AssertionError("drawn")

    monkeypatch.setattr("attncheck.reading.inputs.make_exact_inputs", draws)
    implementation = implementation_of(target)
    found = [lack_known_beforehand(implementation, plan.case(unit), unit.dtype) for unit in plan.units[:200]]
    assert any(found)


def test_a_bundled_implementation_is_always_asked(plan: Plan) -> None:
    implementation = Implementation(BACKENDS["numpy"])
    assert {lack_known_beforehand(implementation, plan.case(unit), unit.dtype) for unit in plan.units[:100]} == {None}
