"""Whether a random problem stays within the range of a dtype: beyond it no implementation owes an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.execution.operations import run_operation
from attncheck.reading.canonical import AttentionProblem, call_form
from attncheck.reading.dtypes import largest_number
from attncheck.reading.lowered import lowered
from attncheck.searching.regimes import raw_scores
from attncheck.spec import BY_SCORE

Array = NDArray[Any]
Inputs = Mapping[str, Array]

_BEYOND_ALL = 1e30


def largest_step(operation: str, options: Mapping[str, Any], inputs: Inputs) -> float:
    """Return the largest number that is stored on the way, by NumPy in float64."""
    found = 0.0
    with np.errstate(all="ignore"):
        for array in _steps(operation, options, inputs):
            finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else np.zeros(0)
            found = max(found, float(finite.max(initial=0.0)))
    return found


def is_wide(dtype: str) -> bool:
    """Whether a dtype holds whatever the regimes can draw."""
    return largest_number(dtype) > _BEYOND_ALL


def fits(largest: float, dtype: str) -> bool:
    """Whether a dtype holds a number, and twice that: roundings, and other orders of multiplying."""
    return largest < largest_number(dtype) / 2


def _multiplied(inputs: Inputs) -> Inputs:
    """Multiply stored keys and values with their factors."""
    factors = {name: f"{name}_factor" for name in ("key", "value") if f"{name}_factor" in inputs}
    kept = {name: array for name, array in inputs.items() if name not in factors.values()}
    return kept | {name: inputs[name] * inputs[factor] for name, factor in factors.items()}


def _steps(operation: str, options: Mapping[str, Any], inputs: Inputs) -> Iterator[Array]:
    if operation == "normalized_attention":  # attention has no norm
        yield from inputs.values()
        yield from run_operation(numpy_backend, operation, inputs, options).values()
        return
    if operation == "latent_attention":
        yield from _of_both_forms(options, inputs)
        return
    operation, posed = lowered(operation, AttentionProblem(dict(options), dict(inputs)))
    options, inputs = posed.options, _multiplied(posed.inputs)
    yield from inputs.values()
    plain = call_form(operation, options, inputs)
    yield from run_operation(numpy_backend, operation, plain.inputs, plain.options).values()
    if operation == "attention_gradients":
        forward = {name: array for name, array in plain.inputs.items() if name != "grad_output"}
        yield from run_operation(numpy_backend, "attention", forward, plain.options).values()
        yield raw_scores(inputs["grad_output"], inputs["value"])  # the gradient of the weights
    if operation in {"scoring", *BY_SCORE}:  # what the score's own layers give
        for operand, weight in (("query", "weight"), ("query", "query_weight"), ("key", "key_weight")):
            if weight in inputs:
                yield inputs[operand] @ inputs[weight]


def _of_both_forms(options: Mapping[str, Any], inputs: Inputs) -> Iterator[Array]:
    """Yield what is stored where keys and values are made of latent vectors, and where they are not."""
    yield from inputs.values()
    latent, projection = inputs["latent"][:, np.newaxis], inputs["key_projection"]
    stages = run_operation(numpy_backend, "latent_attention", inputs, options)
    yield from stages.values()
    yield from (latent @ inputs[f"{name}_projection"] for name in ("key", "value"))
    absorbed = inputs["query"] @ projection.swapaxes(-1, -2)
    yield absorbed
    yield absorbed @ latent.swapaxes(-1, -2)  # the rotated parts may cancel much of it
    yield stages["weights"] @ latent
