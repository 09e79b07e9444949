"""How accurate a wrong result is: as a lower precision alone would be. That is no cause, and said where none is found.

A result is as accurate as a format where its errors are within the bounds that a computation in that format would have.
That is said where they also look like roundings, of both signs and not in proportion to what they are errors of, and
are not far smaller. An accuracy explains every failure: one error beyond its bounds refutes it, and so does a failure
in a dtype for which it is good enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from attncheck.attention.errors import Bound, Real
from attncheck.attention.formats import FORMATS
from attncheck.attention.latents import size_of_made
from attncheck.judging.alternatives import Alternative
from attncheck.judging.truth import Array, Stages, Truth
from attncheck.reading.canonical import AttentionProblem
from attncheck.spec import stage_position
from attncheck.verdicts import Verdict

ACCURACIES = (("float32", "native", "float32"), ("16-bits", "eager_pre", "bfloat16"))
"""Of each its name, and the rounding model and dtype whose roundings it has; the best one first."""

_MIN_Z = 2.0**-8
"""In units of the noise that a format makes: errors far smaller are not that format's."""
_MIN_ERRORS = 16
_MAX_OF_ONE_SIGN = 0.95
_MAX_EXPLAINED = 0.5

Agrees = Callable[[Truth, str, Array, str], bool]


def judge_accuracy(
    truth: Truth, posed: AttentionProblem, failing: Stages, rounding_model: str, agrees: Agrees
) -> tuple[Alternative | None, set[str]]:
    """Return the accuracy that what fails has, if any can be told, and the names of those that it has not.

    ``agrees(truth, stage, array, rounding_model)`` holds a stage against a truth within its bounds.
    """
    refuted = set[str]()
    for name, of_format, dtype in ACCURACIES:
        if not _is_lower(dtype, truth.dtype):
            refuted.add(_called(name))
            continue
        bounds = _bounds_of(truth, dtype, of_format)
        lower = replace(truth, _bounds={rounding_model: dict(bounds)}, _readings={})
        if not all(agrees(lower, stage, array, rounding_model) for stage, array in failing.items()):
            refuted.add(_called(name))
            continue
        first = min(failing, key=stage_position)
        is_noise = _is_noise(truth, bounds[first].sigma, first, failing[first])
        if is_noise is None:
            return None, refuted
        if is_noise:
            return _convention(name, posed), refuted
        return None, refuted | {_called(other) for other, _, _ in ACCURACIES}
    return None, refuted


def _bounds_of(truth: Truth, dtype: str, of_format: str) -> dict[str, Bound]:
    """Return the bounds of a lower precision; the same for whoever fails."""
    found: dict[str, Bound] | None = truth._readings.get(of_format)
    if found is None:
        own = replace(truth, dtype=dtype, _bounds={}, _readings={}).bounds(of_format)
        found = truth._readings[of_format] = _with_rounded_operands(truth, own, FORMATS[dtype].unit_roundoff)
    return found


def _with_rounded_operands(truth: Truth, bounds: Mapping[str, Bound], unit: float) -> dict[str, Bound]:
    """Allow raw scores the rounding of query and key, which every later stage is allowed with the scale."""
    if "raw_scores" not in bounds or not {"query", "key"} <= truth.inputs.keys() - truth.exact.keys():
        return dict(bounds)
    query, key = truth.inputs["query"].astype(np.float64), truth.inputs["key"].astype(np.float64)
    if "key_projection" in truth.inputs:
        key = size_of_made(key, truth.inputs["key_projection"].astype(np.float64))
    group = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    size = np.abs(query) @ np.swapaxes(np.repeat(np.abs(key), group, -3) if group > 1 else np.abs(key), -1, -2)
    own, moved = bounds["raw_scores"], (2 * unit + unit * unit) * size
    return {**bounds, "raw_scores": Bound(own.max_error + moved, own.sigma + moved)}


def _is_noise(truth: Truth, scale: Real, stage: str, array: Array) -> bool | None:
    """Say whether the errors of a stage look like roundings of a format; None where there are too few, or too small."""
    exact, stored = truth.exact[stage], array.astype(np.float64)
    known = np.isfinite(exact.high) & np.isfinite(exact.radius) & np.isfinite(stored)
    value, error = exact.high[known], stored[known] - exact.high[known] - exact.low[known]
    wrong = error != 0
    with np.errstate(all="ignore"):
        z = np.abs(error) / scale[known]
        if wrong.sum() < _MIN_ERRORS or not np.max(z[np.isfinite(z)], initial=0.0) >= _MIN_Z:
            return None
        positive = float((error[wrong] > 0).mean())
        explained = _cosine(error, value) ** 2
    return 1 - _MAX_OF_ONE_SIGN <= positive <= _MAX_OF_ONE_SIGN and not explained > _MAX_EXPLAINED


def _cosine(one: Real, other: Real) -> float:
    """Return the cosine of the angle between two vectors, 0 where one has no direction; squares may not underflow."""
    one, other = (each / np.abs(each).max(initial=0.0) for each in (one, other))
    cosine = float(one @ other / np.sqrt((one @ one) * (other @ other)))
    return cosine if np.isfinite(cosine) else 0.0


def _is_lower(of: str, dtype: str) -> bool:
    return FORMATS[of].precision < FORMATS[dtype].precision and dtype not in ("float16", "bfloat16")


def _called(name: str) -> str:
    return f"accuracy-of-{name}"


def _convention(name: str, posed: AttentionProblem) -> Alternative:
    description = f"the {{stage}} is as accurate as {name.replace('-', ' ')} alone"
    return Alternative(_called(name), description, "", posed, Verdict.NUMERIC, is_fitted=True)
