"""NumPy's attention, which misbehaves where a plan says so: what workers have to survive, each kind for real.

The environment variable ATTNCHECK_FAULTS names the plan, a JSON file of {fingerprint of the inputs: name of a kind}.
``faults.py`` makes one and runs it; tests of the harness make plans of their own.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import locale
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from attncheck.backends import numpy_backend

PLAN_VARIABLE = "ATTNCHECK_FAULTS"
FUNCTIONS = (
    "dot_scores", "cosine_scores", "general_scores", "additive_scores", "mask_scores", "softmax", "attention",
    "attention_gradients", "multi_head_attention",
)  # fmt: skip
CHILD_SLEEPS = "86399.25"
"""Seconds, by which a child process that was left behind can be told from others."""

_FOREVER = 86_400


@dataclass(frozen=True)
class Kind:
    """What is done before the right answer is computed, and what must be said of it.

    ``act`` gets the inputs; what it returns, if not None, is returned instead of the answer. ``agree`` as the verdict:
    it is done after the right answer was computed, which is returned, and no other evaluation may notice.
    """

    act: Callable[[tuple[Any, ...]], Any]
    verdict: str
    says: str = ""


def fingerprint(name: str, positional: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """Return what tells one evaluation from another."""
    digest = hashlib.sha256(name.encode())
    for key, value in [*enumerate(positional), *sorted(options.items())]:
        array = np.asarray(value) if hasattr(value, "shape") else np.array(repr(value))
        digest.update(f"{key}{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


@cache
def _plan() -> dict[str, str]:
    path = os.environ.get(PLAN_VARIABLE)
    return dict(json.loads(Path(path).read_text(encoding="utf-8"))) if path else {}


def _function(name: str) -> Callable[..., Any]:
    def function(*positional: Any, **options: Any) -> Any:
        planned = _plan().get(fingerprint(name, positional, options))
        kind = KINDS[planned] if planned is not None else None
        if kind is not None and kind.verdict != "agree" and (instead := kind.act(positional)) is not None:
            return instead
        answer = getattr(numpy_backend, name)(*positional, **options)
        if kind is not None and kind.verdict == "agree":
            kind.act(positional)
        return answer

    return function


def _c() -> Any:
    return ctypes.CDLL(None)


def _says_and_exits(code: int) -> None:
    os.write(2, b"first words\nlast words\n")
    os._exit(code)


def _prints_lines() -> None:
    while True:
        print("on and on" * 100)


def _prints_one_line(descriptor: int) -> None:
    while True:
        os.write(descriptor, b"on and on" * 1000)


def _hoards() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(b"x" * 2**22))


def _takes_at_once() -> None:
    hoard = bytearray(b"x" * 2**31)
    time.sleep(_FOREVER)
    del hoard


def _closes_everything() -> None:
    os.closerange(0, 4096)


def _puts_another_file_in_every_place() -> None:
    os.closerange(0, 4096)
    for _ in range(64):
        os.open(os.devnull, os.O_RDWR)


def _hangs_with_signals_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _c().sleep(_FOREVER)


def _hangs_and_lets_nothing_else_run() -> None:
    ctypes.PyDLL(None).sleep(_FOREVER)  # keeps the interpreter's lock


def _waits_for_itself() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _spins() -> None:
    while True:
        pass


def _raises(error: BaseException) -> None:
    raise error


def _recurses() -> Any:
    return _recurses()


class _WithoutMessage(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


class _EndlessMessage(Exception):
    def __str__(self) -> str:
        while True:
            pass


def _starts_a_thread() -> None:
    threading.Thread(target=_spins_slowly, name="never ends", daemon=True).start()


def _spins_slowly() -> None:
    while True:
        time.sleep(0.05)


def _forks() -> None:
    os.fork()


def _leaves_a_child() -> None:
    subprocess.Popen(["sleep", CHILD_SLEEPS], stdin=subprocess.DEVNULL)


def _leaves_a_daemon() -> None:
    """Leave a process without a parent, in a session of its own, that holds the log and the way back open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                with suppress(OSError):
                    os.set_inheritable(descriptor, True)
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            os.execvp("sleep", ["sleep", CHILD_SLEEPS])
        os._exit(0)


def _leaves_a_zombie() -> None:
    process = subprocess.Popen(["true"])
    process.returncode = 0  # so that nobody collects it


def _deletes_its_folder() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    Path(folder).rmdir()


def _sets_an_alarm() -> None:
    signal.signal(signal.SIGALRM, lambda *ignored: os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)


def _changes_settings() -> None:
    np.seterr(all="raise")
    warnings.simplefilter("error")
    locale.setlocale(locale.LC_ALL, "C")
    random.seed(1)
    np.random.seed(1)
    sys.setrecursionlimit(1000)


