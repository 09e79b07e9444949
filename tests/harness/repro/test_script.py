"""Scripts for bug reports: they need no attncheck, and find what the harness found."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attncheck.cli import app
from attncheck.errors import UsageError
from attncheck.execution.implementation_selection import select_callable
from attncheck.explain import find_implementation
from attncheck.reading.case import Case
from attncheck.repro import repro_script

Done = subprocess.CompletedProcess[str]
PLAIN = "attention/every-dimension-is-different-and-none-is-forgotten"
ATTENTION = """
inputs:
  query: {draw: randn, shape: [1, 2, 3, 5]}
  key: {draw: randn, shape: [1, 2, 4, 5]}
  value: {draw: randn, shape: [1, 2, 4, 6]}
"""


def written(tmp_path: Path, case: str, name: str) -> str:
    path = tmp_path / "written.py"
    result = CliRunner().invoke(app, ["repro", case, name, "--output", str(path)])
    assert result.exit_code == 0, result.output
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        "softmax/drawn-scores-are-normalised-over-the-last-axis-and-no-other",
        "gradients/gradients-with-respect-to-queries-keys-and-values",
    ],
    ids=["attention", "softmax", "gradients"],
)
@pytest.mark.parametrize("goes_wrong", [False, True])
def test_the_exit_status_says_what_the_harness_said(
    tmp_path: Path,
    right_kernels: str,
    wrong_kernels: str,
    run_script: Callable[[str], Done],
    case: str,
    goes_wrong: bool,
) -> None:
    text = written(tmp_path, case, wrong_kernels if goes_wrong else right_kernels)
    story = ast.get_docstring(ast.parse(text)) or ""
    assert ("It goes wrong at" in story) == goes_wrong
    assert ("Every stage is within its error bound" in story) != goes_wrong
    done = run_script(text)
    assert done.returncode == goes_wrong, done.stdout + done.stderr
    assert ("WRONG" in done.stdout) == goes_wrong


def test_a_frameworks_code_comes_along_but_for_what_the_case_does_not_use(
    one_case: Callable[..., Case], run_script: Callable[[str], Done]
) -> None:
    text = repro_script(one_case("attention", ATTENTION), find_implementation("numpy"), "float64", (), "No story.")
    assert "def attention(" in text
    assert "def mask_scores(" in text
    assert "def multi_head_attention(" not in text
    done = run_script(text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if "is right" in line] == [
        "raw_scores",
        "scores",
        "weights",
        "log_sum_exp",
        "output",
    ]


def test_the_docstring_keeps_a_story_as_it_is(one_case: Callable[..., Case]) -> None:
    told = "A path\\to and \\N, \"quoted\", '''thrice''' and a last \\"
    text = repro_script(one_case("attention", ATTENTION), find_implementation("numpy"), "float32", (), told)
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    assert docstring is not None
    assert docstring.endswith(f"\n{told}\n")
    text = repro_script(one_case("attention", ATTENTION), find_implementation("numpy"), "float32", (), 'a """ b\0\x1b')
    assert ast.get_docstring(ast.parse(text), clean=False) == docstring.replace(told, "a ''' b\ufffd\ufffd")


def test_no_line_of_a_script_is_endless(one_case: Callable[..., Case]) -> None:
    case = one_case("attention", ATTENTION.replace("2, 4,", "2, 400,"))
    text = repro_script(case, find_implementation("numpy"), "float32", (), "No story.")
    data = text[text.index("# The inputs") :]
    assert max(map(len, data.splitlines())) <= 100
    assert "unpack(" in data


@pytest.mark.parametrize("layouts", ["{query: strided, key: transposed}", "{key: broadcast, value: broadcast}"])
def test_inputs_lie_in_memory_as_the_harness_lays_them(
    tmp_path: Path,
    one_case: Callable[..., Case],
    kernel: Callable[..., str],
    reproduce: Callable[..., Done],
    layouts: str,
) -> None:
    # Known from what a layout is: (B, H, L, D) = (2, 3, 4, 5) of float32, four bytes each.
    strides = {
        "plain": (240, 80, 20, 4),
        "strided": (480, 160, 40, 8),
        "transposed": (240, 20, 60, 4),
        "broadcast": (0, 0, 20, 4),
    }
    asked = dict(pair.split(": ") for pair in layouts.strip("{}").split(", "))
    text = "def attention(query, key, value):\n    print('strides', query.strides, key.strides, value.strides)\n"
    path = kernel(f"{text}    return query\n")
    fields = f"""
    memory_layout: {layouts}
    arrays:
      row: {{draw: randn, shape: [1, 1, 4, 5]}}
      head: {{concat: [row, row, row], axis: 1}}
    inputs:
      query: {{draw: randn, shape: [2, 3, 4, 5]}}
      key: {{concat: [head, head], axis: 0}}
      value: {{concat: [head, head], axis: 0}}
    """
    done = reproduce(one_case("attention", fields), path)
    expected = (strides[asked.get(name, "plain")] for name in ("query", "key", "value"))
    assert f"strides {' '.join(map(str, expected))}" in done.stdout, done.stdout + done.stderr


