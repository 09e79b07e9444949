"""ONNX's backend tests become cases and tests again: what is equal, what is left out, and what is refused."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck import cli
from attncheck.attention.exact_array import Enclosure
from attncheck.backends import LIBRARIES
from attncheck.common.errors import OnnxDataError, OutputError, UsageError
from attncheck.execution.worker import Computed
from attncheck.judging.judge import judge_case
from attncheck.reading.case import Case
from attncheck.reading.selection import select_cases
from attncheck.results.format import Row
from attncheck.spec.verdicts import Verdict

if LIBRARIES["onnx"].is_installed:
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    from attncheck.onnx_data.exporting import round_to_dtype
    from attncheck.onnx_data.files import BackendTest, _make_model, write_test

pytestmark = pytest.mark.onnx
RNG = np.random.default_rng(8068)
EXAMPLES = Path(__file__).parents[3] / "examples"
Array = NDArray[Any]
Judged = Callable[[Case], tuple[Row, ...]]
ORDER = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


def uniform(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.random(shape).astype(dtype)


def attention(
    name: str, inputs: Mapping[str, Array], outputs: tuple[str, ...] = ("Y",), opset: int = 23, **attributes: Any
) -> BackendTest:
    """Make a test whose outputs are those of the evaluator that the standard comes with."""
    given = {each: inputs[each] for each in ORDER if each in inputs}
    unknown = dict.fromkeys(outputs, np.zeros(1, np.float32))
    model = _make_model(BackendTest(name, "Attention", opset, attributes, given, unknown))
    found = ReferenceEvaluator(model).run(list(outputs), dict(given))
    return BackendTest(name, "Attention", opset, attributes, given, dict(zip(outputs, found, strict=True)))


QKV = {"Q": uniform(2, 4, 3, 8), "K": uniform(2, 2, 5, 8), "V": uniform(2, 2, 5, 6)}
MERGED = {"Q": uniform(2, 3, 32), "K": uniform(2, 5, 16), "V": uniform(2, 5, 12)}
PAST = {"past_key": uniform(2, 2, 4, 8), "past_value": uniform(2, 2, 4, 6)}
PRESENT, MATRIX = ("Y", "present_key", "present_value"), ("Y", "qk_matmul_output")
MASK = RNG.random((3, 5)) < 0.6
MASK[0] = False
TESTS: dict[str, tuple[dict[str, Array], tuple[str, ...], int, dict[str, Any]]] = {
    "test_plain": (QKV, ("Y",), 23, {}),
    "test_options": (QKV, MATRIX, 23, {"is_causal": 1, "scale": 0.1, "softcap": 2.0, "qk_matmul_output_mode": 1}),
    "test_boolean_mask": ({**QKV, "attn_mask": MASK}, MATRIX, 23, {"qk_matmul_output_mode": 2}),
    "test_mask_per_head": ({**QKV, "attn_mask": uniform(4, 3, 5)}, MATRIX, 23, {"qk_matmul_output_mode": 3}),
    "test_past": ({**QKV, **PAST}, PRESENT, 23, {"is_causal": 1}),
    "test_3d": ({**MERGED, **PAST, "attn_mask": uniform(3, 9)}, PRESENT, 23, {"q_num_heads": 4, "kv_num_heads": 2}),
    "test_lengths": ({**QKV, "nonpad_kv_seqlen": np.array([3, 5])}, ("Y",), 24, {"is_causal": 1}),
    "test_short_mask": (
        {**QKV, "nonpad_kv_seqlen": np.array([2, 4]), "attn_mask": uniform(3, 4)},
        ("Y",),
        24,
        {"is_causal": 1},
    ),
    "test_window": (QKV, ("Y",), 25, {"left_window_size": 1, "right_window_size": 2}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tests as ONNX writes them, those of softmax with the numbers that NumPy computes."""
    folder = tmp_path_factory.mktemp("node")
    for name, (inputs, outputs, opset, attributes) in TESTS.items():
        write_test(folder / name, attention(name, inputs, outputs, opset, **attributes))
    for axis in (0, 1, -1):
        scores = uniform(2, 3, 4)
        weights = np.exp(scores) / np.exp(scores).sum(axis=axis, keepdims=True)
        name = f"test_softmax_axis_{axis % 3}"
        write_test(
            folder / name, BackendTest(name, "Softmax", 13, {"axis": axis}, {"input": scores}, {"output": weights})
        )
    return folder


