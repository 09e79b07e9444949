"""One case again: explained in a fresh process, or after the calls that came before it in a check.

An implementation may keep something from one call to the next: a buffer, a table for the last shape, a compiled kernel
that it takes for another's. In a fresh process its failure then does not show. It is repeated after the calls that the
check's worker had been asked before it, and of these as few are looked for as make it happen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from attncheck.config import expected_failures_of
from attncheck.diagnosis.declared import truth_for
from attncheck.diagnosis.examine import judge_and_diagnose
from attncheck.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.implementations import Implementation, ImplementationSelection, renamed
from attncheck.execution.runner import Group, GroupRunner, group_by_process, lone_runner, task_of
from attncheck.execution.worker import Computed, Outcome
from attncheck.judging.judge_implementation import JudgedStages, with_faults
from attncheck.judging.judge_stages import StageJudgement, sound_stages
from attncheck.judging.truth import Conditioning, conditioning_of
from attncheck.judging.units import own_empty_rows
from attncheck.judging.xfail import beyond_expected, largest_ratio, reason_for
from attncheck.options import FunctionOptions
from attncheck.reading.case import Case, case_record
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.selection import read_called
from attncheck.results.format import FAILURE_NUMBERS
from attncheck.results.last_failed import CaseInDtype, Checked, killed_the_worker, what_was_found
from attncheck.results.records import changed
from attncheck.store import NO_STORE, Store
from attncheck.verdicts import Verdict

_Evaluation = tuple[str, str, str]
"""An implementation, a case and a dtype."""


@dataclass(frozen=True)
class Explanation:
    """The judged result of one implementation in one case and dtype.

    ``failure`` says why there are no stages; ``outside`` why there is no exact answer to hold them against.
    ``expected_failures`` tells, by stage, why what is wrong there was expected.
    """

    case: Case
    dtype: str
    implementation: str
    rounding_model: str
    judgements: tuple[StageJudgement, ...]
    begins_at: str
    failure: str = ""
    outside: str = ""
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    """The features that the implementation would need to support the case, where that is why there are no stages."""
    padded: str = ""
    """The padding of the call, as the implementation requires it; empty where it was made as the case has it."""
    conditioning: Mapping[str, Conditioning] = field(default_factory=dict)
    """By stage, how large the error bounds are beside the numbers."""
    diagnosis: str | None = None
    """The convention or mistake that gives these numbers, where that is known: a name of docs/diagnoses.md."""
    repeated: Repetition | None = None
    """What is to be said before it of a failure that a fresh process does not show."""

    @property
    def before(self) -> tuple[Call, ...]:
        """The calls that have to come first, for the failure to happen."""
        return (self.repeated.needed or ()) if self.repeated else ()

    @property
    def fails(self) -> bool:
        """True if anything is wrong; what is unsupported is not."""
        of_stages = any(judgement.verdict.exit_code for judgement in self.judgements)
        return of_stages or bool(self.failure and not self.failure.startswith(Verdict.UNSUPPORTED))

    @property
    def failing_stages(self) -> list[str]:
        """The stages that fail; one without a name where there are none to judge."""
        failing = [item.stage for item in self.judgements if item.verdict.exit_code]
        return failing or ([""] if self.fails else [])

    @property
    def first_failing(self) -> StageJudgement | None:
        """The judgement of the stage where it goes wrong, or of the first that fails; None where none does.

        What an implementation does not return is known from what it does to later stages.
        """
        failing = [each for each in self.judgements if each.verdict.exit_code]
        return next((each for each in failing if each.stage == self.begins_at), failing[0] if failing else None)

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The numbers that ``FAILURE_NUMBERS`` names, of the element where it is worst; None for what there is not."""
        found = self.first_failing
        if found is None:
            return dict.fromkeys(FAILURE_NUMBERS)
        measured = found.introduced if found.against == "step" else found.accumulated
        return {
            "element_stage": None if found.index is None else found.stage,
            "element": None if found.index is None else list(found.index),
            "computed": found.value,
            "exact": found.exact,
            "error": found.error,
            "bound": found.bound,
            "ratio": None if measured is None else measured.ratio,
            "against": found.against,
            "diagnosis": self.diagnosis,
        }


