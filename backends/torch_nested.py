"""scaled_dot_product_attention of nested tensors: sequences that lie one after the other, each of its own length.

On a CPU its math kernel computes them, without causality, groups or masks. Nested tensors have the layout jagged,
(S, length, H, D) in memory. https://docs.pytorch.org/docs/stable/nested.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attncheck.backends.composed import make_gradients
from attncheck.backends.contract import Stages
from attncheck.backends.torch_backend import describe, from_numpy, prepare, to_numpy
from attncheck.backends.torch_common import differentiate

__all__ = ["describe", "from_numpy", "packed_attention", "packed_attention_gradients", "prepare", "to_numpy"]


def packed_attention(
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
    queries, keys, values = _nest(query, cu_seqlens_q), _nest(key, cu_seqlens_k), _nest(value, cu_seqlens_k)
    output = functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
    return {"output": output.transpose(1, 2).values().transpose(0, 1).unsqueeze(0)}


def _nest(packed: Tensor, cu_seqlens: Tensor) -> Any:
    """Return (1, H, L, D) as a nested tensor (S, H, length, D)."""
    values = packed.squeeze(0).transpose(0, 1).contiguous()  # (L, H, D)
    return torch.nested.nested_tensor_from_jagged(values, cu_seqlens.long()).transpose(1, 2)


packed_attention_gradients = make_gradients(packed_attention, differentiate)