@pytest.fixture(scope="module")
def judge_alone(compute: Callable[..., Any]) -> Judged:
    """Judge NumPy in a case, and the case's numbers with it."""

    def judged(case: Case) -> tuple[Row, ...]:
        [dtype] = case.dtypes
        inputs, stages = compute(case, dtype)
        return tuple(judge_case(case, dtype, inputs, {"numpy": Computed(stages)}, {"numpy": "native"}).rows)

    return judged


def run(*words: str) -> str:
    """Run a command; return what it prints."""
    with redirect_stdout(io.StringIO()) as said:
        cli.app(list(words), standalone_mode=False)
    return said.getvalue()


def import_from(folder: Path, output: Path) -> str:
    return run("import", "onnx", str(folder), "--output", str(output))


def tensors(folder: Path) -> dict[str, tuple[bytes, int, tuple[int, ...]]]:
    """The bytes, type and shape of every tensor of a test."""
    read = {path.name: TensorProto.FromString(path.read_bytes()) for path in folder.glob("*/*.pb")}
    return {name: (each.raw_data, each.data_type, tuple(each.dims)) for name, each in read.items()}


def attributes_of(folder: Path) -> dict[str, Any]:
    [node] = onnx.load(folder / "model.onnx").graph.node
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def cases_of(folder: Path) -> dict[str, Case]:
    return {case.id.rpartition("/")[2]: case for case in select_cases([str(folder)]).cases}


def test_tests_come_back_to_the_byte(data: Path, tmp_path: Path) -> None:
    said = import_from(data, tmp_path / "cases")
    assert f"{len(TESTS)} cases: {tmp_path / 'cases' / 'attention.yaml'}" in said
    assert "left out: 1 (test_softmax_axis_0): Softmax is along another axis than the last two" in said
    run("export", "onnx", str(tmp_path / "back"), str(tmp_path / "cases"))
    back = {path.name for path in (tmp_path / "back").iterdir()}
    assert back == {path.name for path in data.iterdir()} - {"test_softmax_axis_0"}
    for name in back:
        assert tensors(tmp_path / "back" / name) == tensors(data / name), name
        onnx.checker.check_model(onnx.load(tmp_path / "back" / name / "model.onnx"))
    for name in TESTS:
        own = attributes_of(tmp_path / "back" / name)
        assert {
            each: value for each, value in own.items() if each != "qk_matmul_output_mode" or value
        } == attributes_of(data / name)


def test_the_cases_are_judged_against_what_the_tests_say(data: Path, tmp_path: Path, judge_alone: Judged) -> None:
    import_from(data, tmp_path / "cases")
    cases = cases_of(tmp_path / "cases")
    assert len(cases) == len(TESTS) + 2
    for case in cases.values():
        rows = judge_alone(case)
        printed = [row for row in rows if row.comparison == "printed"]
        assert len(printed) == sum(int(np.prod(expected.shape)) for expected in case.expected)
        assert {row.verdict for row in rows} == {Verdict.AGREE}


