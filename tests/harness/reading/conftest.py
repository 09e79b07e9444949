from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from attncheck.reading import selection
from attncheck.reading.selection import TILE_TEMPLATE

SMALL = (
    *("attention", "masking", "properties", "scoring", "softmax", "tags", TILE_TEMPLATE),
    *("documents/onnx_softmax", "documents/attention_scoring_post", "probes/rounding", "probes/masks"),
)


@pytest.fixture(scope="module")
def few_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make of the bundled corpus a few files: reading all of it takes seconds of a processor."""
    whole, root = Path(str(files("attncheck.cases"))), tmp_path_factory.mktemp("bundled") / "cases"
    for name in SMALL:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole / f"{name}.yaml", root / f"{name}.yaml")
    (root / "__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "find_bundled_cases_folder", lambda: root)
        yield root
