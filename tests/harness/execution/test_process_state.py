"""What evaluations share is put back; what cannot be put back is told."""

from __future__ import annotations

import gc
import locale
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck.execution import process_state
from attncheck.execution.process_state import ProcessState, has_many_mappings


@pytest.fixture
def snapshot() -> Iterator[ProcessState]:
    """Take what is now, of this test alone."""
    process_state._restorers.cache_clear()
    found = ProcessState.snapshot()
    yield found
    found.restore()
    process_state._restorers.cache_clear()


def state() -> dict[str, Any]:
    return {
        "folder": Path.cwd(),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "locale": locale.setlocale(locale.LC_ALL),
        "random": random.getstate(),
        "NumPy's random": str(np.random.get_state()),
        "recursion": sys.getrecursionlimit(),
        "garbage": gc.isenabled(),
        "functions": (np.asarray, np.exp),
    }


def change_all(folder: Path) -> None:
    os.chdir(folder)
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
    warnings.simplefilter("error")
    warnings.showwarning = print
    locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8")
    random.seed(3)
    np.random.seed(3)
    sys.setrecursionlimit(sys.getrecursionlimit() + 7)
    gc.disable()
    np.asarray = np.exp = None  # type: ignore[assignment]


def test_what_python_and_numpy_keep_is_put_back(snapshot: ProcessState, tmp_path: Path) -> None:
    before = state()
    change_all(tmp_path)
    changed = {name: value != before[name] for name, value in state().items()}
    assert snapshot.restore()
    assert all(changed.values()), changed
    assert state() == before


def test_a_folder_that_is_gone_is_left(snapshot: ProcessState, tmp_path: Path) -> None:
    before = Path.cwd()
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert snapshot.restore()
    assert Path.cwd() == before


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_signals_are_handled_as_before_and_timers_are_off(snapshot: ProcessState) -> None:
    before, heard = signal.getsignal(signal.SIGALRM), []
    signal.signal(signal.SIGALRM, lambda *given: heard.append(given))
    signal.setitimer(signal.ITIMER_REAL, 50.0, 50.0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    assert snapshot.restore()
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_output_that_goes_elsewhere_cannot_be_put_back(snapshot: ProcessState, tmp_path: Path) -> None:
    kept = os.dup(2)
    try:
        with (tmp_path / "elsewhere").open("w") as file:
            os.dup2(file.fileno(), 2)
        assert not snapshot.restore()
        os.close(2)
        assert not snapshot.restore()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert snapshot.restore()


def test_threads_that_were_not_there_are_noticed(snapshot: ProcessState) -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    wait: Callable[[], None] = thread.join
    assert not snapshot.has_more_threads()
    thread.start()
    assert snapshot.has_more_threads()
    event.set()
    wait()
    assert not snapshot.has_more_threads()


@pytest.mark.parametrize(
    ("mappings", "held", "many"),
    [(60, 2**31, True), (40, 2**31, False), (60, 2**20, False)],
    ids=["more than half", "less than half", "a small process"],
)
def test_a_process_with_many_memory_mappings_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mappings: int, held: int, many: bool
) -> None:
    (tmp_path / "maps").write_text("7f00-7f01 r--p\n" * mappings)
    (tmp_path / "most").write_text("100\n")
    monkeypatch.setattr(process_state, "_MAPPINGS", tmp_path / "maps")
    monkeypatch.setattr(process_state, "_MAX_MAPPINGS", tmp_path / "most")
    assert has_many_mappings(held) is many


def test_another_system_has_no_mappings_to_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_state, "_MAPPINGS", tmp_path / "maps")
    assert not has_many_mappings(2**40)
