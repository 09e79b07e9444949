"""Attention by ``mlx.core.fast.scaled_dot_product_attention``, on a CPU.

There it is a composition: the query is scaled and stored before the product, and a boolean mask puts the lowest finite
number in the place of scores. Its string "causal" has the last query at the last key.
https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.fast.scaled_dot_product_attention.html
"""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import Stages, Tensor, Window


def prepare(dtype: str, threads: int) -> None:
    """Compute on the CPU; how many threads it takes is its own affair."""
    mx.set_default_device(mx.cpu)


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {"version": version("mlx"), "device": str(mx.default_device())}


def from_numpy(array: NDArray[Any]) -> Tensor:
    """Copy the array; bfloat16 goes over as its bits."""
    if array.dtype.name == "bfloat16":
        return mx.array(np.ascontiguousarray(array).view(np.uint16)).view(mx.bfloat16)
    if array.dtype == np.float64:
        return mx.array(array, dtype=mx.float64)  # float32 unless it is said
    return mx.array(array)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's numbers as an array."""
    if tensor.dtype == mx.bfloat16:
        import ml_dtypes  # adds bfloat16 to NumPy; mlx neither knows it nor brings it, and the bits are the same

        return np.array(tensor.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(tensor)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
) -> Stages:
    """Attend in one call; what it has no word for is part of the mask."""
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = mx.concatenate([past_key, key], axis=2), mx.concatenate([past_value, value], axis=2)
    lengths = query.shape[2], key.shape[2]
    from_the_end = window == (None, 0) if past else is_causal and window is None
    if from_the_end and lengths[0] + past == lengths[1] and mask is None and bias is None and key_lengths is None:
        return {"output": _call(query, key, value, "causal", sinks, scale)}
    allowed = _may_attend(lengths, past, mask=mask, is_causal=is_causal, window=window, key_lengths=key_lengths)
    return {"output": _call(query, key, value, _merge(allowed, bias), sinks, scale)}


def attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
) -> Stages:
    """Differentiate through the call."""
    given = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks}
    inputs = {name: tensor for name, tensor in given.items() if tensor is not None}
    options: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": scale}
    options |= {"window": window, "key_lengths": key_lengths}

    def output_of(*tensors: Tensor) -> list[Tensor]:
        return [attention(**dict(zip(inputs, tensors, strict=True)), **options)["output"]]

    _, gradients = mx.vjp(output_of, list(inputs.values()), [grad_output])
    return {f"grad_{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}


def _call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | str | None, sinks: Tensor | None, scale: float | None
) -> Tensor:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if query.dtype == mx.float64 and scale != float(np.float32(scale)):
        raise NotImplementedError("mlx holds the scale in float32, and this one is none")
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, mask=mask, sinks=sinks)


def _may_attend(
    lengths: tuple[int, int],
    past: int,
    *,
    mask: Tensor | None,
    is_causal: bool,
    window: Window | None,
    key_lengths: Tensor | None,
) -> Tensor | None:
    """Combine everything that forbids a key: (B, H, Lq, T), or what broadcasts to it."""
    queries, keys = mx.arange(lengths[0])[:, None], mx.arange(lengths[1])
    conditions = [] if mask is None else [mask]
    if is_causal:
        conditions.append(keys <= queries)
    before, after = window or (None, None)
    if before is not None:
        conditions.append(keys >= queries + past - before)
    if after is not None:
        conditions.append(keys <= queries + past + after)
    if key_lengths is not None:
        conditions.append(keys < key_lengths.reshape(-1, 1, 1, 1))
    allowed = None
    for condition in conditions:
        allowed = condition if allowed is None else mx.logical_and(allowed, condition)
    return allowed


def _merge(allowed: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Make the one mask that the call takes: boolean, True = may attend, or added to the scores."""
    if allowed is None or bias is None:
        return bias if allowed is None else allowed
    return mx.where(allowed, bias, mx.array(-math.inf, dtype=bias.dtype))
