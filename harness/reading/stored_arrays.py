"""Arrays read from .npy, .npz and .safetensors files, with limits on sizes; Python objects are never unpickled.

safetensors: 8 bytes with the length of a JSON header, the header, and the numbers of all arrays one after another
(huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from attncheck.common.errors import AttncheckError
from attncheck.common.store import digest_of
from attncheck.reading.array_kinds import StoredContents, StoredNumbers
from attncheck.reading.shapes import FieldFault
from attncheck.spec import Shape

Array = NDArray[Any]
MAX_FILE_BYTES = 2**30
"""Bytes of a file."""
MAX_STORED_NUMBERS = 2**26
"""Numbers of an array."""
MAX_COUNTS = 2**14
"""Whole numbers that are all looked at, as counts have to be."""
_MAX_HEADER_BYTES = 2**20
_MAX_EXACT_INTEGER = 2**53
"""float64 has every whole number up to this one."""
_MAX_LISTED_NAMES = 20
SAFETENSORS_DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": bool,
        **{f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)},
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
    }.items()
}


class StoredArrayFault(FieldFault, AttncheckError):
    """A stored array cannot be used; ``field`` is what of its description is at fault."""


def summarize_stored_array(source: StoredNumbers) -> StoredContents:
    """Read an array and return its summary. Raises ``StoredArrayFault``."""
    return _summarize(_read_float64(source))


def read_stored_array(source: StoredNumbers) -> NDArray[np.float64]:
    """Return an array's numbers in float64, which holds them exactly.

    Raises ``StoredArrayFault``, also if the file has changed since its case was read.
    """
    array = _read_float64(source)
    if source.array is None and source.contents is not None and source.contents.digest != digest_of(array):
        raise StoredArrayFault("file", f"{source.file} has changed since its case was read; run the command again")
    return array


def _summarize(array: NDArray[np.float64]) -> StoredContents:
    if array.size <= MAX_COUNTS and (array == np.floor(array)).all() and np.isfinite(array).all():
        return StoredContents(digest_of(array), array.shape, tuple(map(float, array.ravel())), True)
    is_finite = np.isfinite(array)
    finite = array if is_finite.all() else array[is_finite]
    extremes = [float(finite.min()), float(finite.max())] if finite.size else []
    extremes += [float(fraction) for fraction in finite[finite != np.floor(finite)][:1]]
    if finite is not array:
        extremes += [number for number in (math.inf, -math.inf) if (array == number).any()]
        extremes += [math.nan] if np.isnan(array).any() else []
    return StoredContents(digest_of(array), array.shape, tuple(extremes), False)


def _read_float64(source: StoredNumbers) -> NDArray[np.float64]:
    if source.array is not None:
        return _as_float64(source.array)
    data = _read_bytes(source)
    reader = _PARSERS[Path(source.file).suffix.lower()]
    try:
        array = reader(data, source.name)
    except StoredArrayFault:
        raise
    except Exception as error:  # whatever bytes make of the parsers of zip, JSON and NumPy's headers
        raise StoredArrayFault("file", f"{source.file} is damaged or incomplete: {str(error)[:200]}") from None
    return _as_float64(array)


def _read_bytes(source: StoredNumbers) -> bytes:
    path = _require_path_inside(source)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_FILE_BYTES + 1) if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise StoredArrayFault("file", f"{source.file} cannot be read: {os.strerror(error.errno or 0)}") from None
    if size > MAX_FILE_BYTES or len(data) > MAX_FILE_BYTES:
        raise StoredArrayFault("file", f"{source.file} has {size} bytes; expected at most {MAX_FILE_BYTES}")
    if source.sha256 is not None and (digest := hashlib.sha256(data).hexdigest()) != source.sha256:
        raise StoredArrayFault("sha256", f"{source.file} has the checksum {digest}; it is another file, or was changed")
    return data


def _require_path_inside(source: StoredNumbers) -> Path:
    """Return the path of the file, which has to be below the folder of the case file, also if links are followed."""
    named = source.file
    known = ", ".join(_PARSERS)
    if PurePosixPath(named).suffix.lower() not in _PARSERS:
        raise StoredArrayFault("file", f"expected a file that ends with one of {known}, got {named[:80]!r}")
    if PurePosixPath(named).is_absolute() or PureWindowsPath(named).anchor or "\0" in named:
        raise StoredArrayFault("file", f"expected a path relative to the folder of the case file, got {named[:80]!r}")
    folder = Path(source.folder or ".")
    path = folder / named
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
        exists = path.is_file()
    except (OSError, RuntimeError):
        inside, exists = True, False
    if not inside or ".." in PurePosixPath(named.replace("\\", "/")).parts:
        raise StoredArrayFault("file", f"{named[:80]!r} leads out of the folder of the case file; put the file inside")
    if not exists:
        raise StoredArrayFault("file", f"there is no file {named[:80]!r} in the folder of the case file")
    return path


def _as_float64(array: Array) -> NDArray[np.float64]:
    """Return the same numbers in float64. Raises ``StoredArrayFault`` for what is no number, or has none there."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "V" and array.dtype.name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        hint = "; NumPy forgets bfloat16, so store float32, or safetensors" if size == 2 else ""
        raise StoredArrayFault("file", f"expected numbers or booleans, got {array.dtype}{hint}")
    if kind not in "biufV" or (kind == "f" and size > 8):
        raise StoredArrayFault("file", f"expected numbers of at most 64 bits or booleans, got {array.dtype}")
    if kind in "iu" and size == 8 and array.size and max(-int(array.min()), int(array.max())) > _MAX_EXACT_INTEGER:
        raise StoredArrayFault(
            "file", f"has a whole number beyond {_MAX_EXACT_INTEGER}, which float64 cannot represent exactly"
        )
    return np.ascontiguousarray(array.astype(np.float64)).reshape(array.shape)


