"""Attention in PyTorch, eager: the modular code that its users write.

Sources: Vaswani et al. 2017; Luong et al. 2015; Bahdanau et al. 2015. Shapes and meanings: ``contract.py``.
"""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from attncheck.backends import composed
from attncheck.backends.contract import (
    EmptyRows,
    Latent,
    LseBase,
    Norm,
    Scored,
    Stages,
    Window,
    takes,
)
from attncheck.backends.torch_common import differentiate, may_attend, seen_from_the_end, sequences_of


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
    """Share the array's memory, so that a strided or broadcast view stays one."""
    if min(array.strides, default=0) < 0:
        array = array.copy()  # torch has no negative strides
    with warnings.catch_warnings():
        # A broadcast view is read-only in NumPy, which torch does not know; nothing here writes into its inputs.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        if array.dtype.name.startswith("float8"):
            return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))
        return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's numbers as an array."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes  # adds bfloat16 to NumPy; torch neither knows it nor brings it, and the bits are the same

        bits: NDArray[Any] = tensor.view(torch.uint16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: NDArray[Any] = tensor.numpy()
    return array


def dot_scores(
    query: Tensor, key: Tensor, *, scale: float | Tensor | None = None, softcap: float | None = None
) -> Stages:
    """Score by scaled dot product."""
    raw_scores = query @ key.mT
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    stages: Stages = {"raw_scores": raw_scores, "scores": raw_scores * scale}
    if softcap is not None:
        stages["capped"] = softcap * torch.tanh(stages["scores"] / softcap)
    return stages


def cosine_scores(query: Tensor, key: Tensor, *, scale: float | None = None) -> Stages:
    """Score by the cosine of the angle between query and key."""
    # functional.normalize would divide by no length below 1e-12.
    query = query / torch.linalg.vector_norm(query, dim=-1, keepdim=True)
    key = key / torch.linalg.vector_norm(key, dim=-1, keepdim=True)
    cosines = query @ key.mT
    return {"scores": cosines if scale is None else cosines * scale}


def general_scores(query: Tensor, key: Tensor, weight: Tensor, *, score_bias: Tensor | None = None) -> Stages:
    """Score by a bilinear form."""
    scores = query @ weight @ key.mT
    return {"scores": scores if score_bias is None else scores + score_bias[:, None, None]}


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
    scores: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    query_offsets: Tensor | None = None,
    mask_fill: float | None = None,
) -> Stages:
    """Add the bias, then set what may not be attended to -inf, or to ``mask_fill``."""
    stages: Stages = {}
    if bias is not None:
        scores = stages["biased"] = scores + bias
    rules: dict[str, Any] = {"is_causal": is_causal, "window": window, "key_lengths": key_lengths}
    rules |= {"query_offsets": query_offsets, "device": scores.device}
    allowed = may_attend(scores.shape, mask=mask, **rules)
    if allowed is not None:
        stages["masked"] = scores.masked_fill(~allowed, -math.inf if mask_fill is None else mask_fill)
    return stages


def softmax(scores: Tensor, *, empty_rows: EmptyRows = "zero") -> Stages:
    """Normalise each row over the keys."""
    # torch's own softmax of a row of -inf is NaN, and so is its gradient: such a row must not reach it at all.
    empty = scores.isneginf().all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1)  # equal scores have equal weights
    if empty_rows != "uniform":
        weights = weights.masked_fill(empty, 0.0 if empty_rows == "zero" else math.nan)
    return {"weights": weights, "log_sum_exp": torch.logsumexp(scores, dim=-1)}


