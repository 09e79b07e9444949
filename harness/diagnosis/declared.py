"""Conventions that a function declares, and the exact answer under them.

Every command uses this module, so that all judge a function alike. What a query without a key
gives is declared, too, but no other problem (``judging.empty_row_conventions``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from attncheck.common.store import NO_STORE, Store
from attncheck.diagnosis.readings import ALL_READINGS
from attncheck.execution.implementations import Implementation
from attncheck.judging.alternatives import Alternative, delivered, is_same
from attncheck.judging.truth import Truth, truth_of_case, truth_of_reading
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.reading.problem import Problem
from attncheck.spec import DECLARABLE


def truth_for(
    implementation: Implementation,
    case: Case,
    inputs: Inputs,
    returned: Collection[str] | None = None,
    store: Store = NO_STORE,
) -> Truth:
    """Return the exact answer of a case as an implementation reads it, of the stages that it ``returned``."""
    return truth_as_declared(truth_of_case(case, inputs, returned, store), implementation.reads_calls_as)


def truth_as_declared(own: Truth, conventions: Mapping[str, str]) -> Truth:
    """Return the exact answer of a case as an implementation reads it that declares conventions; of most, the case's.

    What says how it is read is the truth's ``read_as``.
    """
    if not conventions:
        return own
    key = f"declared {sorted(conventions.items())}"
    if key not in own.of_readings:
        reading = read_as_declared(own.judged.called, conventions)
        own.of_readings[key] = (
            own if reading is None else replace(truth_of_reading(own, reading.problem), read_as=reading.description)
        )
    found: Truth = own.of_readings[key]
    return found


def read_as_declared(problem: Problem, conventions: Mapping[str, str]) -> Alternative | None:
    """Return a problem as an implementation reads its call that declares these conventions; None where it is the same.

    They are applied to the call as it is made, one behind the other. What a query without a key gives is none of them.
    """
    called, applied = delivered(problem), list[str]()
    for is_before in (True, False):  # what a call is lowered to has options that nobody was asked for
        for option in conventions.items():
            if option[0] in applied:
                continue
            rows = (each for each in ALL_READINGS if each.option == option and each.before_lowering is is_before)
            forms = (form for row in rows for form in replace(row, before_lowering=False).of_problem(called))
            if found := next((form for form in forms if _is_said_by(form, option)), None):
                called, applied = found.problem, [*applied, option[0]]
        called = called.without_layout()
    if not applied:
        return None
    words = "; ".join(DECLARABLE[name][conventions[name]] for name in DECLARABLE if name in applied)
    return Alternative(called, name="declared", description=words)


def rewrite_for_conventions(problem: Problem, conventions: Mapping[str, str]) -> Problem | None:
    """Rewrite a problem as the call by which an implementation with these conventions computes it; None if none does.

    If True in a mask forbids, the call has the inverted mask. A corner of causality cannot be undone like that.
    """
    found = read_as_declared(problem, conventions)
    if found is None:
        return problem
    again = read_as_declared(found.problem, conventions)
    return found.problem if again is not None and is_same(again.problem, delivered(problem).without_layout()) else None


def _is_said_by(form: Alternative, option: tuple[str, str]) -> bool:
    is_problem = form.replacement is None and not form.stage_aliases
    return is_problem and (option[0] != "scale" or bool(form.shared))
