"""The loop of somebody who changes a kernel: runs that stop, go on to the same, or run what failed; full disks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from here import command_here, own_code_here
from tables import tables_beside

from attncheck.backends import BackendEntry
from attncheck.common.errors import ExitCode, OutputError, UsageError
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.selection import select_cases
from attncheck.reports.frames import make_frames
from attncheck.reports.merge import merge_runs
from attncheck.results import resume
from attncheck.results.coverage import EarlyStop
from attncheck.results.last_failed import FailedEvaluation
from attncheck.results.reader import read_run, read_runs
from attncheck.results.writer import ResultsWriter
from attncheck.run import RunSummary, Settings, run_cases

WRONG = "def softmax(scores):\n    stages = numpy_backend.softmax(scores); stages['weights'] *= -1; return stages"
TEXTS = tables_beside(__file__)["resume"]
UNITS = 8  # four cases in two dtypes

pytestmark = pytest.mark.usefixtures("forked_workers")


Run = Callable[..., RunSummary]


@pytest.fixture
def run(
    workers_here: None,
    case_folder: Path,
    tmp_path: Path,
    honest: tuple[BackendEntry, BackendEntry],
    make_backend: Callable[..., BackendEntry],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Run the small cases on one that is right and one that is wrong, cut off after some evaluations if so asked."""
    monkeypatch.setattr(ResultsWriter, "SECONDS_PER_PART", 0.0)
    chosen = ImplementationSelection(tuple(map(Implementation, (honest[0], make_backend("wrong", WRONG)))))
    (tmp_path / "known.yaml").write_text(TEXTS["known"])
    expected_failures = load_expected_failures([tmp_path / "known.yaml"])

    def start(
        name: str, *, cut_after: int | None = None, heard: list[FailedEvaluation] | None = None, **more: Any
    ) -> RunSummary:
        def on_progress(done: int, total: int) -> None:
            if done == cut_after:
                raise KeyboardInterrupt

        settings = Settings(tmp_path / name, expected_failures=expected_failures, complete=True, **more)
        on_failure = [].append if heard is None else heard.append
        cases = select_cases(["small"], base=tmp_path).cases
        return run_cases(cases, chosen, settings, on_progress=on_progress, on_failure=on_failure)

    return start


def said(summary: RunSummary) -> tuple[object, ...]:
    columns = ("case", "dtype", "implementation", "comparison", "stage", "verdict", "message")
    failures = sorted(tuple(str(getattr(row, column)) for column in columns) for row in summary.failures)
    return summary.exit_code, summary.evaluations, summary.verdicts, failures


def tables(directory: Path) -> dict[str, pd.DataFrame]:
    return make_frames(merge_runs(read_runs([directory]))).tables()


def test_a_run_that_was_cut_off_anywhere_comes_to_the_same(run: Run, tmp_path: Path) -> None:
    whole = run("whole")
    assert {row.verdict for row in whole.failures} >= {"numeric", "xpass"}
    expected = tables(tmp_path / "whole")
    for cut_after in (0, 5, 2 * UNITS):
        name = f"cut-{cut_after}"
        with pytest.raises(KeyboardInterrupt):
            run(name, cut_after=cut_after)
        assert read_run(tmp_path / name).summary is None
        assert said(run(name, resume=True)) == said(whole)
        found = tables(tmp_path / name)
        for each, table in expected.items():
            pd.testing.assert_frame_equal(found[each], table, obj=f"{each} of {name}")
        assert len(read_run(tmp_path / name).arrays()) == len(read_run(tmp_path / "whole").arrays())


def test_what_is_done_is_not_done_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("out", resume=True)  # where nothing is yet a run is started
    assert whole.evaluations == 2 * UNITS
    rows, path = tables(tmp_path / "out")["results"], tmp_path / "out" / "cases.json"
    (tmp_path / "modules" / "wrong_backend.py").write_text("raise RuntimeError('nobody needs it')")
    with monkeypatch.context() as patch:
        patch.setattr(resume, "read_cases", pytest.fail)
        assert said(run("out", resume=True)) == said(whole)
    content = json.loads(path.read_text())  # the same in another order and spelling is the same
    path.write_text(json.dumps({**content, "cases": content["cases"][::-1]}, indent=1))
    assert said(run("out", resume=True)) == said(whole)
    pd.testing.assert_frame_equal(tables(tmp_path / "out")["results"], rows)


