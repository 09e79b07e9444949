"""Flags of elements, and how they spread: which elements of a stage an input's element reaches.

Flags have shapes that broadcast to the stages' own: a row that is reached as a whole has one flag for all its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attncheck.attention.exact_array import Flags as Flags
from attncheck.attention.problem import Computation


@dataclass(frozen=True, eq=False)
class FlagContext:
    """The arguments of a reach rule: the problem, the flags of its inputs, and which keys are attended.

    With ``attended``, only flags of attended keys reach a row; without, flags of all keys do.
    """

    problem: Computation
    input_flags: Mapping[str, Flags]
    attended: Flags | None = None


def any_over_axes(flags: Flags, axis: int | tuple[int, ...]) -> Flags:
    """Reduce axes to whether any is set; they stay, of length 1."""
    return np.asarray(np.any(flags, axis=axis, keepdims=True))


def repeat_flags_for_heads(flags: Flags, like: Flags) -> Flags:
    """Repeat the flags of key or value heads for the query heads of ``like`` that share them."""
    heads, key_heads = like.shape[-3], flags.shape[-3]
    return flags if key_heads == heads else np.repeat(flags, heads // key_heads, axis=-3)


def any_in_head_groups(flags: Flags, kv_heads: int) -> Flags:
    """Collect the query heads that share a key or value head: (B, H, L, D) -> (B, Hkv, L, D)."""
    batch, _, *rest = flags.shape
    return any_over_axes(flags.reshape(batch, kv_heads, -1, *rest), 2)[:, :, 0]


def propagate_weighted_mean_flags(value: Flags, attended: Flags | None) -> Flags:
    """Follow values to the means that they are part of: (..., Lq, Dv), or one row for all."""
    if attended is None:
        return any_over_axes(value, -2)
    return np.asarray(attended.astype(np.float32) @ value.astype(np.float32) > 0)


def make_score_flag_rule(*shared: str) -> Callable[[FlagContext, Flags, Flags], Flags]:
    """Return the reach rule of scores: a query flags its row, a key its column, a ``shared`` input all scores."""

    def reach(known: FlagContext, query: Flags, key: Flags) -> Flags:
        row = any_over_axes(query, -1)
        column = np.swapaxes(any_over_axes(repeat_flags_for_heads(key, row), -1), -1, -2)
        return row | column | any(bool(known.input_flags[name].any()) for name in shared if name in known.input_flags)

    return reach


def pass_through(_: object, first: Any, *__: Any) -> Any:
    """Return the first operand: flags follow it element by element."""
    return first
