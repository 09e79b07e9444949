"""The Pallas kernels that come with JAX, interpreted: their formulas, their gradients, and what each refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES

PALLAS = LIBRARIES["pallas"]
pytestmark = [pytest.mark.pallas, pytest.mark.skipif(not PALLAS.is_installed, reason="jax is not installed")]

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(24491)


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


def inputs(queries: int, keys: int, heads: int = 2, kv_heads: int = 2, value_width: int = 8) -> dict[str, NDArray[Any]]:
    shapes = {"query": (2, heads, queries, 8), "key": (2, kv_heads, keys, 8), "value": (2, kv_heads, keys, value_width)}
    return {name: normal(*shape) for name, shape in shapes.items()}


LIMITS = np.array([0, 5, 5, 12])
PACKED = {name: array[:1] for name, array in inputs(12, 12).items()} | {"cu_seqlens_q": LIMITS, "cu_seqlens_k": LIMITS}
PAST = {"past_key": normal(2, 2, 128, 8), "past_value": normal(2, 2, 128, 8)}
BIAS = normal(1, 2, 1, 256)
MASK = RNG.random((1, 2, 128, 128)) < 0.7
MASK[..., 0] = True
LENGTHS = np.array([100, 128])
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mha in blocks": ("gpu_mha", inputs(32, 48), {"scale": -0.75}),
    "mha in one block": ("gpu_mha", inputs(3, 5), {}),
    "mha, causal": ("gpu_mha", inputs(48, 48), {"is_causal": True}),
    "flash": ("tpu_flash", inputs(128, 256), {"scale": 0.5}),
    "flash, causal, with lengths": ("tpu_flash", {**inputs(128, 128), "key_lengths": LENGTHS}, {"is_causal": True}),
    "flash with a bias and no scale": ("tpu_flash", {**inputs(128, 256), "bias": BIAS}, {"scale": 1.0}),
    "splash in groups": ("tpu_splash", inputs(128, 256, 4, value_width=16), {"softcap": 2.0}),
    "splash, causal, with lengths": ("tpu_splash", {**inputs(128, 128), "key_lengths": LENGTHS}, {"is_causal": True}),
    "splash, local, with sinks": ("tpu_splash", {**inputs(128, 128), "sinks": normal(2)}, {"window": (3, 1)}),
    "splash, masked": ("tpu_splash", {**inputs(128, 128), "mask": MASK}, {"is_causal": True}),
}
FORWARD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **CALLS,
    "a single query": ("gpu_decode", inputs(1, 48, 4), {}),
    "a single query of a cache": (
        "gpu_decode",
        {**inputs(1, 32, 4), "key_lengths": np.array([7, 32]), "past_key": normal(2, 2, 16, 8)}
        | {"past_value": normal(2, 2, 16, 8)},
        {"window": (4, None)},
    ),
    "splash, local behind a past": ("tpu_splash", {**inputs(128, 128), **PAST}, {"window": (7, 0)}),
}


@pytest.mark.parametrize("call", FORWARD)
def test_the_call_is_the_formula(judge_mode: Judge, call: str) -> None:
    mode, arrays, options = FORWARD[call]
    found = judge_mode(f"pallas.{mode}", "float32", "attention", arrays, options)
    assert set(found.values()) == {"agree"}, found
    assert ("log_sum_exp" in found) == (mode != "tpu_flash")


PAGES = {"query": normal(2, 4, 1, 8), "key_pages": normal(7, 4, 2, 8), "value_pages": normal(7, 4, 2, 8)}
PAGES |= {"block_table": np.array([[5, 0, 3], [6, 1, 2]]), "key_lengths": np.array([12, 6])}


@pytest.mark.parametrize("options", [{}, {"scale": -0.5}, {"softcap": 1.5, "is_causal": True}], ids=str)
def test_pages_out_of_order_are_those_of_their_sequence(judge_mode: Judge, options: dict[str, Any]) -> None:
    assert judge_mode("pallas.gpu_paged", "float32", "paged_attention", PAGES, options) == {"output": "agree"}


def test_what_lies_behind_the_keys_of_a_sequence_shows_where_it_is_nan(judge_mode: Judge) -> None:
    """A weight of 0 times NaN: backends/expected_failures/pallas.yaml."""
    behind = PAGES["value_pages"].copy()
    behind[1, 3] = np.nan  # the eighth key of the second sequence, which has six
    found = judge_mode("pallas.gpu_paged", "float32", "paged_attention", {**PAGES, "value_pages": behind}, {})
    assert found == {"output": "nonfinite"}


@pytest.mark.parametrize("call", CALLS)
def test_its_gradients_are_those_of_the_formula(judge_mode: Judge, call: str) -> None:
    mode, arrays, options = CALLS[call]
    if call == "mha in blocks":
        arrays = inputs(32, 32)
    like_output = normal(*arrays["query"].shape[:3], arrays["value"].shape[3])
    asked = {**arrays, "grad_output": like_output}
    found = judge_mode(f"pallas.{mode}", "float32", "attention_gradients", asked, options)
    assert set(found.values()) == {"agree"}, found
    assert len(found) == 3 + ("bias" in arrays) + ("sinks" in arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("call", ["mha, causal", "flash, causal, with lengths", "splash, local, with sinks"])
def test_it_computes_in_16_bits_as_well(judge_mode: Judge, call: str, dtype: str) -> None:
    mode, arrays, options = CALLS[call]
    assert set(judge_mode(f"pallas.{mode}", dtype, "attention", arrays, options).values()) == {"agree"}


def test_packed_sequences_are_segments(judge_mode: Judge) -> None:
    like_output = {"grad_output": normal(1, 2, 12, 8)}
    for operation, more in (("packed_attention", {}), ("packed_attention_gradients", like_output)):
        found = judge_mode("pallas.gpu_mha", "float32", operation, {**PACKED, **more}, {"is_causal": True})
        assert set(found.values()) == {"agree"}, found


def asked(mode: str, arrays: dict[str, Any], function: str = "attention", **options: Any) -> dict[str, Any]:
    backend: Any = PALLAS.load(mode)
    backend.prepare("float32", 1)
    tensors = {
        name: backend.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)
        for name, array in arrays.items()
    }
    stages: dict[str, Any] = getattr(backend, function)(**tensors, **options)
    return stages


@pytest.mark.parametrize(
    ("mode", "arrays", "reason"),
    [
        ("gpu_mha", inputs(4, 4, 4), "as many heads of keys"),
        ("gpu_mha", inputs(129, 129), "up to 128"),
        ("gpu_mha", inputs(4, 0), "up to 128"),
        ("gpu_decode", inputs(2, 16), "one query"),
        ("gpu_decode", inputs(1, 0), "one key"),
        ("tpu_flash", inputs(128, 128, 4), "as many heads of keys"),
        ("tpu_flash", inputs(0, 128), "one block"),
        ("tpu_splash", inputs(128, 0), "one block"),
        ("tpu_splash", {**inputs(128, 128), "mask": np.stack([MASK[0], ~MASK[0]])}, "one mask for all"),
    ],
)
def test_what_a_kernel_has_not_is_refused(mode: str, arrays: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        asked(mode, arrays)


def test_segments_that_differ_between_queries_and_keys_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="queries and keys alike"):
        asked("gpu_mha", {**PACKED, "cu_seqlens_k": np.array([0, 4, 4, 12])}, "packed_attention")


def test_a_width_that_a_tpu_cannot_lay_out_is_refused() -> None:
    wide = {name: normal(1, 1, 128, 136) for name in ("query", "key", "value")}
    with pytest.raises(NotImplementedError, match="multiples of it"):
        asked("tpu_flash", wide)


@pytest.mark.parametrize(
    ("keys", "options", "start", "end", "parts"),
    [
        (48, {}, None, None, 3),
        (512, {}, None, None, 16),
        (272, {}, None, None, 1),
        (48, {"window": (0, 2)}, 0, 3, 3),
    ],
)
def test_a_window_of_one_query_is_where_its_keys_start_and_end(
    keys: int, options: dict[str, Any], start: int | None, end: int | None, parts: int
) -> None:
    from attncheck.backends import pallas_gpu_decode

    with mock.patch.object(pallas_gpu_decode, "gqa", side_effect=pallas_gpu_decode.gqa) as called:
        asked("gpu_decode", inputs(1, keys), **options)
    handed_over = [None if each is None else int(each) for each in called.call_args.args[3:5]]
    assert (handed_over, called.call_args.kwargs["k_splits"]) == ([start, end], parts)
