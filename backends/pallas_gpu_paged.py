"""``jax.experimental.pallas.ops.gpu.paged_attention``: one query of each sequence, in Pallas' interpreter.

It has no scale: the query is multiplied by it and stored. The pages of a sequence are split into as many parts as its
default allows, up to 16; each part is attended to by itself, in one block, and the parts are merged.
https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/experimental/pallas/ops/gpu/paged_attention.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as paged

from attncheck.backends.contract import Stages, Tensor
from attncheck.backends.jax_backend import describe, from_numpy, prepare, to_numpy

__all__ = ["describe", "from_numpy", "paged_attention", "prepare", "to_numpy"]

_MOST_PARTS, _MOST_PAGES_OF_A_BLOCK = 16, 8


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> Stages:
    """Attend with a single query, which causality leaves all keys that are used."""
    if query.shape[2] != 1:
        raise NotImplementedError("paged_attention takes one query of each sequence")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    pages = block_table.shape[1]
    parts = _largest_divisor(pages, _MOST_PARTS)
    output = paged(
        query[:, :, 0] * jnp.asarray(factor, query.dtype), _by_head(key_pages), _by_head(value_pages),
        block_table.astype(jnp.int32), key_lengths.astype(jnp.int32),
        pages_per_compute_block=_largest_divisor(pages // parts, _MOST_PAGES_OF_A_BLOCK), k_splits=parts,
        attn_logits_soft_cap=softcap, interpret=jax.default_backend() == "cpu",
    )  # fmt: skip
    return {"output": output[:, :, None]}


def _by_head(pages: Tensor) -> Tensor:
    return pages.transpose(2, 0, 1, 3)


def _largest_divisor(number: int, most: int) -> int:
    return max((each for each in range(1, most + 1) if number % each == 0), default=1)
