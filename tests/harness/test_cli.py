"""The command line from end to end: exit codes, what is printed and left, names for a shell, a check that watches."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from unittest import mock

import psutil
import pytest
from bundled import bundled
from kernels import kernel
from processes import PATIENCE, wait_until
from tables import CASES, tables_beside

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.cli import completion
from attncheck.cli.process import as_memory_error
from attncheck.cli.watching import WatchedFiles, changed_files
from attncheck.execution.implementations import processor_implementations
from attncheck.results.reader import read_run
from attncheck.spec import DTYPES

Honest = tuple[BackendEntry, ...]
Invoke = Callable[..., tuple[int, str, str]]
MakeBackend = Callable[..., BackendEntry]

MODULE = (sys.executable, "-m", "attncheck")
GHOST = BackendEntry("ghost", "no_module", ("no_such_framework",))

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="terminals and signals work otherwise on Windows")


# Exit codes


def test_agreement_gives_0_whatever_lies_in_the_folder(case_folder: Path, tmp_path: Path) -> None:
    for name in ("harness", "backends", "reports", "tests", "cases"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('the wrong {name}')")
    for name in ("cli", "run", "worker", "frames", "numpy_backend"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the wrong {name}')")
    installed = Path(sys.executable).with_name("attncheck")
    command = [*((str(installed),) if installed.is_file() else MODULE), "check", "small", "-b", "numpy"]
    variables = os.environ | {"TERM": "xterm-256color"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["numpy agrees with the exact answer.", "Judged 4 of 4 cases."]
    assert lines[-1] == "Report: results/latest/report/report.html"
    assert "\x1b[" not in done.stdout
    assert read_run(tmp_path / "results" / "latest").environment["command"] == "attncheck check small -b numpy"


@pytest.mark.usefixtures("forked_workers", "case_folder")
def test_what_is_missing_cannot_be_run_or_takes_too_long_gives_3(
    invoke: Invoke, honest: Honest, make_backend: MakeBackend
) -> None:
    broken = make_backend("broken", "def softmax(scores):\n    raise ValueError('no')")
    slow = make_backend("slow", "import time\ndef softmax(scores):\n    time.sleep(60)")
    table = {entry.name: entry for entry in (*honest, GHOST, broken, slow)}
    with mock.patch.dict(BACKENDS, table, clear=True):
        check = ("check", "small", "-d", "float64", "--no-report", "-b")
        code, out, err = invoke(*check, "first,ghost", "-b", "second")
        assert (code, err) == (3, "attncheck: ghost could not run: asked for by name, not installed\n")
        assert out.startswith("first and second agree; not everything could be run.\nJudged 4 of 4 cases on each.")
        assert "ghost" not in out, "it is said once"
        assert invoke("report", "results/latest")[0] == 3
        assert invoke("run", "small", "-b", "ghost", "--quiet") == (3, "", err)
        code, out, _ = invoke(*check, "first,broken")
        words = "first and broken agree; in 2 cases, broken could not be run.\nbroken: judged 2 of 4 "
        assert code == 3
        assert out.startswith(f"{words}cases; 2 could not be run. The other: judged 4 of 4 cases."), out
        code, out, _ = invoke(*check, "slow", "--time-limit", "0.5")
        assert (code, "slow.eager: not done after 0.5 s; the worker was " in out) == (3, True)


@pytest.mark.parametrize(("arguments", "message"), tables_beside(__file__)["bad_usage"])
def test_bad_usage_gives_2_and_one_line(
    arguments: list[str], message: str, case_folder: Path, tmp_path: Path, invoke: Invoke
) -> None:
    (tmp_path / "file").write_text("mine")
    code, out, err = invoke(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("attncheck: ")
    assert message in err
    assert not (tmp_path / "results").exists()
    assert {path.name for path in case_folder.iterdir()} == {"small.yaml"}
    assert (tmp_path / "file").read_text() == "mine"


# Interrupted


@posix_only
@pytest.mark.parametrize("end", [lambda pid: os.killpg(pid, signal.SIGINT), lambda pid: os.kill(pid, signal.SIGTERM)])
def test_what_was_judged_before_an_interruption_is_on_disk_and_can_be_reported(
    case_folder: Path, tmp_path: Path, make_backend: MakeBackend, invoke: Invoke, end: Callable[[int], None]
) -> None:
    note = "from pathlib import Path\nimport time\n"
    last = f"def softmax(scores):\n    if scores.shape[-2] == 1: Path({str(tmp_path)!r}, NAME).touch()\n"
    for name in ("first", "second"):
        make_backend(name, note + last.replace("NAME", repr(name)) + "    return numpy_backend.softmax(scores)")
    make_backend("slow", f"{note}def softmax(scores):\n    Path({str(tmp_path)!r}, 'slow').touch()\n    time.sleep(60)")
    script = Path(__file__).with_name("interrupted.py")
    # As from a terminal: Ctrl-C goes to the command and to all its workers.
    with subprocess.Popen(
        [sys.executable, script, "check", "small", "-d", "float64", "-o", "out"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "modules")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_until(lambda: all((tmp_path / name).exists() for name in ("first", "second", "slow", "judged")))
        end(process.pid)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert out == ""
    # A line of progress, every five seconds, may come before it.
    assert err.splitlines()[-1] == (
        "attncheck: interrupted; what was judged is in out: `attncheck report out` shows it, and the same command with "
        "--resume goes on"
    )
    run = read_run(tmp_path / "out")
    assert run.summary is None
    # The slow one answered for the first case and never for the second.
    assert set(run.rows["case"]) == {"small/small/a-scores"}
    assert set(run.rows["verdict"]) == {"agree"}
    code, out, err = invoke("report", "out")
    assert (code, err) == (3, "")
    assert "this run was interrupted, or is still going on: its results are not complete." in out


@posix_only
def test_a_closed_standard_output_does_not_become_the_pipe_to_a_worker(case_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attncheck", "check", "small", "-b", "numpy", "-o", "out", "--no-report"]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, set(read_run(tmp_path / "out").rows["verdict"])) == (0, {"agree"}), ended.stderr


def in_shell(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run attncheck as ``"$@"`` in a script."""
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "attncheck", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@posix_only
def test_a_reader_that_has_seen_enough_leaves_the_exit_code_as_it_is(case_folder: Path, tmp_path: Path) -> None:
    check = ("check", "small", "-b", "numpy", "-o", "out", "--no-report")
    for words, code in ((check, "0"), (("list", "tags"), "0")):
        ended = in_shell(tmp_path, '"$@" | true; echo ${PIPESTATUS[0]}', *words)
        assert ended.stdout == f"{code}\n", (words, ended.stderr)
        assert "Traceback" not in ended.stderr


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full and limits of addresses are Linux's")