def find_implementation(name: str, function: FunctionOptions | None = None, called: str = "") -> Implementation:
    """Return an implementation by its name, its backend's, or as file.py:function. Raises ``UsageError``.

    One of a user's is ``called`` as a report calls it, where that is given.
    """
    chosen: ImplementationSelection = select_implementations(None, [name], **(function or FunctionOptions()).called)
    if chosen.missing:
        raise UsageError(f"{chosen.missing[0]} is not installed")
    (found,) = chosen.implementations[:1]
    return renamed(found, called) if called else found


def explain_case(
    case: Case,
    implementation: Implementation,
    dtype: str,
    limits: Limits,
    runner: GroupRunner[str] | None = None,
    expected_failures: Sequence[ExpectedFailure] | None = None,
    *,
    store: Store = NO_STORE,
) -> Explanation:
    """Compute a case in a worker, ``runner``'s if there is one, and judge every stage.

    ``expected_failures`` of the implementation; None is what is bundled, and what the project names. Exact answers are
    taken from the ``store``.
    """
    rounding_model = implementation.rounding_model(dtype)
    if rounding_model is None:
        absent = f"unsupported: declares no {dtype}"
        return Explanation(case, dtype, implementation.name, "none", (), "", absent, lacks=(dtype,))
    if expected_failures is None:
        expected_failures = expected_failures_of([implementation.entry.name])
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    group = Group(implementation, (dtype,))
    with nullcontext(runner) if runner else lone_runner(group, limits, with_neighbours=True) as worker:
        outcome = worker.evaluate(task_of(case, inputs))
    return explain_outcome(case, implementation, dtype, inputs, outcome, expected_failures, store=store)


def explain_outcome(
    case: Case,
    implementation: Implementation,
    dtype: str,
    inputs: Inputs,
    outcome: Outcome,
    expected_failures: Sequence[ExpectedFailure],
    *,
    store: Store = NO_STORE,
) -> Explanation:
    """Judge every stage of what an implementation returned for a case, in a dtype that it declares."""
    rounding_model = implementation.rounding_model(dtype)
    assert rounding_model is not None
    evaluation = (implementation.name, case.id, dtype)
    if not isinstance(outcome, Computed):
        failure = f"{outcome.verdict}: {outcome.message}"
        found = reason_for(expected_failures, *evaluation, "", outcome.verdict)
        reasons = {} if found is None else {"": found.entry.reason}
        whose = (case, dtype, implementation.name, rounding_model, (), "", failure)
        return Explanation(*whose, expected_failures=reasons, lacks=outcome.lacks, padded=outcome.padded)
    truth = truth_for(implementation, case, dtype, inputs, outcome.stages, store)
    own = own_empty_rows(implementation, expected_failures, case.id, dtype)
    own = replace(own, is_asked=not outcome.not_asked)
    judged = judge_and_diagnose(truth, outcome.stages, case.stage_shapes, rounding_model, own)
    judged = with_faults(judged, outcome.faults)
    measured = {each.stage for each in judged.judgements if each.accumulated is not None}
    returned = truth.for_returned(outcome.stages)
    sound = sound_stages(returned, outcome.stages, case.stage_shapes)
    conditions = {
        name: large
        for name, array in sound.items()
        if name in measured and (large := conditioning_of(returned, name, array, rounding_model)) is not None
    }
    return Explanation(
        case,
        dtype,
        implementation.name,
        rounding_model,
        tuple(_with_limit(expected_failures, each, evaluation) for each in judged.judgements),
        judged.begins_at,
        outside=truth.outside,
        expected_failures=_expected_stages(expected_failures, judged, evaluation),
        padded=outcome.padded,
        conditioning=conditions,
        diagnosis=judged.diagnosis.name if judged.diagnosis is not None else None,
    )


def _expected_stages(
    expected_failures: Sequence[ExpectedFailure], judged: JudgedStages, evaluation: _Evaluation
) -> dict[str, str]:
    """Return the reasons of the failures that are expected, by stage."""
    reasons = {
        each.stage: reason_for(
            expected_failures, *evaluation, each.stage, each.verdict, ratio=_ratio(each), empty_rows=each.empty_rows
        )
        for each in judged.judgements
        if each.verdict.exit_code
    }
    excused = dict.fromkeys(sorted(judged.excused), judged.reason)
    return {stage: found.entry.reason for stage, found in reasons.items() if found is not None} | excused


