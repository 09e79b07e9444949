"""Somebody's own implementation in a script: every function of the contract, from wherever it is loaded."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.reading.case import Case

Done = subprocess.CompletedProcess[str]
QUERY_AND_KEY = "query: {draw: randn, shape: [2, 3, 4, 5]}\n  key: {draw: randn, shape: [2, 3, 6, 5]}\n"
ATTENTION = f"inputs:\n  {QUERY_AND_KEY}  value: {{draw: randn, shape: [2, 3, 6, 7]}}\n"
CASES = {
    "dot_scores": ("scoring", f"options: {{score: dot}}\ninputs:\n  {QUERY_AND_KEY}", ["scores"]),
    "cosine_scores": ("scoring", f"options: {{score: cosine}}\ninputs:\n  {QUERY_AND_KEY}", ["scores"]),
    "general_scores": (
        "scoring",
        f"options: {{score: general}}\ninputs:\n  {QUERY_AND_KEY}  weight: {{draw: randn, shape: [5, 5]}}\n",
        ["scores"],
    ),
    "additive_scores": (
        "scoring",
        f"options: {{score: additive}}\ninputs:\n  {QUERY_AND_KEY}"
        "  query_weight: {draw: randn, shape: [5, 8]}\n  key_weight: {draw: randn, shape: [5, 8]}\n"
        "  score_vector: {draw: randn, shape: [8]}\n",
        ["scores"],
    ),
    "mask_scores": (
        "masking",
        "inputs:\n  scores: {draw: randn, shape: [2, 3]}\n  mask: {values: [[1, 0, 1], [1, 1, 0]]}\n",
        ["masked"],
    ),
    "softmax": ("softmax", "inputs:\n  scores: {draw: randn, shape: [2, 3, 4, 6]}\n", ["weights"]),
    "attention": ("attention", f"options: {{is_causal: true}}\n{ATTENTION}", ["output"]),
    "attention_gradients": (
        "attention_gradients",
        f"{ATTENTION}  grad_output: {{draw: randn, shape: [2, 3, 4, 7]}}\n",
        ["grad_query", "grad_key", "grad_value"],
    ),
    "multi_head_attention": (
        "multi_head_attention",
        "options: {heads: 2}\ninputs:\n"
        + "".join(f"  {name}: {{draw: randn, shape: [2, 3, 4]}}\n" for name in ("query", "key", "value"))
        + "".join(f"  {name}_weight: {{draw: randn, shape: [4, 6]}}\n" for name in ("query", "key", "value")),
        ["output"],
    ),
}


@pytest.mark.parametrize("function", CASES)
def test_every_function_of_a_module_is_called_and_what_it_returns_is_named(
    one_case: Callable[..., Case],
    reproduce: Callable[..., Done],
    right_kernels: str,
    wrong_kernels: str,
    function: str,
) -> None:
    operation, fields, stages = CASES[function]
    case = one_case(operation, fields)
    done = reproduce(case, right_kernels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith("is right")] == [
        f"{stage} is right" for stage in stages
    ]
    done = reproduce(case, wrong_kernels)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if "is WRONG at" in line] == stages


def test_gradients_may_come_as_a_dict(
    one_case: Callable[..., Case], reproduce: Callable[..., Done], kernel: Callable[..., str], right_kernels: str
) -> None:
    as_dict = """

several = attention_gradients

def attention_gradients(*given):
    return dict(zip(["grad_query", "grad_key", "grad_value"], several(*given)))
"""
    operation, fields, stages = CASES["attention_gradients"]
    path = kernel(Path(right_kernels).read_text(encoding="utf-8") + as_dict)
    done = reproduce(one_case(operation, fields), path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is right") == len(stages)


UNIFORM = """
import numpy as np


def attention(query, key, value, *, mask, KEYWORD):
    scores = np.where(mask, query @ key.swapaxes(-1, -2) * np.float32(query.shape[-1] ** -0.5), np.float32(FILL))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value
