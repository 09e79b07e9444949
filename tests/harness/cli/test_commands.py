"""What a shell offers, which is every name there is with nothing heavy behind it, and a check that watches files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest
from bundled import bundled
from kernels import kernel
from processes import PATIENCE
from tables import tables_beside

from attncheck.cli import completion
from attncheck.cli.watching import WatchedFiles, changed_files
from attncheck.execution.implementations import every_implementation
from attncheck.spec import DTYPES

pytestmark = pytest.mark.usefixtures("forked_workers")


def test_all_there_is_is_offered_and_nothing_else() -> None:
    files = completion.complete_cases("")
    offered = {name for file in files for name in completion.complete_cases(f"{file}/")}
    selection = bundled()
    ids = {case.id for case in selection.cases}
    plain, globs = {name for name in offered if "*" not in name}, [name for name in offered if "*" in name]
    assert [name for name in ids - plain if not any(fnmatchcase(name, glob) for glob in globs)] == []
    assert [name for name in plain - ids if not name.startswith("properties/")] == []  # those are asked otherwise
    assert [glob for glob in globs if not any(fnmatchcase(name, glob) for name in ids)] == []
    assert {item.name for item in every_implementation()} <= set(completion.complete_implementation(""))
    assert completion.complete_dtypes("float64,") == [f"float64,{dtype}" for dtype in DTYPES]
    assert completion.complete_tags("") == list(selection.tags)
    assert completion.complete_implementations("numpy,torch.sdpa_f") == ["numpy,torch.sdpa_flash"]


def test_nothing_heavy_is_imported_to_offer_names() -> None:
    code = (
        "import sys, attncheck.cli; from attncheck.cli import completion\n"
        "for name in dir(completion):\n"
        "    if name.startswith('complete_'): assert getattr(completion, name)(''), name\n"
        "assert completion.complete_cases('attention/')\n"
        "print(sorted({'numpy', 'pandas', 'pydantic', 'yaml', 'torch', 'jax', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """A kernel that imports files of its own folder, in every way in which that can be written."""
    for name, text in tables_beside(__file__)["watched"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / "kernel.py"


def names(files: WatchedFiles, folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in files.states()}


def test_a_kernel_is_watched_with_what_it_imports_from_its_own_folder_and_imported_while_it_could_be_read(
    watched: Path, tmp_path: Path
) -> None:
    files = WatchedFiles([watched])
    everything = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")} - {"unused.py"}
    assert names(files, tmp_path) == everything
    watched.write_text("import unused\ndef broken(:\n", encoding="utf-8")
    assert names(files, tmp_path) == everything
    watched.write_text("import unused\n", encoding="utf-8")
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


def test_a_save_in_several_steps_is_one_change(watched: Path) -> None:
    """Written in parts, renamed away and written anew, and replaced by another file of the same size and time."""
    files, text, status = WatchedFiles([watched]), watched.read_text(), watched.stat()
    away, new = watched.with_suffix(".old"), watched.with_suffix(".new")
    nothing: Callable[[], object] = lambda: None  # noqa: E731
    in_parts = [lambda part=part: watched.write_text(part) for part in ("", text[:20], text + "#")]  # type: ignore[misc]
    found, now = files.wait(files.states(), steps(nothing, *in_parts))
    assert (found, now) == ([watched], files.states())
    new.write_text("import unused\n")
    found, now = files.wait(
        files.states(), steps(lambda: watched.rename(away), *[nothing] * 5, lambda: new.rename(watched))
    )
    assert watched in found
    assert now[watched] is not None
    before, status = files.states(), watched.stat()
    with pytest.raises(AssertionError, match="never noticed"):
        files.wait(before, steps(lambda: watched.rename(away), lambda: away.rename(watched)))
    new.write_bytes(watched.read_bytes())
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert files.wait(before, steps(lambda: new.replace(watched)))[0] == [watched]


WATCHED = kernel("output * query.dtype.type(WRONG.get(query.shape[-2], 1))", before="from wrong import WRONG\n")


@dataclass
class Watching:
    """The process, and what it has written."""

    process: subprocess.Popen[bytes]
    folder: Path

    def text(self, stream: str) -> str:
        return (self.folder / stream).read_text(encoding="utf-8")

    def until(self, text: str, stream: str = "out", after: int = 0) -> str:
        """Wait for a text behind so many letters, and for the end of its line; return what stands there."""
        deadline = monotonic() + PATIENCE
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
        return self.process.wait(PATIENCE)


Start = Callable[..., Watching]


@pytest.fixture
def watching(calls_in_a_row: Path, tmp_path: Path) -> Iterator[Callable[..., Watching]]:
    """Start a watched check of a kernel that is wrong for as many queries as wrong.py says, by what it says."""
    (tmp_path / "kernel.py").write_text(WATCHED, encoding="utf-8")
    (tmp_path / "wrong.py").write_text("WRONG = {}\n", encoding="utf-8")
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> Watching:
        command = [sys.executable, "-m", "attncheck", "check", "row.yaml", "-i", "kernel.py:attention", "--watch"]
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
        process.wait(PATIENCE)


def test_a_save_runs_again_and_only_what_changed_is_shown(watching: Start) -> None:
    seen = watching("--no-report")
    first = seen.until("Report: not written; attncheck report results/latest writes it")
    assert first.startswith("kernel.attention agrees with the exact answer. Judged 9 of 9 cases.")
    seen.until("watching kernel.py, row.yaml, wrong.py", "err")

    printed = seen.save("wrong.py", "WRONG = {3: 2, 5: 2}\n")
    lines = seen.until("5-queries ", after=printed).splitlines()
    assert lines[0].endswith("wrong.py: 2 verdicts got worse, 0 got better, 0 changed otherwise; 2 fail (exit code 1)")
    assert len(lines) == 3
    worse = "  worse  kernel.attention  row/3-queries  float32  passes -> numeric at output,"
    assert lines[1].startswith(worse)

    printed = seen.save("kernel.py", WATCHED.replace("def attention", "def attention(:"))
    seen.until("kernel.py cannot be loaded: SyntaxError", "err")
    assert seen.text("out")[printed:] == ""

    seen.save("kernel.py", WATCHED)
    printed = seen.save("wrong.py", "WRONG = {}\n")
    assert "2 got better, 0 changed otherwise; nothing fails" in seen.until("nothing fails", after=printed)
    workers = psutil.Process(seen.process.pid).children(recursive=True)
    assert seen.end() == 0
    assert seen.text("err").splitlines()[-1] == "attncheck: watching ended"
    assert "Traceback" not in seen.text("err")
    _, alive = psutil.wait_procs(workers, PATIENCE)
    assert not alive
    assert not (seen.folder / "results" / "latest" / "report").exists()
