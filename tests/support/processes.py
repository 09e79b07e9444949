"""Processes of others, and waiting for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE = 600.0
"""Seconds to wait for what has to come: how slow a machine is fails no test."""


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
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


def kill_child(pid: int) -> None:
    """Kill a child of this process, and wait until it can hear of it: a moment later than it looks dead from outside.

    Its other threads end, too. A worker that was forked is the child of another process.
    """
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
