"""Attention in JAX as its users run it, compiled: each function of the eager module as one XLA program.

The compiler may fuse steps, contract a product and a sum into one operation, and leave out the rounding of an
intermediate that nothing else reads. The stages come back sorted by name, as JAX sorts the keys of a dictionary.

``OUTPUT`` is attention that returns only its output, as models call it: the compiler may then fuse what it has to store
for the stages, and leave out what nothing reads. ``ABSORBED`` is latent attention with its projections absorbed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace

import jax.numpy as jnp

from attncheck.backends import jax_backend
from attncheck.backends.composed import make_absorbed
from attncheck.backends.contract import Stages
from attncheck.backends.jax_backend import describe, from_numpy, prepare, to_numpy
from attncheck.backends.jax_programs import kept

__all__ = [
    "ABSORBED",
    "OUTPUT",
    "additive_attention",
    "additive_scores",
    "attention",
    "attention_gradients",
    "cosine_attention",
    "cosine_scores",
    "describe",
    "dot_scores",
    "from_numpy",
    "general_attention",
    "general_scores",
    "latent_attention",
    "mask_scores",
    "merge_states",
    "multi_head_attention",
    "normalized_attention",
    "packed_attention",
    "packed_attention_gradients",
    "paged_attention",
    "prepare",
    "quantized_attention",
    "softmax",
    "to_numpy",
]

# What a program is compiled for, rather than given: it decides on shapes, and on which operations there are.
_STATIC = frozenset(
    {"empty_rows", "epsilon", "heads", "is_causal", "kv_heads", "lse_base", "norm", "norm_after_rotation"}
    | {"mask_fill", "norm_over", "rotary_interleaved", "scale", "softcap", "window"}
)


def compiled(function: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return a function of the contract as one program, compiled anew for every set of shapes and options."""
    return kept(function, _STATIC & {*inspect.signature(function).parameters})


dot_scores = compiled(jax_backend.dot_scores)
cosine_scores = compiled(jax_backend.cosine_scores)
general_scores = compiled(jax_backend.general_scores)
additive_scores = compiled(jax_backend.additive_scores)
mask_scores = compiled(jax_backend.mask_scores)
softmax = compiled(jax_backend.softmax)
attention = compiled(jax_backend.attention)
general_attention = compiled(jax_backend.general_attention)
additive_attention = compiled(jax_backend.additive_attention)
cosine_attention = compiled(jax_backend.cosine_attention)
attention_gradients = compiled(jax_backend.attention_gradients)
multi_head_attention = compiled(jax_backend.multi_head_attention)
packed_attention = compiled(jax_backend.packed_attention)
packed_attention_gradients = compiled(jax_backend.packed_attention_gradients)
paged_attention = compiled(jax_backend.paged_attention)
quantized_attention = compiled(jax_backend.quantized_attention)
normalized_attention = compiled(jax_backend.normalized_attention)
latent_attention = compiled(jax_backend.latent_attention)
merge_states = compiled(jax_backend.merge_states)


def _output_alone(function: Callable[..., Stages]) -> Callable[..., Stages]:
    @wraps(function)
    def output_alone(*inputs: object, **options: object) -> Stages:
        return {"output": function(*inputs, **options)["output"]}

    return output_alone


_SHARED = {"prepare": prepare, "describe": describe, "from_numpy": from_numpy, "to_numpy": to_numpy}
OUTPUT = SimpleNamespace(
    **_SHARED,
    attention=compiled(_output_alone(jax_backend.attention)),
    multi_head_attention=compiled(_output_alone(jax_backend.multi_head_attention)),
)
ABSORBED = SimpleNamespace(
    **_SHARED,
    latent_attention=compiled(make_absorbed(jax_backend.attention, jnp.concatenate, lambda a, b: a @ b.mT)),
)
