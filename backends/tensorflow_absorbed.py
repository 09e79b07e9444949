"""Latent attention in TensorFlow with its projections absorbed, as servers decode: no key and no value is made.

Behind the query's own projection this is attention to one head of keys, the latent vectors, which are its values, too.
Shapes and meanings: ``contract.py``. DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1.2.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from attncheck.backends import tensorflow_backend
from attncheck.backends.contract import Stages, Tensor, Window
from attncheck.backends.tensorflow_backend import describe, from_numpy, prepare, to_numpy

__all__ = ["describe", "from_numpy", "latent_attention", "prepare", "to_numpy"]


def latent_attention(
    query: Tensor,
    latent: Tensor,
    key_projection: Tensor,
    value_projection: Tensor,
    *,
    query_rotary: Tensor | None = None,
    key_rotary: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    query_offsets: Tensor | None = None,
) -> Stages:
    """Attend to latent vectors, and project their mean."""
    options: dict[str, Any] = {"mask": mask, "bias": bias, "is_causal": is_causal, "softcap": softcap}
    options |= {"window": window, "key_lengths": key_lengths, "query_offsets": query_offsets}
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1] + (0 if query_rotary is None else query_rotary.shape[-1]))
    query, key = tf.matmul(query, key_projection, transpose_b=True), latent  # (B, H, Lq, C), (B, Lk, C)
    if query_rotary is not None and key_rotary is not None:
        query, key = (tf.concat(each, axis=-1) for each in ((query, query_rotary), (key, key_rotary)))
    stages = tensorflow_backend.attention(query, key[:, tf.newaxis], latent[:, tf.newaxis], scale=scale, **options)
    stages["output"] = tf.matmul(stages["output"], value_projection)
    return stages
