"""Case files as programs write them: YAML of plain data, what fits on one line, and arrays that lie beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import BytesIO, StringIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LINE = 110
"""Characters of what stands on one line; numbers of a row always do."""
_KEPT_DTYPES = frozenset({"float64", "float32", "float16"})


def case_text(data: Mapping[str, Any]) -> str:
    """Write what stands in a case file."""
    from ruamel.yaml import YAML

    yaml, text = YAML(), StringIO()
    yaml.width, yaml.indent, yaml.allow_unicode = 1 << 20, 2, True
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(_styled(dict(data)), text)
    return text.getvalue()


def _styled(data: Any) -> Any:
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if not isinstance(data, dict | list):
        return data
    parts = {name: _styled(value) for name, value in data.items()} if isinstance(data, dict) else map(_styled, data)
    styled: Any = CommentedMap(parts) if isinstance(data, dict) else CommentedSeq(parts)
    is_row = isinstance(data, list) and all(isinstance(each, int | float) for each in data)
    if is_row or len(str(data)) <= _LINE:
        styled.fa.set_flow_style()
    return styled


def stored_arrays(arrays: Mapping[str, Array]) -> tuple[bytes, str]:
    """Return the .npz file of some arrays, in dtypes that NumPy's files know and that hold them, and its checksum."""
    content = BytesIO()
    kept = {name: each if _is_known(each) else each.astype(np.float32) for name, each in arrays.items()}
    np.savez_compressed(content, **kept)  # type: ignore[arg-type] # whose stubs know no mapping of arrays
    return content.getvalue(), hashlib.sha256(content.getvalue()).hexdigest()


def _is_known(array: Array) -> bool:
    return array.dtype.name in _KEPT_DTYPES or array.dtype.kind in "biu"
