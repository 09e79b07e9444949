"""A case as an entry of a case file that is about to be written, with the arrays that lie beside it.

How the inputs of a case stand in its file, where that decides what ONNX's operator is given for them.

ONNX's Softmax as the operation softmax, whose scores lie along the last axis, and back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.onnx_data.files import BackendTest, NotACase
from attncheck.reading import array_kinds as kinds
from attncheck.reading.array_kinds import StoredArray
from attncheck.reading.case import Case
from attncheck.spec import DTYPES, Shape

Array = NDArray[Any]
Source = dict[str, Any]
"""An array as a case file describes it."""
_IN_NUMPY_FILES = frozenset({"float64", "float32", "float16", "bool", "int64"})


@dataclass
class Entry:
    """What of a case is known so far; ``notes`` say what of the test the case does not say.

    ``inputs`` and ``expected`` stages are described with arrays by their names; ``beside`` are these arrays.
    """

    operation: str
    dtype: str
    inputs: dict[str, Source] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    expected: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_merged: bool = False
    beside: dict[str, Array] = field(default_factory=dict)

    def stored(self, name: str, array: Array) -> Source:
        """Keep an array beside the case, in a dtype that NumPy's files know, and return how the case refers to it."""
        self.beside[name] = array if array.dtype.name in _IN_NUMPY_FILES else array.astype(np.float32)
        return {"name": name}

    def expect(self, stage: str, called: str, array: Array, *, transpose: bool = False) -> None:
        """Expect what the test says of a stage."""
        if array.dtype.name != self.dtype:
            self.notes.append(f"{called} is of {array.dtype.name} and is left out: the case computes in {self.dtype}")
            return
        turned = {"transpose": True} if transpose else {}
        self.expected.append({"stage": stage, "called": called, "printed": self.stored(called, array), **turned})

    def data(self, name: str, identity: str, place: dict[str, str]) -> dict[str, Any]:
        """Return the entry of a case file; ``place`` says where the arrays lie."""
        fields: dict[str, Any] = {
            "name": name,
            "id": identity,
            "inputs": {each: _placed(source, place) for each, source in self.inputs.items()},
            "options": self.options,
            "dtypes": [self.dtype],
            "layout": "merged" if self.is_merged else None,
            "allow_nonfinite": True if self._is_nonfinite() else None,
            "computed_in": self.dtype if self.expected else None,
            "expect": [{**each, "printed": _placed(each["printed"], place)} for each in self.expected],
            "notes": self.notes,
        }
        return {key: value for key, value in fields.items() if value not in (None, {}, [])}

    def _is_nonfinite(self) -> bool:
        """Whether NaN or infinity stands where a case has to say that it is meant."""
        names = {source["name"] for name, source in self.inputs.items() if "name" in source and name != "bias"}
        numbers = (self.beside[name] for name in names)
        return any(array.dtype.kind == "f" and not np.isfinite(array).all() for array in numbers)


def _placed(source: Any, place: dict[str, str]) -> Any:
    """Say of every array beside the case in which file it lies."""
    if isinstance(source, list):
        return [_placed(each, place) for each in source]
    if not isinstance(source, dict):
        return source
    own = {key: _placed(value, place) for key, value in source.items()}
    return {"file": place["file"], **own, "sha256": place["sha256"]} if "name" in source else own


def begin(test: BackendTest, operation: str, numbers: tuple[str, ...], known: frozenset[str]) -> Entry:
    """Begin a case in the dtype of a test's ``numbers``. Raises ``NotACase`` where they differ, or are none of cases'.

    ``known`` are the attributes that a case can say.
    """
    missing = [name for name in numbers[:1] if name not in test.inputs]
    if missing or not test.outputs:
        raise NotACase("a node without its first input, or without an output")
    unknown = sorted(test.attributes.keys() - known)
    if unknown:
        raise NotACase(f"an attribute {unknown[0]}")
    for name, value in test.attributes.items():
        if not isinstance(value, int | float):
            raise NotACase(f"an attribute {name} that is no number")
    dtypes = {test.inputs[name].dtype.name for name in numbers if name in test.inputs}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise NotACase(f"inputs of {' and '.join(sorted(dtypes))}")
    return Entry(operation, dtypes.pop())


def shape_in_file(case: Case, name: str) -> Shape | None:
    """Return the shape of an input that lies in a file, as it lies there; None of any other input."""
    return _shape(padded(case, name) or _source(case, name))


def is_turned(case: Case, name: str) -> bool:
    """Whether an input lies in a file with its last two axes swapped."""
    source = _source(case, name)
    return isinstance(source, StoredArray) and source.transpose


def padded(case: Case, name: str) -> kinds.Array | None:
    """Return what a mask or a bias is before keys are added to it that nobody may attend to; None where none are."""
    source = _source(case, name)
    match source:
        case kinds.Concat(concat=[StoredArray() as first, kinds.Constant() as rest], axis=-1) if not _is_arranged(
            source
        ):
            return first if rest.constant == (-math.inf if name == "bias" else 0) else None
    return None


def _source(case: Case, name: str) -> kinds.Array:
    source = case.inputs[name]
    return case.arrays[source.ref] if isinstance(source, kinds.Reference) and not _is_arranged(source) else source


def _shape(source: kinds.Array) -> Shape | None:
    if not isinstance(source, StoredArray) or source.contents is None or source.rows is not None:
        return None
    return source.contents.shape


def _is_arranged(source: kinds.Array) -> bool:
    return source.transpose or any(value is not None for value in (source.rows, source.times, source.plus))


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
