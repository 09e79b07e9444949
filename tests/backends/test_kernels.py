"""Each library's own facts: which kernel and which mask it is handed, what is compiled once, and what no check sees."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck import check
from attncheck.backends import BACKENDS, EVERYTHING, PADDED_BY, numpy_backend
from attncheck.backends.contract import Backend
from attncheck.execution.call import Limits
from attncheck.execution.operations import Task, parameters_of, run_operation
from attncheck.execution.runner import Group, GroupRunner
from attncheck.execution.worker import Computed
from attncheck.explain import find_implementation
from attncheck.processors import processor_flags

Arrays = dict[str, NDArray[Any]]
Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(2205)
SERVICES = {"prepare", "describe", "from_numpy", "to_numpy"}
TORCH, TENSORFLOW, JAX = (BACKENDS[name] for name in ("torch", "tensorflow", "jax"))


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4 in 2 groups, Lq 3, Lk 5, D and Dv 6.
INPUTS = {"query": normal(2, 4, 3, 6), "key": normal(2, 2, 5, 6), "value": normal(2, 2, 5, 6)}
PAST = {"past_key": normal(2, 2, 4, 6), "past_value": normal(2, 2, 4, 6)}
SQUARE = {**INPUTS, "query": normal(2, 4, 5, 6)}
GRAD_OUTPUT = {"grad_output": normal(2, 4, 3, 6)}
MASK = np.array([True, True, False, True, True, True, True, True, True, True]).reshape(2, 1, 1, 5)
BIAS = normal(1, 4, 1, 5)
# Three sequences, of which the second has no keys: Lq 3 + 1 + 2, Lk 4 + 0 + 3.
PACKED = {
    **{"query": normal(1, 4, 6, 6), "key": normal(1, 4, 7, 6), "value": normal(1, 4, 7, 4)},
    **{"cu_seqlens_q": np.array([0, 3, 4, 6]), "cu_seqlens_k": np.array([0, 4, 4, 7])},
}


def asked(name: str, operation: str, inputs: Arrays, dtype: str = "float32", **options: Any) -> Arrays:
    """Call a mode's function with arrays in a dtype."""
    framework, _, mode = name.partition(".")
    with mock.patch.dict(os.environ, EVERYTHING[framework].environment_of(mode)):
        backend: Any = EVERYTHING[framework].load(mode)
        backend.prepare(dtype, 1)
        stored = {each: array.astype(dtype) if array.dtype.kind == "f" else array for each, array in inputs.items()}
        stages = getattr(backend, operation)(
            **{each: backend.from_numpy(array) for each, array in stored.items()}, **options
        )
        return {stage: backend.to_numpy(tensor) for stage, tensor in stages.items()}


@pytest.mark.torch
def test_each_mode_of_torch_runs_its_kernel() -> None:
    names = []
    for mode in ("sdpa", "sdpa_math", "sdpa_flash"):
        backend: Any = TORCH.load(mode)
        tensors = {name: backend.from_numpy(array).requires_grad_() for name, array in INPUTS.items()}
        names.append(backend.attention(**tensors)["output"].grad_fn.name())
    assert ["FlashAttention" in name for name in names] == [True, False, True]


@pytest.mark.torch
def test_another_mistake_is_not_taken_for_something_unsupported() -> None:
    with pytest.raises(RuntimeError) as raised:
        asked("torch.sdpa", "attention", {**INPUTS, "key": normal(2, 2, 5, 5)})
    assert not isinstance(raised.value, NotImplementedError)


@pytest.mark.torch
def test_no_keys_give_zeros() -> None:
    none = {name: INPUTS[name][:, :, :0] for name in ("key", "value")}
    inputs = {"query": INPUTS["query"], **none, "bias": BIAS[..., :0]}
    for mode in ("torch.sdpa", "torch.sdpa_math"):
        output = asked(mode, "attention", inputs)["output"]
        np.testing.assert_array_equal(output, np.zeros((2, 4, 3, 6)))
        gradients = asked(mode, "attention_gradients", {**inputs, **GRAD_OUTPUT})
        assert all((gradient == 0).all() for gradient in gradients.values())
        assert gradients["grad_query"].shape == (2, 4, 3, 6)


