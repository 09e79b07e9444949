"""torch.nn.functional.scaled_dot_product_attention: with each of its kernels, causal biases, and nested tensors.

On a CPU torch picks a flash kernel where it can, and the math kernel where Dv is unlike D, the last axis is strided, an
axis is empty or the bias needs a gradient. Those calls the flash kernel by itself refuses.

``torch.nn.attention.bias`` has causal_upper_left and causal_lower_right, which take the place of the mask, so that
nothing else can forbid a key; lower right is what a query behind a cache, and sequences that end together, ask for.
https://docs.pytorch.org/docs/stable/nn.attention.bias.html

Nested tensors are sequences that lie one after the other, each of its own length, in the layout jagged: (S, length, H,
D) in memory. On a CPU the math kernel computes them, without causality, groups or masks.
https://docs.pytorch.org/docs/stable/nested.html
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from attncheck.backends import torch_backend
from attncheck.backends.contract import CallOptions, Stages, Window, pass_as_options
from attncheck.backends.derived import with_gradients
from attncheck.backends.library_arrays import FrameworkArrays, KerasArrays
from attncheck.backends.torch_backend import split_sequences

_REFUSAL_MESSAGES = {
    "attn_mask should not be set when is_causal": (
        "the math kernel of scaled_dot_product_attention takes attn_mask or is_causal, not both"
    ),
    "No available kernel": (
        "the flash kernel of scaled_dot_product_attention needs values as wide as the keys, "
        "a last axis without strides, and no gradient of a bias"
    ),
}
"""What the error says that a kernel answers with, and what the kernel does not do."""


def _restrict_to_kernel(kernel: SDPBackend | None) -> Callable[..., Tensor]:
    """Return the function, restricted to one kernel where one is named."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        try:
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                return functional.scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
        except RuntimeError as error:
            for message, reason in _REFUSAL_MESSAGES.items():
                if message in str(error):
                    raise NotImplementedError(reason) from error
            raise

    return scaled_dot_product_attention


attention_with_chosen_kernel = _restrict_to_kernel(None)
flash, efficient, cudnn, math = map(
    _restrict_to_kernel,
    (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH),
)
LIBRARY = FrameworkArrays(torch_backend)
KERAS = KerasArrays(LIBRARY, "torch")
"""What libraries that compute with torch are called on."""


_CAUSAL_WINDOW: Window = (None, 0)
"""The window of a query that attends to all keys up to its own position: causality, counted behind a past."""


def _attend_with_bias(query: Tensor, key: Tensor, value: Tensor, causal: CausalBias, scale: float | None) -> Tensor:
    grouped = query.size(1) != key.size(1)
    output: Tensor = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=causal, scale=scale, enable_gqa=grouped
    )
    return output


def _attend_lower_right(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    with warnings.catch_warnings():
        # More queries than keys give NaN, it says; queries without a key get zeros since pytorch/pytorch#133882.
        warnings.filterwarnings("ignore", message="Lower right causal bias will produce NaNs")
        causal = causal_lower_right(query.size(2), key.size(2))
    return _attend_with_bias(query, key, value, causal, scale)


def _upper_left_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Stages:
    """Attend with query i to keys up to i."""
    if not is_causal:
        raise NotImplementedError("causal_upper_left is causal")
    return {"output": _attend_with_bias(query, key, value, causal_upper_left(query.size(2), key.size(2)), scale)}


@pass_as_options("is_causal", "scale", "window", "past_key", "past_value")
def _lower_right_attention(query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Stages:
    """Attend with the last query at the last key: as many queries as keys, or a past before them."""
    is_causal, window = options.is_causal, options.window
    if not (is_causal and window is None) and (is_causal or window != _CAUSAL_WINDOW):
        raise NotImplementedError("causal_lower_right is causal, and has no other window")
    if query.size(2) != key.size(2):
        raise NotImplementedError("causal_lower_right aligns the last query with the last key")
    key, value, _ = options.with_past(key, value, torch.cat)
    return {"output": _attend_lower_right(query, key, value, options.scale)}


def _lower_right_packed_attention(
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
    """Attend within each sequence separately, with a bias for its lengths."""
    if not is_causal:
        raise NotImplementedError("causal_lower_right is causal")
    parts = split_sequences(query, key, value, (cu_seqlens_q, cu_seqlens_k), key_lengths)
    return {"output": torch.cat([_attend_lower_right(*sequence, scale) for sequence in parts], dim=2)}


UPPER_LEFT = with_gradients(torch_backend, attention=_upper_left_attention)
LOWER_RIGHT = with_gradients(
    torch_backend, attention=_lower_right_attention, packed_attention=_lower_right_packed_attention
)


def _nested_packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float | None = None,
) -> Stages:
    """Attend within every sequence, in one call."""
    if query.size(1) != key.size(1):
        raise NotImplementedError("nested tensors need as many key and value heads as query heads on a CPU")
    queries, keys, values = (
        _to_nested_tensor(query, cu_seqlens_q),
        _to_nested_tensor(key, cu_seqlens_k),
        _to_nested_tensor(value, cu_seqlens_k),
    )
    output = functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
    return {"output": output.transpose(1, 2).values().transpose(0, 1).unsqueeze(0)}


def _to_nested_tensor(packed: Tensor, cu_seqlens: Tensor) -> Any:
    """Return (1, H, L, D) as a nested tensor (S, H, length, D)."""
    values = packed.squeeze(0).transpose(0, 1).contiguous()  # (L, H, D)
    return torch.nested.nested_tensor_from_jagged(values, cu_seqlens.long()).transpose(1, 2)


NESTED = with_gradients(torch_backend, packed_attention=_nested_packed_attention)
