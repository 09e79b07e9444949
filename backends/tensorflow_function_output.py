"""Attention in TensorFlow graphs that return the output alone, as models call them: no stage has to be kept.

The graph's optimiser and XLA may then fuse what they have to store in ``tensorflow_function``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace

import tensorflow as tf

from attncheck.backends import tensorflow_backend as eager
from attncheck.backends import tensorflow_function
from attncheck.backends.contract import Stages


def _output_alone(function: Callable[..., Stages]) -> Callable[..., Stages]:
    @wraps(function)
    def output_alone(*inputs: object, **options: object) -> Stages:
        return {"output": function(*inputs, **options)["output"]}

    return output_alone


def _compiled(stages: SimpleNamespace, *, jit_compile: bool) -> SimpleNamespace:
    """Return a backend whose operations are the eager ones as graphs."""
    return SimpleNamespace(
        prepare=stages.prepare,
        describe=stages.describe,
        from_numpy=stages.from_numpy,
        to_numpy=stages.to_numpy,
        **{
            each.__name__: tf.function(_output_alone(each), jit_compile=jit_compile)
            for each in (eager.attention, eager.multi_head_attention)
        },
    )


GRAPH = _compiled(tensorflow_function.GRAPH, jit_compile=False)
XLA = _compiled(tensorflow_function.XLA, jit_compile=True)
