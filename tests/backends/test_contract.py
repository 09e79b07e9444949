"""What holds of a backend as a whole: names, order, conversion, dtypes, and the order of stages."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import attncheck.backends
from attncheck.backends import BACKENDS
from attncheck.backends.contract import Backend

Run = Callable[..., dict[str, NDArray[Any]]]

RNG = np.random.default_rng(20170612)
QUERY, KEY, VALUE = RNG.normal(size=(2, 3, 4, 6)), RNG.normal(size=(2, 3, 5, 6)), RNG.normal(size=(2, 3, 5, 7))
MASK, BIAS = RNG.random(size=(2, 1, 1, 5)) < 0.7, RNG.normal(size=(1, 3, 4, 1))
MODELS = {"query": RNG.normal(size=(2, 4, 11)), "key": RNG.normal(size=(2, 5, 9)), "value": RNG.normal(size=(2, 5, 10))}
WEIGHTS = {
    "query_weight": RNG.normal(size=(11, 3 * 6)),
    "key_weight": RNG.normal(size=(9, 3 * 6)),
    "value_weight": RNG.normal(size=(10, 3 * 7)),
    "output_weight": RNG.normal(size=(3 * 7, 13)),
}
BIASES = {f"{name}_bias": RNG.normal(size=WEIGHTS[f"{name}_weight"].shape[1]) for name in ("query", "key", "value")}

SCORES = (2, 3, 4, 5)
ATTENTION_SHAPES = {
    "raw_scores": SCORES,
    "scores": SCORES,
    "biased": SCORES,
    "masked": SCORES,
    "weights": SCORES,
    "log_sum_exp": (2, 3, 4),
}


def _functions(tree: ast.AST) -> dict[str, str]:
    """Return each public function's parameters as written, without self and without annotations."""
    found = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
            found[node.name] = ast.unparse(node.args)
    return found


def _module(name: str) -> ast.Module:
    # Read, not imported, so that a framework which is not installed is checked as well.
    return ast.parse((Path(attncheck.backends.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", BACKENDS.values(), ids=BACKENDS.keys())
def test_every_module_has_the_functions_of_the_contract_in_its_order_with_its_parameters(
    entry: attncheck.backends.BackendEntry,
) -> None:
    (contract,) = (node for node in ast.walk(_module("contract")) if isinstance(node, ast.ClassDef))
    wanted, found = _functions(contract), _functions(_module(entry.module.rpartition(".")[2]))
    assert list(found) == list(wanted)
    assert found == wanted


def test_a_backend_describes_itself_in_words_and_names_version_and_device(setting: Any) -> None:
    description = setting.backend.describe()
    assert {"version", "device"} <= set(description)
    assert all(isinstance(value, str) and value for name, value in description.items())


def test_one_thread_is_what_a_backend_reports_after_being_prepared_for_one(setting: Any) -> None:
    assert setting.backend.describe().get("threads", "1") == "1"


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array,
        lambda array: array[:, ::-1, ::-2],
        lambda array: array.swapaxes(0, 2),
        lambda array: np.broadcast_to(array[:, :1], array.shape),
        lambda array: array[:, :, :0],
        lambda array: array[0, 0, 0],
    ],
    ids=["whole", "negative strides", "transposed", "broadcast", "empty", "rank 0"],
)
@pytest.mark.parametrize("boolean", [False, True], ids=["floats", "booleans"])
def test_an_array_comes_back_from_the_framework_with_its_dtype_shape_and_numbers(
    setting: Any, view: Callable[[NDArray[Any]], Any], boolean: bool
) -> None:
    numbers = np.array([0.1, -0.0, np.inf, -np.inf, np.nan, 1e-30, *range(18)], dtype=setting.dtype).reshape(2, 3, 4)
    array = np.asarray(view(numbers > 1 if boolean else numbers))
    back = setting.backend.to_numpy(setting.backend.from_numpy(array))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    np.testing.assert_array_equal(np.signbit(back.astype(setting.dtype)), np.signbit(array.astype(setting.dtype)))


def test_attention_names_its_stages_in_order_with_their_shapes_and_keeps_the_dtype(setting: Any, run: Run) -> None:
    stages = run("attention", QUERY, KEY, VALUE, mask=MASK, bias=BIAS, is_causal=True, scale=0.3)
    shapes = {**ATTENTION_SHAPES, "output": (2, 3, 4, 7)}
    assert [(name, stage.shape) for name, stage in stages.items()] == list(shapes.items())
    assert {stage.dtype for stage in stages.values()} == {setting.dtype}


def test_multi_head_attention_names_its_stages_in_order_and_keeps_the_dtype(setting: Any, run: Run) -> None:
    options = {**WEIGHTS, **BIASES, "output_bias": RNG.normal(size=13), "mask": MASK, "bias": BIAS, "is_causal": True}
    stages = run("multi_head_attention", **MODELS, heads=3, **options)
    shapes = {
        "query": (2, 3, 4, 6),
        "key": (2, 3, 5, 6),
        "value": (2, 3, 5, 7),
        **ATTENTION_SHAPES,
        "context": (2, 3, 4, 7),
        "output": (2, 4, 13),
    }
    assert [(name, stage.shape) for name, stage in stages.items()] == list(shapes.items())
    assert {stage.dtype for stage in stages.values()} == {setting.dtype}


def test_stages_that_nothing_asks_for_are_left_out(run: Run) -> None:
    assert list(run("attention", QUERY, KEY, VALUE)) == ["raw_scores", "scores", "weights", "log_sum_exp", "output"]
    assert run("mask_scores", np.zeros(SCORES)) == {}
    assert list(run("mask_scores", np.zeros(SCORES), bias=BIAS)) == ["biased"]
    assert list(run("mask_scores", np.zeros(SCORES), is_causal=True)) == ["masked"]


@pytest.mark.parametrize(
    "operation", ["dot_scores", "general_scores", "additive_scores", "mask_scores", "softmax"], ids=str
)
def test_every_other_operation_keeps_the_dtype_of_its_inputs(setting: Any, run: Run, operation: str) -> None:
    inputs: dict[str, tuple[NDArray[Any], ...]] = {
        "dot_scores": (QUERY, KEY),
        "general_scores": (QUERY, KEY, np.eye(6)),
        "additive_scores": (QUERY, KEY, np.eye(6), np.eye(6), np.ones(6)),
        "mask_scores": (np.zeros(SCORES),),
        "softmax": (np.zeros(SCORES),),
    }
    options = {
        "mask_scores": {"mask": MASK, "bias": BIAS, "is_causal": True},
        "additive_scores": {"score_bias": np.ones(6)},
    }
    stages = run(operation, *inputs[operation], **options.get(operation, {}))
    assert stages
    assert {stage.dtype for stage in stages.values()} == {setting.dtype}


def test_no_operation_writes_into_the_arrays_that_it_is_given(setting: Any) -> None:
    backend: Backend = setting.backend
    given = [array.astype(setting.dtype) for array in (QUERY, KEY, VALUE, np.broadcast_to(BIAS, SCORES))]
    kept = [array.copy() for array in given]
    query, key, value, bias = (backend.from_numpy(array) for array in given)
    backend.attention(query, key, value, bias=bias, mask=backend.from_numpy(MASK), is_causal=True)
    for array, before in zip(given, kept, strict=True):
        np.testing.assert_array_equal(array, before)
