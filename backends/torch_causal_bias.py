"""scaled_dot_product_attention with ``torch.nn.attention.bias``: causal_upper_left and causal_lower_right.

Both take the place of the mask, so that nothing else can forbid a key; lower right is what a query behind a cache, and
sequences that end together, ask for. https://docs.pytorch.org/docs/stable/nn.attention.bias.html
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from attncheck.backends import torch_backend
from attncheck.backends.composed import make_gradients, with_functions
from attncheck.backends.contract import Stages, Window
from attncheck.backends.torch_common import differentiate, sequences_of

_UP_TO_ITSELF: Window = (None, 0)
"""The window of a query that attends to all keys up to its own position: causality, counted behind a past."""


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: CausalBias, scale: float | None) -> Tensor:
    grouped = query.size(1) != key.size(1)
    output: Tensor = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=causal, scale=scale, enable_gqa=grouped
    )
    return output


def _attend_from_the_end(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    with warnings.catch_warnings():
        # More queries than keys give NaN, it says; queries without a key get zeros since pytorch/pytorch#133882.
        warnings.filterwarnings("ignore", message="Lower right causal bias will produce NaNs")
        causal = causal_lower_right(query.size(2), key.size(2))
    return _attend(query, key, value, causal, scale)


def _upper_left(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Stages:
    """Attend where query i may attend to keys up to i."""
    if not is_causal:
        raise NotImplementedError("causal_upper_left is causal")
    return {"output": _attend(query, key, value, causal_upper_left(query.size(2), key.size(2)), scale)}


def _lower_right(
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
    return {"output": _attend_from_the_end(query, key, value, scale)}


def _lower_right_packed(
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
    parts = sequences_of(query, key, value, (cu_seqlens_q, cu_seqlens_k), key_lengths)
    return {"output": torch.cat([_attend_from_the_end(*own, scale) for own in parts], dim=2)}


UPPER_LEFT = with_functions(
    torch_backend, {"attention": _upper_left, "attention_gradients": make_gradients(_upper_left, differentiate)}
)
LOWER_RIGHT = with_functions(
    torch_backend,
    {
        "attention": _lower_right,
        "attention_gradients": make_gradients(_lower_right, differentiate),
        "packed_attention": _lower_right_packed,
        "packed_attention_gradients": make_gradients(_lower_right_packed, differentiate),
    },
)
