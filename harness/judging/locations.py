"""Where in a stage its wrong elements lie, where few words say it exactly: one head, the last rows, a tile of keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attncheck.spec import STAGE_SPECS

Flags = NDArray[np.bool_]

_MIN_WRONG = 2
"""Of a single element its index says more."""
_NAMES = {"Lq": ("query row", "query rows"), "Lk": ("key", "keys"), "T": ("key", "keys")}
_COLUMN = ("column", "columns")


def where_wrong(stage: str, wrong: Flags) -> str:
    """Say in which part of a stage all wrong elements are: ranges of its axes; empty where that is all of it.

    Ranges are those of indices, ends included. An axis whose wrong indices are no range is left out.
    """
    count = int(wrong.sum())
    if count < _MIN_WRONG:
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
    letters = STAGE_SPECS[stage].axes[2:] if stage in STAGE_SPECS else ("Lq", "")
    rest = [_NAMES.get(letter, _COLUMN) for letter in letters]
    is_merged = rank == 3 and len(rest) == 2  # the merged heads of multi_head_attention
    axes = [batch, _NAMES["Lq"], _COLUMN] if is_merged else [batch, head, *rest]
    return axes[-rank:] if rank <= len(axes) else []
