"""``check --watch``, as a process of its own beside which files are written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

SECONDS = 180
CASES = """\
title: Five lengths
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}, dtypes: [float64]}
for_each: {keys: [1, 2, 3, 4, 5]}
cases:
  - name: Some keys
    inputs:
      query: {draw: randn, shape: [2, 4]}
      key: {draw: randn, shape: [{each: keys}, 4]}
      value: {draw: randn, shape: [{each: keys}, 4]}
"""
KERNEL = """\
import numpy as np
from wrong import WRONG

def attention(query, key, value):
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value * query.dtype.type(WRONG.get(key.shape[-2], 1))
"""
Invoke = Callable[..., tuple[int, str, str]]


@dataclass
class Watching:
    """The process, and what it has written."""

    process: subprocess.Popen[bytes]
    folder: Path

    def text(self, stream: str) -> str:
        return (self.folder / stream).read_text(encoding="utf-8")

    def until(self, text: str, stream: str = "out", after: int = 0) -> str:
        """Wait for a text behind so many letters, and for the end of its line; return what stands there."""
        deadline = monotonic() + SECONDS
        while text not in (found := self.text(stream)[after:]) or not found.endswith("\n"):
            assert self.process.poll() is None, f"it ended: {self.text('out')}{self.text('err')}"
            assert monotonic() < deadline, f"no {text!r} in {found!r}; errors: {self.text('err')}"
            sleep(0.05)
        return found

    def save(self, name: str, content: str) -> int:
        """Save a file as editors do that write beside it and rename; return how much was printed before."""
        printed = len(self.text("out"))
        beside = self.folder / f".{name}.new"
        beside.write_text(content, encoding="utf-8")
        beside.replace(self.folder / name)
        return printed

    def end(self) -> int:
        """Press Ctrl-C; return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(SECONDS)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Callable[..., Watching]]:
    """Start a watched check of a kernel that is wrong for as many keys as wrong.py says, by what it says."""
    (tmp_path / "keys.yaml").write_text(CASES, encoding="utf-8")
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / "wrong.py").write_text("WRONG = {}\n", encoding="utf-8")
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> Watching:
        command = [sys.executable, "-m", "attncheck", "check", "keys.yaml", "-i", "kernel.py:attention", "--watch"]
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            # A shell ignores Ctrl-C for what it runs in the background, and what is ignored is inherited.
            before = signal.signal(signal.SIGINT, signal.SIG_DFL)
            try:
                started.append(subprocess.Popen([*command, *options], cwd=tmp_path, stdout=out, stderr=err))
            finally:
                signal.signal(signal.SIGINT, before)
        return Watching(started[0], tmp_path)

    yield start
    for process in started:
        process.kill()
        process.wait(SECONDS)


def test_a_save_runs_again_and_only_what_changed_is_shown(watching: Callable[..., Watching]) -> None:
    seen = watching("--no-report")
    first = seen.until("Report: not written; attncheck report results/latest writes it")
    assert first.startswith("kernel.attention agrees with the exact answer. Judged 5 of 5 cases.")
    seen.until("watching kernel.py, keys.yaml, wrong.py", "err")

    printed = seen.save("wrong.py", "WRONG = {3: 2, 5: 2}\n")
    lines = seen.until("some-keys-keys-5 [", after=printed).splitlines()
    assert lines[0].endswith("wrong.py: 2 newly failing (exit code 1)")
    assert len(lines) == 3
    assert lines[1].startswith("  newly failing: kernel.attention: keys/some-keys-keys-3 [float64]: numeric at output,")

    printed = seen.save("wrong.py", "WRONG = {5: 2, 4: 9}\n")
    text = seen.until("failing as before", after=printed)
    assert "wrong.py: 1 newly failing, 1 newly passing, 1 failing as before (exit code 1)" in text

    printed = seen.save("kernel.py", KERNEL.replace("def attention", "def attention(:"))
    seen.until("kernel.py cannot be loaded: SyntaxError", "err")
    assert seen.text("out")[printed:] == ""

    printed = seen.save("kernel.py", KERNEL.replace("WRONG.get(key.shape[-2], 1)", "WRONG.get(key.shape[-2], 1) ** 9"))
    assert ": 2 failing otherwise (exit code 1)" in seen.until("failing otherwise", after=printed)

    printed = seen.save("keys.yaml", CASES.replace("[1, 2, 3, 4, 5]", "[1, 2, 3]"))
    assert "keys.yaml: nothing changed, 2 failing as before" in seen.until("keys.yaml", after=printed)

    printed = seen.save("wrong.py", "WRONG = {}\n")
    printed = seen.save("keys.yaml", CASES)
    assert "2 newly passing, nothing fails" in seen.until("nothing fails", after=printed)
    workers = psutil.Process(seen.process.pid).children(recursive=True)
    assert seen.end() == 0
    assert seen.text("err").splitlines()[-1] == "attncheck: watching ended"
    assert "Traceback" not in seen.text("err")
    _, alive = psutil.wait_procs(workers, SECONDS)
    assert not alive
    assert not (seen.folder / "results" / "latest" / "report").exists()


