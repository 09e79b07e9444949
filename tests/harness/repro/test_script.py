"""Scripts for bug reports: they need no attncheck, call whatever the harness calls, and find what it found."""

from __future__ import annotations

import ast
import base64
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from scripts import Bench, Done
from tables import tables_beside
from typer.testing import CliRunner

from attncheck.asking.engine import Engine
from attncheck.asking.question import Question
from attncheck.attention.sampling import select_stage_rows
from attncheck.backends import ALL_ENTRIES, BackendEntry, Library
from attncheck.cli import app
from attncheck.common.errors import UsageError
from attncheck.execution.implementation_selection import find_implementation, implementation_of_callable
from attncheck.execution.implementations import Implementation, make_user_entry
from attncheck.execution.user_call import load_target, read_target_declarations
from attncheck.execution.user_code import Target
from attncheck.judging.judge_stages import flag_failing_elements
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_inputs
from attncheck.reading.selection import select_cases
from attncheck.repro import repro_script, write_scripts, writing
from attncheck.repro.code import (
    NotSeparable,
    are_right,
    array_code,
    copy_functions,
    expected_stage,
    inline_module,
    judge,
    read_module_source,
)
from attncheck.repro.writing import MAX_LINES
from attncheck.results.format import Row
from attncheck.searching.search import describe_worst_element
from attncheck.spec.dtypes import numpy_dtype

pytestmark = pytest.mark.usefixtures("forked_workers")

TABLES = tables_beside(__file__)
app.load()  # all commands, whichever another test has loaded

PLAIN = "attention/every-dimension-is-different-and-none-is-forgotten"
DRAWN = "softmax/drawn-scores-are-normalised-over-the-last-axis-and-no-other"
ATTENTION = TABLES["attention"]


@pytest.fixture
def bench(tmp_path: Path, load_text: Callable[[str], list[Case]]) -> Bench:
    return Bench(tmp_path, load_text)


def ends_with(code: int, done: Done, said: str = "") -> None:
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


def command_writes(tmp_path: Path, *arguments: str) -> str:
    """Run ``attncheck repro`` and return the script."""
    path = tmp_path / "written.py"
    result = CliRunner().invoke(app, ["repro", *arguments, "--output", str(path)])
    assert result.exit_code == 0, result.output
    return path.read_text(encoding="utf-8")


def test_the_exit_status_and_the_story_say_what_the_harness_said(bench: Bench, tmp_path: Path) -> None:
    case = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"
    for path, options, goes_wrong in (
        (bench.right, ["--no-reduce"], False),
        (bench.wrong, ["--no-reduce"], True),
        (bench.wrong, [], True),
    ):
        text = command_writes(tmp_path, case, f"{path}:attention", *options)
        assert (len(text.splitlines()) <= MAX_LINES) == goes_wrong
        story = ast.get_docstring(ast.parse(text)) or ""
        assert ("Every stage is within its error bound" in story) != goes_wrong
        done = bench.run(text)
        ends_with(goes_wrong, done)
        assert ("WRONG" in done.stdout) == goes_wrong


def test_the_docstring_keeps_a_story_as_it_is_and_no_line_is_endless(bench: Bench) -> None:
    case, numpy = bench.case("attention", ATTENTION.replace("2, 4,", "2, 400,")), find_implementation("numpy")
    told = "A path\\to and \\N, \"quoted\", '''thrice''' and a last \\"
    text = repro_script(case, numpy, "float32", (), told)
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    assert docstring is not None
    assert docstring.endswith(f"\n{told}\n")
    data = text[text.index("import os") : text.index("\ndef ")]
    assert max(map(len, data.splitlines())) <= 200
    assert "key = np.frombuffer(zlib.decompress(" in data
    text = repro_script(case, numpy, "float32", (), 'a """ b\0\x1b')
    assert ast.get_docstring(ast.parse(text), clean=False) == docstring.replace(told, "a ''' b\ufffd\ufffd")


def test_inputs_lie_in_memory_as_the_harness_lays_them(bench: Bench) -> None:
    # Known from what a layout is: (B, H, L, D) = (2, 3, 4, 5) of float32, four bytes each.
    strided, transposed, broadcast = (480, 160, 40, 8), (240, 20, 60, 4), (0, 0, 20, 4)
    text = "def attention(query, key, value):\n    print('strides', query.strides, key.strides, value.strides)\n"
    path = bench.kernel(f"{text}    return query\n")
    for layouts, expected in {
        "{query: strided, key: transposed}": (strided, transposed, (240, 80, 20, 4)),
        "{key: broadcast, value: broadcast}": ((240, 80, 20, 4), broadcast, broadcast),
    }.items():
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
        ends_with(1, bench.reproduce(bench.case("attention", fields), path), f"strides {' '.join(map(str, expected))}")


