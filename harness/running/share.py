"""How much of a machine's memory each of the worker processes on it may hold."""

from __future__ import annotations

from dataclasses import replace

import psutil

from attncheck.running.executor import Limits

_LEAST_MEMORY = 3 * 2**29
"""Bytes. A framework that has done nothing yet holds up to 800 MB, and starting one anew takes seconds."""


def fair_share(limits: Limits, workers: int) -> Limits:
    """Limit each of so many workers on this machine; three quarters of its memory are theirs."""
    share = max(_LEAST_MEMORY, psutil.virtual_memory().total * 3 // 4 // max(workers, 1))
    return replace(limits, memory=min(limits.memory, share))
