"""Users' functions that refuse most of what they are asked: nothing is green that was hardly judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.implementations import Implementation
from attncheck.reading.selection import select_cases
from attncheck.widening import find_widening

KERNEL = """
import numpy as np

def attention(query, key, value, *, mask={mask}, scale=None):
    assert scale is None or isinstance(scale, float)
    if {refuses}:
        raise NotImplementedError("not of these shapes")
    group = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, group, 1), np.repeat(value, group, 1)
    scores = query @ key.swapaxes(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
RESTRICTED = "query.shape[2] != key.shape[2] or query.shape[3] != value.shape[3] or query.shape[2] % 16"


def kernel(folder: Path, refuses: str, mask: str = "None") -> str:
    path = folder / "kernel.py"
    path.write_text(KERNEL.format(refuses=refuses, mask=mask), encoding="utf-8")
    return f"{path}:attention"


def implementation(target: str) -> Implementation:
    (found,) = select_implementations(None, [target]).implementations
    return found


def test_the_loosest_requirements_are_found_by_which_refused_cases_are_computed(tmp_path: Path) -> None:
    cases = select_cases(["attention/*", "values/*", "kernel_shapes/lengths/*"]).cases
    found = find_widening(implementation(kernel(tmp_path, RESTRICTED)), cases, Limits())
    assert found is not None
    assert found.requires.items() >= {("lengths", "equal"), ("value_width", "equal")}
    assert max(value for value in found.requires.values() if isinstance(value, int)) == 16
    assert 0 < found.computed <= found.tried
    assert find_widening(implementation(kernel(tmp_path, "True")), cases, Limits()) is None


def test_who_is_judged_in_less_than_a_tenth_does_not_agree_and_is_told_what_helps(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "attncheck",
        "check",
        "attention/*",
        "kernel_shapes/masks/*",
        "kernel_shapes/widths/*",
        "--json",
    ]
    target = kernel(tmp_path, "query.shape[3] % 16 or query.shape[2] % 8")
    for words, code in (([], 3), (["--min-judged", "1"], 0)):
        done = subprocess.run(
            [*command, "-i", target, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        document = json.loads(done.stdout)
        assert (done.returncode, document["failures"]) == (code, []), done.stderr
        assert document["answer"].endswith("too few cases to say that it agrees") == (code == 3)
        advice = 'declare attention.requires = {"width_multiple": 16, "query_length_multiple": 8} below it'
        assert any(advice in line for line in document["too_few_judged"]) == (code == 3)


def test_a_case_without_what_a_function_requires_is_unsupported(tmp_path: Path) -> None:
    target = kernel(tmp_path, "False", mask="REQUIRED").replace("mask=REQUIRED, ", "mask, ")
    (tmp_path / "kernel.py").write_text((tmp_path / "kernel.py").read_text().replace("mask=REQUIRED", "mask"))
    command = [sys.executable, "-m", "attncheck", "check", "attention/*", "--json", "-i", target]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (of,) = json.loads(done.stdout)["coverage"].values()
    assert of["lacks"]["no mask in the case"] > 0


def test_padding_that_makes_millions_of_scores_of_a_few_is_not_asked(tmp_path: Path) -> None:
    target = kernel(tmp_path, "query.shape[2] != key.shape[2]")
    with (tmp_path / "kernel.py").open("a") as file:
        file.write('\nattention.requires = {"lengths": "equal"}\n')
    command = [sys.executable, "-m", "attncheck", "check", "large/*", "--json", "-i", target]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (of,) = json.loads(done.stdout)["coverage"].values()
    assert of["lacks"]["padding of few queries to many keys"] > 0
    assert of["stopped"] == 0


def test_a_dtype_that_is_asked_for_is_run_though_the_function_declares_nothing(tmp_path: Path) -> None:
    target = kernel(tmp_path, "False").replace("kernel.py:attention", "kernel.py:wide")
    with (tmp_path / "kernel.py").open("a") as file:
        file.write("\ndef wide(query, key, value):\n")
        file.write("    given = (each.astype(np.float32) for each in (query, key, value))\n")
        file.write("    return attention(*given).astype(query.dtype)\n")
    command = [sys.executable, "-m", "attncheck", "check", "attention/*", "--json", "-i", target, "-d", "float16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (of,) = json.loads(done.stdout)["coverage"].values()
    assert (done.returncode, of["judged"] > 0) == (0, True), done.stderr
    assert "declares no float16: as that was asked for, it is held to the class eager there" in done.stderr