"""


@pytest.mark.parametrize("keyword", ["", "empty_rows='zero'", "**options"])
@pytest.mark.parametrize(("fill", "code"), [("-1e9", 0), ("-np.inf", 1)])
def test_a_convention_is_asked_for_where_the_function_takes_it(
    one_case: Callable[..., Case],
    reproduce: Callable[..., Done],
    kernel: Callable[..., str],
    keyword: str,
    fill: str,
    code: int,
) -> None:
    mask = "  mask: {values: [[1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]}\n"
    path = kernel(UNIFORM.replace("KEYWORD", keyword).replace("mask, )", "mask)").replace("FILL", fill))
    done = reproduce(one_case("attention", f"options: {{empty_rows: uniform}}\n{ATTENTION}{mask}"), f"{path}:attention")
    assert done.returncode == code, done.stdout + done.stderr


ATTRIBUTES = """

def my_kernel(q, k, v, **options):
    return attention(q, k, v, **options)


def holder(query, key, value, *, is_causal=False):
    raise ValueError("not this one")


holder.attention = attention


class Kernels:
    def __call__(self, query, key, value, *, is_causal=False):
        return attention(query, key, value, is_causal=is_causal)

    def bound(self, query, key, value, *, is_causal=False):
        return attention(query, key, value, is_causal=is_causal)

    class inside:
        attention = staticmethod(attention)


instance = Kernels()
"""


@pytest.mark.parametrize(
    "attribute", ["my_kernel", "holder", "instance", "instance.bound", "Kernels.inside", "Kernels.inside.attention"]
)
def test_whatever_the_harness_can_call_the_script_calls(
    one_case: Callable[..., Case],
    reproduce: Callable[..., Done],
    kernel: Callable[..., str],
    right_kernels: str,
    attribute: str,
) -> None:
    path = kernel(Path(right_kernels).read_text(encoding="utf-8") + ATTRIBUTES)
    operation, fields, _ = CASES["attention"]
    done = reproduce(one_case(operation, fields), f"{path}:{attribute}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "output is right" in done.stdout


@pytest.mark.parametrize("name", ["my-kernel 2.py", "random.py", "types.py", "class.py"])
def test_a_file_may_be_called_anything_and_lie_beside_the_script(
    one_case: Callable[..., Case],
    reproduce: Callable[..., Done],
    kernel: Callable[..., str],
    right_kernels: str,
    name: str,
) -> None:
    kernel("FACTOR = 1\n", "beside_it.py")
    drawing = "from beside_it import FACTOR\nimport random\nimport types\n\nrandom.random(), types.ModuleType\n"
    path = kernel(f"{Path(right_kernels).read_text(encoding='utf-8')}\n{drawing}", name)
    operation, fields, _ = CASES["attention"]
    done = reproduce(one_case(operation, fields), f"{path}:attention")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "output is right" in done.stdout


def test_a_module_of_the_working_directory_is_found_from_elsewhere(
    one_case: Callable[..., Case],
    reproduce: Callable[..., Done],
    right_kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "elsewhere" / "of_mine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "fast.py").write_text(Path(right_kernels).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "elsewhere")
    operation, fields, _ = CASES["attention"]
    done = reproduce(one_case(operation, fields), "of_mine.fast:attention")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "output is right" in done.stdout


def test_another_file_can_be_named_when_the_script_is_run(
    one_case: Callable[..., Case],
    run_script: Callable[..., Done],
    reproduce: Callable[..., Done],
    right_kernels: str,
    wrong_kernels: str,
    tmp_path: Path,
) -> None:
    operation, fields, _ = CASES["attention"]
    assert reproduce(one_case(operation, fields), wrong_kernels).returncode == 1
    text = (tmp_path / "report.py").read_text(encoding="utf-8")
    assert f"{wrong_kernels} (or a file that is named behind the command)" in text
    done = run_script(text, arguments=[right_kernels])
    assert done.returncode == 0, done.stdout + done.stderr
