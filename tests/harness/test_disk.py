"""A disk that is full, a folder that is read-only: one line that says where, why and what to do, and no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from attncheck.errors import OutputError

pytestmark = pytest.mark.usefixtures("forked_workers")

Invoke = Callable[..., tuple[int, str, str]]
WRONG = """\
from attncheck.backends import numpy_backend
from attncheck.backends.numpy_backend import dot_scores

def softmax(scores):
    stages = numpy_backend.softmax(scores)
    return stages | {"weights": -stages["weights"]}
"""
FULL = "No space left on device; free some space and repeat the command, a run with --resume"
READ_ONLY = "Read-only file system; allow writing there, or name another place"


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    """Write an implementation that is wrong, so that there are arrays and scripts to be written; return its name."""
    (tmp_path / "wrong.py").write_text(WRONG)
    return "wrong.py"


def _as_ever(real: Callable[..., Any], path: Any, *given: Any, **options: Any) -> Any:
    return real(*given, **options)


@pytest.fixture
def break_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Let every write to a file with this in its path fail with this number; "" heals it."""
    write_text, open_, write_table = Path.write_text, Path.open, pq.write_table

    def break_(part: str, number: int) -> None:
        def failing(real: Callable[..., Any], path: Any, *given: Any, **options: Any) -> Any:
            if part and part in str(path):
                raise OSError(number, os.strerror(number))
            return real(*given, **options)

        def opened(path: Path, mode: str = "r", *given: Any, **options: Any) -> Any:
            return (failing if "w" in mode else _as_ever)(open_, path, path, mode, *given, **options)

        monkeypatch.setattr(Path, "write_text", lambda path, *a, **o: failing(write_text, path, path, *a, **o))
        monkeypatch.setattr(Path, "open", opened)
        monkeypatch.setattr(pq, "write_table", lambda table, path, **o: failing(write_table, path, table, path, **o))

    return break_


WRITTEN = {
    "environment.json": "out/environment.json",
    "cases.json": "out/cases.json",
    "arrays/": "out/arrays/part-00000.parquet",
    "rows/": "out/rows/part-00000.parquet",
    "summary.json": "out/summary.json",
    "000.py": "out/scripts/000.py",
    "index.json": "out/scripts/index.json",
    "junit.xml": "out/report/junit.xml",
    "report.html": "out/report/report.html",
    "report.md": "out/report/report.md",
}
"""Parts of paths, and what cannot be written if nothing can that has one of them."""


def test_what_cannot_be_written_is_named_and_the_run_goes_on_when_it_can(
    case_folder: Path, wrong: str, invoke: Invoke, break_disk: Callable[[str, int], None]
) -> None:
    arguments = ("check", "small", "--implementation", wrong, "--dtype", "float64", "--output", "out", "--quiet")
    for place, (part, named) in enumerate(WRITTEN.items()):
        number, told = ((errno.ENOSPC, FULL), (errno.EROFS, READ_ONLY))[place % 2]
        break_disk(part, number)
        code, _, err = invoke(*arguments, *(["--resume"] if place else []))
        assert (code, err) == (2, f"attncheck: {named} cannot be written: {told}\n")
    break_disk("", 0)
    code, _, err = invoke(*arguments, "--resume")
    assert (code, err) == (1, "")
    assert Path("out/report/report.md").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_a_limit_on_the_size_of_files_is_told_for_real(tmp_path: Path, case_folder: Path) -> None:
    # It compiles nothing: what it left behind, cut off, would be imported by others.
    command = f"ulimit -f 1; exec {sys.executable} -B -m attncheck check small -b numpy -o out -q"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("attncheck: out/")
    assert "cannot be written: File too large; raise the limit" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_reason_is_the_system_s_and_the_advice_fits() -> None:
    for error, message in (
        (PermissionError(errno.EACCES, ""), "here cannot be written: Permission denied; allow writing there, or name"),
        (OSError("no number"), "here cannot be written: no number"),
        (NotADirectoryError(errno.ENOTDIR, ""), "here cannot be written: Not a directory"),
    ):
        assert str(OutputError.of("here", error)).startswith(message)
