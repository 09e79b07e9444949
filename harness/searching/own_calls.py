"""Calls with a user's arrays, of any framework, as questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attncheck.asking.question import Question
from attncheck.backends import as_numpy
from attncheck.common.errors import UsageError
from attncheck.common.wording import join_words, suggest_names
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.searching.concrete import case_of_problem
from attncheck.spec import DTYPES, OPERATIONS, InputSpec, input_specs


def question_from_arrays(
    operation: str, inputs: Mapping[str, Any], options: Mapping[str, Any], dtype: str | None, folder: Path
) -> Question:
    """Return the question for a call with these arrays.

    Args:
        operation: The operation.
        inputs: Arrays of any framework by the names of docs/cases.md; one that is None is left out.
        options: The options of the call.
        dtype: The dtype of the call; None for that of the arrays.
        folder: The folder for large arrays. It may be removed after the call.

    Raises:
        UsageError: If there is no such operation or dtype, or an input is unknown, missing or of another kind.
        CaseError: If shapes and options are no call of the operation.
    """
    if operation not in OPERATIONS:
        raise UsageError(f"operation: unknown {operation!r}; {suggest_names(operation, OPERATIONS)}")
    for name, mapping in (("inputs", inputs), ("options", options)):
        if not isinstance(mapping, Mapping):
            raise UsageError(f"{name}: expected a mapping by name, such as a dict; got a {type(mapping).__name__}")
    specs = input_specs(operation, options.get("score"))
    present = {name: value for name, value in inputs.items() if value is not None}
    if unknown := next((name for name in present if name not in specs), None):
        raise UsageError(f"inputs: unknown {unknown!r}; {suggest_names(str(unknown), specs)}")
    if missing := [name for name, spec in specs.items() if spec.required and name not in present]:
        raise UsageError(f"inputs: {join_words(missing)} missing")
    arrays = {name: _checked_array(name, value, specs) for name, value in present.items()}
    chosen = _dtype_of_call(arrays, specs) if dtype is None else dtype
    if chosen not in DTYPES:
        raise UsageError(f"dtype: unknown {chosen!r}; expected one of {', '.join(DTYPES)}")
    numbers = {name: array.astype(np.float64) if specs[name].is_number else array for name, array in arrays.items()}
    problem = Problem(operation, options, numbers, chosen)
    question = Question(case_of_problem(problem, folder, "asked/call", title="A call with arrays of your own"), chosen)
    question.inputs  # noqa: B018 # read now, while the folder is there
    return question


def _checked_array(name: str, value: Any, specs: Mapping[str, InputSpec]) -> Array:
    """Return an input as an array. Raises ``UsageError`` if it is none of the kind that the operation takes."""
    try:
        array = as_numpy(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"inputs: {name}: {error}") from None
    kind, spec = array.dtype.kind, specs[name]
    if spec.is_boolean and kind != "b":
        added = "; numbers that are added to the scores are the input bias" if "bias" in specs else ""
        raise UsageError(f"inputs: {name}: expected booleans, true where a query may attend; got {array.dtype}{added}")
    if spec.is_count and kind not in "iu":
        raise UsageError(f"inputs: {name}: expected whole numbers; got {array.dtype}")
    if spec.is_number and kind in "bcUSO":
        raise UsageError(f"inputs: {name}: expected real numbers; got {array.dtype}")
    return array


def _dtype_of_call(arrays: Mapping[str, Array], specs: Mapping[str, InputSpec]) -> str:
    """Return the dtype of all inputs that are rounded to the dtype of a case. Raises ``UsageError`` for several."""
    dtypes = {
        name: str(array.dtype)
        for name, array in arrays.items()
        if specs[name].is_number and not (specs[name].is_row_statistic or specs[name].is_narrow)
    }
    if len(set(dtypes.values())) != 1:
        shown = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise UsageError(f"inputs: several dtypes ({shown}); say with dtype which one is meant")
    [dtype] = set(dtypes.values())
    if dtype not in DTYPES:
        choices = ", ".join(DTYPES)
        raise UsageError(f"inputs: {next(iter(dtypes))} is {dtype}; say with dtype what to round it to: {choices}")
    return dtype
