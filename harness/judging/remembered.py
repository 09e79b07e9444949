"""Exact answers and rows that judging keeps in a store, and their keys.

Error bounds of all stages are not kept: computing them takes little longer than reading them would. Those of a single
returned stage are (``single_stage.py``).

Every entry is a pure function of the parts of its key: the numbers of the problem bit by bit, the dtype, the rounding
model, the returned stages, and the code that judges, with the versions of the libraries that it computes with.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attncheck.common.store import StoreKey, UnreadableEntry, digest_of, digest_of_code
from attncheck.execution.environment import cpu_features
from attncheck.execution.worker import Outcome
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs
from attncheck.results.format import Row
from attncheck.spec.verdicts import Verdict

if TYPE_CHECKING:
    from attncheck.attention.exact_array import Enclosure

Arrays = Mapping[str, NDArray[Any]]

_JUDGING_PARTS = (
    *("spec", "reading", "attention", "judging", "diagnosis", "results.format"),
    *("backends.codes", "backends.composed", "backends.contract", "backends.derived", "backends.entry"),
    *("backends.families", "backends.numpy_backend"),
    *("execution.call_server", "execution.environment", "execution.implementations"),
    *("execution.operations", "execution.worker"),
    "common",
)
JUDGING_CODE = tuple(f"attncheck.{part}" for part in _JUDGING_PARTS)
"""All code of this package on which a verdict depends."""
_LIBRARIES = ("numpy", "python-flint", "ml_dtypes", "attncheck")


@lru_cache
def judging_version() -> str:
    """Return a digest of the code that judges, of its libraries, and of the processor's features."""
    return digest_of(digest_of_code(JUDGING_CODE, _LIBRARIES), cpu_features())


def make_store_key(kind: str, *parts: Any) -> StoreKey:
    """Return the key of an entry that depends on the parts, and on the code that judges."""
    return StoreKey(kind, digest_of(judging_version(), *parts))


def make_store_key_of_rows(
    case: Case,
    dtype: str,
    inputs: RoundedInputs,
    outcomes: Mapping[str, Outcome],
    judged_by: Sequence[Mapping[str, Any]],
) -> StoreKey:
    """Return the key of the rows of one case in one dtype.

    ``judged_by`` are mappings by implementation with all else on which its verdicts depend. The duration of an
    evaluation is no part of the key.
    """
    untimed = {name: replace(outcome, seconds=None) for name, outcome in outcomes.items()}
    return make_store_key("rows", case.digest, dtype, inputs, list(outcomes), untimed, judged_by)


def rows_to_bytes(rows: Sequence[Row]) -> bytes:
    """Serialise rows, each as the fields that differ from the default."""
    return zlib.compress(json.dumps([row.__getstate__() for row in rows]).encode(), 1)


def rows_from_bytes(data: bytes) -> tuple[Row, ...]:
    """Read rows that ``rows_to_bytes`` wrote. Raises ``UnreadableEntry``."""
    try:
        rows = json.loads(zlib.decompress(data))
        return tuple(Row(**{**fields, "verdict": Verdict(fields["verdict"])}) for fields in rows)
    except (zlib.error, ValueError, TypeError, KeyError) as error:
        raise UnreadableEntry from error


def enclosures_to_bytes(exact: Mapping[str, Enclosure], inner: Arrays) -> bytes:
    """Serialise exact stages, and the float64 stages between; low and radius in units of the last place of high."""
    from attncheck.attention.exact_array import unit_in_last_place

    parts = {f"high {stage}": enclosure.high for stage, enclosure in exact.items()}
    for stage, enclosure in exact.items():
        unit = unit_in_last_place(enclosure.high)
        parts |= {
            f"low {stage}": _divide_by_unit_if_lossless(enclosure.low, unit),
            f"radius {stage}": _divide_by_unit_if_lossless(enclosure.radius, unit),
        }
    return arrays_to_bytes({**parts, **{f"inner {stage}": array for stage, array in inner.items()}})