def test_what_failed_runs_first_and_each_run_writes_its_report(watching: Callable[..., Watching]) -> None:
    seen = watching()
    report = seen.folder / "results" / "latest" / "report" / "report.md"
    seen.until("watching", "err")
    assert "agrees with the exact answer" in report.read_text()
    printed = seen.save("wrong.py", "WRONG = {4: 3}\n")
    seen.until("some-keys-keys-4 [", after=printed)
    note = "    with open('order', 'a') as file:\n        file.write(f'{key.shape[-2]}')\n"
    printed = seen.save("kernel.py", KERNEL.replace("    scores", f"{note}    scores", 1))
    seen.until("1 failing as before", after=printed)
    assert (seen.folder / "order").read_text() == "41235"
    deadline = monotonic() + SECONDS
    while not report.is_file() or "is wrong in 1 of the 5 cases" not in report.read_text():
        assert monotonic() < deadline
        sleep(0.05)
    assert seen.end() == 1


def test_ctrl_c_in_a_run_ends_it_and_all_that_it_started(watching: Callable[..., Watching]) -> None:
    seen = watching("--no-report")
    seen.until("watching", "err")
    hanging = "    open('hangs', 'w').close()\n    import time\n    time.sleep(600)\n    scores"
    seen.save("kernel.py", KERNEL.replace("    scores", hanging, 1))
    deadline = monotonic() + SECONDS
    while not (seen.folder / "hangs").exists():
        assert monotonic() < deadline
        sleep(0.05)
    workers = psutil.Process(seen.process.pid).children(recursive=True)
    assert workers
    assert seen.end() == 0
    assert "attncheck: interrupted; what was judged is in results/latest" in seen.text("err")
    _, alive = psutil.wait_procs(workers, SECONDS)
    assert not alive


def test_a_kernel_that_cannot_be_loaded_at_first_is_watched_until_it_can(
    watching: Callable[..., Watching], tmp_path: Path
) -> None:
    (tmp_path / "kernel.py").write_text("import os\nos._exit(3)\n")
    seen = watching("--no-report")
    seen.until("its process died with exit code 3", "err")
    seen.until("watching kernel.py", "err")
    printed = seen.save("kernel.py", KERNEL)
    assert seen.until("Results: results/latest", after=printed).startswith("kernel.attention agrees")
    seen.save("kernel.py", "import nowhere_at_all\n")
    seen.until("ModuleNotFoundError", "err")
    assert seen.end() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-b", "numpy"), "there is no file to watch"),
        (("-i", "kernel.py:attention", "--json"), "does not go with --json"),
        (("-i", "kernel.py:attention", "--resume", "--annotations"), "does not go with --resume or --annotations"),
        (("-i", "absent.py:attention"), "no file absent.py"),
    ],
)
def test_what_cannot_be_watched_is_refused(options: tuple[str, ...], message: str, invoke: Invoke) -> None:
    Path("kernel.py").write_text(KERNEL)
    code, out, err = invoke("check", *options, "--watch")
    assert code == 2
    assert (message in json.loads(out)["error"]["message"]) if "--json" in options else (out == "")
    assert message in err
    assert [path.name for path in Path().iterdir()] == ["kernel.py"]
