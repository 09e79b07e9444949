"""Arrays as text in a script, read back bit for bit: small ones as people write them, others packed."""

from __future__ import annotations

import base64
import re
import sys
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SPELLED_OUT = 64
"""Numbers of an array that are still written out."""
_WIDTH = 100
"""Characters in a line."""


def written(array: NDArray[Any], margin: int = 0, lead: int = 0) -> str:
    """Write an array as an expression that stands behind a margin and ``lead`` more characters in its first line."""
    if not array.size:
        return f"np.zeros({array.shape}, {_dtype(array)})"
    return (_spelled(array, margin + lead) if array.size <= _SPELLED_OUT else "") or _packed(array, margin)


def _spelled(array: NDArray[Any], start: int) -> str:
    """Write every number in as few digits as tell it from its neighbours; empty where these do not give it back."""
    plain = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    behind = f", {_dtype(array)})"
    text = np.array2string(
        plain,
        max_line_width=_WIDTH,
        separator=", ",
        prefix=" " * (start + len("np.array(")),
        suffix=f"{behind},",
        threshold=sys.maxsize,
        floatmode="unique",
    )
    if np.issubdtype(plain.dtype, np.floating):
        # Python reads them as float64 first, and of a NaN its payload is lost.
        read = np.array([float(number) for number in re.findall(r"[^\[\],\s]+", text)]).astype(plain.dtype)
        if read.tobytes() != plain.tobytes():
            return ""
    return f"np.array({text}{behind}"


def _packed(array: NDArray[Any], margin: int) -> str:
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")
    inner = " " * (margin + 4)
    width = _WIDTH - len(inner)
    lines = [f"{inner}{text[start : start + width]}\n" for start in range(0, len(text), width)]
    return f'unpack("{array.dtype.name}", {array.shape}, """\n{"".join(lines)}{inner}""")'


def _dtype(array: NDArray[Any]) -> str:
    name = array.dtype.name
    return {"bool": "bool", "bfloat16": "ml_dtypes.bfloat16"}.get(name, f"np.{name}")
