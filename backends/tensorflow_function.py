"""Attention in TensorFlow graphs: the eager functions, traced by ``tf.function``, and compiled by XLA.

A call with new shapes, dtypes or options is traced anew, and by XLA compiled anew; ``tf.function`` keeps every trace.
All stages are returned, so that a compiler may fuse operations but not leave a stage out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import tensorflow as tf

from attncheck.backends import tensorflow_backend as eager
from attncheck.backends.contract import Stages

_OPERATIONS: tuple[Callable[..., Stages], ...] = (
    eager.dot_scores,
    eager.cosine_scores,
    eager.general_scores,
    eager.additive_scores,
    eager.mask_scores,
    eager.softmax,
    eager.attention,
    eager.general_attention,
    eager.additive_attention,
    eager.cosine_attention,
    eager.attention_gradients,
    eager.multi_head_attention,
    eager.packed_attention,
    eager.packed_attention_gradients,
    eager.paged_attention,
    eager.quantized_attention,
    eager.normalized_attention,
    eager.latent_attention,
    eager.merge_states,
)


def _compiled(*, jit_compile: bool) -> SimpleNamespace:
    """Return a backend whose operations are the eager ones as graphs."""
    return SimpleNamespace(
        prepare=eager.prepare,
        describe=_describe,
        from_numpy=eager.from_numpy,
        to_numpy=eager.to_numpy,
        **{each.__name__: tf.function(each, jit_compile=jit_compile) for each in _OPERATIONS},
    )


def _describe() -> dict[str, str]:
    flags = {name.lower(): os.environ.get(name, "none") for name in ("TF_XLA_FLAGS", "XLA_FLAGS")}
    return {**eager.describe(), **flags}


GRAPH = _compiled(jit_compile=False)
XLA = _compiled(jit_compile=True)
