from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from here import INSIDE, run_here

from attncheck.reading.case import Case
from attncheck.reading.loader import load_case_file


@pytest.fixture(scope="session")
def scratch_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases") / "scratch.yaml"


@pytest.fixture(scope="session")
def load_text(scratch_file: Path) -> Callable[[str | bytes], list[Case]]:
    """Load a case file from its text; the tag `known` is defined."""

    def load(text: str | bytes) -> list[Case]:
        scratch_file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return load_case_file(scratch_file, "file.yaml", "prefix", ["known"])

    return load


@pytest.fixture
def invoke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process, in the test's folder; return exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        return run_here(arguments), *capfd.readouterr()

    return run


@pytest.fixture
def run_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run pytest in this process as somebody does in the test's folder; what it imports from there is forgotten."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        before, path = {*sys.modules}, [*sys.path]
        monkeypatch.chdir(tmp_path)
        sys.path.insert(0, str(tmp_path))
        capfd.readouterr()
        try:
            code = pytest.main([*INSIDE, "-q", *arguments])
        finally:
            sys.path[:] = path
            for name in {*sys.modules} - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                    del sys.modules[name]
        return subprocess.CompletedProcess(arguments, int(code), *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def fuzzing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Callable[[str, int], Path], Any]]:
    """Return what makes an input of a fuzzing target from a seed, and the targets that take it."""
    folder = tmp_path_factory.mktemp("fuzz") / "input"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
        make_input: Any = importlib.import_module("fuzz_pool").make_input

        def make(target: str, seed: int) -> Path:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make_input(target, seed, 0, folder)
            return folder

        yield make, importlib.import_module("fuzz_targets").TARGETS