def test_what_is_no_right_result_at_all_is_wrong_too(bench: Bench) -> None:
    for number, (body, said, in_few_lines) in enumerate(TABLES["no_results"]):
        path = bench.kernel(
            f"def attention(query, key, value, *, is_causal=False):\n    {body}\n", f"kernel{number}.py"
        )
        if said:
            ends_with(1, bench.reproduce(bench.case("attention", ATTENTION), path), said)
        if in_few_lines:
            entry = make_user_entry(Target.parse(f"{path}:attention"), {}, None)
            kernel = Implementation(entry, next(iter(entry.all_modes)))
            text = shortly(bench.case("attention", TABLES["fields"]), kernel, "float32")
            ends_with(1, bench.run(text or ""), in_few_lines)


def test_of_what_no_script_can_show_none_is_written_and_why_is_said(bench: Bench, tmp_path: Path) -> None:
    output = tmp_path / "none.py"
    path = bench.kernel(
        TABLES["restricted"].replace("mask=None, scale=None", "mask=None").replace("if scale is None else scale", "")
    )
    result = CliRunner().invoke(app, ["repro", PLAIN, f"{path}:attention", "--output", str(output)])
    assert "unsupported: takes no scale, which has to be given where the width is padded" in str(result.exception)
    assert not output.exists()
    case = bench.case("attention", ATTENTION)
    with pytest.raises(UsageError, match=r"numpy\.eager declares no float16"):
        repro_script(case, find_implementation("numpy"), "float16", (), "")
    an_object = implementation_of_callable(lambda query, key, value: value, None, "mine")
    with pytest.raises(UsageError, match=r"name it file\.py:function"):
        repro_script(case, an_object, "float32", (), "")
    row = Row(DRAWN, "softmax", "float32", an_object.name, "stage", "weights", "numeric")
    assert write_scripts(select_cases([DRAWN], base=tmp_path).cases, [an_object], [row], tmp_path) == 0
    assert not (tmp_path / "scripts").exists()


@pytest.mark.parametrize(
    ("name", "dtype", "packages"),
    [
        pytest.param("torch.sdpa", "bfloat16", ["ml_dtypes"], marks=pytest.mark.torch),
        pytest.param("tensorflow.keras_attention", "float32", ["ml_dtypes"], marks=pytest.mark.tensorflow),
        pytest.param("jax.jit", "float32", ["ml_dtypes", "scipy"], marks=pytest.mark.jax),
    ],
)
def test_a_script_carries_a_frameworks_code_and_in_bfloat16_says_that_it_needs_ml_dtypes(
    bench: Bench, name: str, dtype: str, packages: list[str]
) -> None:
    text = repro_script(bench.case("attention", ATTENTION), find_implementation(name), dtype, (), "No story.")
    assert ("It needs numpy, torch and ml_dtypes." in text) == (dtype == "bfloat16")
    ends_with(0, bench.run_in_a_process(text, packages), "output is right")


QUERY_AND_KEY = "query: {draw: randn, shape: [2, 3, 4, 5]}\n  key: {draw: randn, shape: [2, 3, 6, 5]}\n"
WITH_VALUE = f"inputs:\n  {QUERY_AND_KEY}  value: {{draw: randn, shape: [2, 3, 6, 7]}}\n"
CAUSAL = f"options: {{is_causal: true}}\n{WITH_VALUE}"


def test_every_function_of_a_module_is_called_and_what_it_returns_is_named(bench: Bench) -> None:
    as_dict = bench.kernel(Path(bench.right).read_text(encoding="utf-8") + "\n\n" + TABLES["as_dict"])
    for operation, fields, stages in TABLES["functions"]:
        case = bench.case(operation, fields)
        for path in [bench.right, *([as_dict] if operation == "attention_gradients" else [])]:
            done = bench.reproduce(case, path)
            ends_with(0, done)
            lines = [line for line in done.stdout.splitlines() if line.endswith("is right")]
            assert lines == [f"{stage} is right" for stage in stages]
        done = bench.reproduce(case, bench.wrong)
        ends_with(1, done)
        assert [line.split()[0] for line in done.stdout.splitlines() if "is WRONG at" in line] == stages


