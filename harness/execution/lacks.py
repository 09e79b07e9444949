"""What an own implementation lacks for a case, known from its parameters before any numbers are drawn.

A kernel that has few of the options is asked for every case of the corpus, and most of them it cannot do: what that
costs is what somebody waits for who edits it. Whatever is not certain here is left to the call itself, which says the
same of what it lacks (``operations.run_operation``).
"""

from __future__ import annotations

import numpy as np

from attncheck.execution.implementations import Implementation
from attncheck.execution.operations import LackingError, call_of, check_parameters, conventions_lacking
from attncheck.execution.signatures import INPUTS
from attncheck.execution.user_code import UserImplementation
from attncheck.execution.worker import Failure, unsupported
from attncheck.reading.case import Case
from attncheck.reading.inputs import Exact, convert_inputs
from attncheck.reading.lowering import AttentionProblem, call_form
from attncheck.spec import OPERATIONS


def lack_known_beforehand(implementation: Implementation, case: Case, dtype: str) -> Failure | None:
    """Return the outcome of a case that an implementation has no function or no parameter for; None if it may have."""
    entry = implementation.entry
    if not isinstance(entry, UserImplementation) or OPERATIONS[case.operation].is_folded:
        return None
    name, keywords = call_of(case.operation, case.options)
    parameters = entry.parameters.get(name)
    if parameters is None:
        return unsupported(LackingError.of_function(name)) if entry.parameters else None
    positional = INPUTS[name]
    if entry.requirements.get(name) or not parameters.lacking({*case.inputs, *keywords}.difference(positional)):
        return None
    posed = _call_without_numbers(case, dtype)
    _, keywords = call_of(case.operation, posed.options)
    unasked = conventions_lacking(parameters, posed.options)
    asked = [each for each in (*posed.inputs, *keywords) if each not in (*positional, *unasked)]
    try:
        check_parameters(parameters, asked)
    except LackingError as error:
        return unsupported(error)
    return None


def _call_without_numbers(case: Case, dtype: str) -> AttentionProblem:
    """Return the call that a case is, all of whose numbers are 0."""
    zeros = {name: np.zeros(shape) for name, shape in case.input_shapes.items()}
    inputs = convert_inputs(case, {name: Exact(array, array) for name, array in zeros.items()}, dtype)
    return call_form(case.operation, case.options, inputs.arrays)
