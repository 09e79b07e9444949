from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import Bench

from attncheck.reading.case import Case


@pytest.fixture
def bench(tmp_path: Path, load_text: Callable[[str], list[Case]]) -> Bench:
    return Bench(tmp_path, load_text)
