"""Small problems of every operation, with every input and option that a step of its own belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.attention.problem import Computation as Canonical
from attncheck.backends import numpy_backend
from attncheck.dtypes import rounded_once
from attncheck.execution.operations import run_operation
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading import lowering
from attncheck.spec import statistics_dtype

Array = NDArray[Any]
Arrays = dict[str, Array]
Options = dict[str, Any]
B, H, HKV, LQ, LK, D, DV = 2, 4, 2, 5, 6, 4, 3
INF = np.inf


@dataclass(frozen=True, eq=False)
class Problem(lowering.Problem):
    """A problem with inputs in float64, counts, masks and codes of 8 bits apart."""

    def stored(self, dtype: str) -> Problem:
        """Return the same with numbers as a dtype stores them."""
        dtypes = {"log_sum_exps": statistics_dtype(dtype)}
        arrays = {
            name: rounded_once(array, dtypes.get(name, dtype)) if array.dtype == np.float64 else array
            for name, array in self.inputs.items()
        }
        return replace(self, inputs=arrays)

    def truth(self, dtype: str = "float64", *, supports_statistics: bool = True) -> Truth:
        """Return what is true of it; its inputs are stored already."""
        return find_truth(self, dtype, supports_statistics=supports_statistics)

    def returned(self) -> Arrays:
        """Return NumPy's stages."""
        called = self.called()
        with np.errstate(all="ignore"):
            return dict(run_operation(numpy_backend, self.operation, called.inputs, called.options))

    def laid_out(self, rows: NDArray[np.intp] | None = None) -> tuple[str, Options, Arrays]:
        """Return the operation, options and inputs of the canonical form, of some query rows or of all."""
        plain = self.lowered().canonical(rows)
        return plain.operation, dict(plain.options), dict(plain.inputs)

    def on_walk(self) -> Canonical:
        """Return what walks over the graph take."""
        return Canonical.of(self.lowered().canonical()).in_float64()


Draw = Callable[..., Array]


def _qkv(n: Draw, heads: int = HKV, keys: int = LK, width: int = D) -> Arrays:
    return {"query": n(B, H, LQ, width), "key": n(B, heads, keys, width), "value": n(B, heads, keys, DV)}


def _layer(n: Draw, *, bias: bool = False, out: bool = True) -> Arrays:
    arrays = {name: n(B, length, 5) for name, length in (("query", LQ), ("key", LK), ("value", LK))}
    widths = (("query", H * D), ("key", HKV * D), ("value", HKV * DV))
    arrays |= {f"{name}_weight": n(5, width) / 2 for name, width in widths}
    arrays |= {f"{name}_bias": n(width) for name, width in widths} if bias else {}
    return arrays | ({"output_weight": n(H * DV, 7), "output_bias": n(7)} if out else {})


