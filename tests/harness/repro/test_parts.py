"""Parts of scripts: arrays, code that stands alone, and what stages are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from scripts import Bench
from tables import tables_beside

from attncheck.attention.sampling import rows_of_stage
from attncheck.backends import EVERYTHING
from attncheck.dtypes import numpy_dtype
from attncheck.judging.judge_stages import failing_elements
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.repro.code import (
    NotSeparable,
    copied,
    expected_of,
    inlined,
    judge,
    read_module,
    unpack,
    written,
    wrong_elements,
)

pytestmark = pytest.mark.usefixtures("forked_workers")

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
    np.float64(0.1).reshape(()),
    RANDOM.normal(size=(4, 6)).T,
    np.frombuffer(RANDOM.bytes(64 * 4), np.float32),
]


def test_an_array_is_written_as_people_write_it_and_read_back_bit_for_bit() -> None:
    names = {"np": np, "ml_dtypes": ml_dtypes, "inf": np.inf, "nan": np.nan, "unpack": unpack}
    for array in ARRAYS:
        for margin in (0, 8):
            text = written(array, margin)
            read = eval(text, names)
            assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes()), text
            assert max(map(len, text.splitlines())) <= 100
    assert written(np.array([[0.1, -2]], np.float32)) == "np.array([[ 0.1, -2. ]], np.float32)"
    assert written(np.array([True])) == "np.array([ True], bool)"
    # A large one takes lines, and less room where it repeats itself.
    text = written(np.tile(RANDOM.normal(size=10), 1000))
    assert text.startswith('unpack("float64", (10000,), """\n')
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
    read_module.cache_clear()


def run(code: str) -> dict[str, Any]:
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
    code = inlined("attncheck.second", {"root"})
    assert run(code)["second"].root(4) == 8.0
    assert "os" not in code.replace("cos", "").split()
    assert "unused" not in code
    assert "# Why it is doubled." in code
    assert "attncheck" not in code
    module("third", "def helper():\n    return 1\n\n\ndef told():\n    return helper()\n")
    both = "from attncheck.third import told\ndef helper():\n    return 2\ndef both():\n    return told(), helper()\n"
    module("fourth", both)
    assert run(inlined("attncheck.fourth", ["both"]))["fourth"].both() == (1, 2), "names of two modules do not meet"


def test_a_module_that_does_more_than_define_is_refused_and_functions_are_copied_as_they_stand(module: Module) -> None:
    for number, statement in enumerate(("print('hello')", "from os import *")):
        module(f"first{number}", f"{statement}\n\n\ndef told():\n    return 1\n")
        with pytest.raises(NotSeparable, match=f"first{number}, line 1"):
            inlined(f"attncheck.first{number}", ["told"])
    code = copied("attncheck.repro.code", {"unpack"})
    assert code.startswith("import base64\nimport zlib\n")
    assert "def run(" not in code
    assert run(f"Any = None\n{code}")["unpack"]("float64", (0,), "eJwDAAAAAAE=").shape == (0,)


def test_every_mode_of_every_backend_can_be_taken_apart() -> None:
    for entry in EVERYTHING.values():
        for mode in entry.all_modes.values():
            names = {"prepare", "from_numpy", "to_numpy"} if mode.attribute is None else {mode.attribute}
            code = inlined(mode.module, names)
            compile(code, mode.module, "exec")
            assert "attncheck." not in code


def tokens(queries: int, keys: int, more: str = "") -> str:
    """Return inputs of attention of one head."""
    shapes = {"query": (queries, 4), "key": (keys, 4), "value": (keys, 3)}
    lines = [f"  {name}: {{draw: randn, shape: [1, 1, {rows}, {width}]}}" for name, (rows, width) in shapes.items()]
    return "\n".join(["inputs:", *lines, more])


TABLES = tables_beside(__file__)
NAN, LARGE = TABLES["nan"], TABLES["large"]
EMPTY_ROW = "  mask: {values: [[0, 0, 0], [1, 0, 1]]}"
FIELDS = {
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


def truth_of(case: Case, dtype: str) -> Truth:
    return truth_of_case(case, dtype, convert_inputs(case, make_exact_inputs(case), dtype))


def spoiled(truth: Truth, stage: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[Any]:
    """Return a stage whose errors are about as large as the bounds, some of them NaN and infinite."""
    exact, max_error = truth.exact[stage].high, truth.bounds(class_of(truth.dtype))[stage].max_error
    with np.errstate(all="ignore"):
        near = exact + max_error * random.uniform(-1.5, 1.5, exact.shape)
        near[random.uniform(size=exact.shape) < 0.3] = 0
        near = np.where(random.uniform(size=exact.shape) < 0.3, exact, near)
        odd = random.choice([np.nan, np.inf, -np.inf], exact.shape)
        kept = np.where(random.uniform(size=exact.shape) < 0.1, odd, near)
        if truth.query_rows is None or kept.shape == shape:
            return kept.astype(numpy_dtype(truth.dtype))
        whole = np.zeros(shape)
        whole[..., truth.query_rows, :] = kept
        return whole.astype(numpy_dtype(truth.dtype))


@pytest.mark.parametrize("fields", FIELDS)
def test_the_script_finds_wrong_what_the_judge_finds_wrong(bench: Bench, fields: str) -> None:
    for dtype in ("float32", "float16"):
        case = bench.case("attention", f"dtypes: [{dtype}]\n{FIELDS[fields]}")
        truth = truth_of(case, dtype)
        random = np.random.default_rng(7)
        found = 0
        for stage in {"scores", "masked", "weights", "output"} & truth.exact.keys():
            shape = case.stage_shapes[stage]
            expected = expected_of(truth, stage, shape, class_of(dtype))
            for _ in range(5):
                computed = spoiled(truth, stage, shape, random)
                kept = rows_of_stage(stage, computed, truth.query_rows)
                by_judge = failing_elements(truth, stage, kept, class_of(dtype))
                by_script, _, _ = wrong_elements(kept.astype(np.float64), expected)
                np.testing.assert_array_equal(by_script, by_judge)
                is_right, told = judge(computed, expected, dtype)
                assert is_right == (not by_judge.any()), told
                found += int(by_judge.sum())
        assert found or dtype == "float16", "something has to be wrong for this to say anything"


def test_what_is_open_is_right_whatever_it_is(bench: Bench) -> None:
    # Where a mask forbids the key of a query that holds NaN, selection gives -inf and addition NaN.
    case = bench.case("attention", NAN)
    expected = expected_of(truth_of(case, "float32"), "masked", case.stage_shapes["masked"], "native")
    assert expected.exact is not None
    for anything in (np.nan, -np.inf, 3):
        computed = expected.exact.astype(np.float32)
        computed[0, 0, 0, 1] = anything
        assert judge(computed, expected, "float32")[0]
    computed[0, 0, 0, 0] = 3  # NaN is right there, and nothing else
    is_right, told = judge(computed, expected, "float32")
    assert not is_right
    assert "is WRONG at 1 of 6 elements; 1 of 6 numbers have no exact answer\n" in told
    assert "most at [0, 0, 0, 0]: computed 3, exact nan, off by inf" in told
