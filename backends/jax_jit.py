"""Attention in JAX as its users run it, compiled: each function of the eager module as one XLA program.

The compiler may fuse steps, contract a product and a sum into one operation, and leave out the rounding of an
intermediate that nothing else reads. The stages come back sorted by name, as JAX sorts the keys of a dictionary.

``OUTPUT`` is attention that returns only its output, as models call it: the compiler may then fuse what it has to store
for the stages, and leave out what nothing reads. ``ABSORBED`` is latent attention with its projections absorbed.
Libraries that compute with JAX are called on ``LIBRARY``, or compiled on ``LIBRARY_JIT``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import jax.numpy as jnp

from attncheck.backends import composed, jax_backend
from attncheck.backends.contract import Stages
from attncheck.backends.jax_programs import kept
from attncheck.backends.library_arrays import JaxArrays, JittedArrays, KerasArrays, TokamaxArrays

# What a program is compiled for, rather than given: it decides on shapes, and on which operations there are.
_STATIC = frozenset(
    {"empty_rows", "epsilon", "heads", "is_causal", "kv_heads", "lse_base", "norm", "norm_after_rotation"}
    | {"mask_fill", "norm_over", "rotary_interleaved", "scale", "softcap", "window"}
)


def compiled(function: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return a function of the contract as one program, compiled anew for every set of shapes and options."""
    return kept(function, _STATIC & {*inspect.signature(function).parameters})


JIT = composed.compiled(jax_backend, compiled)
OUTPUT = composed.compiled_output(jax_backend, compiled)
ABSORBED = composed.absorbed(jax_backend.attention, jnp.concatenate, lambda a, b: a @ b.mT, jax_backend, compiled)
LIBRARY = JaxArrays(jax_backend)
LIBRARY_JIT = JittedArrays(jax_backend, kept)
TOKAMAX = TokamaxArrays(jax_backend, kept)
KERAS = KerasArrays(LIBRARY_JIT, "jax")
