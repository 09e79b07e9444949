"""Where in a stage its wrong elements lie, where few words say it exactly: one head, the last rows, a tile of keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]

_LEAST = 2
"""Of a single element its index says more."""
_WITH_KEYS = frozenset({"raw_scores", "scores", "capped", "biased", "masked", "weights", "grad_bias"})
_BY_KEY = frozenset({"key", "value", "grad_key", "grad_value"})


def where_wrong(stage: str, wrong: Flags) -> str:
    """Say in which part of a stage all wrong elements are: ranges of its axes; empty where that is all of it.

    Ranges are those of indices, ends included. An axis whose wrong indices are no range is left out.
    """
    count = int(wrong.sum())
    if count < _LEAST:
        return ""
    parts = []
    for axis, (one, many) in enumerate(_axes(stage, wrong.ndim)):
        others = tuple(other for other in range(wrong.ndim) if other != axis)
        indices = np.flatnonzero(wrong.any(axis=others))
        first, last, length = int(indices[0]), int(indices[-1]), wrong.shape[axis]
        if len(indices) < length and last - first + 1 == len(indices):
            parts.append(f"{one} {first} of {length}" if first == last else f"{many} {first} to {last} of {length}")
    return f"all {count} wrong elements are in {', '.join(parts)} (counted from 0)" if parts else ""


def _axes(stage: str, rank: int) -> list[tuple[str, str]]:
    """Return the names of a stage's axes, for one index and for several."""
    batch, head = ("batch entry", "batch entries"), ("head", "heads")
    query, key, column = ("query row", "query rows"), ("key", "keys"), ("column", "columns")
    if stage == "log_sum_exp":
        axes = [batch, head, query]
    elif rank == 3:  # the merged heads of multi_head_attention
        axes = [batch, query, column]
    else:
        axes = [batch, head, key if stage in _BY_KEY else query, key if stage in _WITH_KEYS else column]
    return axes[-rank:] if rank <= len(axes) else []
