"""``jax.experimental.pallas.ops.gpu.decode_attention.gqa``: one query of each sequence, in Pallas' interpreter.

``start_idx`` and ``kv_seq_len`` name the first key and the end. The keys are split, each part is attended to by itself,
and the parts are merged: in as many parts as there are blocks of 16 keys, at most 16, the default. The residuals are
the sum of the exponentials and their maximum.
https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/experimental/pallas/ops/gpu/decode_attention.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.decode_attention import gqa

from attncheck.backends.contract import Stages, Tensor, Window
from attncheck.backends.jax_backend import describe, from_numpy, prepare, to_numpy

__all__ = ["attention", "describe", "from_numpy", "prepare", "to_numpy"]

_BLOCK, _MOST_PARTS = 16, 16


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
) -> Stages:
    """Attend with a single query; a window is where it starts and ends."""
    if query.shape[2] != 1:
        raise NotImplementedError("gqa takes one query of each sequence")
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = (jnp.concatenate(each, axis=-2) for each in ((past_key, key), (past_value, value)))
    start, end = _ends(past, key.shape[2], window, key_lengths)
    output, (total, maximum) = gqa(
        query[:, :, 0], key.swapaxes(1, 2), value.swapaxes(1, 2), start, end,
        sm_scale=scale, block_k=_BLOCK, k_splits=_parts(key.shape[2]),
        return_residuals=True, interpret=jax.default_backend() == "cpu",
    )  # fmt: skip
    log_sum_exp = maximum + jnp.log(total)
    return {"log_sum_exp": log_sum_exp[..., None], "output": output[:, :, None]}


def _ends(
    past: int, keys: int, window: Window | None, key_lengths: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    before, after = window or (None, None)
    start = None if before is None else jnp.int32(max(past - before, 0))
    end = None if key_lengths is None else key_lengths.astype(jnp.int32)
    if after is not None:
        end = jnp.minimum(keys if end is None else end, jnp.int32(min(past + after + 1, keys)))
    return start, end


def _parts(keys: int) -> int:
    if not keys:
        raise NotImplementedError("gqa takes one key or more")
    return max(parts for parts in range(1, _MOST_PARTS + 1) if keys // _BLOCK % parts == 0)
