"""A case as an entry of a case file that is about to be written, with the arrays that lie beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.onnx_data.files import BackendTest, NotACase
from attncheck.spec import DTYPES

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
