"""The protocol by which a program in any language is judged: one request, one answer, over its standard streams.

A message is a line of JSON and, right behind it, the arrays that the line lists: their elements in C order, little
endian, without gaps. ``docs/protocol.md`` is the whole of it for authors; nothing here runs a program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.spec import DTYPES

VERSION = 1
MAX_HEADER = 2**16
"""Bytes of a line. Whoever sends no line end sends no message."""
MAX_ARRAY = 2**31
"""Bytes of one array of an answer."""
_ADVICE = "write debugging output to standard error"
WIRE: Mapping[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "bool": np.dtype("?"),
}
"""What an element is; a bool is one byte, 0 or 1."""


class ProtocolError(Exception):
    """A program's message is none; says what was expected."""


@dataclass(frozen=True)
class Description:
    """What a program says of itself.

    ``functions`` are those of the contract that it has, each with the keywords that it takes. ``name`` and ``version``
    are what reports say of it. All else is what a function in Python declares as its attributes.
    """

    functions: Mapping[str, tuple[str, ...]]
    name: str = ""
    version: str = ""
    dtypes: tuple[str, ...] = ("float64", "float32")
    classes: Mapping[str, str] = field(default_factory=dict)
    conventions: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    grouped_heads: bool = True
    value_width: bool = True


@dataclass(frozen=True)
class Refused:
    """An answer without stages: what is ``unsupported``, or an ``error``."""

    kind: str
    reason: str


def describe_request() -> bytes:
    """Return the first request: what the program is."""
    return _line({"attncheck": VERSION, "ask": "describe"})


def call_request(function: str, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]) -> Iterator[bytes]:
    """Give the pieces of a request to call a function of the contract.

    Raises ``NotImplementedError`` for an option that JSON cannot say.
    """
    listed = [{"name": name, "dtype": str(array.dtype), "shape": list(array.shape)} for name, array in arrays.items()]
    header = {"attncheck": VERSION, "ask": "call", "function": function, "options": dict(options), "arrays": listed}
    try:
        yield _line(header)
    except (TypeError, ValueError) as error:
        raise NotImplementedError(f"its request cannot be written as JSON: {error}") from None
    for array in arrays.values():
        yield np.ascontiguousarray(array, WIRE[str(array.dtype)]).tobytes()


def _line(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_header(stream: IO[bytes]) -> dict[str, Any]:
    """Read the line of an answer. Raises ``EOFError`` where there is none, ``ProtocolError`` where it is no object."""
    line = stream.readline(MAX_HEADER + 1)
    if not line:
        raise EOFError
    if not line.endswith(b"\n"):
        what = f"no line end in its first {MAX_HEADER} bytes" if len(line) > MAX_HEADER else "an end before the line's"
        raise ProtocolError(f"expected a line of JSON; got {what}: {_shown(line)}")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"expected a line of JSON; got {_shown(line)}: {error}; {_ADVICE}") from None
    if not isinstance(header, dict):
        raise ProtocolError(f"expected a JSON object; got {_shown(line)}")
    return header


def _shown(line: bytes) -> str:
    return repr(line[:80]) + ("..." if len(line) > 80 else "")


def read_description(stream: IO[bytes]) -> Description:
    """Read the answer to the first request. Raises ``EOFError`` or ``ProtocolError``."""
    header = read_header(stream)
    if header.pop("attncheck", None) != VERSION:
        raise ProtocolError(f'describe: expected "attncheck": {VERSION}, the version of the protocol')
    functions = _functions(header.pop("functions", None))
    dtypes = tuple(_checked(header, "dtypes", list, ["float64", "float32"]))
    if unknown := [each for each in dtypes if each not in DTYPES]:
        raise ProtocolError(f"describe: unknown dtype {unknown[0]!r}; expected {', '.join(DTYPES)}")
    found = Description(
        functions,
        _checked(header, "name", str, ""),
        _checked(header, "version", str, ""),
        dtypes,
        _checked(header, "classes", dict, {}),
        _checked(header, "conventions", dict, {}),
        _checked(header, "requires", dict, {}),
        _checked(header, "grouped_heads", bool, True),
        _checked(header, "value_width", bool, True),
    )
    if header:
        raise ProtocolError(f"describe: unknown field {next(iter(header))!r}")
    return found


def _functions(listed: Any) -> dict[str, tuple[str, ...]]:
    are_lists = isinstance(listed, dict) and all(isinstance(each, list) for each in listed.values())
    if (
        not listed
        or not are_lists
        or not all(isinstance(each, str) for keywords in listed.values() for each in keywords)
    ):
        raise ProtocolError('describe: expected "functions", such as {"attention": ["mask", "is_causal", "scale"]}')
    return {name: tuple(keywords) for name, keywords in listed.items()}


def _checked(header: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = header.pop(name, default)
    if not isinstance(value, kind):
        raise ProtocolError(f"describe: {name}: expected {_KINDS[kind]}; got {value!r}")
    return value


_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}


def read_answer(stream: IO[bytes]) -> dict[str, NDArray[Any]] | Refused:
    """Read the answer to a call: its stages, or why there are none. Raises ``EOFError`` or ``ProtocolError``."""
    header = read_header(stream)
    for kind in ("unsupported", "error"):
        if isinstance(reason := header.get(kind), str):
            return Refused(kind, reason)
    listed = header.get("stages")
    if not isinstance(listed, list) or not listed:
        expected = '"stages", a list with an entry for each array, "unsupported" or "error"'
        raise ProtocolError(f"expected {expected}; got {', '.join(map(repr, header)) or 'an empty object'}")
    stages = [_stage(each) for each in listed]
    if repeated := [name for name, _, _ in stages if [other for other, _, _ in stages].count(name) > 1]:
        raise ProtocolError(f"stage {repeated[0]} is there twice")
    return {name: _read_array(stream, name, dtype, shape) for name, dtype, shape in stages}


def _stage(listed: Any) -> tuple[str, np.dtype[Any], Sequence[int]]:
    """Check an entry of an answer's list."""
    if not isinstance(listed, dict) or not isinstance(listed.get("name"), str):
        raise ProtocolError(f'a stage has "name", "dtype" and "shape"; got {listed!r}')
    name, dtype, shape = listed["name"], str(listed.get("dtype")), listed.get("shape")
    if dtype not in WIRE:
        raise ProtocolError(f"stage {name}: unknown dtype {dtype!r}; expected {', '.join(WIRE)}")
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise ProtocolError(f"stage {name}: shape: expected a list of lengths; got {shape!r}")
    if math.prod(shape) * WIRE[dtype].itemsize > MAX_ARRAY:
        raise ProtocolError(f"stage {name}: shape {shape} is larger than {MAX_ARRAY:,} bytes")
    return name, WIRE[dtype], shape


def _read_array(stream: IO[bytes], name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
    size = math.prod(shape) * dtype.itemsize
    found = stream.read(size)
    if len(found) < size:
        raise ProtocolError(
            f"stage {name}: expected {size:,} bytes for shape {list(shape)}; got {len(found):,}, and the end"
        )
    if dtype.kind != "b":
        return np.frombuffer(found, dtype).reshape(shape)
    array = np.frombuffer(found, np.uint8).reshape(shape)
    if (array > 1).any():
        raise ProtocolError(f"stage {name}: a bool is a byte of 0 or 1; got {array.max()}")
    return array.astype(bool)
