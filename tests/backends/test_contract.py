"""What holds of a backend as a whole: names, order, conversion, dtypes, and the order of stages."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

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


def _mode_params() -> list[Any]:
    params = []
    for entry in BACKENDS.values():
        for mode in entry.modes:
            marks = [
                getattr(pytest.mark, entry.name),
                pytest.mark.skipif(not entry.is_installed, reason=f"{entry.packages[0]} is not installed"),
            ]
            params.append(pytest.param(entry, mode.name, id=f"{entry.name}.{mode.name}", marks=marks))
    return params


@pytest.mark.parametrize(("entry", "mode"), _mode_params())
def test_every_mode_has_functions_of_the_contract_with_parameters_of_the_contract_in_its_order(
    entry: attncheck.backends.BackendEntry, mode: str
) -> None:
    with mock.patch.dict(os.environ, entry.environment):
        backend = entry.load(mode)
    wanted = {name: signature(function) for name, function in vars(Backend).items() if not name.startswith("_")}
    found = {name: signature(getattr(backend, name)) for name in wanted if hasattr(backend, name)}
    services = {"prepare", "describe", "from_numpy", "to_numpy"}
    assert services < set(found)  # and at least one operation
    for name, own in found.items():
        of_contract = wanted[name].parameters
        assert list(own.parameters) == [each for each in of_contract if each in own.parameters], name
        for parameter in own.parameters.values():
            assert parameter.kind == of_contract[parameter.name].kind, (name, parameter)
            assert (parameter.default is parameter.empty) == (of_contract[parameter.name].default is parameter.empty), (
                name,
                parameter,
            )


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


def test_attention_with_a_softcap_and_grouped_heads_names_its_stages_in_order(setting: Any, run: Run) -> None:
    stages = run("attention", QUERY, KEY[:, :1], VALUE[:, :1], bias=BIAS, softcap=2.0, window=(1, None))
    shapes = {"raw_scores": SCORES, "scores": SCORES, "capped": SCORES, **ATTENTION_SHAPES, "output": (2, 3, 4, 7)}
    assert [(name, stage.shape) for name, stage in stages.items()] == list(shapes.items())
    assert {stage.dtype for stage in stages.values()} == {setting.dtype}


def test_gradients_have_the_shapes_of_what_they_belong_to_and_keep_the_dtype(setting: Any, run: Run) -> None:
    key, value, grad_output = KEY[:, :1], VALUE[:, :1], np.ones((2, 3, 4, 7))
    gradients = run("attention_gradients", QUERY, key, value, grad_output, mask=MASK, bias=BIAS, softcap=2.0)
    shapes = {"grad_query": QUERY.shape, "grad_key": key.shape, "grad_value": value.shape, "grad_bias": BIAS.shape}
    assert [(name, gradient.shape) for name, gradient in gradients.items()] == list(shapes.items())
    assert {gradient.dtype for gradient in gradients.values()} == {setting.dtype}
    without = run("attention_gradients", QUERY, key, value, grad_output)
    assert list(without) == ["grad_query", "grad_key", "grad_value"]


def test_whole_numbers_keep_their_values_and_shape(setting: Any) -> None:
    lengths = np.array([5, 0, 2**31 - 1], dtype=np.int64)
    back = setting.backend.to_numpy(setting.backend.from_numpy(lengths))
    assert np.issubdtype(back.dtype, np.signedinteger)
    np.testing.assert_array_equal(back, lengths)


@pytest.mark.parametrize(
    "operation",
    ["dot_scores", "cosine_scores", "general_scores", "additive_scores", "mask_scores", "softmax"],
    ids=str,
)
def test_every_other_operation_keeps_the_dtype_of_its_inputs(setting: Any, run: Run, operation: str) -> None:
    inputs: dict[str, tuple[NDArray[Any], ...]] = {
        "dot_scores": (QUERY, KEY),
        "cosine_scores": (QUERY, KEY),
        "general_scores": (QUERY, KEY, np.eye(6)),
        "additive_scores": (QUERY, KEY, np.eye(6), np.eye(6), np.ones(6)),
        "mask_scores": (np.zeros(SCORES),),
        "softmax": (np.zeros(SCORES),),
    }
    options = {
        "mask_scores": {
            "mask": MASK,
            "bias": BIAS,
            "is_causal": True,
            "window": (2, None),
            "key_lengths": np.array([5, 3]),
        },
        "additive_scores": {"score_bias": np.ones(6)},
        "cosine_scores": {"scale": 3.0},
        "dot_scores": {"softcap": 3.0},
    }
    stages = run(operation, *inputs[operation], **options.get(operation, {}))
    assert stages
    assert {stage.dtype for stage in stages.values()} == {setting.dtype}


def test_no_operation_writes_into_the_arrays_that_it_is_given(setting: Any) -> None:
    backend: Backend = setting.backend
    given = [array.astype(setting.dtype) for array in (QUERY, KEY, VALUE, np.broadcast_to(BIAS, SCORES))]
    kept = [array.copy() for array in given]
    query, key, value, bias = (backend.from_numpy(array) for array in given)
    options = {"mask": backend.from_numpy(MASK), "is_causal": True, "softcap": 2.0}
    backend.attention(query, key, value, bias=bias, **options)
    backend.attention_gradients(query, key, value, value[:, :, :4], bias=bias, **options)
    for array, before in zip(given, kept, strict=True):
        np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(("entry", "mode"), _mode_params())
def test_a_mode_says_whether_packed_sequences_have_to_become_a_mask(
    entry: attncheck.backends.BackendEntry, mode: str
) -> None:
    with mock.patch.dict(os.environ, entry.environment):
        backend = entry.load(mode)
    lacks = hasattr(backend, "attention") and not hasattr(backend, "packed_attention")
    assert entry.all_modes[mode].folds_sequences == lacks
