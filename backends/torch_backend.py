"""Attention in PyTorch, eager: the modular code that its users write.

Sources: Vaswani et al. 2017; Luong et al. 2015; Bahdanau et al. 2015. Shapes and meanings: ``contract.py``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from attncheck.backends.contract import Stages


def prepare(dtype: str, threads: int) -> None:
    """Limit the threads of this process."""
    torch.set_num_threads(threads)


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {
        "version": torch.__version__,
        "device": "cpu",
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def from_numpy(array: NDArray[Any]) -> Tensor:
    """Copy into a tensor, so that no operation can write into the caller's array."""
    # array.copy() for a second reason: torch refuses an array with negative strides.
    return torch.from_numpy(array.copy())


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's numbers as an array."""
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def dot_scores(query: Tensor, key: Tensor, *, scale: float | None = None) -> Stages:
    """Score by scaled dot product."""
    raw_scores = query @ key.mT
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    return {"raw_scores": raw_scores, "scores": raw_scores * scale}


def general_scores(query: Tensor, key: Tensor, weight: Tensor) -> Stages:
    """Score by a bilinear form."""
    return {"scores": query @ weight @ key.mT}


def additive_scores(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    score_vector: Tensor,
    *,
    score_bias: Tensor | None = None,
) -> Stages:
    """Score by a small feed-forward network."""
    query_part = (query @ query_weight).unsqueeze(-2)  # (B, H, Lq, 1, A)
    key_part = (key @ key_weight).unsqueeze(-3)  # (B, H, 1, Lk, A)
    hidden = query_part + key_part
    if score_bias is not None:
        hidden = hidden + score_bias
    return {"scores": torch.tanh(hidden) @ score_vector}


def mask_scores(
    scores: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None, is_causal: bool = False
) -> Stages:
    """Add the bias, then set what may not be attended to -inf."""
    stages: Stages = {}
    if bias is not None:
        scores = stages["biased"] = scores + bias
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        mask = causal if mask is None else mask & causal
    if mask is not None:
        stages["masked"] = scores.masked_fill(~mask, -math.inf)
    return stages


def softmax(scores: Tensor) -> Stages:
    """Normalise each row over the keys."""
    # torch's own softmax of a row of -inf is NaN.
    empty = scores.isneginf().all(dim=-1, keepdim=True)
    return {
        "weights": torch.softmax(scores, dim=-1).masked_fill(empty, 0.0),
        "log_sum_exp": torch.logsumexp(scores, dim=-1),
    }


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Score, mask, normalise and average the values."""
    stages = dot_scores(query, key, scale=scale)
    stages |= mask_scores(stages["scores"], mask=mask, bias=bias, is_causal=is_causal)
    *_, logits = stages.values()  # the last stage that was asked for
    stages |= softmax(logits)
    stages["output"] = stages["weights"] @ value
    return stages


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    output_weight: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    output_bias: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Project, attend in every head, merge the heads and project once more."""
    if output_weight is None and output_bias is not None:
        raise ValueError("output_bias needs output_weight")
    stages: Stages = {
        "query": _split_heads(_project(query, query_weight, query_bias), heads),
        "key": _split_heads(_project(key, key_weight, key_bias), heads),
        "value": _split_heads(_project(value, value_weight, value_bias), heads),
    }
    stages |= attention(**stages, mask=mask, bias=bias, is_causal=is_causal, scale=scale)
    stages["context"] = stages.pop("output")
    merged = _merge_heads(stages["context"])
    stages["output"] = merged if output_weight is None else _project(merged, output_weight, output_bias)
    return stages


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # functional.linear wants the weight as (out, in).
    return functional.linear(inputs, weight.mT, bias)


def _split_heads(inputs: Tensor, heads: int) -> Tensor:
    return inputs.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, L, H*D) -> (B, H, L, D)


def _merge_heads(context: Tensor) -> Tensor:
    return context.transpose(1, 2).flatten(-2)  # (B, H, L, D) -> (B, L, H*D)
