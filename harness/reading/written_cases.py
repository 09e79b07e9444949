"""Write case files by program: YAML of plain data, short values on one line, and arrays in a file next to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import BytesIO, StringIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_MAX_FLOW_WIDTH = 110
"""The most characters of a value on one line; a row of numbers is always on one line."""
_DTYPES_OF_NPZ = frozenset({"float64", "float32", "float16"})


def format_case_file(data: Mapping[str, Any]) -> str:
    """Return the text of a case file."""
    from ruamel.yaml import YAML

    yaml, text = YAML(), StringIO()
    yaml.width, yaml.indent, yaml.allow_unicode = 1 << 20, 2, True
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(_as_styled_yaml(dict(data)), text)
    return text.getvalue()


def _as_styled_yaml(data: Any) -> Any:
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if not isinstance(data, dict | list):
        return data
    parts = (
        {name: _as_styled_yaml(value) for name, value in data.items()}
        if isinstance(data, dict)
        else map(_as_styled_yaml, data)
    )
    styled: Any = CommentedMap(parts) if isinstance(data, dict) else CommentedSeq(parts)
    is_row = isinstance(data, list) and all(isinstance(value, int | float) for value in data)
    if is_row or len(str(data)) <= _MAX_FLOW_WIDTH:
        styled.fa.set_flow_style()
    return styled


def pack_npz(arrays: Mapping[str, Array]) -> tuple[bytes, str]:
    """Return the .npz file of some arrays, in dtypes that NumPy's files support without loss, and its checksum."""
    content = BytesIO()
    kept = {
        name: array if array.dtype.name in _DTYPES_OF_NPZ or array.dtype.kind in "biu" else array.astype(np.float32)
        for name, array in arrays.items()
    }
    np.savez_compressed(content, **kept)  # type: ignore[arg-type] # whose stubs know no mapping of arrays
    return content.getvalue(), hashlib.sha256(content.getvalue()).hexdigest()
