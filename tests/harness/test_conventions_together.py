"""A kernel that means several things otherwise: each is named, where cases show them at once, too."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from here import command_here, own_code_here

from attncheck.spec import DECLARABLE

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
DECLARED = """
attention.conventions = {"heads": "tiled", "corner": "bottom_right", "empty_rows": "uniform"}
"""
CASES = ("attention/*", "grouped_heads/*", "coincidences/causality-*", "pairs/*causal*", "probes/masks/*")


def _attncheck(folder: Path, kernel: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "kernel.py").write_text(kernel, encoding="utf-8")
    with own_code_here():
        return subprocess.CompletedProcess(words, *command_here(words, folder))


CHECK = ("check", *CASES, "-d", "float64", "-i", "kernel.py:attention", "--no-report")


def test_cases_that_show_several_conventions_are_named_by_those_that_others_show_one_by_one(tmp_path: Path) -> None:
    done = _attncheck(tmp_path, KERNEL, *CHECK, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    found = {each["diagnosis"] for each in document["defects"]}
    assert found >= {"heads-tiled", "aligned-bottom-right", "empty-rows-uniform"}
    together = {name for name in found if name and " and " in name}
    assert together
    assert set().union(*(name.split(" and ") for name in together)) <= found
    assert {each["verdict"] for each in document["failures"]} == {"semantic"}
    shown = _attncheck(tmp_path, KERNEL, "report", "results/latest")
    assert ": it is right if it means these: " in shown.stdout
    (line,) = (line for line in shown.stdout.splitlines() if "declare it: attention.conventions = " in line)
    assert json.loads(line.partition("conventions = ")[2]) == json.loads(DECLARED.partition("= ")[2])


def test_what_is_declared_is_judged_as_it_is_read_and_says_so(tmp_path: Path) -> None:
    done = _attncheck(tmp_path, KERNEL + DECLARED, *CHECK)
    assert done.returncode == 0, done.stdout + done.stderr
    corner, heads = DECLARABLE["corner"]["bottom_right"], DECLARABLE["heads"]["tiled"]
    assert "agrees with the exact answer" in done.stdout
    assert f", read as: {corner} and {heads}. " in done.stdout
    broken = (KERNEL + DECLARED).replace("behind > 0", "behind > 1")
    wrong = _attncheck(tmp_path, broken, *CHECK)
    assert wrong.returncode == 1
    assert "causality is off by one" in wrong.stdout


def test_conventions_prints_what_to_declare_and_takes_it(tmp_path: Path) -> None:
    asked = _attncheck(tmp_path, KERNEL, "conventions", "kernel.py:attention")
    (line,) = (line for line in asked.stdout.splitlines() if "declare what it does: attention.conventions = " in line)
    assert json.loads(line.partition("conventions = ")[2]) == json.loads(DECLARED.partition("= ")[2])
    taken = _attncheck(tmp_path, KERNEL + DECLARED, "conventions", "kernel.py:attention")
    assert (taken.returncode, "declare" in taken.stdout) == (0, False)
    other = _attncheck(tmp_path, KERNEL + DECLARED.replace("tiled", "mixed"), "conventions", "kernel.py:attention")
    assert "conventions: expected heads, one of tiled; got 'mixed'" in other.stderr