def test_half_a_part_is_computed_again(run: Run, tmp_path: Path) -> None:
    run("out")
    expected = tables(tmp_path / "out")["results"]
    parts = sorted((tmp_path / "out" / "rows").glob("part-*.npz"))
    parts[1].write_bytes(parts[1].read_bytes()[:100])
    (tmp_path / "out" / "rows" / ".part-00099.npz.partial").write_bytes(b"PK")
    (tmp_path / "out" / "summary.json").unlink()
    run("out", resume=True)
    assert not list((tmp_path / "out").rglob("*.partial"))
    assert read_run(tmp_path / "out").notes == ()
    columns = [column for column in expected if column != "seconds"]
    pd.testing.assert_frame_equal(tables(tmp_path / "out")["results"][columns], expected[columns])


@pytest.mark.parametrize("change", ["another name", "one more"])
def test_another_plan_is_refused_by_name(run: Run, tmp_path: Path, case_folder: Path, change: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run("out", cut_after=3)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    text = (case_folder / "small.yaml").read_text()
    last = text[text.rindex("  - name:") :].replace("- name: ", "- name: Other ", 1)
    other = text.replace("name: B weights", "name: B other weights") if change == "another name" else f"{text}{last}"
    (case_folder / "small.yaml").write_text(other)
    with pytest.raises(UsageError, match=r"resumed: the case small/small/(b-)?other-.* is another; run"):
        run("out", resume=True)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed as POSIX systems kill")
def test_a_run_killed_at_any_change_comes_to_the_same(tmp_path: Path, case_folder: Path) -> None:
    script = [sys.executable, Path(__file__).with_name("killed_anywhere.py")]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    *complaints, answer = done.stdout.splitlines()
    changes, others = json.loads(answer)
    assert (complaints, others) == ([], [])
    assert changes > 10


# A disk that is full, a folder that is read-only


FULL = "No space left on device; free some space and repeat the command, a run with --resume"
READ_ONLY = "Read-only file system; allow writing there, or name another place"


@pytest.fixture
def break_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Let every write to a file with this in its path fail with this number; "" heals it."""
    write_text, open_ = Path.write_text, Path.open

    def break_(part: str, number: int) -> None:
        def check(path: Any, mode: str = "w") -> None:
            if part and part in str(path) and "w" in mode:
                raise OSError(number, os.strerror(number))

        def opened(path: Path, mode: str = "r", *given: Any, **options: Any) -> Any:
            return check(path, mode) or open_(path, mode, *given, **options)

        monkeypatch.setattr(Path, "write_text", lambda path, *a, **o: check(path) or write_text(path, *a, **o))
        monkeypatch.setattr(Path, "open", opened)

    return break_


def test_what_cannot_be_written_is_named_and_the_run_goes_on_when_it_can(
    case_folder: Path, tmp_path: Path, break_disk: Callable[[str, int], None]
) -> None:
    (tmp_path / "wrong.py").write_text(TEXTS["wrong_file"])  # so that there are arrays and scripts to be written
    arguments = ("check", "small", "--implementation", "wrong.py", "--dtype", "float64", "--output", "out", "--quiet")
    with own_code_here():
        for place, (part, named) in enumerate(TEXTS["written"].items()):
            number, told = ((errno.ENOSPC, FULL), (errno.EROFS, READ_ONLY))[place % 2]
            break_disk(part, number)
            code, _, err = command_here([*arguments, *(["--resume"] if place else [])], tmp_path)
            assert (code, err) == (2, f"attncheck: {named} cannot be written: {told}\n")
        break_disk("", 0)
        code, _, err = command_here([*arguments, "--resume"], tmp_path)
    assert (code, err) == (1, "")
    assert (tmp_path / "out/report/report.md").is_file()
    for error, message in (
        (PermissionError(errno.EACCES, ""), "here cannot be written: Permission denied; allow writing there, or name"),
        (OSError("no number"), "here cannot be written: no number"),
        (OSError(errno.EFBIG, ""), "here cannot be written: File too large; raise the limit"),
    ):
        assert str(OutputError.from_os_error("here", error)).startswith(message)


# Runs that stop; sessions.yaml has those that go on, or run what failed


def test_a_stopped_run_looks_for_no_outdated_records_and_tells_failures_as_they_happen(run: Run) -> None:
    heard: list[FailedEvaluation] = []
    summary = run("out", dtypes=("float32",), max_failures=1, heard=heard)
    assert (summary.exit_code, summary.stopped) == (ExitCode.DISAGREE, EarlyStop(1, not_run=2))
    assert {row.verdict for row in summary.failures} == {"numeric"}  # and no xpass
    assert [str(each) for each in heard] == ["wrong.eager: small/small/b-weights [float32]: numeric at weights"]
