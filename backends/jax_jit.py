"""Attention in JAX as its users run it, compiled: each function of the eager module as one XLA program.

The compiler may fuse steps, contract a product and a sum into one operation, and leave out the rounding of an
intermediate that nothing else reads. The stages come back sorted by name, as JAX sorts the keys of a dictionary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import jax

from attncheck.backends import jax_backend
from attncheck.backends.contract import FUNCTIONS, Stages

# What a program is compiled for, rather than given: it decides on shapes, and on which operations there are.
_STATIC = frozenset(
    {"empty_rows", "epsilon", "heads", "is_causal", "kv_heads", "lse_base", "norm", "norm_after_rotation"}
    | {"norm_over", "rotary_interleaved", "scale", "softcap", "window"}
)


def compiled(function: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return a function of the contract as one program, compiled anew for every set of shapes and options."""
    static = [name for name in inspect.signature(function).parameters if name in _STATIC]
    program: Callable[..., Stages] = jax.jit(function, static_argnames=static)
    return program


JIT = SimpleNamespace(
    prepare=jax_backend.prepare,
    describe=jax_backend.describe,
    from_numpy=jax_backend.from_numpy,
    to_numpy=jax_backend.to_numpy,
    **{name: compiled(getattr(jax_backend, name)) for name in FUNCTIONS},
)