def _patches_numpy() -> None:
    np.asarray = np.errstate = np.array = None  # type: ignore[assignment, misc]


def _closes_its_output() -> None:
    sys.stdout.close()
    os.close(2)


def _returns_what_is_too_large(inputs: tuple[Any, ...]) -> Any:
    return np.broadcast_to(np.zeros((), dtype=inputs[0].dtype), (1, 1, 2**20, 2**20))


def _changes_its_inputs(inputs: tuple[Any, ...]) -> None:
    inputs[0][...] += 1


KINDS: dict[str, Kind] = {
    "segfault": Kind(lambda _: ctypes.string_at(0), "crash", "(SIGSEGV); its last line: Fatal Python error"),
    "abort": Kind(lambda _: os.abort(), "crash", "(SIGABRT)"),
    "exit in good order": Kind(lambda _: os._exit(0), "crash", "died with exit code 0"),
    "exit with last words": Kind(lambda _: _says_and_exits(9), "crash", "code 9; its last lines: first words | last"),
    "killed": Kind(lambda _: os.kill(os.getpid(), signal.SIGKILL), "crash", "(SIGKILL)"),
    "terminated": Kind(lambda _: os.kill(os.getpid(), signal.SIGTERM), "crash", "(SIGTERM)"),
    "endless lines on stdout": Kind(lambda _: _prints_lines(), "crash", "it printed"),
    "one endless line on stdout": Kind(lambda _: _prints_one_line(1), "crash", "it printed"),
    "one endless line on stderr": Kind(lambda _: _prints_one_line(2), "crash", "it printed"),
    "memory bit by bit": Kind(lambda _: _hoards(), "crash", "GiB of memory, more than"),
    "memory at once": Kind(lambda _: _takes_at_once(), "crash", "GiB of memory, more than"),
    "every file closed": Kind(lambda _: _closes_everything(), "crash", "its file descriptors were closed"),
    "other files in their places": Kind(
        lambda _: _puts_another_file_in_every_place(), "crash", "its file descriptors were closed"
    ),
    "sleep": Kind(lambda _: time.sleep(_FOREVER), "timeout", "not done after"),
    "spin": Kind(lambda _: _spins(), "timeout", "not done after"),
    "deadlock": Kind(lambda _: _waits_for_itself(), "timeout", "not done after"),
    "hang in C, signals blocked": Kind(lambda _: _hangs_with_signals_blocked(), "timeout", "not done after"),
    "hang in C, lock held": Kind(lambda _: _hangs_and_lets_nothing_else_run(), "timeout", "not done after"),
    "stopped": Kind(lambda _: os.kill(os.getpid(), signal.SIGSTOP), "timeout", "not done after"),
    "endless message": Kind(lambda _: _raises(_EndlessMessage()), "timeout", "not done after"),
    "exception": Kind(lambda _: _raises(ValueError("no such luck")), "error", "ValueError: no such luck"),
    "sys.exit": Kind(lambda _: sys.exit(3), "error", "SystemExit: 3"),
    "KeyboardInterrupt": Kind(lambda _: _raises(KeyboardInterrupt()), "error", "KeyboardInterrupt"),
    "recursion": Kind(lambda _: _recurses(), "error", "RecursionError"),
    "message that raises": Kind(lambda _: _raises(_WithoutMessage()), "error", "whose message cannot be shown"),
    "huge message": Kind(lambda _: _raises(ValueError("x" * 10**8)), "error", "ValueError: xxx"),
    "impossible allocation": Kind(lambda _: np.ones(2**55), "error", "MemoryError"),
    "what cannot be sent": Kind(lambda _: threading.Lock(), "error", "returned"),
    "too large to be sent": Kind(_returns_what_is_too_large, "error", "GiB, more than 8 GiB: "),
    "thread left running": Kind(lambda _: _starts_a_thread(), "error", "left 1 thread(s) running: never ends"),
    "fork that comes back": Kind(lambda _: _forks(), "error", "forked, and the child process came back"),
    "changed inputs": Kind(_changes_its_inputs, "error", "changed its input"),
    "NumPy patched": Kind(lambda _: _patches_numpy(), "error", "'NoneType' object is not callable"),
    "child left running": Kind(lambda _: _leaves_a_child(), "agree"),
    "daemon left running": Kind(lambda _: _leaves_a_daemon(), "agree"),
    "zombie": Kind(lambda _: _leaves_a_zombie(), "agree"),
    "folder deleted": Kind(lambda _: _deletes_its_folder(), "agree"),
    "alarm set": Kind(lambda _: _sets_an_alarm(), "agree"),
    "settings changed": Kind(lambda _: _changes_settings(), "agree"),
    "output closed": Kind(lambda _: _closes_its_output(), "agree"),
}  # fmt: skip

for _name in FUNCTIONS:
    globals()[_name] = _function(_name)
