"""Find failures of a check that a new process does not show.

A function may keep state between calls, such as a mask for the last number of keys. Some of its results then belong to
other calls. No reading of the case explains them, or a wrong one does by accident. So after the diagnosis, a few
failing calls of a user's function are repeated, each in a new process. If a call is right there, its result in the
check depends on earlier calls, or on chance.

A new process costs at least the import of a framework, so the calls are chosen in two steps:

1. A group has the failures of one diagnosis, or those without a diagnosis. A group without a diagnosis, or with one
   that passing cases contradict, is doubtful. The simplest call of the two largest doubtful groups is repeated. If it
   is wrong again, nothing else is repeated. So an ordinary fault costs at most two processes, and none if one diagnosis
   explains all failures.
2. Otherwise, further calls of all groups are repeated, within the limits below. The failures of a group get the new
   diagnosis if all of its repeated calls are right. In any other group, only the calls that are right get it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from attncheck.common.wording import EXCEPTION_PREFIX, count_noun
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.worker import Computed
from attncheck.execution.workers import WorkerPool
from attncheck.judging.judge import MEMORY_DIAGNOSES, OTHER_CALL_DIAGNOSIS, RIGHT_IN_NEW_PROCESS_DIAGNOSIS
from attncheck.judging.units import Judge
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_inputs, make_problem_of_case
from attncheck.results.format import Row, has_failure
from attncheck.results.last_failed import CaseInDtype
from attncheck.spec.verdicts import WRONG_NUMBER_VERDICTS

MAX_DOUBTFUL_GROUPS = 2
"""Groups of which a call is repeated first: usually, the largest has the cause of most failures."""
MAX_REPEATED_PER_GROUP, MAX_REPEATED_CALLS = 3, 8
"""Calls that are repeated. Three cases also confirm a reading (``diagnosis.run``). A call takes 0.4 s with NumPy, as
measured on two busy cores."""
MAX_SECONDS = 5.0
"""Seconds after which no further call is repeated: a framework that is imported in 2 s is then imported three times."""


def mark_results_of_earlier_calls(
    undiagnosed: Sequence[Row],
    diagnosed: Sequence[Row],
    implementations: Sequence[Implementation],
    cases: Mapping[str, Case],
    judge: Judge,
    limits: Limits,
) -> list[Row]:
    """Return failing rows in their order, with the diagnosis of users' functions whose failures a new process lacks.

    Args:
        undiagnosed: The failing rows before the diagnosis.
        diagnosed: The same rows with their diagnoses, in the same order.
        implementations: The implementations of the run.
        cases: The cases of the run by id.
        judge: Judges the repeated calls.
        limits: Limits of the new processes.
    """
    marked = list(diagnosed)
    for item in implementations:
        numbers = [
            number
            for number, row in enumerate(diagnosed)
            if row.implementation == item.name and row.case in cases and isinstance(item.entry, UserImplementation)
        ]
        numbers.sort(key=lambda number: sum(map(math.prod, cases[diagnosed[number].case].input_shapes.values())))
        before, after = ([rows[number] for number in numbers] for rows in (undiagnosed, diagnosed))
        is_right = partial(_is_right_in_new_process, item, cases, judge, limits)
        for number, row in zip(numbers, mark_irreproducible_rows(before, after, is_right), strict=True):
            marked[number] = row
    return marked


def _is_right_in_new_process(
    implementation: Implementation, cases: Mapping[str, Case], judge: Judge, limits: Limits, call: CaseInDtype
) -> bool:
    """Return whether a call is right in a process that has made no other call."""
    case, dtype = cases[call[0]], call[1]
    inputs, workers = make_inputs(case, dtype), WorkerPool(limits, probes_state=False)
    with closing(workers), workers.new_process_worker(implementation, dtype) as runner:
        outcome = runner.evaluate(make_problem_of_case(case, inputs).as_call())
    if not isinstance(outcome, Computed):
        return False
    return not has_failure(judge.judge_unit(case, dtype, inputs, {implementation.name: outcome}).rows)


def mark_irreproducible_rows(
    undiagnosed: Sequence[Row], diagnosed: Sequence[Row], is_right: Callable[[CaseInDtype], bool]
) -> list[Row]:
    """Return the failing rows of one implementation; those that a new process does not show have the new diagnosis.

    Args:
        undiagnosed: The failing rows before the diagnosis.
        diagnosed: The same rows with their diagnoses, in the same order, those of the simplest calls first.
        is_right: Repeats a call in a new process, and returns whether it is right there.
    """
    groups: dict[str, list[CaseInDtype]] = defaultdict(list)
    doubtful, seen = set[str](), set[CaseInDtype]()
    for row in diagnosed:
        diagnosis, call = row.diagnosis or "", (row.case, row.dtype)
        if not _is_wrong_stage(row) or diagnosis in MEMORY_DIAGNOSES.values() or call in seen:
            continue
        seen.add(call)
        groups[diagnosis].append(call)
        if not diagnosis or EXCEPTION_PREFIX in row.message:
            doubtful.add(diagnosis)
    by_size = sorted(groups, key=lambda diagnosis: -len(groups[diagnosis]))
    first = [groups[diagnosis][0] for diagnosis in by_size if diagnosis in doubtful][:MAX_DOUBTFUL_GROUPS]
    end, right = time.monotonic() + MAX_SECONDS, {call: is_right(call) for call in first}
    if not any(right.values()):
        return list(diagnosed)
    for diagnosis in by_size:
        for call in groups[diagnosis][:MAX_REPEATED_PER_GROUP]:
            if call not in right and len(right) < MAX_REPEATED_CALLS and time.monotonic() < end:
                right[call] = is_right(call)
    affected = {call for call, agrees in right.items() if agrees}
    for calls in groups.values():
        repeated = [right[call] for call in calls if call in right]
        affected.update(calls if repeated and all(repeated) else ())
    has_state = any(row.diagnosis == OTHER_CALL_DIAGNOSIS for row in diagnosed)
    diagnosis = OTHER_CALL_DIAGNOSIS if has_state else RIGHT_IN_NEW_PROCESS_DIAGNOSIS
    count = sum(right.values())
    are_right = f"{count_noun(count, 'repeated call')} {'is' if count == 1 else 'are'} right in a new process"
    description = f"the result depends on earlier calls, or on chance: {are_right}"
    return [
        replace(before, diagnosis=diagnosis, message=f"{description}; {before.message}")
        if _is_wrong_stage(row) and (row.case, row.dtype) in affected
        else row
        for before, row in zip(undiagnosed, diagnosed, strict=True)
    ]


def _is_wrong_stage(row: Row) -> bool:
    return row.comparison == "stage" and row.verdict in WRONG_NUMBER_VERDICTS and not row.xfail