def self_attention(**more: NDArray[Any]) -> Arrays:
    """Draw words and what projects them to two heads."""
    names = ("query", "key", "value", "output")
    weights = {f"{name}_weight": normal(6, 6) for name in names} | {f"{name}_bias": normal(6) for name in names}
    return dict.fromkeys(names[:3], normal(2, 4, 6)) | weights | more


@pytest.mark.torch
def test_only_the_fast_mode_takes_the_fast_path() -> None:
    import torch

    kernel, calls = torch._native_multi_head_attention, {}
    inputs = self_attention(mask=np.ones((2, 2, 4, 4), dtype=bool), key_lengths=np.array([3, 1]))
    for mode in ("mha", "mha_weights", "mha_fast"):
        with mock.patch.object(torch, "_native_multi_head_attention", wraps=kernel) as fast:
            asked(f"torch.{mode}", "multi_head_attention", inputs, heads=2, is_causal=True)
        calls[mode] = fast.call_count
    assert calls == {"mha": 0, "mha_weights": 0, "mha_fast": 1}


@pytest.mark.torch
def test_a_module_gives_what_is_known_without_a_key(given_without_a_key: Callable[[str, str], dict[str, str]]) -> None:
    """Judged by it in test_calls.py where it is zero; NaN and the others' numbers are seen here."""
    inputs = self_attention(mask=np.array([True, False, True, True]).reshape(1, 1, 4, 1))
    given = {}
    for mode in ("mha", "mha_weights", "mha_fast"):
        output = asked(f"torch.{mode}", "multi_head_attention", inputs, "float64", heads=2)["output"]
        assert np.isfinite(output[:, [0, 2, 3]]).all()
        given[mode] = "nan" if np.isnan(output[:, 1]).all() else "zero"
        if given[mode] == "zero":
            np.testing.assert_array_equal(output[:, 1], np.broadcast_to(inputs["output_bias"], (2, 6)))
        assert given_without_a_key(f"torch.{mode}", "float64") == {"empty_rows": given[mode]}


@pytest.mark.torch
def test_nested_tensors_go_through_one_call_with_a_nested_layout() -> None:
    import torch
    from torch.nn import functional

    seen = []
    original = functional.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.append((query.is_nested, query.layout, query.size(0)))
        return original(query, key, value, **options)

    with mock.patch.object(functional, "scaled_dot_product_attention", spy):
        asked("torch.nested", "packed_attention", PACKED)
    assert seen == [(True, torch.jagged, 3)]


