"""How the inputs of a case stand in its file, where that decides what ONNX's operator is given for them."""

from __future__ import annotations

import math

from attncheck.reading import array_kinds as kinds
from attncheck.reading.case import Case
from attncheck.reading.file_kinds import StoredArray
from attncheck.spec import Shape


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
