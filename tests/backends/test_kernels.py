"""Each library's own facts: which kernel and which mask it is handed, what is compiled once, and what no check sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from modes import asked, needing
from numpy.typing import NDArray

from attncheck import check
from attncheck.backends import ALL_ENTRIES, BACKENDS, Library, numpy_backend
from attncheck.execution.operations import run_operation

Arrays = dict[str, NDArray[Any]]
Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(2205)
TORCH, TENSORFLOW = (BACKENDS[name] for name in ("torch", "tensorflow"))


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4 in 2 groups, Lq 3, Lk 5, D and Dv 6.
INPUTS = {"query": normal(2, 4, 3, 6), "key": normal(2, 2, 5, 6), "value": normal(2, 2, 5, 6)}
PAST = {"past_key": normal(2, 2, 4, 6), "past_value": normal(2, 2, 4, 6)}
SQUARE = {**INPUTS, "query": normal(2, 4, 5, 6)}
GRAD_OUTPUT = {"grad_output": normal(2, 4, 3, 6)}
BIAS = normal(1, 4, 1, 5)
# Three sequences, of which the second has no keys: Lq 3 + 1 + 2, Lk 4 + 0 + 3.
PACKED = {
    **{"query": normal(1, 4, 6, 6), "key": normal(1, 4, 7, 6), "value": normal(1, 4, 7, 4)},
    **{"cu_seqlens_q": np.array([0, 3, 4, 6]), "cu_seqlens_k": np.array([0, 4, 4, 7])},
}


@pytest.mark.torch
def test_each_mode_of_torch_runs_its_kernel() -> None:
    from attncheck.backends import torch_backend, torch_sdpa

    kernels = {}
    for mode in ("sdpa", "sdpa_math", "sdpa_flash"):
        called = TORCH.get_mode(mode)
        assert isinstance(called, Library)
        tensors = {name: torch_backend.from_numpy(array).requires_grad_() for name, array in INPUTS.items()}
        output = getattr(torch_sdpa, called.function_path.partition(":")[2])(**tensors, enable_gqa=True)
        kernels[mode] = "FlashAttention" in output.grad_fn.name()
    assert kernels == {"sdpa": True, "sdpa_math": False, "sdpa_flash": True}


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


CAUSAL: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "plainly": (INPUTS, {}),
    "causal": (INPUTS, {"is_causal": True}),
    "causal as long as the keys": (SQUARE, {"is_causal": True}),
    "causal behind a past": ({**SQUARE, **PAST}, {"window": (None, 0)}),
    "a window": (INPUTS, {"window": (1, 1)}),
}


@pytest.mark.parametrize("library", [needing("mlx"), needing("paddle")])
def test_arrays_go_over_to_a_library_and_come_back(library: str) -> None:
    backend: Any = ALL_ENTRIES[library].load("sdpa")
    backend.prepare("float32", 1)
    for name in ("float64", "float32", "float16", "bfloat16", "int32", "bool"):
        array = np.arange(-4, 8).reshape(3, 4)[:, ::2].astype(getattr(ml_dtypes, name, name))
        back = backend.to_numpy(backend.from_numpy(array))
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


SCALES_IN_FLOAT32 = {
    "mlx.sdpa": "holds its scale in float32",
    "onnxruntime.function": "is a float32",
    "onnx.reference": "is a float32",
}


@pytest.mark.parametrize("name", [needing(name) for name in SCALES_IN_FLOAT32])
def test_a_scale_that_is_no_float32_is_refused_in_float64_by_what_holds_it_in_float32(name: str) -> None:
    library, _, mode = name.partition(".")
    backend: Any = ALL_ENTRIES[library].load(mode)
    tensors = {name: backend.from_numpy(array[..., :4]) for name, array in INPUTS.items()}
    with pytest.raises(NotImplementedError, match=SCALES_IN_FLOAT32[name]):
        backend.attention(**tensors, scale=0.77)
    assert backend.to_numpy(backend.attention(**tensors, scale=0.75)["output"]).dtype == np.float64


@pytest.mark.onnxruntime
def test_a_sink_of_minus_infinity_is_none(judge_mode: Judge) -> None:
    inputs = {"query": normal(2, 4, 5, 16), "key": normal(2, 2, 5, 16), "value": normal(2, 2, 5, 16)}
    inputs["sinks"] = np.array([0.5, -1.0, -np.inf, 2.0])
    found = judge_mode("onnxruntime.group_query_attention", "float32", "attention", inputs, {"is_causal": True})
    assert found == {"output": "agree"}


ALONE = {**INPUTS, "key": normal(2, 4, 5, 6), "value": normal(2, 4, 5, 7)}


@pytest.mark.openvino
def test_a_query_without_a_key_is_nan_and_an_output_stays_as_it_was_when_the_next_call_comes() -> None:
    backend: Any = ALL_ENTRIES["openvino"].load("sdpa")
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
def test_a_window_of_one_query_is_where_its_keys_start_and_end() -> None:
    from attncheck.backends import pallas_gpu

    handed_over = {}
    for keys, window in ((48, None), (512, None), (272, None), (48, (0, 2))):
        inputs = {"query": normal(2, 2, 1, 8), "key": normal(2, 2, keys, 8), "value": normal(2, 2, keys, 8)}
        with mock.patch.object(pallas_gpu, "gqa", side_effect=pallas_gpu.gqa) as called:
            asked("pallas.gpu_decode", "attention", inputs, **({"window": window} if window else {}))
        edges = [None if each is None else int(each) for each in called.call_args.args[3:5]]
        handed_over[keys, window] = (*edges, called.call_args.kwargs["k_splits"])
    assert handed_over == {
        (48, None): (None, None, 3),
        (512, None): (None, None, 16),
        (272, None): (None, None, 1),
        (48, (0, 2)): (0, 3, 3),
    }


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


@pytest.mark.torch
def test_no_keys_give_zeros_and_another_mistake_is_not_taken_for_something_unsupported() -> None:
    none = {name: INPUTS[name][:, :, :0] for name in ("key", "value")}
    inputs = {"query": INPUTS["query"], **none, "bias": BIAS[..., :0]}
    for mode in ("torch.sdpa", "torch.sdpa_math"):
        output = asked(mode, "attention", inputs)["output"]
        np.testing.assert_array_equal(output, np.zeros((2, 4, 3, 6)))
        gradients = asked(mode, "attention_gradients", {**inputs, **GRAD_OUTPUT})
        assert all((gradient == 0).all() for gradient in gradients.values())
    with pytest.raises(RuntimeError) as raised:
        asked("torch.sdpa", "attention", {**INPUTS, "key": normal(2, 2, 5, 5)})
    assert not isinstance(raised.value, NotImplementedError)


@pytest.mark.tensorflow
@pytest.mark.parametrize("mode", ["function", "xla"])
def test_graphs_are_traced_for_new_shapes_alone_and_xla_compiles_them(mode: str) -> None:
    backend: Any = TENSORFLOW.load(mode)
    before = backend.softmax.experimental_get_tracing_count()
    for keys in (3, 3, 5, 3, 5):
        weights = asked(f"tensorflow.{mode}", "softmax", {"scores": np.zeros((1, 1, 1, keys))})["weights"]
        np.testing.assert_allclose(weights, np.full((1, 1, 1, keys), 1 / keys), rtol=2.0**-22, atol=0)
    assert backend.softmax.experimental_get_tracing_count() == before + 2
    scores = backend.from_numpy(np.zeros((1, 1, 2, 3), dtype=np.float32))
    if mode == "xla":
        compiled = backend.softmax.experimental_get_compiler_ir(scores, empty_rows="zero")(stage="hlo")
        assert "HloModule" in compiled
        assert {"xla_flags", "tf_xla_flags", "version", "device"} <= set(backend.describe())
    else:
        with pytest.raises(ValueError, match="jit_compile"):
            backend.softmax.experimental_get_compiler_ir(scores, empty_rows="zero")


LONGER = {"query": normal(2, 4, 5, 16), "key": normal(2, 2, 7, 16), "value": normal(2, 2, 7, 16)}
PAGES = {
    **{"query": normal(2, 4, 3, 4), "key_pages": normal(5, 2, 2, 4), "value_pages": normal(5, 2, 2, 6)},
    **{"block_table": np.array([[3, 0, 99], [4, 1, 2]]), "key_lengths": np.array([4, 5])},
}
SHORT = {**PACKED, "key_lengths": np.array([3, 0, 3])}
ON_PAGES = ("paged_attention", PAGES, {}, "key_pages", np.s_[2, 1])  # the sixth key of a sequence that has five
UNUSED: dict[str, tuple[str, Arrays, dict[str, Any], str, Any]] = {
    "torch.causal_lower_right": ("packed_attention", SHORT, {"is_causal": True}, "key", np.s_[:, :, 3]),
    "onnxruntime.group_query_attention": ("attention", LONGER, {"is_causal": True}, "key", np.s_[:, :, 5:]),
    **dict.fromkeys(("onnxruntime.attention", "onnxruntime.function", "onnx.reference"), ON_PAGES),
}


@pytest.mark.parametrize("name", [needing(name) for name in UNUSED])
def test_what_lies_behind_the_keys_that_are_used_is_not_read(name: str) -> None:
    operation, inputs, options, spoilt, place = UNUSED[name]
    changed = {**inputs, spoilt: inputs[spoilt].copy()}
    changed[spoilt][place] = np.nan
    expected, found = (asked(name, operation, each, **options)["output"] for each in (inputs, changed))
    np.testing.assert_array_equal(found, expected)


WITHOUT_A_KEY = ("torch.flex", "onnxruntime.attention", "onnxruntime.function", "onnx.reference")


@pytest.mark.parametrize("name", [needing(name) for name in WITHOUT_A_KEY])
def test_a_query_without_a_key_gets_zeros(name: str) -> None:
    mask = np.ones((2, 1, 3, 5), dtype=bool)
    mask[1, 0, 2] = False
    found = asked(name, "attention", {**INPUTS, "mask": mask})
    assert (found["output"][1, :, 2] == 0).all()
    assert (found.get("log_sum_exp", np.full((2, 4, 3), -np.inf))[1, :, 2] == -np.inf).all()
    np.testing.assert_allclose(found["output"][0], numpy_backend.attention(**INPUTS)["output"][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("library", [needing("mlx"), needing("paddle")])
def test_a_librarys_own_causality_is_asked_for_where_nothing_else_forbids_a_key(library: str) -> None:
    """MLX counts it from the last key, Paddle from the first."""
    holder = import_module("paddle.nn.functional" if library == "paddle" else "mlx.core.fast")
    kernel, handed_over = holder.scaled_dot_product_attention, {}

    @wraps(kernel)
    def called(*tensors: Any, **words: Any) -> Any:
        handed_over[call] = bool(words.get("is_causal")) or str(words.get("mask")) == "causal"
        return kernel(*tensors, **words)

    for call, (inputs, options) in CAUSAL.items():
        if library == "mlx" or call in ("causal", "a window"):
            with mock.patch.object(holder, "scaled_dot_product_attention", called):
                asked(f"{library}.sdpa", "attention", inputs, **options)
    wanted = {"causal": True, "a window": False}
    if library == "mlx":
        wanted |= {"plainly": False, "causal": False, "causal as long as the keys": True, "causal behind a past": True}
    assert handed_over == wanted


SEGMENTS = {"pallas.gpu_mha": (2, 2, 12, 8, [0, 5, 5, 12]), "transformers.eager": (4, 2, 7, 6, [0, 1, 4, 4, 7])}
"""Heads, heads of keys, lengths, widths, and where sequences end, of which one is empty."""


@pytest.mark.parametrize("name", [needing(name) for name in SEGMENTS])
def test_packed_sequences_are_kept_apart_by_segments_or_positions(name: str, judge_mode: Judge) -> None:
    heads, kv_heads, length, width, ends = SEGMENTS[name]
    inputs = {"query": normal(1, heads, length, width)}
    inputs |= {each: normal(1, kv_heads, length, width) for each in ("key", "value")}
    inputs |= {"cu_seqlens_q": np.array(ends), "cu_seqlens_k": np.array(ends)}
    calls: list[tuple[str, Arrays, dict[str, Any]]] = [("packed_attention", {}, {})]
    if name == "pallas.gpu_mha":
        calls.append(("packed_attention_gradients", {"grad_output": normal(1, heads, length, width)}, {}))
    else:
        calls.append(("packed_attention", {}, {"window": (1, None)}))
    for operation, more, options in calls:
        found = judge_mode(name, "float32", operation, {**inputs, **more}, {"is_causal": True, **options})
        judged = found.values() if name == "pallas.gpu_mha" else [found["output"]]
        assert set(judged) == {"agree"}, found
