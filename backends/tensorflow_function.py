"""Attention in TensorFlow graphs: the eager functions, traced by ``tf.function``, and compiled by XLA.

A call with new shapes, dtypes or options is traced anew, and by XLA compiled anew; ``tf.function`` keeps every trace.
Where all stages are returned, a compiler may fuse operations but not leave a stage out. Where the output alone is, as
models call attention, the graph's optimiser and XLA may fuse what they would have to store. ``ABSORBED`` is latent
attention with its projections absorbed, one operation after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace

import tensorflow as tf

from attncheck.backends import tensorflow_backend as eager
from attncheck.backends.composed import make_absorbed
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


def _output_alone(function: Callable[..., Stages]) -> Callable[..., Stages]:
    @wraps(function)
    def output_alone(*inputs: object, **options: object) -> Stages:
        return {"output": function(*inputs, **options)["output"]}

    return output_alone


def _describe() -> dict[str, str]:
    flags = {name.lower(): os.environ.get(name, "none") for name in ("TF_XLA_FLAGS", "XLA_FLAGS")}
    return {**eager.describe(), **flags}


def _backend(describe: Callable[[], dict[str, str]], **functions: Callable[..., Stages]) -> SimpleNamespace:
    """Return a backend with these functions on the eager one's arrays."""
    arrays = {"from_numpy": eager.from_numpy, "to_numpy": eager.to_numpy}
    return SimpleNamespace(prepare=eager.prepare, describe=describe, **arrays, **functions)


def _compiled(*, jit_compile: bool) -> SimpleNamespace:
    """Return a backend whose operations are the eager ones as graphs."""
    return _backend(_describe, **{each.__name__: tf.function(each, jit_compile=jit_compile) for each in _OPERATIONS})


def _compiled_output(*, jit_compile: bool) -> SimpleNamespace:
    """Return a backend whose operations are the eager ones as graphs, of which only the output is returned."""
    functions = (eager.attention, eager.multi_head_attention)
    return _backend(
        _describe, **{each.__name__: tf.function(_output_alone(each), jit_compile=jit_compile) for each in functions}
    )


GRAPH, GRAPH_OUTPUT = _compiled(jit_compile=False), _compiled_output(jit_compile=False)
XLA, XLA_OUTPUT = _compiled(jit_compile=True), _compiled_output(jit_compile=True)
ABSORBED = _backend(
    eager.describe, latent_attention=make_absorbed(eager.attention, tf.concat, partial(tf.matmul, transpose_b=True))
)
