"""How states, numbers and shapes are written on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attncheck.reports.cells import State

SYMBOLS: Mapping[State, str] = {
    State.AGREE: "✓",
    State.ERRATUM: "✓",
    State.UNVERIFIED: "?",
    State.UNSUPPORTED: "\N{EN DASH}",
    State.XFAIL: "≈",
    State.XPASS: "!",
    State.MISPRINT: "!",
    State.FAILING: "✗",
}
"""A sign beside every word, so that no verdict is said by colour alone."""

NOTHING = "\N{EN DASH}"
"""Stands where there is no number."""

SHORT_DTYPES: Mapping[str, str] = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def short(value: float | None, digits: int = 3) -> str:
    """Write a number shortly; a dash for no number."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.{digits}g}"


def long(value: float | None, dtype: str) -> str:
    """Write a number with all digits that its dtype has."""
    return short(value, 17 if dtype == "float64" else 9)


def shape_text(shape: Sequence[int]) -> str:
    """Write the lengths of axes."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, shape)) or "scalar"


def options_text(options: Mapping[str, Any]) -> list[str]:
    """Write options as they stand in a case."""
    return [f"{name} = {value}" for name, value in options.items()]
