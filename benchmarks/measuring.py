"""What benchmarks share: one thread, and tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def on_one_thread() -> None:
    """Begin anew with libraries on one thread, unless they are: NumPy reads these variables when it is loaded."""
    if any(os.environ.get(name) != "1" for name in _THREADS):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | dict.fromkeys(_THREADS, "1"))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows out in Markdown."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
