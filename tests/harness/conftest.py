from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.harness import cli
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.loader import load_case_file


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
        monkeypatch.setattr(sys, "argv", ["attncheck", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capfd.readouterr()

    return run