def test_the_script_of_a_function_with_a_signature_calls_it_by_these_words(bench: Bench) -> None:
    words = "q, k, v, cu_seqlens_q, block_table, cu_seqlens_k, causal=False"
    text = f"def kernel({words}):\n    return 0 * v[0, 0, 0] + q[..., :1]"
    (case,) = select_cases(["ragged/more-queries-than-keys-and-a-sequence-without-keys"]).cases
    target = Target.parse(f"{bench.kernel(text)}:kernel", "flash_attn")
    entry = make_user_entry(target, read_target_declarations(load_target(target), "kernel", "flash_attn"), None)
    script = repro_script(case, Implementation(entry, "kernel"), "float32", (), "No story.")
    ends_with(1, bench.run(script, its_own={"attncheck", "ml_dtypes"}), "output is WRONG")


def test_a_convention_is_asked_for_where_the_function_takes_it(bench: Bench) -> None:
    mask = "  mask: {values: [[1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]}\n"
    case = bench.case("attention", f"options: {{empty_rows: uniform}}\n{WITH_VALUE}{mask}")
    for keyword in ("", "empty_rows='zero'", "**options"):
        for fill, code in (("-1e9", 0), ("-np.inf", 1)):
            text = TABLES["uniform"].replace("KEYWORD", keyword).replace("mask, )", "mask)").replace("FILL", fill)
            ends_with(code, bench.reproduce(case, f"{bench.kernel(text)}:attention"))


def test_whatever_the_harness_can_call_the_script_calls(bench: Bench) -> None:
    text, case = Path(bench.right).read_text(encoding="utf-8"), bench.case("attention", CAUSAL)
    path = bench.kernel(text + "\n\n" + TABLES["attributes"])
    targets = [
        f"{path}:{attribute}"
        for attribute in (
            "my_kernel",
            "holder",
            "instance",
            "instance.bound",
            "Kernels.inside",
            "Kernels.inside.attention",
        )
    ]
    bench.kernel("FACTOR = 1\n", "beside_it.py")
    drawing = "from beside_it import FACTOR\nimport random\nimport types\n\nrandom.random(), types.ModuleType\n"
    for name in ("my-kernel 2.py", "random.py", "types.py", "class.py"):
        ends_with(0, bench.reproduce(case, f"{bench.kernel(text + drawing, name)}:attention"), "output is right")
        Path(path).with_name(name).unlink()
    for target in targets:
        ends_with(0, bench.reproduce(case, target), "output is right")


def test_a_module_of_the_working_directory_is_found_from_elsewhere_and_another_file_may_be_named(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "elsewhere" / "of_mine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "fast.py").write_text(Path(bench.right).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "elsewhere")
    case = bench.case("attention", CAUSAL)
    ends_with(0, bench.reproduce(case, "of_mine.fast:attention"), "output is right")
    ends_with(1, bench.reproduce(case, bench.wrong))
    text = (tmp_path / "report.py").read_text(encoding="utf-8")
    assert f"{bench.wrong} (or a file that is named behind the command)" in text
    ends_with(0, bench.run(text, arguments=[bench.right]))


def test_a_script_makes_the_padded_call_and_finds_what_the_harness_found(bench: Bench, tmp_path: Path) -> None:
    for number, (was, instead, says) in enumerate(
        (
            ("return {", "return {", ""),
            ("weights @ value}", "2 * weights @ value}", "output is WRONG"),
            ("scores, -np.inf)", "scores, -3)", "weights gives"),  # masked keys, which were added, have weights
        )
    ):
        path = bench.kernel(TABLES["restricted"].replace(was, instead), f"padded{number}.py")
        kernel = find_implementation(f"{path}:attention")
        text = repro_script(select_cases([PLAIN], base=tmp_path).cases[0], kernel, "float32", (), "No story.")
        for words in ("It makes one call, padded with zero columns (", "scale=", '"weights": KeptElements('):
            assert words in text
        done = bench.run(text)
        ends_with(bool(says), done, says)
        assert "AssertionError" not in done.stderr


def shortly(case: Case, kernel: Implementation, dtype: str) -> str | None:
    """Write the short form, or none where it takes more."""
    with Engine() as engine:
        found = engine.ask(kernel, Question(case, dtype))
    text = repro_script(case, kernel, dtype, found.judgements, "", element=describe_worst_element(found) or "nothing")
    return text if len(text.splitlines()) <= MAX_LINES else None


CALLED = TABLES["of groups"]


def test_a_script_is_short_whatever_signature_and_padding(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bench.kernel(TABLES["called"], "called.py")
    monkeypatch.syspath_prepend(bench.folder)
    monkeypatch.setenv("PYTHONPATH", str(bench.folder))
    monkeypatch.setitem(writing.FRAMEWORK_OF_MODE, ("called", "ARRAYS"), "numpy")
    arrays = {"module": "called", "attribute": "ARRAYS", "package": "numpy"}
    case = bench.case("attention", CALLED)
    for name, differs in TABLES["short"].items():
        if differs is not None:
            row = Library(
                name, function_path=f"called:Attend().{name}", family="keras", family_changes=differs, **arrays
            )
            entry: Any = BackendEntry("called", "", ("numpy",), modes=(row,), default_mode=name)
        else:
            target = Target.parse(f"{path}:{name}")
            entry = make_user_entry(target, read_target_declarations(load_target(target), name), None)
        kernel = Implementation(entry, name)
        with Engine() as engine:
            found = engine.ask(kernel, Question(case, "float32"))
        text = shortly(case, kernel, "float32") or ""
        assert len(text.splitlines()) <= MAX_LINES
        assert "attncheck" not in text, name
        ends_with(1, bench.run(text), describe_worst_element(found).partition(":")[0] + " is WRONG")


# Parts: arrays, code that stands alone, and what stages are compared with

Module = Callable[[str, str], None]

RANDOM = np.random.default_rng(3)
ARRAYS = [
    RANDOM.normal(size=(2, 3, 4)),
    RANDOM.normal(size=(2, 3, 4)).astype(np.float32) * np.float32(1e-39),
    RANDOM.normal(size=(30, 40)).astype(np.float16),
    RANDOM.normal(size=(2, 5)).astype(ml_dtypes.bfloat16),
    RANDOM.normal(size=(40, 50)).astype(ml_dtypes.bfloat16),
    np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e308, 5e-324]),
    np.array([0x7FC00001, 0xFFC00000], np.uint32).view(np.float32),  # two NaNs with a payload
    np.array([[True, False], [False, False]]),
    np.arange(5),
    np.zeros((2, 0, 3), np.float32),
    np.array(0.1),
    RANDOM.normal(size=(4, 6)).T,
    np.frombuffer(RANDOM.bytes(64 * 4), np.float32),
]


