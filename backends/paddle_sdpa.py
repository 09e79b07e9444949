"""``paddle.nn.functional.scaled_dot_product_attention`` on a CPU, where it is a composition (``_math_attention``).

Causality is from the top left, and a mask beside it is ignored, as its documentation warns. A boolean mask becomes
one of 0 and minus infinity, which is added.
https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle/nn/functional/scaled_dot_product_attention_en.html
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.nn import functional

from attncheck.backends.contract import Stages, Tensor, Window


def prepare(dtype: str, threads: int) -> None:
    """Compute on the CPU; its threads are those of OMP_NUM_THREADS."""
    paddle.set_device("cpu")


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {"version": paddle.__version__, "device": paddle.get_device()}


def from_numpy(array: NDArray[Any]) -> Tensor:
    """Copy the array; bfloat16 goes over as its bits, which is how paddle takes them from NumPy."""
    if array.dtype.name == "bfloat16":
        return paddle.to_tensor(np.ascontiguousarray(array).view(np.uint16), dtype="bfloat16")
    return paddle.to_tensor(np.ascontiguousarray(array))


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's numbers as an array."""
    array: NDArray[Any] = tensor.numpy()
    if tensor.dtype == paddle.bfloat16:
        import ml_dtypes  # adds bfloat16 to NumPy; paddle hands out its bits

        return array.view(ml_dtypes.bfloat16)
    return array


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
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
        key, value = paddle.concat([past_key, key], axis=2), paddle.concat([past_value, value], axis=2)
    rows_first = [each.transpose([0, 2, 1, 3]) for each in (query, key, value)]  # (B, H, L, D) -> (B, L, H, D)
    alone = is_causal and mask is None and bias is None and window is None and key_lengths is None
    lengths = query.shape[2], key.shape[2]
    allowed = None if alone else _may_attend(lengths, past, mask, is_causal, window, key_lengths)
    output = functional.scaled_dot_product_attention(
        *rows_first, attn_mask=_merge(allowed, bias), is_causal=alone, scale=scale
    )
    return {"output": output.transpose([0, 2, 1, 3])}


def attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
) -> Stages:
    """Differentiate through the call."""
    given = {"query": query, "key": key, "value": value, "bias": bias}
    inputs = {name: tensor.detach() for name, tensor in given.items() if tensor is not None}
    for tensor in inputs.values():
        tensor.stop_gradient = False
    options: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": scale}
    output = attention(**inputs, **options, window=window, key_lengths=key_lengths)["output"]
    gradients = paddle.grad([output], list(inputs.values()), [grad_output])
    return {f"grad_{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}


def _may_attend(
    lengths: tuple[int, int],
    past: int,
    mask: Tensor | None,
    is_causal: bool,
    window: Window | None,
    key_lengths: Tensor | None,
) -> Tensor | None:
    """Combine everything that forbids a key: (B, H, Lq, T), or what broadcasts to it."""
    queries, keys = paddle.arange(lengths[0]).unsqueeze(-1), paddle.arange(lengths[1]).unsqueeze(0)
    conditions = [] if mask is None else [mask]
    if is_causal:
        conditions.append(keys <= queries)
    before, after = window or (None, None)
    if before is not None:
        conditions.append(keys >= queries + (past - before))
    if after is not None:
        conditions.append(keys <= queries + (past + after))
    if key_lengths is not None:
        conditions.append(keys < key_lengths.reshape([-1, 1, 1, 1]))
    allowed = None
    for condition in conditions:
        allowed = condition if allowed is None else paddle.logical_and(allowed, condition)
    return allowed


def _merge(allowed: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Make the one mask that the call takes: boolean, True = may attend, or added to the scores."""
    if allowed is None or bias is None:
        return bias if allowed is None else allowed
    return paddle.where(allowed, bias, paddle.full([], -math.inf, dtype=bias.dtype))
