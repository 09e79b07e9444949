"""One case on one implementation, computed again and judged stage by stage: the story of ``attncheck explain``."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from attncheck.harness.errors import UsageError
from attncheck.harness.judging.judge_stages import StageJudgement, judge_stages, where_it_begins
from attncheck.harness.judging.truth import find_truth
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.harness.running.executor import Group, GroupRunner, Limits
from attncheck.harness.running.implementations import Chosen, Implementation, choose_implementations
from attncheck.harness.running.worker import Computed, Failure, Outcome, Task


@dataclass(frozen=True)
class Explanation:
    """What one implementation did with one case in one dtype.

    ``failure`` says why there are no stages; ``outside`` why there is no exact answer to hold them against.
    """

    case: Case
    dtype: str
    implementation: str
    numerical_class: str
    judgements: tuple[StageJudgement, ...]
    begins_at: str
    failure: str = ""
    outside: str = ""


def find_case(cases: tuple[Case, ...], wanted: str) -> Case:
    """Return the one case that is meant. Raises ``UsageError`` for none or several."""
    exact = [case for case in cases if case.id == wanted]
    if len(exact or cases) == 1:
        return (exact or cases)[0]
    listed = "\n".join(f"  {case.id}" for case in cases[:20])
    raise UsageError(f"{wanted!r} matches {len(cases)} cases; name one of them:\n{listed}")


def find_implementation(name: str) -> Implementation:
    """Return an implementation by its name, or by its backend's. Raises ``UsageError``."""
    chosen: Chosen = choose_implementations([name.partition(".")[0]])
    for implementation in chosen.implementations:
        if name in (implementation.name, implementation.entry.name):
            return implementation
    if chosen.missing:
        raise UsageError(f"{chosen.missing[0]} is not installed")
    raise UsageError(f"unknown implementation {name!r}; expected {chosen.implementations[0].name}")


def explain_case(case: Case, implementation: Implementation, dtype: str, limits: Limits) -> Explanation:
    """Compute a case in a worker and judge every stage."""
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    numerical_class = implementation.numerical_class(dtype)
    outcome = _compute(implementation, dtype, limits, Task(case.operation, case.options, inputs.arrays))
    if not isinstance(outcome, Computed):
        failure = f"{outcome.verdict}: {outcome.message}"
        return Explanation(case, dtype, implementation.name, numerical_class, (), "", failure)
    truth = find_truth(case.operation, case.options, inputs.arrays, dtype, generic=case.generic)
    judgements = judge_stages(truth, outcome.stages, case.stage_shapes, numerical_class)
    return Explanation(
        case,
        dtype,
        implementation.name,
        numerical_class,
        tuple(judgements),
        where_it_begins(judgements),
        outside=truth.outside,
    )


def _compute(implementation: Implementation, dtype: str, limits: Limits, task: Task) -> Outcome:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as logs:
        runner: GroupRunner[str] = GroupRunner(Group(implementation, (dtype,)), limits, Path(logs))
        runner.run(["the case"], lambda _key: task, lambda _key, outcome: outcomes.append(outcome))
    return outcomes[0] if outcomes else Failure("crash", "the worker gave no answer")
