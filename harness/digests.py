"""One digest for everything that a result follows from: equal values have equal digests in every process.

Numbers count with every bit, arrays with dtype and shape, mappings and sets without regard to order, dataclasses and
models with the name of their class. A tuple is as good as a list. What it does not know it refuses, so that nothing is
left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

_SIZE = 16


def digest_of(*parts: Any) -> str:
    """Return a digest, in hexadecimal. Raises ``TypeError`` for what is not plain data."""
    return _hashed(json.dumps(parts, default=_parts, sort_keys=True).encode())


def _hashed(data: bytes) -> str:
    return blake2b(data, digest_size=_SIZE).hexdigest()


def _parts(value: Any) -> Any:
    """Return what an object that JSON does not know is made of."""
    match value:
        case np.ndarray() | np.generic():
            return _of_array(np.asarray(value))
        case Mapping():
            return dict(value)
        case Set():
            found: Any = sorted(value)
        case bytes():
            found = _hashed(value)
        case Enum():
            found = value.name
        case BaseModel():
            found = value.model_dump_json()
        case _ if is_dataclass(value) and not isinstance(value, type):
            found = {each.name: getattr(value, each.name) for each in fields(value)}
        case _:
            raise TypeError(f"no digest is known for {type(value).__name__}")
    return {type(value).__name__: found}


def _of_array(array: NDArray[Any]) -> dict[str, Any]:
    if array.dtype.hasobject:
        return {"objects": array.tolist(), "shape": array.shape}
    return {"array": _hashed(np.ascontiguousarray(array).tobytes()), "dtype": array.dtype.name, "shape": array.shape}


@lru_cache
def digest_of_code(modules: tuple[str, ...], distributions: tuple[str, ...]) -> str:
    """Return a digest of the sources of modules, and of the versions of what they compute with.

    Args:
        modules: Modules and packages, by the names by which they are imported; of a package everything below counts.
        distributions: Installed distributions whose version counts, beside Python's own.
    """
    code = [(name, path.as_posix(), (root / path).read_bytes()) for name in modules for root, path in _sources(name)]
    return digest_of(code, sys.version, [(name, _version(name)) for name in distributions])


def _sources(name: str) -> Iterable[tuple[Path, Path]]:
    """Return the files of a module, each below a folder."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module named {name!r}")
    folder = Path(spec.origin).parent
    found = sorted(folder.rglob("*.py")) if spec.submodule_search_locations else [Path(spec.origin)]
    return ((folder, path.relative_to(folder)) for path in found)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
