"""Scripts for bug reports: they need no attncheck, call whatever the harness calls, and find what it found."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attncheck.cli import app
from attncheck.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_callable
from attncheck.execution.implementations import Implementation, entry_of
from attncheck.execution.user_code import Target
from attncheck.explain import explain_case, find_implementation
from attncheck.reading.case import Case
from attncheck.reading.selection import select_cases
from attncheck.repro import compact_script, repro_script, write_scripts
from attncheck.repro.script import MAX_LINES, _one_of_each_first
from attncheck.results.format import Row
from attncheck.searching.search import element_of

pytestmark = pytest.mark.usefixtures("forked_workers")

app.load()  # all commands, whichever another test has loaded

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
    result = CliRunner().invoke(app, ["repro", case, name, "--no-reduce", "--output", str(path)])
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
    one_case: Callable[..., Case], run_in_a_process: Callable[[str], Done]
) -> None:
    text = repro_script(one_case("attention", ATTENTION), find_implementation("numpy"), "float64", (), "No story.")
    assert "def attention(" in text
    assert "def mask_scores(" in text
    assert "def multi_head_attention(" not in text
    done = run_in_a_process(text)
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
def test_a_script_carries_torchs_code_and_in_bfloat16_says_that_it_needs_ml_dtypes(
    one_case: Callable[..., Case], run_in_a_process: Callable[..., Done]
) -> None:
    text = repro_script(
        one_case("attention", ATTENTION), find_implementation("torch.sdpa"), "bfloat16", (), "No story."
    )
    assert "It needs numpy, torch and ml_dtypes." in text
    carries_its_code(run_in_a_process(text, ["ml_dtypes"]))


@pytest.mark.tensorflow
def test_a_script_carries_tensorflows_code(
    one_case: Callable[..., Case], run_in_a_process: Callable[..., Done]
) -> None:
    implementation = find_implementation("tensorflow.keras_attention")
    text = repro_script(one_case("attention", ATTENTION), implementation, "float32", (), "No story.")
    carries_its_code(run_in_a_process(text, ["ml_dtypes"]))


@pytest.mark.jax
def test_a_script_carries_jaxs_code(one_case: Callable[..., Case], run_in_a_process: Callable[..., Done]) -> None:
    text = repro_script(one_case("attention", ATTENTION), find_implementation("jax.jit"), "float32", (), "No story.")
    carries_its_code(run_in_a_process(text, ["ml_dtypes", "scipy"]))


def carries_its_code(done: Done) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "output is right" in done.stdout


QUERY_AND_KEY = "query: {draw: randn, shape: [2, 3, 4, 5]}\n  key: {draw: randn, shape: [2, 3, 6, 5]}\n"


WITH_VALUE = f"inputs:\n  {QUERY_AND_KEY}  value: {{draw: randn, shape: [2, 3, 6, 7]}}\n"


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
    "attention": ("attention", f"options: {{is_causal: true}}\n{WITH_VALUE}", ["output"]),
    "attention_gradients": (
        "attention_gradients",
        f"{WITH_VALUE}  grad_output: {{draw: randn, shape: [2, 3, 4, 7]}}\n",
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
    one_case: Callable[..., Case], reproduce: Callable[..., Done], right_kernels: str, wrong_kernels: str, function: str
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
    done = reproduce(
        one_case("attention", f"options: {{empty_rows: uniform}}\n{WITH_VALUE}{mask}"), f"{path}:attention"
    )
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


CASE = "attention/every-dimension-is-different-and-none-is-forgotten"


RESTRICTED = """
import numpy as np


def attention(query, key, value, *, mask=None, scale=None):
    assert query.shape[-1] % 8 == 0 and query.shape[-1] == value.shape[-1]
    assert query.shape[-2] % 16 == 0 and key.shape[-2] % 16 == 0
    scores = query @ key.mT * np.asarray(query.shape[-1] ** -0.5 if scale is None else scale, query.dtype)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return {"weights": weights, "output": weights @ value}


attention.requires = {
    "width_multiple": 8, "value_width": "equal", "query_length_multiple": 16, "key_length_multiple": 16
}
"""


def written_of_padded(folder: Path, name: str, code: int) -> str:
    path = folder / "written.py"
    result = CliRunner().invoke(app, ["repro", CASE, name, "--output", str(path)])
    assert result.exit_code == code, result.output
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("was", "instead", "says"),
    [
        ("return {", "return {", ""),
        ("weights @ value}", "2 * weights @ value}", "output is WRONG"),
        ("scores, -np.inf)", "scores, -3)", "weights gives"),  # masked keys have weights
    ],
    ids=["right", "wrong", "wrong in what was added"],
)
def test_a_script_makes_the_padded_call_and_finds_what_the_harness_found(
    tmp_path: Path, kernel: Callable[..., str], run_script: Callable[[str], Done], was: str, instead: str, says: str
) -> None:
    text = written_of_padded(tmp_path, f"{kernel(RESTRICTED.replace(was, instead))}:attention", 0)
    assert "It makes one call, padded with zero columns (" in text
    assert "scale=" in text
    assert '"weights": KeptElements(' in text
    done = run_script(text)
    assert done.returncode == bool(says), done.stdout + done.stderr
    assert says in done.stdout
    assert "AssertionError" not in done.stderr


def test_no_script_is_written_of_what_cannot_be_padded(tmp_path: Path, kernel: Callable[..., str]) -> None:
    path = kernel(RESTRICTED.replace("mask=None, scale=None", "mask=None").replace("if scale is None else scale", ""))
    result = CliRunner().invoke(app, ["repro", CASE, f"{path}:attention", "--output", str(tmp_path / "written.py")])
    assert "unsupported: takes no scale, which has to be given where the width is padded" in str(result.exception)


DRAWN = "softmax/drawn-scores-are-normalised-over-the-last-axis-and-no-other"


def test_a_check_keeps_a_script_for_what_fails_that_finds_it_again(
    tmp_path: Path, wrong_kernels: str, run_script: Callable[..., object]
) -> None:
    results = tmp_path / "results"
    arguments = ["check", DRAWN, "-i", wrong_kernels, "-d", "float32", "--output", str(results)]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    ((place, name),) = json.loads((results / "scripts" / "index.json").read_text()).items()
    assert place.startswith(f"{DRAWN}|")
    assert place.endswith("|float32")
    done = run_script((results / "scripts" / name).read_text())
    assert done.returncode == 1, done  # type: ignore[attr-defined]


def test_a_run_without_failures_leaves_no_scripts_of_an_earlier_one(tmp_path: Path, right_kernels: str) -> None:
    results = tmp_path / "results"
    arguments = ["check", DRAWN, "-i", right_kernels, "-d", "float32", "--output", str(results)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (results / "scripts").mkdir()
    (results / "scripts" / "000.py").write_text("of an earlier run")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not (results / "scripts").exists()


def test_every_implementation_has_its_first_script_before_any_has_a_second() -> None:
    places = [("one", "a", "float32"), ("two", "a", "float32"), ("one", "b", "float32")]
    assert _one_of_each_first(places) == [places[0], places[2], places[1]]


def test_what_no_script_can_show_has_none(tmp_path: Path) -> None:
    cases = select_cases([DRAWN], base=tmp_path).cases
    implementation = select_callable(lambda query, key, value: value, None, "mine")
    row = Row(DRAWN, "softmax", "float32", implementation.name, "stage", "weights", "numeric")
    assert write_scripts(cases, [implementation], [row], tmp_path) == 0
    assert not (tmp_path / "scripts").exists()


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
