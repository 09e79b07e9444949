"""Attention in TensorFlow graphs: the eager functions, traced by ``tf.function``, and compiled by XLA.

A call with new shapes, dtypes or options is traced anew, and by XLA compiled anew; ``tf.function`` keeps every trace.
Where all stages are returned, a compiler may fuse operations but not leave a stage out. Where the output alone is, as
models call attention, the graph's optimiser and XLA may fuse what they would have to store. ``ABSORBED`` is latent
attention with its projections absorbed, one operation after the other.
"""

from __future__ import annotations

import os
from functools import partial

import tensorflow as tf

from attncheck.backends import tensorflow_backend as eager
from attncheck.backends.derived import compile_backend, compile_output_only, make_absorbed_backend


def _describe() -> dict[str, str]:
    flags = {name.lower(): os.environ.get(name, "none") for name in ("TF_XLA_FLAGS", "XLA_FLAGS")}
    return {**eager.describe(), **flags}


_graph, _xla = (partial(tf.function, jit_compile=jit_compile) for jit_compile in (False, True))
GRAPH, XLA = (compile_backend(eager, transform, describe=_describe) for transform in (_graph, _xla))
GRAPH_OUTPUT, XLA_OUTPUT = (compile_output_only(eager, transform, describe=_describe) for transform in (_graph, _xla))
ABSORBED = make_absorbed_backend(eager.attention, tf.concat, partial(tf.matmul, transpose_b=True), eager)
