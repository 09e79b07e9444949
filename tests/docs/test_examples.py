"""The examples: kernels agree, cases run, and the workflow's commands do what they say."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).parent))
from pages import DOCS, ROOT, Block, Reader, blocks_of, small_corpus

from attncheck import check

EXAMPLES = ROOT / "examples"


@pytest.mark.torch
def test_the_torch_kernel_agrees_at_every_stage() -> None:
    result = check(f"{EXAMPLES}/torch_kernel.py:attention", cases=["attention", "softcap"])
    assert result.agrees, result.explain()
    agreeing = result.frames.results.query("verdict == 'agree'")
    assert {"scores", "capped", "biased", "masked", "weights", "output"} <= set(agreeing["stage"])
    assert set(agreeing["dtype"]) == {"float64", "float32", "bfloat16"}


def test_the_cases_agree() -> None:
    result = check(f"{EXAMPLES}/numpy_kernel.py:attention", cases=[str(EXAMPLES / "my_cases")])
    assert result.agrees, result.explain()
    assert result.judged == result.asked == 2


def _workflow() -> dict[str, Any]:
    text = (EXAMPLES / "attention.yml").read_text(encoding="utf-8")
    return dict(YAML(typ="safe").load(text))


def test_the_workflow_checks_out_what_it_installs_and_keeps_what_it_writes(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    steps = _workflow()["jobs"]["conformance"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    checked_out = [
        step["with"]["path"] for step in steps if "path" in step.get("with", {}) and "repository" in step["with"]
    ]
    assert commands[0].startswith("pip install")
    assert all(f"{folder}/constraints.txt" in commands[0] and f"./{folder}" in commands[0] for folder in checked_out)
    with small_corpus():
        for command in commands[1:]:
            printed = Reader(tmp_path, lambda other: pytest.fail(other)).run(command, 0, "attention.yml")
            assert "agrees with the exact answer" in printed
    [kept] = [step["with"]["path"].split() for step in steps if "upload-artifact" in step.get("uses", "")]
    assert [path for path in kept if not (tmp_path / path).exists()] == []


def test_the_page_on_ci_shows_the_same_workflow() -> None:
    blocks: list[Block] = blocks_of((DOCS / "how-to" / "ci.md").read_text(encoding="utf-8"))
    [shown] = [block.text for block in blocks if block.file == ".github/workflows/attention.yml"]
    text = (EXAMPLES / "attention.yml").read_text(encoding="utf-8")
    assert shown.partition("\n")[2] == text[text.index("name: ") :]
