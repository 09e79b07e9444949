"""ONNX's Softmax as the operation softmax, whose scores lie along the last axis, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.onnx_data.entries import Entry, begin
from attncheck.onnx_data.files import BackendTest, NotACase
from attncheck.onnx_data.given import is_turned, shape_in_file
from attncheck.reading.case import Case

Array = NDArray[Any]
_OPSET = 13
"""Since then the axis is one axis. Before, it was where the array was folded to a matrix."""


def softmax_entry(test: BackendTest) -> Entry:
    """Return the case of a test: along the last axis but one, its array is transposed. Raises ``NotACase``."""
    entry = begin(test, "softmax", ("input",), frozenset({"axis"}))
    if test.opset < _OPSET:
        raise NotACase(f"a Softmax of before opset {_OPSET}, which folds its array to a matrix")
    scores, output = test.inputs["input"], test.outputs["output"]
    if scores.ndim < 1:
        raise NotACase("a Softmax of a single number")
    axis = int(test.attributes.get("axis", -1))
    axis = axis - scores.ndim if axis >= 0 else axis
    if axis not in (-1, -2):
        raise NotACase("a Softmax along another axis than the last two")
    _check_rows(scores, axis)
    source = entry.stored("input", scores)
    entry.inputs["scores"] = {**source, "transpose": True} if axis == -2 else source
    entry.expect("weights", "output", output, transpose=axis == -2)
    return entry


def softmax_test(name: str, case: Case, arrays: Mapping[str, Array], weights: Array) -> BackendTest:
    """Return the test of a case and its exact weights, both of four axes. Raises ``NotACase``."""
    scores, turned = arrays["scores"], is_turned(case, "scores")
    _check_rows(scores, -1)
    shape = shape_in_file(case, "scores") or scores.shape
    if turned:
        scores, weights = (np.swapaxes(each, -1, -2) for each in (scores, weights))
    scores, weights = (each.reshape(shape) for each in (scores, weights))
    attributes = {"axis": scores.ndim - 2} if turned else {}
    return BackendTest(name, "Softmax", _OPSET, attributes, {"input": scores}, {"output": weights})


def _check_rows(scores: Array, axis: int) -> None:
    """Refuse a row without a finite score: what it gives is a convention of cases, and NaN by ONNX's formula."""
    if (scores == -np.inf).all(axis=axis).any():
        raise NotACase("a row of minus infinity alone, of which ONNX's Softmax makes NaN")
