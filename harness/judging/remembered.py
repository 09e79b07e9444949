"""What judging keeps in a store, and by what it is found again: exact answers, error bounds, rows.

Everything is a pure function of what its key is made of: the numbers of the problem bit by bit, the dtype, the rounding
model, what was returned, and the code that judges, with the versions of what it computes with.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound
from attncheck.digests import digest_of, digest_of_code
from attncheck.execution.environment import cpu_features
from attncheck.execution.worker import Outcome
from attncheck.oracle.enclosure import Enclosure
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.results.format import Row
from attncheck.store import Key, UnreadableEntry
from attncheck.verdicts import Verdict

Arrays = Mapping[str, NDArray[Any]]

_PARTS = (
    *("spec", "reading", "attention", "oracle", "judging", "results.format"),
    *("backends.contract", "backends.entry", "backends.numpy_backend"),
    *("execution.cutting", "execution.environment", "execution.implementations"),
    *("execution.operations", "execution.worker"),
    *("digests", "elements", "errors", "processors", "quantities", "store", "verdicts"),
)
JUDGING_CODE = tuple(f"attncheck.{part}" for part in _PARTS)
"""All code of this package that a verdict follows from."""
_COMPUTES_WITH = ("numpy", "python-flint", "ml_dtypes", "attncheck")


@lru_cache
def judging_version() -> str:
    """Return a digest of the code that judges, and of what it computes with: another one may judge otherwise."""
    return digest_of(digest_of_code(JUDGING_CODE, _COMPUTES_WITH), cpu_features())


def key_of(kind: str, *parts: Any) -> Key:
    """Return the key of what follows from so many parts, by the code that judges."""
    return Key(kind, digest_of(judging_version(), *parts))


def key_of_rows(
    case: Case, dtype: str, inputs: Inputs, outcomes: Mapping[str, Outcome], judged_by: Sequence[Mapping[str, Any]]
) -> Key:
    """Return the key of the rows of one case in one dtype.

    ``judged_by`` are mappings by implementation: what else its verdicts follow from. How long an evaluation took counts
    for nothing.
    """
    untimed = {name: replace(outcome, seconds=None) for name, outcome in outcomes.items()}
    return key_of("rows", case.digest, dtype, inputs, list(outcomes), untimed, judged_by)


def rows_to_bytes(rows: Sequence[Row]) -> bytes:
    """Write rows down, each as what differs from the default."""
    return zlib.compress(json.dumps([_as_written(row) for row in rows]).encode(), 1)


def rows_from_bytes(data: bytes) -> tuple[Row, ...]:
    """Read rows that ``rows_to_bytes`` wrote. Raises ``UnreadableEntry``."""
    try:
        return tuple(Row(**{**each, "verdict": Verdict(each["verdict"])}) for each in json.loads(zlib.decompress(data)))
    except (zlib.error, ValueError, TypeError, KeyError) as error:
        raise UnreadableEntry from error


_DEFAULTS = {each.name: each.default for each in fields(Row)}


def _as_written(row: Row) -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if value is not _DEFAULTS[name]}


def enclosures_to_bytes(exact: Mapping[str, Enclosure], inner: Arrays) -> bytes:
    """Write exact stages down, and the float64 stages between."""
    parts = {f"{part} {stage}": array for stage, each in exact.items() for part, array in vars(each).items()}
    return arrays_to_bytes({**parts, **{f"inner {stage}": array for stage, array in inner.items()}})


def enclosures_from_bytes(data: bytes) -> tuple[dict[str, Enclosure], dict[str, NDArray[Any]]]:
    """Read what ``enclosures_to_bytes`` wrote. Raises ``UnreadableEntry``."""
    parts = _by_part(arrays_from_bytes(data), ("high", "low", "radius", "inner"))
    try:
        exact = {
            stage: Enclosure(high, parts["low"][stage], parts["radius"][stage]) for stage, high in parts["high"].items()
        }
    except (KeyError, ValueError) as error:
        raise UnreadableEntry from error
    return exact, parts["inner"]


def bounds_to_bytes(bounds: Mapping[str, Bound]) -> bytes:
    """Write the bounds of stages down."""
    return arrays_to_bytes(
        {f"{part} {stage}": array for stage, each in bounds.items() for part, array in vars(each).items()}
    )


def bounds_from_bytes(data: bytes) -> dict[str, Bound]:
    """Read what ``bounds_to_bytes`` wrote. Raises ``UnreadableEntry``."""
    parts = _by_part(arrays_from_bytes(data), ("max_error", "sigma"))
    try:
        return {stage: Bound(max_error, parts["sigma"][stage]) for stage, max_error in parts["max_error"].items()}
    except KeyError as error:
        raise UnreadableEntry from error


def _by_part(arrays: Arrays, names: Sequence[str]) -> dict[str, dict[str, NDArray[Any]]]:
    parts: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in names}
    for name, array in arrays.items():
        part, _, stage = name.partition(" ")
        if part not in parts:
            raise UnreadableEntry
        parts[part][stage] = array
    return parts


def arrays_to_bytes(arrays: Arrays) -> bytes:
    """Write named arrays of numbers down: a line that describes them, and the numbers of each."""
    heading = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    return b"\n".join([json.dumps(heading).encode(), b"".join(array.tobytes() for array in arrays.values())])


def arrays_from_bytes(data: bytes) -> dict[str, NDArray[Any]]:
    """Read what ``arrays_to_bytes`` wrote. Raises ``UnreadableEntry``."""
    heading, _, numbers = data.partition(b"\n")
    arrays, start = {}, 0
    try:
        for name, dtype, shape in json.loads(heading):
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(numbers, dtype, count, start).reshape(shape).copy()
            start += arrays[name].nbytes
    except (ValueError, TypeError) as error:
        raise UnreadableEntry from error
    return arrays