def test_cases_of_the_corpus_are_computed_alike_by_the_standard_s_evaluator(tmp_path: Path) -> None:
    files = (
        "attention",
        "caches",
        "lengths",
        "masks_of_models",
        "probes/masks",
        "probes/scale_and_bias",
        "query_offsets",
        "windows",
    )
    chosen = [f"{name}/*" for name in files]
    said = run("export", "onnx", str(tmp_path), *chosen, "--dtype", "float64", "--no-cache")
    assert "the operator has no sinks" in said
    folders = sorted(tmp_path.iterdir())
    assert len(folders) > 60
    for folder in folders:
        model = onnx.load(folder / "model.onnx")
        given, wanted = (
            _read(folder, kind, len(infos))
            for kind, infos in (("input", model.graph.input), ("output", model.graph.output))
        )
        names = [each.name for each in model.graph.input]
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(model).run(None, dict(zip(names, given, strict=True)))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7, err_msg=folder.name)


def _read(folder: Path, kind: str, number: int) -> list[Array]:
    paths = (folder / "test_data_set_0" / f"{kind}_{each}.pb" for each in range(number))
    return [numpy_helper.to_array(TensorProto.FromString(path.read_bytes())) for path in paths]


def test_what_is_behind_float64_decides_in_the_middle() -> None:
    middle = 1 + 2.0**-8  # between two numbers of bfloat16, the even one below
    for low, radius, wanted in ((0, 0, 1), (1e-20, 1e-30, 1 + 2.0**-7), (-1e-20, 1e-30, 1), (1e-20, 1e-10, 1)):
        exact = Enclosure(*(np.array([each], np.float64) for each in (middle, low, radius)))
        assert float(round_to_dtype(exact, "bfloat16")[0]) == wanted
        negative = Enclosure(*(np.array([each], np.float64) for each in (-middle, -low, radius)))
        assert float(round_to_dtype(negative, "bfloat16")[0]) == -wanted


LEFT_OUT: tuple[tuple[str, str, dict[str, Array], dict[str, Any], int], ...] = (
    ("a softmax_precision that is narrower", "Attention", QKV, {"softmax_precision": 10}, 23),
    ("a case cannot express the attribute dropout", "Attention", QKV, {"dropout": 1}, 23),
    ("the attribute scale is not a number", "Attention", QKV, {"scale": "half"}, 23),
    ("the scale is not positive", "Attention", QKV, {"scale": -1.0}, 23),
    ("the inputs have dtypes float16 and float32", "Attention", {**QKV, "Q": QKV["Q"].astype(np.float16)}, {}, 23),
    ("without q_num_heads", "Attention", MERGED, {}, 23),
    (
        "the node has nonpad_kv_seqlen and a past",
        "Attention",
        {**QKV, **PAST, "nonpad_kv_seqlen": np.array([3, 5])},
        {},
        23,
    ),
    ("one key, which is either", "Attention", {**QKV, "attn_mask": uniform(3, 1)}, {}, 23),
    ("what no case may be: shape 2x2x5x7", "Attention", {**QKV, "K": uniform(2, 2, 5, 7)}, {}, 23),
    ("a row of minus infinity alone", "Softmax", {"input": np.full((2, 3), -np.inf, np.float32)}, {}, 13),
    ("before opset 13", "Softmax", {"input": uniform(2, 3)}, {}, 11),
)


def test_what_no_case_says_is_left_out_with_its_reason(tmp_path: Path, capsys: Any) -> None:
    for number, (reason, operator, inputs, attributes, opset) in enumerate(LEFT_OUT):
        folder, cases = tmp_path / f"data{number}", tmp_path / f"cases{number}"
        outputs = {"output" if operator == "Softmax" else "Y": np.zeros((2, 4, 3, 6), np.float32)}
        write_test(folder / "test_single", BackendTest("test_single", operator, opset, attributes, inputs, outputs))
        with pytest.raises(OnnxDataError, match="none of its tests is a case"):
            cli.app(["import", "onnx", str(folder), "-o", str(cases)], standalone_mode=False)
        said = capsys.readouterr().out
        assert "left out: 1 (test_single): " in said
        assert reason in said
        assert not list(cases.rglob("*.*"))


def external(tensor: Any) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


