"""``--tile`` from the command to the results: a fault at a kernel's own tile is found, and shown again by its id."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from here import own_code_here

from attncheck.api import check
from attncheck.config import read_config
from attncheck.errors import UsageError
from attncheck.reading.tiles import TEMPLATE

KERNEL = """
import numpy as np


def attention(query, key, value, *, is_causal=False):
    if key.shape[-2] % 6 == 1 and key.shape[-2] > 6:  # the key behind a tile of six is never read
        key, value = key[..., :-1, :], value[..., :-1, :]
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(each, groups, axis=1) for each in (key, value))
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5)
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
SMALL = """
title: A small case
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}, dtypes: [float32]}
cases:
  - name: Nothing but three keys
    inputs: {query: {draw: randn, shape: [3, 4]}, key: {draw: randn, shape: [3, 4]}, value: {identity: 3}}
"""
MISSED = f"{TEMPLATE}/no-edge-shows-in-attention-tile-6-under-by-over"
Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "small.yaml").write_text(SMALL)
    with own_code_here():
        yield tmp_path


def recorded(results: Path) -> set[str]:
    return {case["id"] for case in json.loads((results / "cases.json").read_text())["cases"]}


def test_a_fault_at_the_tile_is_found_and_shown_again_by_its_id(invoke: Invoke, project: Path) -> None:
    own = ["--implementation", "kernel.py:attention", "--no-report"]
    assert invoke("check", "small.yaml", *own, "--output", "without")[0] == 0
    code, out, _ = invoke("check", "small.yaml", "--tile", "6", *own, "--output", "with")
    assert code == 1
    assert "kernel.attention is wrong" in out
    environment = json.loads((project / "with" / "environment.json").read_text())
    assert environment["asked"]["tiles"] == [6]
    assert MISSED in recorded(project / "with")
    assert "small/nothing-but-three-keys" in recorded(project / "with")
    code, out, _ = invoke("explain", MISSED, "kernel.py:attention", "--results", "with")
    assert code == 1
    assert "output" in out
    code, out, _ = invoke("repro", MISSED, "kernel.py:attention", "--output", "shown.py")
    assert (code, (project / "shown.py").exists()) == (0, True)
    code, out, _ = invoke("show", MISSED)
    assert (code, "(tile 6, under by over)" in out) == (0, True)


def test_cases_of_a_tile_are_listed(invoke: Invoke) -> None:
    code, out, _ = invoke("list", "cases", "small.yaml", "--tile", "48", "--tile", "6,7")
    assert code == 0
    for tile in (6, 7, 48):
        assert f"-tile-{tile}-under-by-over" in out
    code, only, _ = invoke("list", "cases", f"{TEMPLATE}/*tile-48*")
    assert (code, "tile-64" in only, "tile-48" in only) == (0, False, True)


def test_what_is_no_tile_is_told_in_a_line_and_what_is_left_out_of_a_large_one_is_said(invoke: Invoke) -> None:
    line = "expected a whole number from 2 to 4096, got '1'; every length is a whole number of tiles of one"
    for command in (["check"], ["list", "cases"]):
        assert invoke(*command, "--tile", "1")[::2] == (2, f"attncheck: --tile: {line}\n")
    asked = ["check", "small.yaml", "--backend", "numpy", "--tag", "cache", "--tile", "512", "--no-report"]
    code, _, err = invoke(*asked)
    assert code == 0
    assert "--tile 512: rows stand for all where there are more than 262,144 scores, and gradients" in err


def test_a_project_says_its_tile_for_runs_in_which_no_cases_are_named(invoke: Invoke, project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.attncheck]\ntile = 48\n")
    assert read_config().tiles == (48,)
    (project / "pyproject.toml").write_text('[tool.attncheck]\ntile = [48, 6]\ncases = ["small.yaml"]\n')
    assert read_config().tiles == (48, 6)
    listed = invoke("list", "cases", "--tag", "cache")[1]
    assert "-tile-48\n" in listed
    assert "-tile-48\n" not in invoke("list", "cases", "small.yaml")[1]
    assert "-tile-48\n" not in invoke("list", "cases", "--tag", "cache", "--tile", "5")[1]
    (project / "pyproject.toml").write_text("[tool.attncheck]\ntile = 1\n")
    with pytest.raises(UsageError, match=r"tool\.attncheck\.tile: expected a whole number from 2 to 4096, got 1"):
        read_config()


def test_the_call_takes_tiles_too() -> None:
    result = check("kernel.py:attention", cases=["small.yaml"], dtypes=["float32"], tiles=[6])
    assert not result.agrees
    assert MISSED in set(result.frames.results["case"])
    assert check("kernel.py:attention", cases=["small.yaml"]).agrees


def test_pytest_takes_tiles_and_the_id_of_a_tiles_case(
    run_pytest: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    named = ["--attncheck", "kernel.py:attention", "--attncheck-cases", "small.yaml", "--attncheck-dtype", "float32"]
    run = partial(run_pytest, "-p", "no:cacheprovider", *named)
    collected = run("--attncheck-tile", "6", "--collect-only").stdout
    assert f"attncheck::kernel.attention[{MISSED}-float32]" in collected
    assert "tile-48" not in collected
    done = run(f"attncheck::kernel.attention[{MISSED}-float32]")
    assert (done.returncode, "1 failed" in done.stdout) == (1, True), done.stdout
    refused = run("--attncheck-tile", "1")
    assert "--attncheck-tile: expected a whole number from 2 to 4096" in refused.stderr