def _with_limit(
    expected_failures: Sequence[ExpectedFailure], judgement: StageJudgement, evaluation: _Evaluation
) -> StageJudgement:
    """Describe an error that is larger than the entry of its expected failure allows."""
    beyond = beyond_expected(
        expected_failures, *evaluation, judgement.stage, judgement.verdict, ratio=_ratio(judgement)
    )
    return replace(judgement, message=f"{judgement.message}; {beyond}") if beyond else judgement


def _ratio(judgement: StageJudgement) -> float:
    return largest_ratio(*(each.ratio for each in (judgement.accumulated, judgement.introduced) if each is not None))


MAX_TRIES = 60
"""Each starts a process."""
MAX_SECONDS = 120.0
"""For looking for fewer calls; then the fewest that were found so far will do."""

Call = tuple[Case, str]
"""A case and a dtype that a worker was asked."""

Each = TypeVar("Each")


@dataclass(frozen=True)
class MetFailure:
    """A failure that a check ``found``, and the calls ``before`` it in the same process, in order.

    ``seen`` is the explanation of that very evaluation, where there is one; ``remark`` what may have changed since.
    """

    found: str
    before: Callable[[], Sequence[Call]]
    seen: Explanation | None = None
    remark: str = ""


@dataclass(frozen=True)
class Repetition:
    """The outcome of repeating a failure that does not show in a fresh process.

    It ``found`` what is said, after as many calls as came ``before``. It happens again after those that are ``needed``;
    None where it did not happen again. ``are_fewest`` says whether each of them is.
    """

    found: str
    before: int
    needed: tuple[Call, ...] | None = None
    are_fewest: bool = False
    remark: str = ""


def explain_again(
    case: Case,
    implementation: Implementation,
    dtype: str,
    limits: Limits,
    earlier: MetFailure | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
    expected_failures: Sequence[ExpectedFailure] | None = None,
    store: Store = NO_STORE,
) -> Explanation:
    """Explain a case in a fresh process, and where it does not fail there as in a check, after that check's calls.

    ``say`` hears what is done while it takes long. ``expected_failures`` and ``store`` are as for ``explain_case``.
    """
    fresh = explain_case(case, implementation, dtype, limits, expected_failures=expected_failures, store=store)
    if earlier is None or fresh.fails:
        return fresh
    before = earlier.before()
    repeated = Repetition(earlier.found, len(before), remark=earlier.remark)
    tries = _Tries(case, implementation, dtype, limits, expected_failures)
    say(f"in a fresh process it agrees; repeating the {len(before)} calls that the check made before it")
    if not before or not tries.fails_after(before):
        return replace(earlier.seen or fresh, repeated=repeated)
    say("it fails after them; looking for those that it takes")
    are_fewest = fewest(before, tries.fails_after)
    needed, found = tries.failing[-1]
    return replace(found, repeated=replace(repeated, needed=tuple(needed), are_fewest=are_fewest))


def failure_in(checked: Checked, case: Case, implementation: Implementation, dtype: str) -> MetFailure | None:
    """Return the failure that a check found in a case; None if it found none, or the case has changed since."""
    record = checked.cases.get(case.id)
    if record is None or changed(record, case_record(case, {})):
        return None

    def read(identities: Iterable[str]) -> Mapping[str, Case]:
        return read_called({identity: checked.address(identity) or identity for identity in identities})

    remark = _changed_since(implementation, checked)
    return failure_among(checked.asked(implementation.name), (case.id, dtype), implementation, read, remark)


def failure_among(
    asked: Mapping[CaseInDtype, str],
    where: CaseInDtype,
    implementation: Implementation,
    read: Callable[[Iterable[str]], Mapping[str, Case]],
    remark: str = "",
) -> MetFailure | None:
    """Return the failure of a case among what became of calls, with those before it, whose cases are ``read``."""
    if not (found := asked.get(where)):
        return None
    evaluations = calls_before(asked, where, group_of(implementation, [each for _, each in asked], where[1]).dtypes)

    def before() -> list[Call]:
        cases = read(identity for identity, _ in evaluations) if evaluations else {}
        return [(cases[identity], each) for identity, each in evaluations if identity in cases]

    return MetFailure(found, before, remark=remark)


def failure_seen_now(seen: Explanation, before: Sequence[Call]) -> MetFailure:
    """Return the failure that a check has just ``seen``, after the calls before it."""
    first = next((each for each in seen.judgements if each.verdict.exit_code), None)
    found = seen.failure if first is None else what_was_found(first.verdict, first.stage, first.message)
    return MetFailure(found, lambda: before, seen)


