"""``jax.jit`` of attention that returns only its output, as models call it: no stage has to be kept for anybody.

The compiler may then fuse what it has to store in ``jax_jit``, and leave out what nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from attncheck.backends import jax_backend
from attncheck.backends.contract import Stages
from attncheck.backends.jax_backend import describe, from_numpy, prepare, to_numpy
from attncheck.backends.jax_jit import compiled

__all__ = ["attention", "describe", "from_numpy", "multi_head_attention", "prepare", "to_numpy"]


def _output_alone(function: Callable[..., Stages]) -> Callable[..., Stages]:
    @wraps(function)
    def output_alone(*inputs: object, **options: object) -> Stages:
        return {"output": function(*inputs, **options)["output"]}

    return output_alone


attention = compiled(_output_alone(jax_backend.attention))
multi_head_attention = compiled(_output_alone(jax_backend.multi_head_attention))