@pytest.mark.torch
def test_keys_behind_those_that_are_used_are_not_read_by_lower_right() -> None:
    inputs = {**PACKED, "key_lengths": np.array([3, 0, 3])}
    spoilt = {**inputs, "key": PACKED["key"].copy()}
    spoilt["key"][:, :, 3] = np.nan
    expected, found = (
        asked("torch.causal_lower_right", "packed_attention", each, is_causal=True)["output"]
        for each in (inputs, spoilt)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.torch
def test_a_query_without_a_key_gets_zeros_from_flex_attention() -> None:
    found = asked("torch.flex", "attention", {**INPUTS, "key_lengths": np.array([3, 0])})
    assert (found["output"][1] == 0).all()
    assert (found["log_sum_exp"][1] == -np.inf).all()


@pytest.fixture
def compiled() -> Iterator[Callable[[str], Any]]:
    """Load a mode of torch.compile, prepared; what ``prepare`` changes is put back."""
    import torch

    threads = torch.get_num_threads()
    kept = {"recompile_limit": 8, "accumulated_recompile_limit": 256, "fail_on_recompile_limit_hit": False}

    def load(mode: str) -> Any:
        backend = TORCH.load(mode)
        backend.prepare("float64", 1)
        return backend

    with torch._dynamo.config.patch(**kept):
        yield load
    torch.set_num_threads(threads)


def run_compiled(backend: Any, operation: str, inputs: dict[str, Any]) -> Arrays:
    """Call a compiled function, and hold its stages against NumPy's, in units of float64."""
    tensors = {
        name: backend.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in inputs.items()
    }
    found = {name: backend.to_numpy(stage) for name, stage in getattr(backend, operation)(**tensors).items()}
    expected = getattr(numpy_backend, operation)(**inputs)
    for stage, array in found.items():
        # Gradients of a weight of at most 7, of 20 sums: a wrong term is off by 1e-2.
        np.testing.assert_allclose(array, expected[stage], rtol=0, atol=7 * 120 * 10 * 2.0**-53, err_msg=stage)
    assert list(found) in (list(expected), ["output"])
    return found


def lengths(queries: int, keys: int, width: int) -> dict[str, Any]:
    """Draw attention with every option; Dv 3. Lengths that are alike are compiled as such."""
    arrays = {
        **{"query": normal(2, 4, queries, width), "key": normal(2, 2, keys, width), "value": normal(2, 2, keys, 3)},
        **{"mask": RNG.random((2, 1, queries, keys)) < 0.7, "bias": normal(1, 4, queries, keys)},
        "key_lengths": np.array([0, keys - 1]),
    }
    return {**arrays, "is_causal": True, "window": (queries // 2, 1), "scale": 0.7, "softcap": 1.5}


@pytest.mark.torch
def test_compiled_stages_are_the_formula_and_never_fall_back_to_eager_code(compiled: Callable[[str], Any]) -> None:
    import torch

    backend = compiled("compile")
    inputs = {name: each for name, each in lengths(5, 6, 7).items() if name not in ("window", "softcap", "key_lengths")}
    assert len(run_compiled(backend, "attention", inputs)) == 7
    tensors = [backend.from_numpy(each.astype(np.float32)) for each in INPUTS.values()]
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        backend.attention(*tensors)


@pytest.mark.torch
def test_gradients_are_compiled_with_every_option_and_once_for_all_lengths(compiled: Callable[[str], Any]) -> None:
    import torch

    backend, counts = compiled("compile"), []
    for queries, keys, width in ((5, 6, 7), (9, 7, 8), (16, 16, 16)):
        inputs = {**lengths(queries, keys, width), "grad_output": normal(2, 4, queries, 3)}
        gradients = run_compiled(backend, "attention_gradients", inputs)
        assert all(np.isfinite(each).all() for each in gradients.values())  # the first batch entry has no key
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.torch
def test_torch_rewrites_what_reads_as_attention(compiled: Callable[[str], Any]) -> None:
    """Otherwise the mode would be that of the eager code once more."""
    import torch
    from torch._dynamo.utils import counters

    alone = {name: np.repeat(array, 4 // array.shape[1], axis=1) for name, array in INPUTS.items()}
    before = counters["inductor"]["fuse_attention"]
    with torch._inductor.config.patch(force_disable_caches=True):
        run_compiled(compiled("compile_output"), "attention", {**alone, "bias": BIAS})
    assert counters["inductor"]["fuse_attention"] == before + 1


@pytest.mark.torch
def test_every_function_of_torch_compile_is_that_of_eager_code_compiled() -> None:
    eager, backend = TORCH.load(), TORCH.load("compile")
    names = {name for name in vars(Backend) if not name.startswith("_") and hasattr(backend, name)} - SERVICES
    assert len(names) > 12
    for name in names - {"attention_gradients"}:
        assert getattr(backend, name)._torchdynamo_orig_callable is getattr(eager, name), name


@pytest.mark.jax
def test_every_operation_of_jax_is_one_compiled_program() -> None:
    import jax

    eager: Any = JAX.load("eager")
    backend: Any = JAX.load("jit")
    operations = set(vars(backend)) - SERVICES
    assert operations == {name for name in vars(Backend) if not name.startswith("_")} - SERVICES
    for name in operations:
        assert isinstance(getattr(backend, name), type(jax.jit(lambda number: number))), name
        assert getattr(backend, name).__wrapped__ is getattr(eager, name)


@pytest.mark.jax
def test_the_softmax_of_jaxs_call_is_computed_in_float32_whatever_the_inputs_are(judge_mode: Judge) -> None:
    """See the review of https://github.com/jax-ml/jax/pull/34112."""
    assert judge_mode("jax.dpa_jit", "float64", "attention", INPUTS, {})["output"] == "numeric"


@pytest.mark.jax
def test_widths_that_differ_are_padded_and_what_requires_shapes_takes_what_pads_to_them(tmp_path: Path) -> None:
    runner: GroupRunner[str] = GroupRunner(Group(find_implementation("jax.dpa_jit"), ("float32",)), Limits(), tmp_path)
    try:
        for narrow, padded in ((("value", "grad_output"), "Dv"), (("query", "key"), "D")):
            given = {name: array.astype(np.float32) for name, array in {**INPUTS, **GRAD_OUTPUT}.items()}
            given |= {name: given[name][..., :5] for name in narrow}
            right = run_operation(numpy_backend, "attention_gradients", given, {})
            outcome = runner.evaluate(Task("attention_gradients", {}, given))
            assert isinstance(outcome, Computed), outcome
            assert outcome.padded == f"zero columns ({padded} 5 to 6)"
            for stage, array in outcome.stages.items():
                np.testing.assert_allclose(array, right[stage], rtol=1e-4, atol=1e-5, err_msg=stage)
    finally:
        runner.close()
    for backend in (JAX.load("dpa"), JAX.load("dpa_jit")):
        for function in (backend.attention, backend.attention_gradients):
            assert parameters_of(function).accepted(PADDED_BY) == PADDED_BY


@pytest.mark.jax
def test_versions_of_jax_that_return_no_log_sum_exp_return_the_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    called = jax.nn.dot_product_attention

    def older(query: Any, key: Any, value: Any, *, mask: Any = None, scale: Any = None, **options: Any) -> Any:
        assert "return_residual" not in options
        return called(query, key, value, mask=mask, scale=scale, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", older)
    stages = asked("jax.dpa", "attention", INPUTS)
    assert list(stages) == ["output"]
    right = run_operation(numpy_backend, "attention", INPUTS, {})["output"]
    np.testing.assert_allclose(stages["output"], right, rtol=1e-4, atol=1e-5)


@pytest.mark.tensorflow
@pytest.mark.parametrize("mode", ["function", "xla"])
def test_graphs_have_eager_codes_parameters_and_are_traced_for_new_shapes_alone(mode: str) -> None:
    eager, backend = TENSORFLOW.load(), TENSORFLOW.load(mode)
    functions = {name: each for name, each in vars(eager).items() if getattr(each, "__module__", "") == eager.__name__}
    operations = [name for name, each in functions.items() if inspect.isfunction(each) and not name.startswith("_")]
    assert "attention_gradients" in operations
    for name in operations:
        own = inspect.signature(getattr(backend, name)).parameters
        assert list(own) == list(inspect.signature(getattr(eager, name)).parameters)
    softmax: Any = backend.softmax
    before = softmax.experimental_get_tracing_count()
    for keys in (3, 3, 5, 3, 5):
        weights = asked(f"tensorflow.{mode}", "softmax", {"scores": np.zeros((1, 1, 1, keys))})["weights"]
        np.testing.assert_allclose(weights, np.full((1, 1, 1, keys), 1 / keys), rtol=2.0**-22, atol=0)
    assert softmax.experimental_get_tracing_count() == before + 2


@pytest.mark.tensorflow
def test_xla_compiles_and_the_plain_graph_does_not() -> None:
    scores = np.zeros((1, 1, 2, 3), dtype=np.float32)
    xla: Any = TENSORFLOW.load("xla")
    graph: Any = TENSORFLOW.load("function")
    compiled = xla.softmax.experimental_get_compiler_ir(xla.from_numpy(scores), empty_rows="zero")(stage="hlo")
    assert "HloModule" in compiled
    with pytest.raises(ValueError, match="jit_compile"):
        graph.softmax.experimental_get_compiler_ir(graph.from_numpy(scores), empty_rows="zero")
    assert {"xla_flags", "tf_xla_flags", "version", "device"} <= set(xla.describe())


# Two heads; models 6, 3 and 8 wide, projected to D 4 and Dv 7, and to 9 at the end.
MODELS = {"query": normal(2, 3, 6), "key": normal(2, 5, 3), "value": normal(2, 5, 8)}
WEIGHTS = {
    **{"query_weight": normal(6, 8), "key_weight": normal(3, 8), "value_weight": normal(8, 14)},
    "output_weight": normal(14, 9),
}


def keras_output(weights: Arrays, **options: Any) -> NDArray[Any]:
    return asked("tensorflow.keras_mha", "multi_head_attention", {**MODELS, **weights}, heads=2, **options)["output"]


@pytest.mark.tensorflow
def test_a_layer_that_is_used_again_takes_the_weights_and_biases_of_its_call() -> None:
    other = {name: weight[::-1, ::-1].copy() for name, weight in WEIGHTS.items()}
    biased = {**WEIGHTS, "key_bias": normal(8), "output_bias": normal(9)}
    first, second = keras_output(biased), keras_output({**other, "value_bias": normal(14)})
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(keras_output(biased), first)


@pytest.mark.tensorflow
def test_windows_are_refused_by_a_keras_that_has_none_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    build_layer: Any = import_module(TENSORFLOW.mode_named("keras_mha").module)._build_layer
    import keras

    class Older(keras.layers.MultiHeadAttention):  # type: ignore[misc] # untyped
        """The layer's signature of Keras 3.6, which takes any keyword and refuses those that it does not know."""

        def __init__(self, num_heads: int, key_dim: int, **options: Any) -> None:
            assert "sliding_window" not in options
            super().__init__(num_heads, key_dim, **options)

    plain = keras_output(WEIGHTS)
    monkeypatch.setattr(keras.layers, "MultiHeadAttention", Older)
    build_layer.cache_clear()
    np.testing.assert_array_equal(keras_output(WEIGHTS), plain)
    with pytest.raises(NotImplementedError, match="has no windows"):
        keras_output(WEIGHTS, window=(1, 0))
    build_layer.cache_clear()


@pytest.mark.tensorflow
def test_keras_says_which_framework_it_computes_with_and_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.dict(os.environ, TENSORFLOW.environment):
        backend: Any = TENSORFLOW.load("keras_dpa")
    description = backend.describe()
    assert description["keras_backend"] == "tensorflow"
    assert {"version", "device", "keras"} <= set(description)
    import keras

    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="computes with jax, expected tensorflow: set KERAS_BACKEND=tensorflow"):
        backend.prepare("float32", 1)


@pytest.mark.keras
def test_keras_on_jax_is_right_wherever_it_is_judged() -> None:
    """``attncheck check`` judges it on PyTorch, its default mode."""
    pytest.importorskip("jax")
    result = check("keras.jax_dpa", cases=["attention", "scoring", "grouped_heads"], dtypes=["float32", "bfloat16"])
    assert result.agrees, result.explain()
    assert result.judged >= 5


def test_each_backend_of_keras_is_configured_by_its_environment() -> None:
    modes = EVERYTHING["keras"].all_modes
    configured = {name: mode.environment["KERAS_BACKEND"] for name, mode in modes.items()}
    assert configured == {"torch_dpa": "torch", "jax_dpa": "jax"}
    assert all(mode.own_process for mode in modes.values())


CAUSAL: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "plainly": (INPUTS, {}),
    "causal": (INPUTS, {"is_causal": True}),
    "causal as long as the keys": (SQUARE, {"is_causal": True}),
    "causal behind a past": ({**SQUARE, **PAST}, {"window": (None, 0)}),
    "a window": (INPUTS, {"window": (1, 1)}),
}


@pytest.mark.mlx
def test_mlxs_own_causality_is_asked_for_where_the_last_query_stands_at_the_last_key() -> None:
    import mlx.core as mx

    kernel, handed_over = mx.fast.scaled_dot_product_attention, {}
    for call, (inputs, options) in CAUSAL.items():
        backend: Any = EVERYTHING["mlx"].load("sdpa")
        with mock.patch.object(mx.fast, "scaled_dot_product_attention", side_effect=kernel) as called:
            run_operation(backend, "attention", inputs, options)
        mask = called.call_args.kwargs["mask"]
        handed_over[call] = "array" if isinstance(mask, mx.array) else str(mask)
    assert handed_over == {
        "plainly": "None",
        "causal": "array",
        "causal as long as the keys": "causal",
        "causal behind a past": "causal",
        "a window": "array",
    }


@pytest.mark.mlx
def test_a_row_without_a_key_is_uniform_under_a_boolean_mask_of_mlx_and_nan_under_one_that_is_added() -> None:
    mask = np.ones((2, 1, 3, 5), dtype=bool)
    mask[1, 0, 2] = False
    value = INPUTS["value"].astype(np.float32).mean(axis=2).repeat(2, axis=1)
    found = asked("mlx.sdpa", "attention", {**INPUTS, "mask": mask})["output"]
    np.testing.assert_allclose(found[1, :, 2], value[1], rtol=0, atol=1e-6)
    assert np.isnan(asked("mlx.sdpa", "attention", {**INPUTS, "mask": mask, "bias": BIAS})["output"][1, :, 2]).all()


@pytest.mark.mlx
def test_a_scale_that_is_no_float32_is_refused_by_mlx_in_float64() -> None:
    backend: Any = EVERYTHING["mlx"].load("sdpa")
    tensors = {name: backend.from_numpy(array[..., :4]) for name, array in INPUTS.items()}
    with pytest.raises(NotImplementedError, match="holds the scale in float32"):
        backend.attention(**tensors, scale=0.77)
    assert backend.to_numpy(backend.attention(**tensors)["output"]).dtype == np.float64


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("mlx", "paddle")]
)
def test_arrays_go_over_to_a_library_and_come_back(library: str) -> None:
    backend: Any = EVERYTHING[library].load("sdpa")
    backend.prepare("float32", 1)
    for name in ("float64", "float32", "float16", "bfloat16", "int32", "bool"):
        array = np.arange(-4, 8).reshape(3, 4)[:, ::2].astype(getattr(ml_dtypes, name, name))
        back = backend.to_numpy(backend.from_numpy(array))
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


@pytest.mark.paddle
def test_paddles_own_causality_is_asked_for_where_nothing_else_forbids_a_key() -> None:
    backend: Any = EVERYTHING["paddle"].load("sdpa")
    kernel, handed_over = backend.functional.scaled_dot_product_attention, {}
    for call in ("causal", "a window"):
        with mock.patch.object(backend.functional, "scaled_dot_product_attention", side_effect=kernel) as called:
            asked("paddle.sdpa", "attention", CAUSAL[call][0], **CAUSAL[call][1])
        given = called.call_args.kwargs
        handed_over[call] = (given["is_causal"], given["attn_mask"] is not None)
    assert handed_over == {"causal": (True, False), "a window": (False, True)}


def of_onnx(*names: str) -> Any:
    params = [pytest.param(name, marks=getattr(pytest.mark, name.partition(".")[0])) for name in names]
    return pytest.mark.parametrize("name", params)


@of_onnx("onnxruntime.attention", "onnxruntime.function", "onnx.reference")
def test_a_query_without_a_key_gets_zeros_and_what_lies_behind_the_keys_of_a_page_is_not_read(name: str) -> None:
    mask = np.ones((2, 1, 3, 5), dtype=bool)
    mask[1, 0, 2] = False
    output = asked(name, "attention", {**INPUTS, "mask": mask})["output"]
    assert (output[1, :, 2] == 0).all()
    np.testing.assert_allclose(output[0], numpy_backend.attention(**INPUTS)["output"][0], rtol=0, atol=1e-5)
    pages = {
        **{"query": normal(2, 4, 3, 4), "key_pages": normal(5, 2, 2, 4), "value_pages": normal(5, 2, 2, 6)},
        **{"block_table": np.array([[3, 0, 99], [4, 1, 2]]), "key_lengths": np.array([4, 5])},
    }
    spoilt = {**pages, "key_pages": pages["key_pages"].copy()}
    spoilt["key_pages"][2, 1] = np.nan  # the sixth key of the second sequence, of which five are used
    expected, found = (asked(name, "paged_attention", each)["output"] for each in (pages, spoilt))
    np.testing.assert_array_equal(found, expected)


@of_onnx("onnxruntime.function", "onnx.reference")
def test_an_attribute_that_is_no_float32_is_refused_in_float64(name: str) -> None:
    library, _, mode = name.partition(".")
    backend: Any = EVERYTHING[library].load(mode)
    with pytest.raises(NotImplementedError, match="is a float32"):
        backend.attention(**INPUTS, scale=0.77)
    assert backend.attention(**INPUTS, scale=0.75)["output"].dtype == np.float64


@pytest.mark.onnxruntime
def test_what_a_cache_holds_behind_its_last_key_is_not_read() -> None:
    name = "onnxruntime.group_query_attention"
    longer = {"query": normal(2, 4, 5, 16), "key": normal(2, 2, 7, 16), "value": normal(2, 2, 7, 16)}
    spoilt = {**longer, "key": longer["key"].copy()}
    spoilt["key"][:, :, 5:] = np.nan
    expected, found = (asked(name, "attention", each, is_causal=True)["output"] for each in (longer, spoilt))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.onnxruntime
def test_a_sink_of_minus_infinity_is_none(judge_mode: Judge) -> None:
    inputs = {"query": normal(2, 4, 5, 16), "key": normal(2, 2, 5, 16), "value": normal(2, 2, 5, 16)}
    inputs["sinks"] = np.array([0.5, -1.0, -np.inf, 2.0])
    found = judge_mode("onnxruntime.group_query_attention", "float32", "attention", inputs, {"is_causal": True})
    assert found == {"output": "agree"}


ALONE = {**INPUTS, "key": normal(2, 4, 5, 6), "value": normal(2, 4, 5, 7)}


@pytest.mark.openvino
def test_without_a_hint_the_processor_decides_what_openvino_computes_float32_in(judge_mode: Judge) -> None:
    flags = processor_flags()
    assert flags is not None
    found = judge_mode("openvino.default", "float32", "attention", ALONE, {})
    assert found == {"output": "numeric" if "avx512_bf16" in flags else "agree"}


@pytest.mark.openvino
def test_a_query_without_a_key_is_nan_and_an_output_stays_as_it_was_when_the_next_call_comes() -> None:
    backend: Any = EVERYTHING["openvino"].load("sdpa")
    backend.prepare("float32", 1)
    arrays = {name: array.astype(np.float32) for name, array in ALONE.items()}
    mask = np.ones((2, 1, 3, 5), dtype=bool)
    mask[1, 0, 2] = False
    first = backend.attention(**arrays, mask=mask)["output"]
    kept = first.copy()
    assert np.isnan(first[1, :, 2]).all()
    assert np.isfinite(np.delete(first[1], 2, axis=1)).all()
    assert np.isfinite(first[0]).all()
    backend.attention(**{**arrays, "value": arrays["value"] + 1}, mask=mask)
    np.testing.assert_array_equal(first, kept)


@pytest.mark.pallas
def test_what_lies_behind_the_keys_of_a_sequence_shows_where_it_is_nan(judge_mode: Judge) -> None:
    """A weight of 0 times NaN: backends/expected_failures/pallas.yaml."""
    pages = {
        **{"query": normal(2, 4, 1, 8), "key_pages": normal(7, 4, 2, 8), "value_pages": normal(7, 4, 2, 8)},
        **{"block_table": np.array([[5, 0, 3], [6, 1, 2]]), "key_lengths": np.array([12, 6])},
    }
    pages["value_pages"][1, 3] = np.nan  # the eighth key of the second sequence, which has six
    assert judge_mode("pallas.gpu_paged", "float32", "paged_attention", pages, {}) == {"output": "nonfinite"}


@pytest.mark.pallas
def test_packed_sequences_are_segments(judge_mode: Judge) -> None:
    ends = np.array([0, 5, 5, 12])
    inputs = {name: normal(1, 2, 12, 8) for name in ("query", "key", "value")}
    inputs |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    more = {"packed_attention": {}, "packed_attention_gradients": {"grad_output": normal(1, 2, 12, 8)}}
    for operation, arrays in more.items():
        found = judge_mode("pallas.gpu_mha", "float32", operation, {**inputs, **arrays}, {"is_causal": True})
        assert set(found.values()) == {"agree"}, found


@pytest.mark.pallas
def test_a_window_of_one_query_is_where_its_keys_start_and_end() -> None:
    from attncheck.backends import pallas_gpu_decode

    handed_over = {}
    for keys, window in ((48, None), (512, None), (272, None), (48, (0, 2))):
        inputs = {"query": normal(2, 2, 1, 8), "key": normal(2, 2, keys, 8), "value": normal(2, 2, keys, 8)}
        with mock.patch.object(pallas_gpu_decode, "gqa", side_effect=pallas_gpu_decode.gqa) as called:
            asked("pallas.gpu_decode", "attention", inputs, **({"window": window} if window else {}))
        edges = [None if each is None else int(each) for each in called.call_args.args[3:5]]
        handed_over[keys, window] = (*edges, called.call_args.kwargs["k_splits"])
    assert handed_over == {
        (48, None): (None, None, 3),
        (512, None): (None, None, 16),
        (272, None): (None, None, 1),
        (48, (0, 2)): (0, 3, 3),
    }


@pytest.mark.flax
def test_flax_has_no_scale() -> None:
    assert "scale" not in EVERYTHING["flax"].load("dpa").attention.__annotations__


PLACES = np.arange(8, 12)[:, np.newaxis], np.arange(12)
CHUNKS = ((PLACES[1] <= PLACES[0]) & (PLACES[1] // 5 == PLACES[0] // 5))[np.newaxis, np.newaxis]


@pytest.mark.transformers
def test_flex_attention_of_transformers_is_the_formula_where_nothing_is_compiled(judge_mode: Judge) -> None:
    dynamo: Any = pytest.importorskip("torch._dynamo")
    self_attention = {"query": normal(2, 4, 4, 6), "key": normal(2, 2, 4, 6), "value": normal(2, 2, 4, 7)}
    past = {"past_key": normal(2, 2, 8, 6), "past_value": normal(2, 2, 8, 7)}
    alone = {**self_attention, "key": normal(2, 4, 4, 6), "value": normal(2, 4, 4, 7), "bias": normal(1, 4, 1, 4)}
    calls: list[tuple[Arrays, dict[str, Any]]] = [
        (self_attention, {"is_causal": True}),
        ({**self_attention, **past}, {"window": (2, 0)}),
        ({**self_attention, **past, "mask": CHUNKS}, {}),
        (alone, {"is_causal": True}),
        ({**INPUTS, "key_lengths": np.array([3, 5])}, {"is_causal": True}),
    ]
    with dynamo.config.patch(disable=True):
        for inputs, options in calls:
            assert judge_mode("transformers.flex", "float32", "attention", inputs, options) == {"output": "agree"}


@pytest.mark.transformers
def test_positions_that_begin_anew_keep_sequences_apart(judge_mode: Judge) -> None:
    ends = np.array([0, 1, 4, 4, 7])
    inputs = {"query": normal(1, 4, 7, 6), "key": normal(1, 2, 7, 6), "value": normal(1, 2, 7, 7)}
    inputs |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    for options in ({"is_causal": True}, {"is_causal": True, "window": (1, None)}):
        found = judge_mode("transformers.eager", "float32", "packed_attention", inputs, options)
        assert found["output"] == "agree"


@pytest.mark.transformers
def test_windows_are_counted_and_masks_of_models_are_found_in_numbers() -> None:
    import torch

    from attncheck.backends.transformers_attention import pattern_in, pattern_of

    asked_for = {
        (False, None): ("bidirectional", None),
        (True, None): ("causal", None),
        (False, (None, 0)): ("causal", None),
        (False, (2, 0)): ("sliding", 3),  # with its own key
        (True, (2, 5)): ("sliding", 3),
        (False, (2, 2)): ("bidirectional_sliding", 2),  # without it
    }
    for (is_causal, window), wanted in asked_for.items():
        found = pattern_of(is_causal, window)
        assert (found.name, found.size) == wanted
    chunks = pattern_in(torch.from_numpy(CHUNKS), 8)
    assert chunks is not None
    assert (chunks.name, chunks.size) == ("chunked", 5)
    image_mask = np.tril(np.ones((4, 4), dtype=bool))
    image_mask[1:3, 1:3] = True
    image = pattern_in(torch.from_numpy(image_mask[np.newaxis, np.newaxis]), 0)
    assert image is not None
    assert image.blocks is not None
    assert image.blocks.tolist() == [[-1, 0, 0, -1]]
    other = RNG.random((1, 1, 4, 12)) < 0.7
    other[..., :2] = True, False
    assert pattern_in(torch.from_numpy(other), 8) is None
