"""A check that runs again whenever a file is saved: which files, when a save is done, what is said of two runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest
from kernels import kernel as source
from processes import wait_until

from attncheck.cli.watching import RunChanges, WatchedFiles, changed_files, failing_outcomes
from attncheck.reports.comparison import MAX_LISTED, NO_RESULT, WRONG, Evaluation, Outcome
from attncheck.results.format import Row


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A kernel that imports files of its own folder, in every way in which that can be written."""
    files = {
        "kernel.py": "import os, numpy\nimport beside\nfrom parts import first\nimport parts.deep.inner as inner\n"
        "def attention(q, k, v):\n    from lazily import late\n",
        "beside.py": "import kernel\n",
        "parts/__init__.py": "from . import second\nfrom .third import something\n",
        "parts/first.py": "from ..beside import it\nfrom .deep import other\n",
        "parts/second.py": "",
        "parts/third.py": "",
        "parts/deep/__init__.py": "",
        "parts/deep/inner.py": "",
        "parts/deep/other.py": "",
        "lazily.py": "",
        "unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / "kernel.py"


def names(files: WatchedFiles, folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in files.states()}


def test_a_kernel_is_watched_with_what_it_imports_from_its_own_folder(kernel: Path, tmp_path: Path) -> None:
    everything = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")}
    assert names(WatchedFiles([kernel]), tmp_path) == everything - {"unused.py"}


def test_while_a_file_cannot_be_read_what_it_imported_before_is_watched(kernel: Path, tmp_path: Path) -> None:
    files = WatchedFiles([kernel])
    before = names(files, tmp_path)
    kernel.write_text("import unused\ndef broken(:\n", encoding="utf-8")
    assert names(files, tmp_path) == before
    kernel.write_text("import unused\n", encoding="utf-8")
    assert names(files, tmp_path) == {"kernel.py", "unused.py"}


def test_a_folder_of_cases_is_watched_with_what_comes_later(tmp_path: Path) -> None:
    (tmp_path / "cases" / "deep").mkdir(parents=True)
    (tmp_path / "cases" / "deep" / "a.yaml").touch()
    files = WatchedFiles([], [tmp_path / "cases", tmp_path / "tags.yaml"])
    before = files.states()
    assert names(files, tmp_path) == {"cases/deep/a.yaml", "tags.yaml"}
    (tmp_path / "cases" / "b.yml").touch()
    assert changed_files(before, files.states()) == [tmp_path / "cases" / "b.yml"]


def steps(*done: Callable[[], object]) -> Callable[[float], None]:
    """Do one thing after the other between the looks at the files; then nothing, but not for ever."""
    left = [*done, *[lambda: None] * 20]

    def pause(seconds: float) -> None:
        assert left, "the change was never noticed"
        left.pop(0)()

    return pause


def test_a_save_in_several_steps_is_one_change(kernel: Path) -> None:
    files = WatchedFiles([kernel])
    before, text = files.states(), kernel.read_text()

    def write(part: str) -> Callable[[], object]:
        return lambda: kernel.write_text(part)

    found, now = files.wait(before, steps(lambda: None, write(""), write(text[:20]), write(text + "#")))
    assert found == [kernel]
    assert now == files.states()


def test_a_file_that_is_renamed_away_and_written_anew_is_waited_for(kernel: Path) -> None:
    files = WatchedFiles([kernel])
    before = files.states()
    away = kernel.with_suffix(".old")
    nothing: list[Callable[[], object]] = [lambda: None] * 5
    new = kernel.with_suffix(".new")
    new.write_text("import unused\n")
    found, now = files.wait(before, steps(lambda: kernel.rename(away), *nothing, lambda: new.rename(kernel)))
    assert kernel in found
    assert now[kernel] is not None


def test_another_file_of_the_same_size_is_a_change(kernel: Path) -> None:
    files = WatchedFiles([kernel])
    before, status, away = files.states(), kernel.stat(), kernel.with_suffix(".old")
    with pytest.raises(AssertionError, match="never noticed"):
        files.wait(before, steps(lambda: kernel.rename(away), lambda: away.rename(kernel)))
    new = kernel.with_suffix(".new")
    new.write_bytes(kernel.read_bytes())
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    found, _ = files.wait(before, steps(lambda: new.replace(kernel)))
    assert found == [kernel]


BIG = Outcome(WRONG, "numeric", "scores", ", 3.1e+05 times its bound")
SMALL = Outcome(WRONG, "numeric", "weights", ", 3 times its bound")


def key(case: str, dtype: str = "float32", name: str = "mine.attention") -> Evaluation:
    return Evaluation("", name, f"file/{case}", dtype)


def test_a_failure_says_where_it_begins_and_how_large_it_is() -> None:
    row = Row("file/a", "attention", "float32", "mine.attention", "stage", "output", "numeric", ratio=312000.0)
    assert str(failing_outcomes([row])[key("a")]) == "numeric at output, 3.1e+05 times its bound"
    begun = Row(**{**vars(row), "begins_at": "scores"})
    assert failing_outcomes([begun])[key("a")] == BIG
    infinite = Row(**{**vars(row), "verdict": "nonfinite", "ratio": float("inf")})
    assert str(failing_outcomes([infinite])[key("a")]) == "nonfinite at output"
    pair = Row("file/a", "attention", "float32", "one.a", "pair", "output", "numeric", other="two.a")
    assert set(failing_outcomes([pair])) == {key("a", name="one.a"), key("a", name="two.a")}


def test_what_could_not_be_run_says_why_whatever_its_addresses_are() -> None:
    rows = [
        Row("file/a", "attention", "float32", "m.a", "stage", "", "error", message=f"ValueError: <f at {address}>")
        for address in ("0x7fa001", "0x99")
    ]
    found = [failing_outcomes([row])[key("a", name="m.a")] for row in rows]
    assert found[0] == found[1]
    assert str(found[0]) == "error: ValueError: <f at 0x...>"


def test_each_kind_of_change_is_counted_and_listed_with_its_dtypes_together() -> None:
    before = {key("a"): BIG, key("b"): BIG, key("c"): BIG, key("c", "float64"): BIG, key("d"): SMALL, key("e"): SMALL}
    now = {key("b"): SMALL, key("d"): SMALL, key("f", "float64"): BIG, key("f"): BIG}
    found = RunChanges.between(before, now, {*now, key("e")})
    assert found.headline == "2 verdicts got worse, 3 got better, 1 changed otherwise; 5 fail"
    assert [" ".join(line.split()) for line in found.lines()] == [
        "worse mine.attention file/f float64, float32 passes -> numeric at scores, 3.1e+05 times its bound",
        "better mine.attention file/a float32 numeric at scores, 3.1e+05 times its bound -> passes",
        "better mine.attention file/c float64, float32 numeric at scores, 3.1e+05 times its bound -> passes",
        "other mine.attention file/b float32 numeric at scores, 3.1e+05 times its bound -> "
        "numeric at weights, 3 times its bound",
    ]
    assert found.failing == {**now, key("e"): SMALL}


def test_the_headline_says_whether_anything_changed_and_whether_anything_fails() -> None:
    failing, crash = {key("a"): BIG}, {key("a"): Outcome(NO_RESULT, "crash")}
    situations: tuple[tuple[dict[Evaluation, Outcome], dict[Evaluation, Outcome], str], ...] = (
        ({}, {}, "nothing changed; nothing fails"),
        (failing, failing, "nothing changed; 1 fails"),
        (failing, {}, "0 verdicts got worse, 1 got better, 0 changed otherwise; nothing fails"),
        (failing, {key("a"): SMALL}, "0 verdicts got worse, 0 got better, 1 changed otherwise; 1 fails"),
        (failing, crash, "1 verdict got worse, 0 got better, 0 changed otherwise; 1 fails"),
    )
    for before, now, headline in situations:
        assert RunChanges.between(before, now, now).headline == headline
    many = {key(f"{number:03}"): BIG for number in range(MAX_LISTED + 5)}
    lines = list(RunChanges.between({}, many, ()).lines())
    assert (len(lines), lines[-1]) == (MAX_LISTED + 1, "and 5 more")


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

KERNEL = source("output * query.dtype.type(WRONG.get(key.shape[-2], 1))", before="from wrong import WRONG\n")

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


Start = Callable[..., Watching]


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


def test_a_save_runs_again_and_only_what_changed_is_shown(watching: Start) -> None:
    seen = watching("--no-report")
    first = seen.until("Report: not written; attncheck report results/latest writes it")
    assert first.startswith("kernel.attention agrees with the exact answer. Judged 5 of 5 cases.")
    seen.until("watching kernel.py, keys.yaml, wrong.py", "err")

    printed = seen.save("wrong.py", "WRONG = {3: 2, 5: 2}\n")
    lines = seen.until("some-keys-keys-5 ", after=printed).splitlines()
    assert lines[0].endswith("wrong.py: 2 verdicts got worse, 0 got better, 0 changed otherwise; 2 fail (exit code 1)")
    assert len(lines) == 3
    worse = "  worse  kernel.attention  keys/some-keys-keys-3  float64  passes -> numeric at output,"
    assert lines[1].startswith(worse)

    printed = seen.save("wrong.py", "WRONG = {5: 2, 4: 9}\n")
    text = seen.until("2 fail (", after=printed)
    assert "wrong.py: 1 verdict got worse, 1 got better, 0 changed otherwise; 2 fail (exit code 1)" in text

    printed = seen.save("kernel.py", KERNEL.replace("def attention", "def attention(:"))
    seen.until("kernel.py cannot be loaded: SyntaxError", "err")
    assert seen.text("out")[printed:] == ""

    printed = seen.save("kernel.py", KERNEL.replace("WRONG.get(key.shape[-2], 1)", "WRONG.get(key.shape[-2], 1) ** 9"))
    assert "2 changed otherwise; 2 fail (exit code 1)" in seen.until("changed otherwise", after=printed)

    printed = seen.save("keys.yaml", CASES.replace("[1, 2, 3, 4, 5]", "[1, 2, 3]"))
    assert "keys.yaml: nothing changed; 2 fail" in seen.until("keys.yaml", after=printed)

    printed = seen.save("wrong.py", "WRONG = {}\n")
    printed = seen.save("keys.yaml", CASES)
    assert "2 got better, 0 changed otherwise; nothing fails" in seen.until("nothing fails", after=printed)
    workers = psutil.Process(seen.process.pid).children(recursive=True)
    assert seen.end() == 0
    assert seen.text("err").splitlines()[-1] == "attncheck: watching ended"
    assert "Traceback" not in seen.text("err")
    _, alive = psutil.wait_procs(workers, SECONDS)
    assert not alive
    assert not (seen.folder / "results" / "latest" / "report").exists()


def test_what_failed_runs_first_and_ctrl_c_ends_a_run(watching: Start) -> None:
    seen = watching()
    report = seen.folder / "results" / "latest" / "report" / "report.md"
    seen.until("watching", "err")
    assert "agrees with the exact answer" in report.read_text()
    printed = seen.save("wrong.py", "WRONG = {4: 3}\n")
    seen.until("some-keys-keys-4 ", after=printed)
    note = "    with open('order', 'a') as file:\n        file.write(f'{key.shape[-2]}')\n"
    printed = seen.save("kernel.py", KERNEL.replace("    scores", f"{note}    scores", 1))
    seen.until("nothing changed; 1 fails", after=printed)
    assert (seen.folder / "order").read_text() == "41235"
    wait_until(lambda: report.is_file() and "is wrong in 1 of the 5 cases" in report.read_text(), SECONDS)
    hanging = "    open('hangs', 'w').close()\n    import time\n    time.sleep(600)\n    scores"
    seen.save("kernel.py", KERNEL.replace("    scores", hanging, 1))
    wait_until((seen.folder / "hangs").exists, SECONDS)
    workers = psutil.Process(seen.process.pid).children(recursive=True)
    assert workers
    assert seen.end() == 1
    assert "attncheck: interrupted; what was judged is in results/latest" in seen.text("err")
    _, alive = psutil.wait_procs(workers, SECONDS)
    assert not alive


def test_a_kernel_that_cannot_be_loaded_at_first_is_watched_until_it_can(watching: Start, tmp_path: Path) -> None:
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