def _softmax_with_sinks(logits: Tensor, sinks: Tensor, empty_rows: EmptyRows) -> Stages:
    """Normalise each row over the keys and the sink of its head, whose own weight is not returned."""
    column = sinks[:, None, None].expand(*logits.shape[:-1], 1)  # (B, H, Lq, 1)
    joined = torch.cat((logits, column), dim=-1)
    stages = softmax(joined)
    weights = stages["weights"][..., :-1]
    if empty_rows != "zero":
        empty = joined.isneginf().all(dim=-1, keepdim=True)
        weights = weights.masked_fill(empty, 1 / max(logits.size(-1), 1) if empty_rows == "uniform" else math.nan)
    return stages | {"weights": weights}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    head_scale: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    query_offsets: Tensor | None = None,
    mask_fill: float | None = None,
    empty_rows: EmptyRows = "zero",
) -> Stages:
    """Rotate, score, mask, normalise and average the values."""
    stages: Stages = {}
    past = 0 if past_key is None else past_key.size(-2)
    if rotary_cos is not None and rotary_sin is not None:
        cos, sin = rotary_cos[past:], rotary_sin[past:]
        key = _rotate(key, cos, sin, rotary_interleaved)
        if query_offsets is not None:
            rows = query_offsets.view(-1, 1, 1) + torch.arange(query.size(-2), device=query.device)
            cos, sin = rotary_cos[rows], rotary_sin[rows]
        query = stages["rotated_query"] = _rotate(query, cos, sin, rotary_interleaved)
    if past_key is not None and past_value is not None:
        key, value = torch.cat((past_key, key), dim=-2), torch.cat((past_value, value), dim=-2)
    if rotary_cos is not None:
        stages["rotated_key"] = key  # the past comes rotated
    group = query.size(1) // key.size(1)  # query heads that share a key and value head
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    factor = scale if head_scale is None else head_scale[:, None, None]
    stages |= dot_scores(query, key, scale=factor, softcap=softcap)
    *_, scores = stages.values()  # capped or not
    rules: dict[str, Any] = {"is_causal": is_causal, "window": window, "key_lengths": key_lengths}
    rules |= {"query_offsets": query_offsets, "device": scores.device, "past": past}
    allowed = may_attend(scores.shape, mask=mask, **rules)
    stages |= mask_scores(scores, mask=allowed, bias=bias, mask_fill=mask_fill)
    *_, logits = stages.values()  # the last stage that was asked for
    if sinks is None:
        stages |= softmax(logits, empty_rows=empty_rows)
    else:
        stages |= _softmax_with_sinks(logits, sinks, empty_rows)
    stages["output"] = stages["weights"] @ value
    return stages


@takes(Scored)
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    key_lengths: Tensor | None = None,
    **options: Unpack[Scored],
) -> Stages:
    """Attend within one sequence after the other."""
    edges = options.pop("is_causal", False), options.pop("window", None)
    parts = []
    for own in sequences_of(query, key, value, (cu_seqlens_q, cu_seqlens_k), key_lengths):
        mask = seen_from_the_end((own[0].size(2), own[1].size(2)), *edges, device=query.device)
        parts.append(attention(*own, mask=mask, **options))
    return {
        "log_sum_exp": torch.cat([part["log_sum_exp"] for part in parts], dim=2),
        "output": torch.cat([part["output"] for part in parts], dim=2),
    }


@takes(Scored)
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    **options: Unpack[Scored],
) -> Stages:
    """Gather the pages of every batch entry, and attend to the keys that are used."""
    pages = block_table.clamp(
        0, key_pages.size(0) - 1
    ).long()  # what stands behind the last page that is used may be none
    key, value = (each[pages].flatten(1, 2).transpose(1, 2) for each in (key_pages, value_pages))  # (B, Hkv, T, D)
    is_used = torch.arange(key.size(2), device=key.device) < key_lengths.view(-1, 1)
    unused = ~is_used[:, None, :, None]
    key, value = key.masked_fill(unused, 0.0), value.masked_fill(unused, 0.0)  # a weight of 0 times NaN is NaN
    edges = options.pop("is_causal", False), options.pop("window", None)
    mask = is_used[:, None, None] & seen_from_the_end(
        (query.size(2), key_lengths.view(-1, 1, 1, 1)), *edges, key.size(2), query.device
    )
    return attention(query, key, value, mask=mask, **options)


