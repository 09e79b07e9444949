from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
