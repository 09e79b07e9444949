"""Short scripts: a screenful, and they find what the harness found."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attncheck.cli import app
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.execution.user_code import Target, entry_of
from attncheck.explain import explain_case
from attncheck.reading.case import Case
from attncheck.repro import compact_script
from attncheck.repro.compact import MAX_LINES
from attncheck.searching.search import element_of

Done = subprocess.CompletedProcess[str]
FIELDS = """
dtypes: [{dtype}]
inputs:
  query: {{draw: randn, shape: [1, 1, 2, 3]}}
  key: {{draw: randn, shape: [1, 1, 3, 3]}}
  value: {{draw: randn, shape: [1, 1, 3, 2]}}
options: {{is_causal: true}}
"""


def script(one_case: Callable[..., Case], path: str, dtype: str, fields: str = FIELDS) -> str | None:
    case, entry = one_case("attention", fields.format(dtype=dtype)), entry_of(Target.of(f"{path}:attention"), {}, None)
    kernel = Implementation(entry, next(iter(entry.all_modes)))
    found = explain_case(case, kernel, dtype, Limits())
    return compact_script(case, kernel, dtype, found.judgements, element_of(found) or "nothing", "python it.py")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_it_ends_as_the_harness_did(
    one_case: Callable[..., Case],
    right_kernels: str,
    wrong_kernels: str,
    run_script: Callable[..., Done],
    dtype: str,
    is_wrong: bool,
) -> None:
    text = script(one_case, wrong_kernels if is_wrong else right_kernels, dtype)
    assert text is not None
    assert len(text.splitlines()) <= MAX_LINES
    done = run_script(text)
    assert done.returncode == is_wrong, done.stdout + done.stderr
    assert ("WRONG" in done.stdout) == is_wrong


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no such shape')", "no such shape"),
        ("return value[..., :1]", "has shape"),
        ("return {'output': value[:, :, :2] * float('nan')}", "WRONG"),
    ],
)
def test_what_is_no_number_is_told_too(
    one_case: Callable[..., Case], kernel: Callable[..., str], run_script: Callable[..., Done], body: str, said: str
) -> None:
    path = kernel(f"def attention(query, key, value, *, is_causal=False):\n    {body}\n")
    text = script(one_case, path, "float32")
    assert text is not None
    done = run_script(text)
    assert done.returncode == 1
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("options:", "memory_layout: {{query: strided}}\noptions:"),
        ("1, 3,", "1, 30,"),
        ("is_causal: true", "is_causal: true, empty_rows: nan"),
    ],
    ids=["memory layout", "many numbers", "convention"],
)
def test_what_needs_more_gets_the_long_form(
    one_case: Callable[..., Case], right_kernels: str, old: str, new: str
) -> None:
    assert script(one_case, right_kernels, "float32", FIELDS.replace(old, new)) is None


@pytest.mark.parametrize("reduces", [True, False])
def test_repro_reduces_first_unless_it_is_not_to(
    tmp_path: Path, wrong_kernels: str, run_script: Callable[..., Done], reduces: bool
) -> None:
    path = tmp_path / "written.py"
    case = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"
    options = [] if reduces else ["--no-reduce"]
    result = CliRunner().invoke(app, ["repro", case, f"{wrong_kernels}:attention", "-o", str(path), *options])
    assert result.exit_code == 0, result.output
    text = path.read_text(encoding="utf-8")
    assert (len(text.splitlines()) <= MAX_LINES) == reduces
    assert run_script(text).returncode == 1
