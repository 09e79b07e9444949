"""The command line from end to end: exit codes, what is printed where, in a CI system too, and what is left on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from processes import PATIENCE, wait_until
from tables import tables_beside

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.results.reader import read_run

Honest = tuple[BackendEntry, ...]
Invoke = Callable[..., tuple[int, str, str]]
MakeBackend = Callable[..., BackendEntry]

MODULE = (sys.executable, "-m", "attncheck")
GHOST = BackendEntry("ghost", "no_module", ("no_such_framework",))

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="terminals and signals work otherwise on Windows")


def run_command(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does, in a process of its own whose output goes to pipes."""
    return subprocess.run(arguments, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)


# Exit codes


def test_agreement_gives_0_whatever_lies_in_the_folder(case_folder: Path, tmp_path: Path) -> None:
    for name in ("harness", "backends", "reports", "tests", "cases"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('the wrong {name}')")
    for name in ("cli", "run", "worker", "frames", "numpy_backend"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the wrong {name}')")
    installed = Path(sys.executable).with_name("attncheck")
    command = (str(installed),) if installed.is_file() else MODULE
    done = run_command(*command, "check", "small", "-b", "numpy", cwd=tmp_path, TERM="xterm-256color")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "numpy agrees with the exact answer. Judged 4 of 4 cases."
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
        assert out.startswith("first and second agree; not everything could be run. Judged 4 of 4 cases on each.")
        assert "ghost" not in out, "it is said once"
        assert invoke("report", "results/latest")[0] == 3
        assert invoke("run", "small", "-b", "ghost", "--quiet") == (3, "", err)
        code, out, _ = invoke(*check, "first,broken")
        words = "first and broken agree; in 2 cases, broken could not be run. broken: judged 2 of 4 "
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
    assert (code, err) == (2, "attncheck: --open opens the report, and --no-report writes none: give one\n")