def _changed_since(implementation: Implementation, checked: Checked) -> str:
    """Return a remark on a user's file that is younger than the results."""
    path = Path(implementation.declared.module)
    is_younger = path.suffix == ".py" and path.is_file() and path.stat().st_mtime > checked.written
    return f"{path.name} has changed since" if is_younger else ""


def calls_before(asked: Mapping[CaseInDtype, str], evaluation: CaseInDtype, dtypes: Sequence[str]) -> list[CaseInDtype]:
    """Return what a worker that serves these dtypes was asked before a place of a plan, since it was started."""
    evaluations = [each for each in asked if each[1] in dtypes]
    earlier = evaluations[: evaluations.index(evaluation)] if evaluation in evaluations else []
    deaths = [number for number, each in enumerate(earlier) if killed_the_worker(asked[each])]
    return earlier[deaths[-1] + 1 :] if deaths else earlier


def group_of(implementation: Implementation, dtypes: Sequence[str], dtype: str) -> Group:
    """Return the process that serves a dtype, in a run of these dtypes."""
    declared = [each for each in sorted({*dtypes, dtype}) if implementation.rounding_model(each)]
    return next(group for group in group_by_process(implementation, declared) if dtype in group.dtypes)


@dataclass
class _Tries:
    """Tries a case after other calls, each time in a process of its own, and keeps what failed."""

    case: Case
    implementation: Implementation
    dtype: str
    limits: Limits
    expected_failures: Sequence[ExpectedFailure] | None
    failing: list[tuple[Sequence[Call], Explanation]] = field(default_factory=list)
    left: int = MAX_TRIES
    until: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def fails_after(self, calls: Sequence[Call]) -> bool | None:
        """Return if the case fails after these calls; None where there have been tries enough."""
        if self.failing and (self.left <= 0 or time.monotonic() > self.until):
            return None
        self.left -= 1
        group = group_of(self.implementation, [each for _, each in calls], self.dtype)
        # However often it ends its worker, these calls are made: it did not end that of the check.
        with lone_runner(group, replace(self.limits, keep_going=True)) as runner:
            for case, dtype in calls:
                runner.evaluate(task_of(case, convert_inputs(case, make_exact_inputs(case), dtype)))
            evaluation = self.case, self.implementation, self.dtype
            found = explain_case(*evaluation, self.limits, runner, self.expected_failures)
        if found.fails:
            self.failing.append((calls, found))
        return found.fails


def fewest(calls: Sequence[Each], fails_after: Callable[[Sequence[Each]], bool | None]) -> bool:
    """Look for the fewest calls after which it fails; the last that failed are those. Whether none can be left out.

    What is kept is mostly of one call, and of a late one: the shortest end of the calls is looked for first, then
    whether its first call alone does, and only then which others can be left out.
    """
    kept = _shortest_end(calls, fails_after)
    if kept is None or len(kept) == 1:
        return kept is not None
    alone = fails_after(kept[:1])
    return _left_out(kept, fails_after) if alone is False else bool(alone)


def _shortest_end(calls: Sequence[Each], fails_after: Callable[[Sequence[Each]], bool | None]) -> Sequence[Each] | None:
    """Return the shortest end of some calls after which it fails; None where there have been tries enough."""
    too_short, enough = 0, len(calls)
    length = 1
    while too_short + 1 < enough:
        length = min(length, enough - 1)
        failed = fails_after(calls[-length:])
        if failed is None:
            return None
        too_short, enough = (too_short, length) if failed else (length, enough)
        length = 2 * length if enough == len(calls) else (too_short + enough) // 2
    return calls[-enough:]


def _left_out(calls: Sequence[Each], fails_after: Callable[[Sequence[Each]], bool | None]) -> bool:
    """Leave out what can be, larger parts first (Zeller's ddmin), until every single call is needed."""
    size = len(calls) // 2
    while True:
        position, before = 0, len(calls)
        while position < len(calls):
            rest = [*calls[:position], *calls[position + size :]]
            failed = fails_after(rest) if rest else False
            if failed is None:
                return False
            calls, position = (rest, position) if failed else (calls, position + size)
        if size == 1 and len(calls) == before:
            return True
        size = max(1, size // 2)
