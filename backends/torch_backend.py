"""Attention in PyTorch, eager: the modular code that its users write.

Sources: Vaswani et al. 2017; Luong et al. 2015; Bahdanau et al. 2015. Shapes and meanings: ``contract.py``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import and_
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from attncheck.backends import codes, composed, derived
from attncheck.backends.contract import EmptyRows, Norm, Scored, Stages, show_keywords_of


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


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor, others: Mapping[str, Any]
) -> Any:
    """Differentiate sum(grad_output * function(*inputs)) by autograd."""
    # detach() makes a leaf that shares memory and strides with the tensor that it is made from.
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = function(*leaves, **others)
    # If an axis is empty, a kernel may ignore its bias: the gradient is zero, and autograd has to create it.
    return torch.autograd.grad(output, leaves, grad_output, materialize_grads=True)


def split_sequences(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: tuple[Tensor, Tensor], key_lengths: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the queries of each sequence, and its used keys and values."""
    limits_of_queries, limits_of_keys = (limits[1:-1].tolist() for limits in cu_seqlens)
    queries = query.tensor_split(limits_of_queries, dim=2)
    keys, values = (packed.tensor_split(limits_of_keys, dim=2) for packed in (key, value))
    used = [part.size(2) for part in keys] if key_lengths is None else key_lengths.tolist()
    for own_query, own_key, own_value, length in zip(queries, keys, values, used, strict=True):
        yield own_query, own_key[:, :, :length], own_value[:, :, :length]


_ARRAYS = composed.ArrayFunctions(
    arange=lambda length, like: torch.arange(length, device=like.device),
    astype=Tensor.to,
    broadcast_to=torch.broadcast_to,
    concat=torch.cat,
    linear=torch.matmul,
    norm=lambda vectors: torch.linalg.vector_norm(vectors, dim=-1, keepdim=True),
    permute=torch.permute,
    repeat=torch.repeat_interleave,
    reshape=torch.reshape,
    stack=torch.stack,
    take=lambda rows, at: rows[at.long()],
    tanh=torch.tanh,
    transposed_product=lambda a, b: a @ b.mT,
    where=torch.where,
)


def softmax(scores: Tensor, *, empty_rows: EmptyRows = "zero") -> Stages:
    """Normalise each row over the keys."""
    # torch's own softmax of a row of -inf is NaN, and so is its gradient: such a row must not reach it at all.
    empty = scores.isneginf().all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1)  # equal scores have equal weights
    if empty_rows != "uniform":
        weights = weights.masked_fill(empty, 0.0 if empty_rows == "zero" else math.nan)
    return {"weights": weights, "log_sum_exp": torch.logsumexp(scores, dim=-1)}


dot_scores = composed.make_dot_scores(_ARRAYS)
cosine_scores = composed.make_cosine_scores(_ARRAYS)
general_scores = composed.make_general_scores(_ARRAYS)
additive_scores = composed.make_additive_scores(_ARRAYS)
mask_scores = composed.make_mask_scores(_ARRAYS)
attention = composed.make_attention(_ARRAYS, dot_scores, mask_scores, softmax)


@show_keywords_of(Scored)
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
    for sequence in split_sequences(query, key, value, (cu_seqlens_q, cu_seqlens_k), key_lengths):
        queries, keys = (torch.arange(tensor.size(2), device=tensor.device) for tensor in sequence[:2])
        behind = keys - (queries[:, None] + sequence[1].size(2) - sequence[0].size(2))
        mask = reduce(
            and_, composed.causal_and_window_conditions(behind, *edges), torch.ones_like(behind, dtype=torch.bool)
        )
        parts.append(attention(*sequence, mask=mask, **options))
    return {
        "log_sum_exp": torch.cat([part["log_sum_exp"] for part in parts], dim=2),
        "output": torch.cat([part["output"] for part in parts], dim=2),
    }


def _normalize(vectors: Tensor, weight: Tensor | None, norm: Norm, epsilon: float) -> Tensor:
    if norm == "rms":
        return functional.rms_norm(vectors, vectors.shape[-1:], weight, epsilon)
    wide = vectors if vectors.element_size() > 2 else vectors.float()
    normalized = functional.normalize(wide, dim=-1, eps=epsilon).to(vectors.dtype)
    return normalized if weight is None else normalized * weight


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # functional.linear wants the weight as (out, in).
    return functional.linear(inputs, weight.mT, bias)


_attend = composed.make_attend(mask_scores, softmax)
general_attention = composed.make_attention_with_scores(general_scores, _attend)
additive_attention = composed.make_attention_with_scores(additive_scores, _attend)
cosine_attention = composed.make_attention_with_scores(cosine_scores, _attend)
attention_gradients = derived.make_gradients(attention, gradients)
gated_attention = composed.make_gated_attention(attention, torch.sigmoid)
gated_attention_gradients = derived.make_gradients(gated_attention, gradients)
packed_attention_gradients = derived.make_gradients(packed_attention, gradients)
_numbers_of_codes = codes.make_numbers_of_codes(
    codes.make_dequantize(
        Tensor.to,
        lambda values, places, dtype: torch.tensor(values, dtype=dtype, device=places.device)[places.long()],
        torch.stack,
        torch.repeat_interleave,
    )
)
_paged = composed.make_paged_attention(_ARRAYS, attention, torch.clamp)
paged_attention = codes.make_attention_to_pages_of_codes(_numbers_of_codes, _paged)
_packed_at_once = composed.make_packed_attention(_ARRAYS, attention, torch.searchsorted)
_ragged = composed.make_ragged_paged_attention(_ARRAYS, _packed_at_once, torch.clamp)
ragged_paged_attention = codes.make_attention_to_pages_of_codes(_numbers_of_codes, _ragged)
quantized_attention = codes.make_quantized_attention(_numbers_of_codes, attention)
normalized_attention = composed.make_normalized_attention(_ARRAYS, attention, _normalize)
latent_attention = composed.make_latent_attention(_ARRAYS, attention, partial(torch.einsum, "blc,hcw->bhlw"))
sparse_attention = composed.make_sparse_attention(_ARRAYS, attention, torch.any)
multi_head_attention = composed.make_multi_head_attention(_ARRAYS, attention, _project)
merge_states = composed.make_merge_states(_ARRAYS, softmax, partial(torch.einsum, "bhqn,nbhqd->bhqd"))
_services = SimpleNamespace(prepare=prepare, describe=describe, from_numpy=from_numpy, to_numpy=to_numpy)
ABSORBED = derived.make_absorbed_backend(attention, torch.cat, lambda a, b: a @ b.mT, _services)
