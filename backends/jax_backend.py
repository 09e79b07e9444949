"""Attention in JAX: the modular code that its users write, op by op or inside ``jax.jit`` (``jax_jit.py``).

Sources: Vaswani et al. 2017; Luong et al. 2015; Bahdanau et al. 2015; Graves et al. 2014. Shapes and meanings:
``contract.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from attncheck.backends import codes, composed, derived
from attncheck.backends.contract import EmptyRows, Norm, Stages, Tensor


def prepare(dtype: str, threads: int) -> None:
    """Switch 64-bit types on where they are asked for, and limit the threads, both for this process."""
    jax.config.update("jax_enable_x64", dtype == "float64")
    # The size of each of XLA's two pools (1: no second thread computes), read when the first array is made.
    # The flag --xla_cpu_multi_thread_eigen=false, which many set, no longer limits anything.
    os.environ["PJRT_NPROC"] = str(threads)


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {
        "version": jax.__version__,
        "device": jax.default_backend(),
        "threads": os.environ.get("PJRT_NPROC", "all"),
        "enable_x64": str(jax.config.jax_enable_x64),
        "default_matmul_precision": str(jax.config.jax_default_matmul_precision),
        "xla_flags": os.environ.get("XLA_FLAGS", "none"),
    }


def from_numpy(array: NDArray[Any]) -> Tensor:
    """Copy into an array on the default device."""
    # jax.numpy.array would compile a program for every shape. What is put may keep the memory that it is given.
    return jax.device_put(array.copy())


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the array's numbers as a NumPy array."""
    return np.asarray(tensor)


_ARRAYS = composed.ArrayFunctions(
    arange=lambda length, like: np.arange(length),  # in NumPy no operation on positions is compiled
    astype=jax.lax.convert_element_type,
    broadcast_to=jnp.broadcast_to,
    concat=jnp.concatenate,
    linear=jnp.matmul,
    norm=partial(jnp.linalg.norm, axis=-1, keepdims=True),
    permute=jnp.transpose,
    repeat=jnp.repeat,
    reshape=jnp.reshape,
    stack=jnp.stack,
    take=lambda rows, at: jnp.asarray(rows)[at],  # positions, in NumPy, have no traced index
    tanh=jnp.tanh,
    transposed_product=lambda a, b: a @ b.mT,
    where=jnp.where,
)


def softmax(scores: Tensor, *, empty_rows: EmptyRows = "zero") -> Stages:
    """Normalise each row over the keys."""
    empty, logits = jnp.isneginf(scores).all(axis=-1, keepdims=True), scores
    if empty_rows == "uniform":
        logits = jnp.where(empty, 0.0, scores)  # equal scores have equal weights
    # Without ``where`` a row of -inf is NaN, and so is its gradient, whatever is put in its place afterwards.
    weights = jax.nn.softmax(logits, axis=-1, where=~jnp.isneginf(logits))
    if empty_rows == "nan":
        weights = jnp.where(empty, jnp.nan, weights)
    return {"weights": weights, "log_sum_exp": jax.nn.logsumexp(scores, axis=-1)}


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor, others: Mapping[str, Any]
) -> Any:
    """Pull grad_output back to the inputs, by reverse mode."""
    return jax.vjp(lambda *tensors: function(*tensors, **others), *inputs)[1](grad_output)


def _normalize(vectors: Tensor, weight: Tensor | None, norm: Norm, epsilon: float) -> Tensor:
    wide = vectors if vectors.dtype.itemsize > 2 else vectors.astype(jnp.float32)
    if norm == "rms":
        normalized = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    else:
        normalized = wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), epsilon)
    normalized = normalized.astype(vectors.dtype)
    return normalized if weight is None else normalized * weight


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    projected = jnp.einsum("ble,ef->blf", inputs, weight)
    return projected if bias is None else projected + bias


dot_scores = composed.make_dot_scores(_ARRAYS)
cosine_scores = composed.make_cosine_scores(_ARRAYS)
general_scores = composed.make_general_scores(_ARRAYS)
additive_scores = composed.make_additive_scores(_ARRAYS)
mask_scores = composed.make_mask_scores(_ARRAYS)
attention = composed.make_attention(_ARRAYS, dot_scores, mask_scores, softmax)
_attend = composed.make_attend(mask_scores, softmax)
general_attention = composed.make_attention_with_scores(general_scores, _attend)
additive_attention = composed.make_attention_with_scores(additive_scores, _attend)
cosine_attention = composed.make_attention_with_scores(cosine_scores, _attend)
attention_gradients = derived.make_gradients(attention, gradients)
gated_attention = composed.make_gated_attention(attention, jax.nn.sigmoid)
gated_attention_gradients = derived.make_gradients(gated_attention, gradients)
packed_attention = composed.make_packed_attention(_ARRAYS, attention, jnp.searchsorted)
packed_attention_gradients = derived.make_gradients(packed_attention, gradients)
_numbers_of_codes = codes.make_numbers_of_codes(
    codes.make_dequantize(
        *(jax.lax.convert_element_type, lambda values, places, dtype: jnp.array(values, dtype)[places]),
        *(jnp.stack, jnp.repeat),
    )
)
_paged = composed.make_paged_attention(_ARRAYS, attention, jnp.clip)
paged_attention = codes.make_attention_to_pages_of_codes(_numbers_of_codes, _paged)
_ragged = composed.make_ragged_paged_attention(_ARRAYS, packed_attention, jnp.clip)
ragged_paged_attention = codes.make_attention_to_pages_of_codes(_numbers_of_codes, _ragged)
quantized_attention = codes.make_quantized_attention(_numbers_of_codes, attention)
normalized_attention = composed.make_normalized_attention(_ARRAYS, attention, _normalize)
latent_attention = composed.make_latent_attention(_ARRAYS, attention, partial(jnp.einsum, "blc,hcw->bhlw"))
sparse_attention = composed.make_sparse_attention(_ARRAYS, attention, jnp.any)
multi_head_attention = composed.make_multi_head_attention(_ARRAYS, attention, _project)
merge_states = composed.make_merge_states(_ARRAYS, softmax, partial(jnp.einsum, "bhqn,nbhqd->bhqd"))
