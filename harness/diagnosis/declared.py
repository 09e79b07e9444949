"""Applies the conventions that a function declares: the exact answer of a case under them.

Every command uses this module, so that all commands judge a function in the same way. A function also declares the
result of a query without a key, but that makes no other problem (``judging.empty_row_conventions``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from attncheck.common.store import NO_STORE, Store
from attncheck.diagnosis.readings import ALL_READINGS
from attncheck.execution.implementations import Implementation
from attncheck.judging.alternatives import AppliedReading, are_same_problem, as_call_with_head_options
from attncheck.judging.truth import Truth, truth_of_case, truth_of_reading
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs
from attncheck.reading.problem import Problem
from attncheck.spec import DECLARABLE_CONVENTIONS


def truth_for_implementation(
    implementation: Implementation,
    case: Case,
    inputs: RoundedInputs,
    returned: Collection[str] | None = None,
    store: Store = NO_STORE,
) -> Truth:
    """Return the exact answer of a case under an implementation's conventions, for the stages that it ``returned``."""
    return truth_under_declared_conventions(
        truth_of_case(case, inputs, returned, store), implementation.declared_readings
    )


def truth_under_declared_conventions(truth: Truth, conventions: Mapping[str, str]) -> Truth:
    """Return the exact answer of a case under declared conventions; the same truth if they change nothing.

    The truth's ``declared_conventions`` describe the conventions that apply.
    """
    if not conventions:
        return truth
    key = f"declared {sorted(conventions.items())}"
    if key not in truth.cached_readings:
        reading = problem_under_conventions(truth.judged_problem.called_problem, conventions)
        truth.cached_readings[key] = (
            truth
            if reading is None
            else replace(truth_of_reading(truth, reading.problem), declared_conventions=reading.description)
        )
    declared: Truth = truth.cached_readings[key]
    return declared


def problem_under_conventions(problem: Problem, conventions: Mapping[str, str]) -> AppliedReading | None:
    """Return the problem that an implementation with these conventions computes; None if they change nothing.

    The conventions are applied to the call, one after the other. The result of a query without a key is not among them.

    Example:
        >>> import numpy as np
        >>> ones = {name: np.ones((1, 1, 2, 4)) for name in ("query", "key", "value")}
        >>> problem = Problem("attention", {}, {**ones, "mask": np.array([[[[True, False]]]])})
        >>> read = problem_under_conventions(problem, {"mask": "true_forbids"})
        >>> read.problem.inputs["mask"].tolist()
        [[[[False, True]]]]
    """
    called, applied = as_call_with_head_options(problem), list[str]()
    for is_before in (True, False):  # the call first: the lowered problem has options that the case does not set
        for option in conventions.items():
            if option[0] in applied:
                continue
            rows = (
                row
                for row in ALL_READINGS
                if row.declarable_convention == option and row.changes_called_operation is is_before
            )
            forms = (
                form
                for row in rows
                for form in replace(row, changes_called_operation=False).apply_to_problem(called)
                if not (form.step_replacement or form.stage_aliases)
                and (option[0] != "scale" or form.common_description)
            )
            if form := next(forms, None):
                called, applied = form.problem, [*applied, option[0]]
        called = called.without_layout()
    if not applied:
        return None
    words = "; ".join(
        DECLARABLE_CONVENTIONS[name][conventions[name]] for name in DECLARABLE_CONVENTIONS if name in applied
    )
    return AppliedReading(called, name="declared", description=words)


def rewrite_for_conventions(problem: Problem, conventions: Mapping[str, str]) -> Problem | None:
    """Return the call with which an implementation with these conventions computes the problem; None if there is none.

    For example, if True in its mask means masked, the call has the inverted mask. Another corner of causality has no
    such call.
    """
    declared = problem_under_conventions(problem, conventions)
    if declared is None:
        return problem
    again = problem_under_conventions(declared.problem, conventions)
    is_undone = again is not None and are_same_problem(
        again.problem, as_call_with_head_options(problem).without_layout()
    )
    return declared.problem if is_undone else None