def _size_in_bytes(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Return how many bytes an array has. Raises ``StoredArrayFault`` for one that is too large, or of objects."""
    if dtype.hasobject:
        raise StoredArrayFault("file", "has Python objects, which attncheck never unpickles; store numbers")
    numbers = math.prod(shape)
    if math.prod(max(1, length) for length in shape) > MAX_STORED_NUMBERS:
        raise StoredArrayFault("file", f"has an array of {numbers} numbers; expected at most {MAX_STORED_NUMBERS}")
    return numbers * dtype.itemsize


def _parse_npy(data: bytes, name: str | None) -> Array:
    if name is not None:
        raise StoredArrayFault("name", "a .npy file has one array without a name; leave the name out")
    file = BytesIO(data)
    version = npy.read_magic(file)
    readers: dict[Any, Callable[[Any], Any]] = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"the format version is {version}; expected {' or '.join(map(str, readers))}")
    shape, is_fortran, dtype = readers[version](file)
    size, rest = _size_in_bytes(shape, dtype), data[file.tell() :]
    if len(rest) != size:
        raise ValueError(f"the numbers have {len(rest)} bytes; expected {size}")
    array: Array = np.frombuffer(rest, dtype)
    return array.reshape(shape[::-1]).T if is_fortran else array.reshape(shape)


def _parse_npz(data: bytes, name: str | None) -> Array:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        member = members[_require_array_name(members, name)]
        most = MAX_STORED_NUMBERS * 8 + _MAX_HEADER_BYTES
        if member.file_size > most:  # whatever the archive says of itself, no more is unpacked
            raise StoredArrayFault("file", f"{name} would unpack to {member.file_size} bytes; expected at most {most}")
        with archive.open(member) as file:
            unpacked = file.read(most + 1)
    if len(unpacked) > most:
        raise StoredArrayFault("file", f"{name} unpacks to more than {most} bytes")
    return _parse_npy(unpacked, None)


def _parse_safetensors(data: bytes, name: str | None) -> Array:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"the header has {length} bytes, and the file has {len(data)}")
    header = json.loads(data[8 : 8 + length], object_pairs_hook=_require_unique_names)
    if not isinstance(header, dict):
        raise ValueError("the header is not a mapping")
    _check_offsets(header, len(data) - 8 - length)
    entry = header[_require_array_name([key for key in header if key != "__metadata__"], name)]
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise ValueError("the header lacks dtype, shape or data_offsets of the array")
    if dtype not in SAFETENSORS_DTYPES:
        raise StoredArrayFault("file", f"has dtype {dtype[:40]}; expected one of {', '.join(SAFETENSORS_DTYPES)}")
    if not all(isinstance(axis, int) and not isinstance(axis, bool) and axis >= 0 for axis in shape):
        raise ValueError("the shape is not a list of whole numbers")
    size, numbers = _size_in_bytes(tuple(shape), SAFETENSORS_DTYPES[dtype]), data[8 + length :]
    if not 0 <= begin <= end <= len(numbers) or end - begin != size:
        raise ValueError(
            f"the array is at bytes {begin} to {end} of {len(numbers)}; expected {size} bytes of numbers there"
        )
    return np.frombuffer(numbers[begin:end], SAFETENSORS_DTYPES[dtype]).reshape(shape)


def _require_unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the entries of a header. Raises ``ValueError`` for a name that is there twice, as the format has it."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("the header has a name twice")
    return entries


def _check_offsets(header: Mapping[str, Any], size: int) -> None:
    """Raise ``ValueError`` unless the arrays lie one after another and fill the file, as the format has it."""
    entries = (entry for name, entry in header.items() if name != "__metadata__")
    offsets: list[Any] = [entry.get("data_offsets") if isinstance(entry, dict) else None for entry in entries]
    ends = 0
    for place in sorted(filter(_is_offset_pair, offsets)):
        if place[0] != ends or place[1] < place[0]:
            raise ValueError(f"an array begins at byte {place[0]} of the numbers; expected {ends}, where the last ends")
        ends = place[1]
    if ends != size:
        raise ValueError(f"the arrays end at byte {ends} of {size} bytes of numbers")


def _is_offset_pair(place: Any) -> bool:
    """Return whether a value is a pair of whole numbers; an array without one is refused when it is read."""
    return isinstance(place, list) and len(place) == 2 and all(type(offset) is int for offset in place)


def _require_array_name(known: Any, name: str | None) -> str:
    """Return the name that is meant. Raises ``StoredArrayFault`` for none, or one that is not there."""
    names = [str(item) for item in known]
    listed = ", ".join(text[:60] for text in names[:_MAX_LISTED_NAMES]) + (
        ", ..." if len(names) > _MAX_LISTED_NAMES else ""
    )
    if name is None:
        raise StoredArrayFault("name", f"say which array of the file: expected one of {listed or 'none'}")
    if name not in names:
        raise StoredArrayFault("name", f"the file has no array {name[:60]!r}; expected one of {listed or 'none'}")
    return name


_PARSERS: Mapping[str, Callable[[bytes, str | None], Array]] = {
    ".npy": _parse_npy,
    ".npz": _parse_npz,
    ".safetensors": _parse_safetensors,
}