def test_of_many_query_rows_those_are_judged_that_the_harness_judges(
    one_case: Callable[..., Case], kernel: Callable[..., str], right_kernels: str, reproduce: Callable[..., Done]
) -> None:
    fields = """
    inputs:
      query: {draw: randn, shape: [1, 1, 4100, 2]}
      key: {draw: randn, shape: [1, 1, 65, 2]}
      value: {draw: randn, shape: [1, 1, 65, 3]}
    """
    case = one_case("attention", fields)
    done = reproduce(case, f"{right_kernels}:attention")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "output is right; 64 query rows of 4100 are judged" in done.stdout
    spoil = "\n\nright = attention\n\ndef attention(*given):\n    out = right(*given)\n"
    spoil += "    out[:, :, {row}] += 1\n    return out\n"
    text = Path(right_kernels).read_text(encoding="utf-8")
    # The last row is always judged; the second is at no edge, and the fixed seed does not draw it.
    done = reproduce(case, f"{kernel(text + spoil.format(row=-1), 'last.py')}:attention")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "at [0, 0, 4099, " in done.stdout
    done = reproduce(case, f"{kernel(text + spoil.format(row=1), 'second.py')}:attention")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_has_no_exact_answer_is_not_judged(
    one_case: Callable[..., Case], right_kernels: str, reproduce: Callable[..., Done]
) -> None:
    case = one_case("softmax", "allow_nonfinite: true\ninputs:\n  scores: {values: [[.inf, 1.0]]}\n")
    done = reproduce(case, right_kernels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights is not judged: it has no exact answer" in done.stdout


def test_what_has_no_exact_answer_is_counted_beside_what_is_judged(
    one_case: Callable[..., Case], right_kernels: str, reproduce: Callable[..., Done]
) -> None:
    case = one_case("softmax", "allow_nonfinite: true\ninputs:\n  scores: {values: [[.inf, 1.0], [0.0, 1.0]]}\n")
    done = reproduce(case, right_kernels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights is right; 2 of 4 numbers have no exact answer\n" in done.stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return query", "output has shape (1, 2, 3, 5); expected (1, 2, 3, 6)"),
        ("import numpy as np; return np.zeros((1, 2, 3, 6))", "output has dtype float64; expected float32"),
        ("return [1.0]", "output is a list; expected an array"),
        ("return {'scores': query}", "output is not returned"),
        ("key[:] = 0; return query", "key is changed by the call"),
        ("raise ValueError('not today')", "ValueError: not today"),
    ],
)
def test_what_is_no_right_result_at_all_is_wrong_too(
    one_case: Callable[..., Case], kernel: Callable[..., str], reproduce: Callable[..., Done], body: str, said: str
) -> None:
    done = reproduce(one_case("attention", ATTENTION), kernel(f"def attention(query, key, value):\n    {body}\n"))
    assert done.returncode == 1
    assert said in done.stdout + done.stderr


def test_what_is_not_supported_cannot_be_reproduced(tmp_path: Path, kernel: Callable[..., str]) -> None:
    path = kernel("def attention(query, key, value): ...\n")
    output = tmp_path / "none.py"
    result = CliRunner().invoke(
        app,
        ["repro", "softmax/drawn-scores-are-normalised-over-the-last-axis-and-no-other", path, "--output", str(output)],
    )
    assert isinstance(result.exception, UsageError)
    assert "has no softmax; there is nothing to reproduce" in str(result.exception)
    assert not output.exists()


def test_a_dtype_or_an_object_that_no_script_can_show_says_so(one_case: Callable[..., Case]) -> None:
    case = one_case("attention", ATTENTION)
    with pytest.raises(UsageError, match=r"numpy\.eager declares no float16"):
        repro_script(case, find_implementation("numpy"), "float16", (), "")
    with pytest.raises(UsageError, match=r"name it file\.py:function"):
        repro_script(case, select_callable(lambda query, key, value: value, None, None), "float32", (), "")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["torch.sdpa", "torch.compile"])
def test_a_script_carries_torchs_code(one_case: Callable[..., Case], reproduce: Callable[..., Done], name: str) -> None:
    carries_its_code(reproduce(one_case("attention", ATTENTION), name))


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["tensorflow.function", "tensorflow.keras_attention"])
def test_a_script_carries_tensorflows_code(
    one_case: Callable[..., Case], reproduce: Callable[..., Done], name: str
) -> None:
    carries_its_code(reproduce(one_case("attention", ATTENTION), name, its_own=["ml_dtypes"]))


@pytest.mark.jax
def test_a_script_carries_jaxs_code(one_case: Callable[..., Case], reproduce: Callable[..., Done]) -> None:
    carries_its_code(reproduce(one_case("attention", ATTENTION), "jax.jit", its_own=["ml_dtypes", "scipy"]))


@pytest.mark.torch
def test_a_script_in_bfloat16_needs_ml_dtypes_and_says_so(
    one_case: Callable[..., Case], run_script: Callable[..., Done]
) -> None:
    text = repro_script(one_case("attention", ATTENTION), find_implementation("torch"), "bfloat16", (), "No story.")
    assert "It needs numpy, torch and ml_dtypes." in text
    carries_its_code(run_script(text, ["ml_dtypes"]))


def carries_its_code(done: Done) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "output is right" in done.stdout
