"""Dtypes, the rounding models that may be declared in them, and what a query without a key may give."""

from __future__ import annotations

from collections.abc import Mapping

from attncheck.backends.contract import EmptyRows

DTYPES = ("float64", "float32", "bfloat16", "float16")
DEFAULT_DTYPES = ("float64", "float32")
"""What a case runs in when neither it nor its file says."""
_WIDE, _SIXTEEN_BITS = ("float64", "float32"), ("bfloat16", "float16")
ROUNDING_MODELS: Mapping[str, tuple[str, ...]] = {
    "native": _WIDE,
    "native_lse": _WIDE,
    "tf32_products": ("float32",),
    "bf16x3_products": ("float32",),
    "bf16_products": ("float32",),
    "fused": _SIXTEEN_BITS,
    "fused_bwd": _SIXTEEN_BITS,
    "fused_lse": _SIXTEEN_BITS,
    "fused_fp8": _SIXTEEN_BITS,
    "eager": _SIXTEEN_BITS,
    "eager_pre": _SIXTEEN_BITS,
    "eager_lse": _SIXTEEN_BITS,
    "eager_cut": ("bfloat16",),
}
"""The rounding models that an implementation may declare, and their dtypes; see ``attention.rounding``."""


def statistics_dtype(dtype: str) -> str:
    """Return the dtype of statistics of rows, such as a log_sum_exp, beside numbers of a dtype."""
    return "float32" if dtype in _SIXTEEN_BITS else dtype


DEFAULT_EMPTY_ROWS: EmptyRows = "zero"
"""The convention of a case that does not say."""
EMPTY_ROWS: Mapping[str, str] = {"nan": "NaN", "uniform": "the mean of all values (uniform)", "zero": "zero"}
"""What a query that may attend to no key gives by each convention, for people."""


def without_a_key(given: str, expected: str) -> str:
    """Return what an implementation gives for a query that may attend to no key, and what the case means instead."""
    return f"a query without a key gives {EMPTY_ROWS[given]}; the case expects {expected}"