DAMAGED_TENSORS: list[tuple[Callable[[Any], object], str]] = [
    (external, "are in another file, which attncheck does not read"),
    (lambda tensor: setattr(tensor, "raw_data", tensor.raw_data[:-3]), "is damaged or incomplete"),
    (
        lambda tensor: tensor.dims.__setitem__(slice(None), [2**40, 2**40]),
        "the tensor has shape 1099511627776x1099511627776",
    ),
    (lambda tensor: tensor.dims.__setitem__(0, -2), "the tensor has shape -2x4x3x8"),
    (lambda tensor: setattr(tensor, "data_type", 0), "is not a TensorProto"),
]


DAMAGED_FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "model.onnx").write_bytes(b"\xff" * 99), r"model.onnx is not a ModelProto"),
    (lambda folder: (folder / "model.onnx").write_bytes(b""), r"model.onnx has no node"),
    (lambda folder: (folder / "test_data_set_0" / "input_1.pb").unlink(), r"input_1.pb cannot be read: No such file"),
    (lambda folder: (folder / "test_data_set_0").rename(folder / "data"), r"has no test_data_set_0"),
    (lambda folder: (folder / "model.onnx").unlink(), r"has no ONNX test; expected folders with model.onnx"),
]


def test_a_damaged_tensor_or_folder_is_one_line_with_its_path(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(OnnxDataError, match=message) as error:
            import_from(tmp_path / "data", tmp_path / "cases")
        assert "\n" not in str(error.value)
        assert not list((tmp_path / "cases").rglob("*.*")), "nothing is left of half an import"

    test = attention("test_b", QKV)
    write_test(tmp_path / "data" / "test_a", test)
    path = tmp_path / "data" / "test_b" / "test_data_set_0" / "input_0.pb"
    for change, message in DAMAGED_TENSORS:
        shutil.rmtree(tmp_path / "data" / "test_b", ignore_errors=True)
        write_test(tmp_path / "data" / "test_b", test)
        tensor = TensorProto.FromString(path.read_bytes())
        change(tensor)
        path.write_bytes(tensor.SerializeToString())
        refused(f"{path}.*{message}")
    for damage, message in DAMAGED_FOLDERS:
        shutil.rmtree(tmp_path / "data")
        write_test(tmp_path / "data" / "test_b", test)
        damage(tmp_path / "data" / "test_b")
        refused(f"{tmp_path / 'data'}.*{message}")


def test_nothing_is_overwritten(data: Path, tmp_path: Path) -> None:
    import_from(data / "test_plain", tmp_path / "cases")
    with pytest.raises(OutputError, match=r"test_plain.npz is already there; .* --output"):
        import_from(data / "test_plain", tmp_path / "cases")
    assert len(cases_of(tmp_path / "cases")) == 1
    with pytest.raises(OutputError, match="is already there"):
        run("export", "onnx", str(data), str(tmp_path / "cases"))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    for words in (["import", "onnx", str(tmp_path)], ["export", "onnx", str(tmp_path)]):
        with pytest.raises(UsageError, match=rf"{words[0]} onnx needs the extra onnx: pip install 'attncheck\[onnx\]'"):
            run(*words)


def test_the_standard_s_own_tests_come_back_to_the_byte(tmp_path: Path) -> None:
    script = [sys.executable, "-W", "ignore", str(EXAMPLES / "make_onnx_tests.py"), str(tmp_path / "data"), "Attention"]
    subprocess.run(script, check=True, timeout=600)
    made = {path.name for path in (tmp_path / "data").iterdir() if "_expanded" not in path.name}
    assert len(made) > 60
    said = import_from(tmp_path / "data", tmp_path / "cases")
    assert f"{len(made)} cases: " in said
    assert said.count("\nleft out: ") == said.count("a graph of several nodes") == 1
    run("export", "onnx", str(tmp_path / "back"), str(tmp_path / "cases"))
    assert {path.name for path in (tmp_path / "back").iterdir()} == made
    for name in made:
        assert tensors(tmp_path / "back" / name) == tensors(tmp_path / "data" / name), name