@linux_only
def test_a_full_disk_behind_standard_output_is_one_line_and_behind_standard_error_nothing(
    case_folder: Path, tmp_path: Path
) -> None:
    check = ("check", "small", "-b", "numpy", "-o", "out", "--no-report")
    for words in (check, ("show", "--help")):
        ended = in_shell(tmp_path, '"$@" > /dev/full', *words)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (3, 1), (words, ended.stderr)
        assert ended.stderr.startswith("attncheck: the standard output cannot be written: No space left on device")
    ended = in_shell(tmp_path, '"$@" 2> /dev/full', "show", "no/such-case")
    assert (ended.returncode, ended.stdout) == (2, "")


@linux_only
def test_few_addresses_are_one_line_about_memory(tmp_path: Path) -> None:
    ended = in_shell(tmp_path, 'ulimit -v 500000; "$@"', "check")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr == (
        "attncheck: not enough memory: this process may have 488 MiB of addresses (ulimit -v); expected at least "
        "768 MiB; raise the limit\n"
    )


def test_an_error_is_a_lack_of_memory_if_one_before_it_is() -> None:
    def raised(*errors: Exception) -> Exception:
        for before, error in pairwise((None, *errors)):
            error.__context__ = before
        return errors[-1]

    strange = AttributeError("module 'pandas' has no attribute '__version__'")
    library = ImportError("libarrow.so: failed to map segment from shared object")
    for lack in (MemoryError(), OSError(errno.ENOMEM, "fork"), library, RuntimeError("can't start new thread")):
        assert as_memory_error(raised(lack, strange)) is not None, lack
    assert as_memory_error(raised(ValueError("out of range"), AttributeError("no such name"))) is None


# What CI systems read


@pytest.mark.usefixtures("workers_here")
def test_open_hands_the_page_of_the_report_to_the_browser(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda page: not opened.append(page))
    case = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"
    for words, page in (
        (("check", case, "-b", "numpy", "--open"), "results/latest/report/report.html"),
        (("explain", case, "numpy", "--open"), "results/explained/report/report.html"),
    ):
        assert invoke(*words)[0] == 0
        assert opened.pop() == Path(page).absolute().as_uri()
    code, _, err = invoke("check", case, "--open", "--no-report")
    assert (code, err) == (
        2,
        "attncheck: --open opens the report, and --no-report writes none: give only one of them\n",
    )


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
    assert {item.name for item in processor_implementations()} <= set(completion.complete_implementation(""))
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
def watching(tmp_path: Path) -> Iterator[Callable[..., Watching]]:
    """Start a watched check of a kernel that is wrong for as many queries as wrong.py says, by what it says."""
    (tmp_path / "row.yaml").write_text(CASES["row cases"], encoding="utf-8")
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
    assert first.startswith("kernel.attention agrees with the exact answer.\nJudged 9 of 9 cases.")
    seen.until("watching kernel.py, row.yaml, wrong.py", "err")

    printed = seen.save("wrong.py", "WRONG = {3: 2, 5: 2}\n")
    lines = seen.until("twice as large", after=printed).splitlines()
    assert lines[0].endswith("wrong.py: 2 verdicts got worse, 0 got better, 0 changed otherwise; 2 fail (exit code 1)")
    worse = "  worse  kernel.attention  row/3-queries  float32  passes -> numeric at output,"
    assert lines[1].startswith(worse)
    assert lines[3:] == ["kernel.attention:", "  the output is twice as large or is sqrt(D) times too large"]

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
