"""The processors that this process may use: how many there are, and what they can."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def available_processors() -> int:
    """Return how many processors this process may use: of a machine's, those that its affinity names."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@lru_cache
def processor_flags() -> frozenset[str] | None:
    """Return what the first processor can, in Linux's words (``amx_bf16``); None where the system does not say."""
    return _flags_of(_CPUINFO)


def _flags_of(path: Path) -> frozenset[str] | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    fields = (line.partition(":") for line in lines)
    return next((frozenset(text.split()) for name, _, text in fields if name.strip() in ("flags", "Features")), None)