def _tables(n: Draw, length: int = 9, pairs: int = D // 2) -> Arrays:
    return {"rotary_cos": n(length, pairs), "rotary_sin": n(length, pairs)}


def _past(n: Draw, past: int = 3) -> Arrays:
    return {"past_key": n(B, HKV, past, D), "past_value": n(B, HKV, past, DV)}


def _codes(n: Draw, dtype: Any) -> Arrays:
    arrays = _qkv(n)
    scales = {"key_scale": np.abs(n(B, HKV, LK)) / 20, "value_scale": np.abs(n(B, HKV, 1)) / 9}
    return {"query": arrays["query"], **{name: (20 * arrays[name]).astype(dtype) for name in ("key", "value")}} | scales


def _latents(n: Draw, width: int = 4) -> Arrays:
    shapes = {"query": (B, H, LQ, width), "latent": (B, LK, 5), "key_projection": (H, 5, width)}
    return {name: n(*shape) for name, shape in {**shapes, "value_projection": (H, 5, DV)}.items()}


def _score(n: Draw, kind: str, *, bias: bool = False) -> Arrays:
    wide = D if kind in ("dot", "cosine") else 3
    arrays = {"query": n(B, 2, LQ, D), "key": n(B, 2, LK, wide)}
    if kind == "general":
        arrays |= {"weight": n(D, wide)} | ({"score_bias": n(2)} if bias else {})
    if kind == "additive":
        arrays |= {"query_weight": n(D, 3), "key_weight": n(wide, 3), "score_vector": n(3)}
        arrays |= {"score_bias": n(3)} if bias else {}
    return arrays


def _parts(n: Draw, *, empty: bool = False) -> Arrays:
    arrays = {"outputs": n(4, B, 2, LQ, DV), "log_sum_exps": 3 * n(4, B, 2, LQ)}
    if empty:
        arrays["log_sum_exps"][1, 0], arrays["outputs"][1, 0] = -INF, 7.0
        arrays["log_sum_exps"][:, 1, 1, 2] = -INF
    return arrays


MASK = np.random.default_rng(1).random((B, 1, LQ, LK)) < 0.6
MASK[..., 0], MASK[0, 0, 2] = True, False
"""Forbids some keys, and a row altogether."""
FORBIDDING = np.random.default_rng(2).random((1, H, LQ, LK)) < 0.15
SINKS = np.array([0.5, -INF, 6.0, -3.0])
GROUPED: Options = {"heads": H, "kv_heads": HKV}


def _bias(n: Draw) -> Array:
    return np.where(FORBIDDING, -INF, n(1, H, LQ, LK))


_MADE: Mapping[str, tuple[str, Options, Callable[[Draw], Arrays]]] = {
    "dot": ("scoring", {"score": "dot", "softcap": 2.0}, lambda n: _score(n, "dot")),
    "scaled dot": ("scoring", {"scale": -0.7}, lambda n: _score(n, "dot")),
    "default scale": ("scoring", {}, lambda n: _score(n, "dot")),
    "general": ("scoring", {"score": "general"}, lambda n: _score(n, "general")),
    "general, bias": ("scoring", {"score": "general"}, lambda n: _score(n, "general", bias=True)),
    "additive": ("scoring", {"score": "additive"}, lambda n: _score(n, "additive")),
    "additive, bias": ("scoring", {"score": "additive"}, lambda n: _score(n, "additive", bias=True)),
    "cosine": ("scoring", {"score": "cosine", "scale": -3.0}, lambda n: _score(n, "cosine")),
    "softmax": ("softmax", {}, lambda n: {"scores": n(B, 2, LQ, LK)}),
    "softmax, empty row": ("softmax", {}, lambda n: {"scores": np.where(MASK & (n(LK) < 9), n(B, 2, LQ, LK), -INF)}),
    "masking": ("masking", {}, lambda n: {"scores": n(B, 1, LQ, LK), "mask": MASK}),
    "masking, bias": ("masking", {}, lambda n: {"scores": n(B, H, LQ, LK), "bias": _bias(n)}),
    "masking, all": (
        "masking",
        {"is_causal": True},
        lambda n: {"scores": n(B, H, LQ, LK), "bias": _bias(n), "mask": MASK},
    ),
    "masking, window": (
        "masking",
        {"window": (1, 2)},
        lambda n: {"scores": n(B, 1, LQ, LK), "key_lengths": np.array([4, 1])},
    ),
    "attention": ("attention", {}, lambda n: _qkv(n)),
    "attention, all": (
        "attention",
        {"softcap": 1.5, "is_causal": True, "scale": -0.4},
        lambda n: {**_qkv(n), "mask": MASK, "bias": _bias(n)},
    ),
    "attention, query mask": (
        "attention",
        {"window": (2, 0)},
        lambda n: {**_qkv(n), "query_mask": np.arange(B * LQ).reshape(B, LQ) % 3 > 0, "key_lengths": np.array([6, 3])},
    ),
    "attention, past": ("attention", {"softcap": 1.5, "window": (2, None)}, lambda n: _qkv(n) | _past(n)),
    "attention, offsets": (
        "attention",
        {"is_causal": True},
        lambda n: {**_qkv(n), **_tables(n), "query_offsets": np.array([1, 3])},
    ),
    "sinks": ("attention", {"softcap": 1.5}, lambda n: {**_qkv(n), "sinks": SINKS, "mask": MASK, "bias": n(H, LQ, 1)}),
    "rotary": ("attention", {}, lambda n: _qkv(n) | _tables(n)),
    "rotary, neighbours": (
        "attention",
        {"rotary_interleaved": True, "is_causal": True},
        lambda n: _qkv(n) | _tables(n, pairs=1) | _past(n) | {"bias": n(1, 1, LQ, LK + 3)},
    ),
    "fill": ("attention", {"mask_fill": -2.5, "softcap": 1.5}, lambda n: {**_qkv(n), "mask": MASK}),
    "general attention": (
        "general_attention",
        {"is_causal": True},
        lambda n: _score(n, "general", bias=True) | {"value": n(B, 2, LK, DV)},
    ),
    "additive attention": (
        "additive_attention",
        {},
        lambda n: _score(n, "additive") | {"value": n(B, 2, LK, DV), "bias": n(LQ, LK)},
    ),
    "cosine attention": (
        "cosine_attention",
        {"scale": -2.0, "mask_fill": -1.0},
        lambda n: _score(n, "cosine") | {"value": n(B, 2, LK, DV), "mask": MASK},
    ),
    "layer": ("multi_head_attention", dict(GROUPED), lambda n: _layer(n)),
    "layer, all": (
        "multi_head_attention",
        {**GROUPED, "is_causal": True, "scale": 0.8},
        lambda n: _layer(n, bias=True) | {"bias": n(1, 1, LQ, LK), "mask": MASK, "sinks": SINKS},
    ),
    "layer, cache": ("multi_head_attention", dict(GROUPED), lambda n: _layer(n, out=False) | _past(n)),
    "layer, rotated cache": (
        "multi_head_attention",
        dict(GROUPED),
        lambda n: _layer(n) | _past(n) | _tables(n) | {"sinks": SINKS},
    ),
    "codes": ("quantized_attention", {}, lambda n: _codes(n, np.int8)),
    "codes of float8": ("quantized_attention", {"is_causal": True}, lambda n: _codes(n, ml_dtypes.float8_e4m3fn)),
    "norms": ("normalized_attention", {"epsilon": 0.01}, lambda n: {**_qkv(n), "query_norm_weight": n(D)}),
    "norms, full": (
        "normalized_attention",
        {"norm": "l2", "norm_over": "full", "epsilon": 0.5, "rotary_interleaved": True},
        lambda n: _qkv(n) | _tables(n) | {"query_norm_weight": n(H * D), "key_norm_weight": n(HKV * D)},
    ),
    "norms, late": (
        "normalized_attention",
        {"norm": "rms", "epsilon": 0.3, "norm_after_rotation": True, "rotary_interleaved": False},
        lambda n: _qkv(n) | _tables(n) | {"key_norm_weight": n(D)},
    ),
    "latents": ("latent_attention", {"is_causal": True}, lambda n: _latents(n)),
    "latents, rotary": (
        "latent_attention",
        {"scale": 0.3},
        lambda n: _latents(n) | {"query_rotary": n(B, H, LQ, 2), "key_rotary": n(B, LK, 2)},
    ),
    "parts": ("merge_states", {}, lambda n: _parts(n)),
    "parts, base 2": ("merge_states", {"lse_base": "2"}, lambda n: _parts(n, empty=True)),
    "gradients": ("attention_gradients", {}, lambda n: {**_qkv(n), "grad_output": n(B, H, LQ, DV)}),
    "gradients, all": (
        "attention_gradients",
        {"softcap": 1.5, "is_causal": True},
        lambda n: {**_qkv(n), "grad_output": n(B, H, LQ, DV), "bias": n(B, 1, LQ, LK), "mask": MASK},
    ),
    "gradients, sinks": (
        "attention_gradients",
        {"scale": 0.7},
        lambda n: {**_qkv(n), "grad_output": n(B, H, LQ, DV), "bias": n(1, H, LQ, 1), "sinks": SINKS},
    ),
    "gradients, rotary": (
        "attention_gradients",
        {"rotary_interleaved": True, "mask_fill": -1.0},
        lambda n: {**_qkv(n), **_tables(n), "grad_output": n(B, H, LQ, DV), "mask": MASK},
    ),
}
NAMES = tuple(_MADE)
FORWARD = tuple(name for name, (operation, *_) in _MADE.items() if operation != "attention_gradients")


def draw(name: str, seed: int = 0, size: float = 1.0) -> Problem:
    """Draw the numbers of a problem."""
    operation, options, made = _MADE[name]
    rng = np.random.default_rng([seed, NAMES.index(name)])
    return Problem(operation, dict(options), made(lambda *shape: size * rng.standard_normal(shape)))


def every(seed: int = 0) -> Iterator[tuple[str, Problem]]:
    """Draw every problem."""
    for name in NAMES:
        yield name, draw(name, seed)