def enclosures_from_bytes(data: bytes) -> tuple[dict[str, Enclosure], dict[str, NDArray[Any]]]:
    """Read what ``enclosures_to_bytes`` wrote. Raises ``UnreadableEntry``."""
    from attncheck.attention.exact_array import Enclosure, unit_in_last_place

    parts: dict[str, dict[str, NDArray[Any]]] = {"high": {}, "low": {}, "radius": {}, "inner": {}}
    try:
        for name, array in arrays_from_bytes(data).items():
            part, _, stage = name.partition(" ")
            parts[part][stage] = array
        exact = {}
        for stage, high in parts["high"].items():
            low, radius = parts["low"][stage], parts["radius"][stage]
            if np.float32 in (low.dtype, radius.dtype):
                unit = unit_in_last_place(high)
                low, radius = (part if part.dtype == np.float64 else part * unit for part in (low, radius))
            exact[stage] = Enclosure(high, low, radius)
    except (KeyError, ValueError) as error:
        raise UnreadableEntry from error
    return exact, parts["inner"]


def _divide_by_unit_if_lossless(array: NDArray[Any], unit: NDArray[Any]) -> NDArray[Any]:
    """Return numbers in units, in float32; unchanged if that would lose a bit of any."""
    with np.errstate(all="ignore"):
        scaled = (array / unit).astype(np.float32)
        return scaled if (scaled * unit).tobytes() == array.tobytes() else array


def arrays_to_bytes(arrays: Arrays) -> bytes:
    """Serialise named arrays of numbers, compressed: a line that describes them, and the numbers of each dtype.

    The first bytes of all numbers come first, then the second bytes, and so on: similar exponents compress well. Arrays
    with the same numbers are stored once.
    """
    heading: list[list[Any]] = []
    numbers = {array.dtype.str: bytearray() for array in arrays.values()}
    known: dict[tuple[str, bytes], int] = {}
    for name, array in arrays.items():
        dtype, data = array.dtype.str, array.tobytes()
        start = known.setdefault((dtype, data), len(numbers[dtype]) // array.itemsize)
        if start * array.itemsize == len(numbers[dtype]):
            numbers[dtype] += data
        heading.append([name, dtype, list(array.shape), start])
    lengths = [[dtype, len(data) // np.dtype(dtype).itemsize] for dtype, data in numbers.items()]
    by_number = [np.frombuffer(data, np.uint8).reshape(-1, np.dtype(dtype).itemsize) for dtype, data in numbers.items()]
    planes = b"".join(number_bytes.T.tobytes() for number_bytes in by_number)
    return b"\n".join([json.dumps([heading, lengths]).encode(), zlib.compress(planes, 1)])


def arrays_from_bytes(data: bytes) -> dict[str, NDArray[Any]]:
    """Read what ``arrays_to_bytes`` wrote. Raises ``UnreadableEntry``."""
    line, _, packed = data.partition(b"\n")
    try:
        heading, lengths = json.loads(line)
        planes = _decompress_numbers_by_dtype(packed, [(np.dtype(dtype), count) for dtype, count in lengths])
        return {
            name: planes[dtype][start : start + math.prod(shape)].reshape(shape).copy()
            for name, dtype, shape, start in heading
        }
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError, zlib.error) as error:
        raise UnreadableEntry from error


def _decompress_numbers_by_dtype(
    packed: bytes, lengths: Sequence[tuple[np.dtype[Any], int]]
) -> dict[str, NDArray[Any]]:
    """Decompress all numbers of each dtype, one after the other."""
    data = zlib.decompress(packed, bufsize=max(1, sum(dtype.itemsize * count for dtype, count in lengths)))
    numbers: dict[str, NDArray[Any]] = {}
    start = 0
    for dtype, count in lengths:
        planes = np.frombuffer(data, np.uint8, count * dtype.itemsize, start).reshape(dtype.itemsize, count)
        numbers[dtype.str] = np.empty(count, dtype)
        number_bytes = numbers[dtype.str].view(np.uint8).reshape(count, dtype.itemsize)
        for place, plane in enumerate(planes):  # twice as fast as a transposed copy
            number_bytes[:, place] = plane
        start += planes.size
    return numbers
