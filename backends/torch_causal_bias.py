"""scaled_dot_product_attention with ``torch.nn.attention.bias``: causal_upper_left and causal_lower_right.

Both take the place of the mask, so that nothing else can forbid a key; lower right is what a query behind a cache, and
sequences that end together, ask for. https://docs.pytorch.org/docs/stable/nn.attention.bias.html
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from attncheck.backends.contract import Stages, Window
from attncheck.backends.torch_backend import describe, from_numpy, prepare, to_numpy
from attncheck.backends.torch_common import differentiate

_UP_TO_ITSELF: Window = (None, 0)
"""The window of a query that attends to all keys up to its own position: causality, counted behind a past."""


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: CausalBias, scale: float | None) -> Tensor:
    grouped = query.size(1) != key.size(1)
    output: Tensor = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=causal, scale=scale, enable_gqa=grouped
    )
    return output


def _lower_right(queries: int, keys: int) -> CausalBias:
    with warnings.catch_warnings():
        # More queries than keys give NaN, it says; queries without a key get zeros since pytorch/pytorch#133882.
        warnings.filterwarnings("ignore", message="Lower right causal bias will produce NaNs")
        return causal_lower_right(queries, keys)


def _attention_from_upper_left(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Stages:
    """Attend where query i may attend to keys up to i."""
    if not is_causal:
        raise NotImplementedError("causal_upper_left is causal")
    return {"output": _attend(query, key, value, causal_upper_left(query.size(2), key.size(2)), scale)}


def _gradients_from_upper_left(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Differentiate the call by autograd."""
    inputs, options = {"query": query, "key": key, "value": value}, {"is_causal": is_causal, "scale": scale}
    return differentiate(_attention_from_upper_left, inputs, grad_output, options)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
) -> Stages:
    """Attend where the last query stands at the last key: as many queries as keys, or a past in front of them."""
    if not (is_causal and window is None) and (is_causal or window != _UP_TO_ITSELF):
        raise NotImplementedError("causal_lower_right is causal, and has no other window")
    if query.size(2) != key.size(2):
        raise NotImplementedError("causal_lower_right aligns the last query with the last key")
    if past_key is not None and past_value is not None:
        key, value = torch.cat((past_key, key), dim=-2), torch.cat((past_value, value), dim=-2)
    return {"output": _attend(query, key, value, _lower_right(query.size(2), key.size(2)), scale)}


def attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
) -> Stages:
    """Differentiate the call by autograd."""
    inputs = {"query": query, "key": key, "value": value}
    options = {"is_causal": is_causal, "scale": scale, "window": window}
    return differentiate(attention, inputs, grad_output, options)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Attend within one sequence after the other, each with a bias for its lengths."""
    if not is_causal:
        raise NotImplementedError("causal_lower_right is causal")
    parts = list(_sequences(query, key, value, cu_seqlens_q, cu_seqlens_k, key_lengths))
    outputs = [_attend(*own, _lower_right(own[0].size(2), own[1].size(2)), scale) for own in parts]
    return {"output": torch.cat(outputs, dim=2)}


def packed_attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    grad_output: Tensor,
    *,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Differentiate the calls by autograd."""
    inputs = {"query": query, "key": key, "value": value}
    options: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "key_lengths": key_lengths}
    options |= {"is_causal": is_causal, "scale": scale}
    return differentiate(packed_attention, inputs, grad_output, options)


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, key_lengths: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the queries of each sequence, and those of its keys and values that are used."""
    queries = query.tensor_split(cu_seqlens_q[1:-1].tolist(), dim=2)
    keys, values = (each.tensor_split(cu_seqlens_k[1:-1].tolist(), dim=2) for each in (key, value))
    used = [each.size(2) for each in keys] if key_lengths is None else key_lengths.tolist()
    for own_query, own_key, own_value, length in zip(queries, keys, values, used, strict=True):
        yield own_query, own_key[:, :, :length], own_value[:, :, :length]


_COMMON: dict[str, Any] = {
    "prepare": prepare,
    "describe": describe,
    "from_numpy": from_numpy,
    "to_numpy": to_numpy,
}
UPPER_LEFT = SimpleNamespace(
    **_COMMON, attention=_attention_from_upper_left, attention_gradients=_gradients_from_upper_left
)
LOWER_RIGHT = SimpleNamespace(
    **_COMMON,
    attention=attention,
    attention_gradients=attention_gradients,
    packed_attention=packed_attention,
    packed_attention_gradients=packed_attention_gradients,
)
