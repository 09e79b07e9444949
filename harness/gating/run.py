"""A run of the gate: its steps, one after the other, within a budget of seconds.

1. The standard cases, as ``attncheck check`` runs them, for at most part of the budget.
2. In a blind process: a few plain calls, which the last step makes again.
3. Delegation: which attention of a library these calls call.
4. Sizes beyond those of the cases.
5. Fresh problems from a seed that is drawn now.
6. Repetition: a few problems, many times.
7. Surroundings: memory layouts, threads, environment variables.
8. Accuracy: which rounding models hold.
9. Fresh problems for the rest of the time; at the end, the plain calls again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from attncheck.asking.accuracy import MeasuredAccuracy, measure_accuracy, small_cases
from attncheck.common.errors import CaseError, ExitCode, UsageError
from attncheck.common.store import Store
from attncheck.common.wording import count_noun
from attncheck.execution.call import Limits
from attncheck.execution.implementations import ImplementationSelection, UserImplementation
from attncheck.gating.behaviours import BEHAVIOURS, DELEGATES, FAILS
from attncheck.gating.kernel_under_test import FIRST_STEP, FRESH_STEP, MORE_STEP, Finding, KernelUnderTest
from attncheck.gating.steps import (
    DELEGATION_STEP,
    END_STEP,
    REPETITION_STEP,
    SIZE_STEP,
    SURROUNDINGS_STEP,
    FreshProblems,
    describe_counts,
    observe_delegation,
    repeat_first_problems,
    repeat_problems,
    run_first_problems,
    try_sizes,
    try_surroundings,
)
from attncheck.reading.case import Case
from attncheck.run import RunSummary, Settings, run_cases
from attncheck.searching.search import SearchTimeExpired, stop_search_after
from attncheck.settings.config import select_configured_cases
from attncheck.settings.options import RunOptions

CHECK_STEP, ACCURACY_STEP = "standard cases", "accuracy"
_CHECK_SHARE = 0.4
"""Of the budget, for the standard cases."""
STEP_SHARES: Mapping[str, float] = {
    FRESH_STEP: 0.1,
    SIZE_STEP: 0.1,
    REPETITION_STEP: 0.12,
    SURROUNDINGS_STEP: 0.12,
    DELEGATION_STEP: 0.1,
    ACCURACY_STEP: 0.05,
    MORE_STEP: 1.0,
}
"""Of the budget, at most, for each step. What the others leave is for further fresh problems."""
_END_SHARE = 0.05
"""Of the budget, for the plain calls at the end, and for writing."""
_MAX_SHOWN = 3
"""Findings of one behaviour that a text shows; the JSON document has all."""
LEAST_SECONDS = 2.5
"""The smallest budget: a process of a kernel in NumPy starts in a second."""
_SECONDS_TO_CLOSE, _SHARE_TO_CLOSE = 2.0, 0.04
"""Seconds, and share, of the budget in which processes are ended and the answer is printed."""
_LEAST_JUDGED = 5
"""Fresh problems that have to be judged, and not only refused."""
REQUIRED_CALLS: Mapping[str, int] = {
    CHECK_STEP: 10,
    FRESH_STEP: 10,
    SIZE_STEP: 5,
    REPETITION_STEP: 100,
    SURROUNDINGS_STEP: 5,
}
"""By step: the calls without which the gate decides nothing."""
_CALLS_PER_BUDGET = 9
"""Calls that never return and fit into a budget."""
_ACCURACY_CASES = 30
"""Cases of each dtype by which accuracy is measured."""


@dataclass(frozen=True)
class GateStep:
    """A step of the gate that was run: its seconds, and its outcome in words."""

    name: str
    outcome: str
    seconds: float


@dataclass
class GateResult:
    """The outcome of a run of the gate.

    Attributes:
        implementation: The name of the kernel.
        seed: The seed of all problems: with it and ``--seed``, the same problems are drawn again.
        budget: The seconds that the gate was allowed.
        steps: The steps that were run.
        findings: What speaks against merging.
        delegations: In how many of the observed calls some other attention was called, by its name.
        observed_calls: How many calls were observed for that.
        accuracy: The measured classes of each dtype.
        not_judged: The steps that judged too little for a decision.
        exit_code: 0 if nothing speaks against merging, 1 if something does, and 3 if too little could be judged.
    """

    implementation: str
    seed: int
    budget: float
    steps: list[GateStep] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    delegations: Mapping[str, int] = field(default_factory=dict)
    observed_calls: int = 0
    accuracy: list[MeasuredAccuracy] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    exit_code: ExitCode = ExitCode.AGREE

    @property
    def may_be_merged(self) -> bool:
        """True if nothing speaks against merging, and enough was judged."""
        return self.exit_code is ExitCode.AGREE

    @property
    def answer(self) -> str:
        """The answer in a line."""
        if self.exit_code is ExitCode.DISAGREE:
            names = ", ".join(dict.fromkeys(finding.behaviour for finding in self.findings))
            return f"{self.implementation}: no, do not merge it: {names}"
        if self.exit_code is ExitCode.NOT_RUN:
            failing = sum(finding.count for finding in self.findings)
            steps = ", ".join(self.not_judged)
            reason = f"{count_noun(failing, 'call')} could not be run" if failing else f"too little was judged: {steps}"
            return f"{self.implementation}: not decided: {reason}"
        return f"{self.implementation}: yes: nothing was seen that speaks against merging it"

    def __str__(self) -> str:
        """Return the answer, the steps, and what speaks against merging, with what to do about it."""
        width = max((len(step.name) for step in self.steps), default=0)
        steps = [f"  {step.name:{width}}  {step.outcome} ({step.seconds:.1f} s)" for step in self.steps]
        lines = [self.answer, *steps]
        for name, behaviour in BEHAVIOURS.items():
            if findings := [finding for finding in self.findings if finding.behaviour == name]:
                lines += ["", f"{name}: {behaviour.sentence} {behaviour.advice}"]
                lines += [line for finding in findings[:_MAX_SHOWN] for line in finding.lines()]
        return "\n".join(lines)


@dataclass
class _Gate:
    subject: KernelUnderTest
    result: GateResult
    deadline: float
    limits: Limits
    store: Store
    show: Callable[[str], None]

    @contextmanager
    def step(self, name: str) -> Iterator[_RunningStep]:
        """Run a step until its share of the budget is over; note its seconds and outcome."""
        begun = time.monotonic()
        end = min(begun + STEP_SHARES.get(name, 1.0) * self.result.budget, self.last_moment)
        current = _RunningStep(end)
        try:
            yield current
        finally:
            words = current.outcome or describe_counts(self.subject, name)
            self.result.steps.append(GateStep(name, words, time.monotonic() - begun))
            self.show(f"{name}: {words}")

    @property
    def last_moment(self) -> float:
        """The time at which the last step begins."""
        return self.deadline - _END_SHARE * self.result.budget


@dataclass
class _RunningStep:
    deadline: float
    outcome: str = ""


@dataclass(frozen=True)
class GateRequest:
    """The extent of a run of the gate.

    Attributes:
        budget: The seconds that it may take.
        seed: The seed of all problems.
        forbids_delegation: Whether calling another attention is a failure.
        begun: The time from which the budget counts, by ``time.monotonic``.
    """

    budget: float
    seed: int
    forbids_delegation: bool = False
    begun: float = field(default_factory=time.monotonic)


def run_gate(
    chosen: ImplementationSelection,
    options: RunOptions,
    request: GateRequest,
    *,
    show: Callable[[str], None] = lambda line: None,
    on_checked: Callable[[], None] = lambda: None,
) -> GateResult:
    """Run the standard cases and then the steps in blind processes, and decide.

    Args:
        chosen: The kernel, alone.
        options: How the standard cases are run; their results are written to ``options.output``.
        request: The budget and the seed.
        show: Shows a line about a step that has ended.
        on_checked: Is called when the results of the standard cases are written.

    Raises:
        UsageError: If the kernel is none of a user's own.
        CaseError: If a case file cannot be used.
    """
    if request.budget < LEAST_SECONDS:
        raise UsageError(f"the budget is {request.budget:g} seconds; expected at least {LEAST_SECONDS:g}")
    deadline = request.begun + request.budget - max(_SECONDS_TO_CLOSE, _SHARE_TO_CLOSE * request.budget)
    (implementation,) = chosen.implementations
    if not isinstance(implementation.entry, UserImplementation):
        raise UsageError(f"{implementation.name}: expected code of your own, as file.py:function or a program")
    options = replace(options, time_limit=min(options.time_limit, request.budget / _CALLS_PER_BUDGET))
    limits, store = options.worker_limits, options.store
    limits = replace(limits, start_seconds=min(limits.start_seconds, request.budget / 2))
    selection = select_configured_cases(options, store)
    if selection.faults:
        raise CaseError(list(selection.faults))
    result = GateResult(implementation.name, request.seed, request.budget)
    subject = KernelUnderTest.make(implementation, limits, store, request.seed)
    gate = _Gate(subject, result, deadline, limits, store, show)
    with gate.step(CHECK_STEP) as step:
        settings = Settings.of(options, chosen, selection.tags, None, store)
        settings = replace(settings, command=sys.orig_argv, max_seconds=_CHECK_SHARE * request.budget)
        summary = run_cases(selection.cases, chosen, settings)
        failing, judged = len({row.case for row in summary.failures}), sum(summary.judged.values())
        stopped = "" if summary.stopped is None else "; the rest was left out, as its share of the time was over"
        step.outcome = f"{judged:,} cases judged, {f'{failing:,} fail' if failing else 'all agree'}{stopped}"
    on_checked()
    subject.record_check(summary.failures, CHECK_STEP)
    try:
        with stop_search_after(deadline - time.monotonic(), subject.engine.workers.kill_running_calls):
            _run_steps(gate, selection.cases)
    except SearchTimeExpired:
        result.steps.append(GateStep("budget", "the time was over before all steps were done", 0.0))
    finally:
        subject.engine.close()
    result.findings = subject.root_findings()
    result.delegations, result.observed_calls = subject.delegations, subject.judged_counts[DELEGATION_STEP]
    if request.forbids_delegation and subject.delegations:
        names = ", ".join(subject.delegations)
        result.findings.append(Finding(DELEGATES, DELEGATION_STEP, f"computes by calling {names}"))
    result.not_judged = steps_with_too_few_calls(summary, subject, forbids_delegation=request.forbids_delegation)
    if any(finding.behaviour != FAILS for finding in result.findings) or summary.exit_code is ExitCode.DISAGREE:
        result.exit_code = ExitCode.DISAGREE
    elif result.findings or result.not_judged:
        result.exit_code = ExitCode.NOT_RUN
    return result


def steps_with_too_few_calls(summary: RunSummary, subject: KernelUnderTest, *, forbids_delegation: bool) -> list[str]:
    """Return the steps that judged too few calls for a decision; calls that are unsupported count, too."""
    counts = subject.judged_counts + subject.unsupported_counts
    counts[FRESH_STEP] += counts[MORE_STEP]
    counts[CHECK_STEP] = sum(summary.judged.values())
    required = {**REQUIRED_CALLS, DELEGATION_STEP: int(forbids_delegation and not subject.is_program)}
    if REQUIRED_CALLS and subject.judged_counts[FRESH_STEP] + subject.judged_counts[MORE_STEP] < _LEAST_JUDGED:
        required[FRESH_STEP] = counts[FRESH_STEP] + 1
    short = [step for step, least in required.items() if counts[step] < least]
    misses_minimum = summary.stopped is None and summary.exit_code is ExitCode.NOT_RUN  # of the project
    return list(dict.fromkeys([*([CHECK_STEP] if misses_minimum else []), *short]))


def _run_steps(gate: _Gate, cases: Sequence[Case]) -> None:
    subject = gate.subject
    fresh = FreshProblems(subject)
    with gate.step(FIRST_STEP):
        firsts = run_first_problems(subject)
    with gate.step(DELEGATION_STEP) as step:
        if subject.is_program:
            step.outcome = "not observed: a program may call anything"
        else:
            observe_delegation(subject, firsts, step.deadline)
            step.outcome = _describe_delegation(subject)
    with gate.step(SIZE_STEP) as step:
        sizes = [size for dtype in subject.dtypes[:1] for size in try_sizes(subject, dtype, step.deadline)]
        step.outcome = "; right up to ".join(filter(None, (describe_counts(subject, SIZE_STEP), ", ".join(sizes))))
    with gate.step(FRESH_STEP) as step:
        fresh.run(step.deadline)
    with gate.step(REPETITION_STEP) as step:
        repeat_problems(subject, firsts, step.deadline)
    with gate.step(SURROUNDINGS_STEP) as step:
        try_surroundings(subject, firsts, step.deadline)
    with gate.step(ACCURACY_STEP) as step:
        chosen = small_cases(cases)
        for dtype in subject.dtypes:
            if time.monotonic() >= step.deadline:
                break
            having = [case for case in chosen if dtype in case.dtypes]
            some = having[:: max(1, len(having) // _ACCURACY_CASES)]
            gate.result.accuracy.append(measure_accuracy(subject.implementation, some, dtype, gate.limits, gate.store))
        step.outcome = "; ".join(measured.answer for measured in gate.result.accuracy) or "not measured"
    if not subject.findings:
        with gate.step(MORE_STEP) as step:
            fresh.run(step.deadline, step=MORE_STEP)
    with gate.step(END_STEP):
        repeat_first_problems(subject, firsts)


def _describe_delegation(subject: KernelUnderTest) -> str:
    calls = subject.judged_counts[DELEGATION_STEP]
    if not calls:
        return "not observed"
    if not subject.delegations:
        return f"calls no other attention in {calls:,} observed calls"
    names = ", ".join(name for name, _ in subject.delegations.most_common())
    return f"computes by calling {names} in {subject.failed_counts[DELEGATION_STEP]:,} of {calls:,} observed calls"
