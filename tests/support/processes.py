"""Processes of others, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something holds, and fail where it does not in a time that no machine needs."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Whether a process has ended with all of its threads: its parent is not told before."""
    try:
        is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return is_zombie and len(list(Path(f"/proc/{pid}/task").glob("*"))) <= 1
    except psutil.NoSuchProcess:
        return True
