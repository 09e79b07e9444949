"""What runs in a worker that was forked (``forked.py``); it imports nothing that a worker does not."""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import Connection

from attncheck.execution import call
from attncheck.execution.call import _exit_process_after


def serve(environment: dict[str, str], connection: Connection) -> None:
    """Serve as a spawned worker does, with the variables of the process that asked for it, and end with that."""
    os.environ.clear()
    os.environ.update(environment)
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_exit_process_after, args=(parent.join,), daemon=True).start()
    call.exit_when_parent_exits = lambda: None  # it is the child of another process, which forks it
    call._serve_calls(connection)