NAMES = {"np": np, "ml_dtypes": ml_dtypes, "inf": np.inf, "nan": np.nan, "zlib": zlib, "base64": base64}


def test_an_array_is_written_as_people_write_it_and_read_back_bit_for_bit() -> None:
    for array in ARRAYS:
        text = array_code(array)
        read = eval(text, {**NAMES})
        assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes()), text
        assert read.flags.writeable
    assert array_code(np.array([[0.1, -2]], np.float32)) == "np.array([[0.1, -2.]], np.float32)"
    assert array_code(np.array([True])) == "np.array([True], bool)"
    assert array_code(np.ones((30, 40), np.float32)) == "np.full((30, 40), 1.0, np.float32)"
    # A large one takes less room where it repeats itself.
    text = array_code(np.tile(RANDOM.normal(size=10), 1000))
    assert text.startswith('np.frombuffer(zlib.decompress(base64.b64decode("""\n')
    assert len(text) < 1000


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Write a module that is taken for one of ours."""
    import attncheck

    monkeypatch.setattr(attncheck, "__path__", [*attncheck.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    yield write
    read_module_source.cache_clear()


def names_of(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"SimpleNamespace": SimpleNamespace}
    exec(f"from __future__ import annotations\n{code}", names)
    return names


def test_what_is_used_comes_along_and_the_rest_stays_behind(module: Module) -> None:
    module(
        "first",
        '"""First."""\nimport math\nimport os\n\nBASE = 2\n# Why it is doubled.\nDOUBLE = BASE * 2\n\n\n'
        "def unused():\n    return os.name\n\n\ndef root(number):\n    return math.sqrt(number * DOUBLE)\n",
    )
    module(
        "second",
        '"""Second."""\nfrom attncheck import first as whole\n'
        "from attncheck.first import DOUBLE as TWICE\n"
        "\n\ndef root(number):\n    return whole.root(number) + TWICE\n",
    )
    code = inline_module("attncheck.second", {"root"})
    assert names_of(code)["second"].root(4) == 8.0
    assert "os" not in code.replace("cos", "").split()
    assert "unused" not in code
    assert "# Why it is doubled." in code
    assert "attncheck" not in code
    module("third", "def helper():\n    return 1\n\n\ndef told():\n    return helper()\n")
    both = "from attncheck.third import told\ndef helper():\n    return 2\ndef both():\n    return told(), helper()\n"
    module("fourth", both)
    assert names_of(inline_module("attncheck.fourth", ["both"]))["fourth"].both() == (1, 2), (
        "names of two modules do not meet"
    )


def test_a_module_that_does_more_than_define_is_refused_and_functions_are_copied_as_they_stand(module: Module) -> None:
    for number, statement in enumerate(("print('hello')", "from os import *")):
        module(f"first{number}", f"{statement}\n\n\ndef told():\n    return 1\n")
        with pytest.raises(NotSeparable, match=f"first{number}, line 1"):
            inline_module(f"attncheck.first{number}", ["told"])
    code = copy_functions("attncheck.repro.code", {"are_right"})
    assert code.startswith("from typing import Any\nimport numpy as np\n")
    assert "def judge(" not in code
    assert names_of(code)["are_right"](1.0, 1.0, 0.0, 0.0)


def test_every_mode_of_every_backend_can_be_taken_apart() -> None:
    for entry in ALL_ENTRIES.values():
        for mode in entry.all_modes.values():
            names = {"prepare", "from_numpy", "to_numpy"} if mode.attribute is None else {mode.attribute}
            code = inline_module(mode.module, names)
            compile(code, mode.module, "exec")
            assert "attncheck." not in code


def tokens(queries: int, keys: int, more: str = "") -> str:
    """Return inputs of attention of one head."""
    shapes = {"query": (queries, 4), "key": (keys, 4), "value": (keys, 3)}
    lines = [f"  {name}: {{draw: randn, shape: [1, 1, {rows}, {width}]}}" for name, (rows, width) in shapes.items()]
    return "\n".join(["inputs:", *lines, more])


NAN, LARGE = TABLES["nan"], TABLES["large"]
EMPTY_ROW = "  mask: {values: [[0, 0, 0], [1, 0, 1]]}"
BY_KIND = {
    "plain": tokens(9, 8),
    "causal": f"options: {{is_causal: true}}\n{tokens(9, 8)}",
    "nan": NAN,
    "large": LARGE,
    "many rows": tokens(4100, 65),
    **{
        f"{kind} rows": f"options: {{empty_rows: {kind}}}\n{tokens(2, 3, EMPTY_ROW)}"
        for kind in ("zero", "uniform", "nan")
    },
}


def class_of(dtype: str) -> str:
    return "native" if dtype in ("float64", "float32") else "eager"


def spoiled(truth: Truth, stage: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[Any]:
    """Return a stage whose errors are about as large as the bounds, some of them NaN and infinite."""
    exact, max_error = (
        truth.exact[stage].high,
        truth.bounds.bounds_by_stage(class_of(truth.bounds.dtype))[stage].max_error,
    )
    with np.errstate(all="ignore"):
        near = exact + max_error * random.uniform(-1.5, 1.5, exact.shape)
        near[random.uniform(size=exact.shape) < 0.3] = 0
        near = np.where(random.uniform(size=exact.shape) < 0.3, exact, near)
        odd = random.choice([np.nan, np.inf, -np.inf], exact.shape)
        kept = np.where(random.uniform(size=exact.shape) < 0.1, odd, near)
        if truth.judged_problem.judged_rows is None or kept.shape == shape:
            return kept.astype(numpy_dtype(truth.bounds.dtype))
        whole = np.zeros(shape)
        whole[..., truth.judged_problem.judged_rows, :] = kept
        return whole.astype(numpy_dtype(truth.bounds.dtype))


@pytest.mark.parametrize("fields", BY_KIND)
def test_the_script_finds_wrong_what_the_judge_finds_wrong(bench: Bench, fields: str) -> None:
    for dtype in ("float32", "float16"):
        case = bench.case("attention", f"dtypes: [{dtype}]\n{BY_KIND[fields]}")
        truth = truth_of_case(case, make_inputs(case, dtype))
        random = np.random.default_rng(7)
        found = 0
        for stage in {"scores", "masked", "weights", "output"} & truth.exact.keys():
            shape = case.stage_shapes[stage]
            expected = expected_stage(truth, stage, shape, class_of(dtype))
            for _ in range(5):
                computed = spoiled(truth, stage, shape, random)
                kept = select_stage_rows(stage, computed, truth.judged_problem.judged_rows)
                by_judge = flag_failing_elements(truth.stage_reference(stage, class_of(dtype), kept), kept)
                by_script = are_right(kept.astype(np.float64), expected.exact, expected.allowed, expected.rest)
                np.testing.assert_array_equal(~by_script, by_judge)
                written_down = "\n".join(expected.judge_arguments())
                given = eval(f"dict({written_down}\n)", {**NAMES})
                assert judge(stage, computed, **given) == (not by_judge.any())
                found += int(by_judge.sum())
        assert found or dtype == "float16", "something has to be wrong for this to say anything"
