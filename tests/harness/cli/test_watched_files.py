"""Which files a kernel and its cases are in, and when a save counts as done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.cli.watched_files import WatchedFiles, changed


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
    assert changed(before, files.states()) == [tmp_path / "cases" / "b.yml"]


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


def test_a_file_of_the_same_size_in_the_place_of_another_is_a_change(kernel: Path) -> None:
    files = WatchedFiles([kernel])
    before, status = files.states(), kernel.stat()
    new = kernel.with_suffix(".new")
    new.write_bytes(kernel.read_bytes())
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    found, _ = files.wait(before, steps(lambda: new.replace(kernel)))
    assert found == [kernel]


def test_what_is_as_it_was_before_is_no_change(kernel: Path) -> None:
    files = WatchedFiles([kernel])
    before, away = files.states(), kernel.with_suffix(".old")
    with pytest.raises(AssertionError, match="never noticed"):
        files.wait(before, steps(lambda: kernel.rename(away), lambda: away.rename(kernel)))
