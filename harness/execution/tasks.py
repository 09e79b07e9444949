"""What workers are asked for a case."""

from __future__ import annotations

from attncheck.execution.worker import Task
from attncheck.reading.canonical import call_form
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs


def task_of(case: Case, inputs: Inputs) -> Task:
    """Return the call that a case is, on inputs in the working dtype."""
    posed = call_form(case.operation, case.options, inputs.arrays)
    return Task(case.operation, posed.options, posed.inputs, case.memory_layout, case.judged_stages)
