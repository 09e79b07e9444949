"""A kernel that means several things otherwise: each is named, where cases show them at once, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KERNEL = """
import numpy as np

def attention(query, key, value, *, mask=None, is_causal=False, scale=None):
    group = query.shape[1] // key.shape[1]
    key, value = np.tile(key, (1, group, 1, 1)), np.tile(value, (1, group, 1, 1))
    scores = query @ key.swapaxes(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    behind = np.arange(key.shape[2]) - np.arange(query.shape[2])[:, None] - key.shape[2] + query.shape[2]
    forbidden = (behind > 0) & is_causal | (False if mask is None else ~mask)
    scores = np.where(forbidden, np.finfo(scores.dtype).min, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
CASES = ("attention/*", "grouped_heads/*", "coincidences/causality-*", "pairs/*causal*", "probes/masks/*")


def test_cases_that_show_several_conventions_are_named_by_those_that_others_show_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    command = [sys.executable, "-m", "attncheck", "check", *CASES, "-d", "float64", "-i", "kernel.py:attention"]
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    found = {each["diagnosis"] for each in document["defects"]}
    assert found >= {"heads-tiled", "aligned-bottom-right", "empty-rows-uniform"}
    together = {name for name in found if name and " and " in name}
    assert together
    assert set().union(*(name.split(" and ") for name in together)) <= found
    assert {each["verdict"] for each in document["failures"]} == {"semantic"}
    shown = subprocess.run(
        [sys.executable, "-m", "attncheck", "report", "results/latest"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ": it is right if it means these: " in shown.stdout
