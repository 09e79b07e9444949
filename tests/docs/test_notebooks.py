"""The notebooks of the examples: pandas alone answers their questions, from what their commands write."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from here import own_code_here
from pages import DOCS, ROOT, Reader, attncheck

from attncheck.results.reader import read_run

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
KERNEL = (ROOT / "examples" / "numpy_kernel.py").read_text(encoding="utf-8")
IN_SIXTEEN_BITS = '\n\nattention.classes = {"float16": "eager"}\n'
CAUSAL = "np.tri(*scores.shape[-2:], dtype=bool)"


def cells(path: Path, kind: str) -> list[str]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def commands(path: Path) -> list[str]:
    text = "\n".join(cells(path, "markdown")).replace("\\\n", " ")
    return re.findall(r"^    (attncheck check .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_answers_its_question_from_the_results_of_its_commands(path: Path, tmp_path: Path) -> None:
    """A kernel in NumPy, which an edit makes wrong before the last of several commands, stands for the libraries."""
    kernel = tmp_path / "kernel.py"
    kernel.write_text(KERNEL + IN_SIXTEEN_BITS, encoding="utf-8")
    lines = commands(path)
    for line in lines:
        if line is lines[-1] and len(lines) > 1:
            wrong = CAUSAL.replace(", dtype", ", scores.shape[-1] - scores.shape[-2], dtype")
            kernel.write_text(KERNEL.replace(CAUSAL, wrong) + IN_SIXTEEN_BITS, encoding="utf-8")
        chosen = re.sub(r"--implementation \S+", "--implementation kernel.py:attention", line)
        with own_code_here():
            assert attncheck(f"{chosen} --no-report --quiet", tmp_path)[0] in (0, 1)
    reader = Reader(tmp_path, lambda command: {})
    code = cells(path, "code")
    assert "attncheck" not in "".join(code)
    for number, cell in enumerate(code, 1):
        reader.execute(cell, f"{path.name}:{number}")
    assert len(reader.namespace["answer"])


def test_the_folder_of_rows_is_the_frame_and_every_column_is_documented_once(tmp_path: Path) -> None:
    assert attncheck("attncheck check 'softmax/*' --backend numpy --no-report --quiet", tmp_path)[0] == 0
    results = tmp_path / "results" / "latest"
    rows = pd.read_parquet(results / "rows")
    pd.testing.assert_frame_equal(rows, read_run(results).rows[list(rows)], check_dtype=False)
    page = (DOCS / "reference" / "results.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| rows\b", page, re.MULTILINE)
    assert sorted(documented) == sorted(rows)
