"""Workers that are forked from a process which has imported what they need, where how they start is not the point.

They are processes of their own as those of a run are. But an interpreter that imports NumPy and ours costs a third of
a second, and a fork of one that has done so a thirtieth. What a worker leaves behind when it ends is not looked for:
a fork's variables cannot be read from outside.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from forked_worker import serve

from attncheck.execution.call import _Worker
from attncheck.execution.worker import THREAD_VARIABLES

IMPORTED = (
    "cloudpickle",
    "hypothesis",
    "ml_dtypes",
    "numpy.random",
    "psutil",
    "pytest",
    "attncheck.backends.numpy_backend",
    "attncheck.execution.call",
    "attncheck.execution.describing",
    "attncheck.execution.environment",
    "attncheck.execution.operations",
    "attncheck.execution.process_state",
    "attncheck.execution.sessions",
    "attncheck.execution.signatures",
    "attncheck.execution.user_call",
    "attncheck.execution.user_code",
    "attncheck.execution.worker",
    "attncheck.executors.local",
    "attncheck.judging.judge",
    "attncheck.judging.truth",
    "forked_imports",
)
"""The modules that workers import, except for frameworks, tests and pandas, which would make every fork dearer."""

if "forkserver" in multiprocessing.get_all_start_methods():
    from multiprocessing.connection import wait
    from multiprocessing.popen_forkserver import Popen

    _reading = threading.Lock()

    class _Forked(Popen):
        """A worker that is forked from the server of ``multiprocessing``."""

        def _launch(self, process: Any) -> None:
            process._target, process._args = serve, (dict(os.environ), *process._args)
            super()._launch(process)  # type: ignore[misc] # the standard library's types have it not

        def poll(self, flag: int = os.WNOHANG) -> int | None:
            """Read the exit code once: whoever starts a process polls all others, beside the thread that waits for one.

            The second of two readers would find the end of the file, and call it exit code 255.
            """
            if self.returncode is None and wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                with _reading:
                    return super().poll()  # type: ignore[misc, no-any-return]
            return self.returncode

    @pytest.fixture(scope="session")
    def forking() -> Iterator[None]:
        """Start the process that workers are forked from, and end it behind the last test."""
        server: Any = forkserver._forkserver  # nothing else says which process it is
        with pytest.MonkeyPatch.context() as patch:
            for name in THREAD_VARIABLES:
                patch.setenv(name, "1")
            patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
            multiprocessing.set_forkserver_preload([*IMPORTED])
            server.ensure_running()
        yield
        if (pid := server._forkserver_pid) is not None:
            os.kill(pid, signal.SIGTERM)  # it would wait for a worker that nobody has ended
            server._stop()

    @contextmanager
    def workers_forked() -> Iterator[None]:
        """Fork workers for as long as it is entered; the fixture ``forking`` is there."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Worker, "_Popen", staticmethod(_Forked))
            yield

else:

    @pytest.fixture(scope="session")
    def forking() -> None:
        """Fork nothing: this system cannot."""

    @contextmanager
    def workers_forked() -> Iterator[None]:
        """Start workers as ever."""
        yield


@pytest.fixture
def forked_workers(forking: None) -> Iterator[None]:
    """Fork workers for a test."""
    with workers_forked():
        yield