@takes(Latent)
def latent_attention(
    query: Tensor,
    latent: Tensor,
    key_projection: Tensor,
    value_projection: Tensor,
    *,
    query_rotary: Tensor | None = None,
    key_rotary: Tensor | None = None,
    **options: Unpack[Latent],
) -> Stages:
    """Make the keys and values of every head, and attend to them."""
    key, value = (torch.einsum("blc,hcw->bhlw", latent, each) for each in (key_projection, value_projection))
    if query_rotary is not None and key_rotary is not None:
        query = torch.cat((query, query_rotary), dim=-1)
        key = torch.cat((key, key_rotary.unsqueeze(1).expand(-1, key.size(1), -1, -1)), dim=-1)
    return attention(query, key, value, **options)


def merge_states(outputs: Tensor, log_sum_exps: Tensor, *, lse_base: LseBase = "e") -> Stages:
    """Merge what attention gave for parts of the keys."""
    scores = log_sum_exps.movedim(0, -1)  # (B, H, Lq, N)
    stages = softmax(scores if lse_base == "e" else scores * math.log(2))
    if lse_base == "2":
        stages["log_sum_exp"] = stages["log_sum_exp"] / math.log(2)
    parts = outputs.masked_fill(log_sum_exps.isneginf().unsqueeze(-1), 0.0)  # 0 times NaN would be NaN
    merged = torch.einsum("bhqn,nbhqd->bhqd", stages["weights"], parts.to(scores.dtype))  # float32 at least
    stages["output"] = merged.to(outputs.dtype)
    return stages


def _normalize(inputs: Tensor, weight: Tensor | None, norm: Norm, epsilon: float, is_full: bool) -> Tensor:
    """Normalise each head's vector, or those of all heads of a position side by side: (B, H, L, D)."""
    rows = inputs.transpose(1, 2).flatten(2) if is_full else inputs
    if norm == "rms":
        normalized = functional.rms_norm(rows, rows.shape[-1:], weight, epsilon)
    else:
        wide = rows if rows.element_size() > 2 else rows.float()
        normalized = functional.normalize(wide, dim=-1, eps=epsilon).to(rows.dtype)
        normalized = normalized if weight is None else normalized * weight
    return normalized.unflatten(-1, (inputs.size(1), -1)).transpose(1, 2) if is_full else normalized


def _rotate(inputs: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of elements of (B, H, L, D) by the first L rows of cos and sin, (L, R) or (B, 1, L, R)."""
    length, pairs = inputs.size(-2), cos.size(-1)
    cos, sin = cos[..., :length, :], sin[..., :length, :]
    rotated, rest = inputs[..., : 2 * pairs], inputs[..., 2 * pairs :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # functional.linear wants the weight as (out, in).
    return functional.linear(inputs, weight.mT, bias)


def _split_heads(inputs: Tensor, heads: int) -> Tensor:
    return inputs.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, L, H*D) -> (B, H, L, D)


def _merge_heads(context: Tensor) -> Tensor:
    return context.transpose(1, 2).flatten(-2)  # (B, H, L, D) -> (B, L, H*D)


_attend = composed.make_attend(mask_scores, softmax)
general_attention = composed.make_attention_by(general_scores, _attend)
additive_attention = composed.make_attention_by(additive_scores, _attend)
cosine_attention = composed.make_attention_by(cosine_scores, _attend)
attention_gradients = composed.make_gradients(attention, differentiate)
gated_attention = composed.make_gated_attention(attention, torch.sigmoid)
gated_attention_gradients = composed.make_gradients(gated_attention, differentiate)
packed_attention_gradients = composed.make_gradients(packed_attention, differentiate)
quantized_attention = composed.make_quantized_attention(attention, Tensor.to)
normalized_attention = composed.make_normalized_attention(attention, _normalize, _rotate)
multi_head_attention = composed.make_multi_head_attention(attention, _project, _split_heads, _merge_heads)
_services = SimpleNamespace(prepare=prepare, describe=describe, from_numpy=from_numpy, to_numpy=to_numpy)
ABSORBED = composed.absorbed(attention, torch.cat, lambda a, b: a @ b.mT, _services)
