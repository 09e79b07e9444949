"""Measures along which axis a user's function attends: that of the sequence, or by mistake that of the heads.

Libraries disagree about the order of these two axes, (B, H, L, D) or (B, L, H, D), so a function is easily called with
the wrong one. It then computes attention, of every position over the heads, and is wrong in nearly every case. One
call with different numbers of heads and positions shows it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np

from attncheck.asking.conventions import most_exact_dtype
from attncheck.backends.families import FAMILIES
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.signatures import INPUTS_BY_FUNCTION
from attncheck.execution.worker import Computed
from attncheck.execution.workers import WorkerPool
from attncheck.judging.judge_stages import stage_agrees
from attncheck.judging.truth import find_truth
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.spec.dtypes import round_to

_HEADS, _LENGTH, _WIDTH = 3, 5, 4
"""Heads and positions differ in number, so that the two answers differ; 1/sqrt(4) is exact in every dtype."""
_ORDERS = {"BHLD": "(batch, heads, length, width)", "BLHD": "(batch, length, heads, width)"}


def axes_advice(implementation: Implementation, limits: Limits) -> str:
    """Return what to change if a user's function attends along the axis of the heads; empty if it does not.

    The function is called once. Only a function of one of the two common orders of axes is measured.
    """
    entry = implementation.entry
    if not isinstance(entry, UserImplementation):
        return ""
    signature = entry.signature
    passed = FAMILIES[signature].layout if signature else "BHLD"
    if passed not in _ORDERS or not _attends_over_heads(implementation, limits):
        return ""
    (computed,) = _ORDERS.keys() - {passed}
    who, otherwise = f"--signature {signature}", "omit the signature, or name the library whose order it has"
    if not signature:
        who, otherwise = "attncheck", "transpose its arrays, or name the library whose order it has with --signature"
    return (
        f"the axes are in another order: {who} passes arrays of {_ORDERS[passed]}, and the function computes with "
        f"{_ORDERS[computed]}: {otherwise} (docs/how-to/kernel.md)"
    )


def _attends_over_heads(implementation: Implementation, limits: Limits) -> bool:
    dtype = most_exact_dtype(implementation)
    rounding_model = implementation.rounding_model(dtype)
    random = np.random.RandomState(1)
    shape = 1, _HEADS, _LENGTH, _WIDTH
    inputs = {name: round_to(random.standard_normal(shape), dtype) for name in INPUTS_BY_FUNCTION["attention"]}
    problem = Problem("attention", {}, inputs, dtype)
    with closing(WorkerPool(limits, probes_state=False)) as workers:
        outcome = workers.worker_for(implementation, dtype).evaluate(problem)
    if not isinstance(outcome, Computed) or rounding_model is None:
        return False
    output = outcome.stages.get("output")
    if output is None or output.shape != shape or _is_right(problem, output, rounding_model):
        return False
    swapped = {name: _swap_heads_and_positions(array) for name, array in inputs.items()}
    return _is_right(replace(problem, inputs=swapped), _swap_heads_and_positions(output), rounding_model)


def _swap_heads_and_positions(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(1, 2))


def _is_right(problem: Problem, output: Array, rounding_model: str) -> bool:
    truth = find_truth(problem, whole=True).for_returned_dtypes({"output": output})
    return stage_agrees(truth.stage_reference("output", rounding_model, output), output)
