"""JAX kernels that look suspicious and are right: compiled programs, donated copies, tuning and callbacks.

attncheck check --implementation benchmarks/gate_kernels/jax_right.py:programs_by_options
"""

import os
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy
from jax import lax

framework = "jax"


def _scores(query, key, mask=None, is_causal=False, scale=None):
    """Return the masked scores (B, H, Lq, Lk)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ _repeat_heads(key, query).swapaxes(-1, -2)  # XLA may round scores * scale in two ways
    if is_causal:
        causal = jnp.tri(*scores.shape[-2:], dtype=bool)
        mask = causal if mask is None else mask & causal
    return scores if mask is None else jnp.where(mask, scores, -jnp.inf)


def _softmax(scores):
    top = scores.max(axis=-1, keepdims=True, initial=-jnp.inf)
    powers = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = powers.sum(axis=-1, keepdims=True)
    return powers / jnp.where(total == 0, 1, total)


def _attend(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the output (B, H, Lq, Dv)."""
    return _softmax(_scores(query, key, mask, is_causal, scale)) @ _repeat_heads(value, query)


def _repeat_heads(array, query):
    return jnp.repeat(array, query.shape[1] // array.shape[1], axis=1)


@partial(jax.jit, static_argnames="is_causal")
def _program(query, key, value, mask, scale, is_causal):
    return _attend(query, key, value, mask, is_causal, scale)


def programs_by_options(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Lets JAX keep compiled programs by shapes and causality, with the scale and the mask as inputs."""
    return _program(query, key, value, mask, query.shape[-1] ** -0.5 if scale is None else scale, is_causal)


_PROGRAMS = {}


def programs_by_scale(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps compiled programs in a table by the scale and causality, both of which are compiled in."""
    place = is_causal, scale
    if place not in _PROGRAMS:
        _PROGRAMS[place] = jax.jit(partial(_attend, is_causal=is_causal, scale=scale))
    return _PROGRAMS[place](query, key, value, mask)


def _scan(query, key, value, mask=None, is_causal=False, scale=None, *, tile=32):
    """Return the output by tiles of keys."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    padding = -scores.shape[-1] % tile
    scores = jnp.pad(scores, [(0, 0)] * 3 + [(0, padding)], constant_values=-jnp.inf)
    value = jnp.pad(value, [(0, 0), (0, 0), (0, padding), (0, 0)])
    tiles = scores.shape[-1] // tile
    scores = jnp.moveaxis(scores.reshape(*scores.shape[:-1], tiles, tile), -2, 0)
    value = jnp.moveaxis(value.reshape(*value.shape[:2], tiles, tile, value.shape[-1]), 2, 0)

    def step(state, part):
        top, total, output = state
        higher = jnp.maximum(top, part[0].max(axis=-1, keepdims=True))
        shift = jnp.where(jnp.isneginf(higher), 0, higher)
        powers, factor = jnp.exp(part[0] - shift), jnp.exp(top - shift)
        return (higher, total * factor + powers.sum(axis=-1, keepdims=True), output * factor + powers @ part[1]), None

    column = jnp.zeros((*query.shape[:-1], 1), scores.dtype)
    empty = jnp.full_like(column, -jnp.inf), column, jnp.zeros((*query.shape[:-1], value.shape[-1]), scores.dtype)
    (_, total, output), _ = lax.scan(step, empty, (scores, value))
    return output / jnp.where(total == 0, 1, total)


def online_softmax(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Scans tiles of 32 keys with a running maximum, the last of them padded with scores of minus infinity."""
    return _scan(query, key, value, mask, is_causal, scale)


def mapped_over_heads(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Maps one head over all heads."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    return jax.vmap(lambda part, values: _softmax(part) @ values, in_axes=1, out_axes=1)(scores, value)


@partial(jax.jit, static_argnames="is_causal", donate_argnums=0)
def _with_donated_copy(copy, key, value, mask, scale, is_causal):
    return _attend(copy, key, value, mask, is_causal, scale)


def donates_a_copy(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Donates a copy of the query to the compiled program."""
    copy = jnp.array(query, copy=True)
    return _with_donated_copy(copy, key, value, mask, query.shape[-1] ** -0.5 if scale is None else scale, is_causal)


def algorithm_by_environment(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Lets ATTENTION_ALGORITHM choose between two right algorithms."""
    compute = _scan if os.environ.get("ATTENTION_ALGORITHM") == "online" else _attend
    return compute(query, key, value, mask, is_causal, scale)


def float32_inside(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes bfloat16 in float32, and rounds the output once."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return _attend(*(array.astype(wide) for array in (query, key, value)), mask, is_causal, scale).astype(query.dtype)


float32_inside.capabilities = {"dtypes": ["float64", "float32", "bfloat16"]}

_FASTEST = {}


def tuned_by_time(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Times two right variants in the first call of a shape, and keeps the faster one."""
    place, arguments = (query.shape, key.shape, query.dtype), (query, key, value, mask, is_causal, scale)
    if place not in _FASTEST:
        seconds = {}
        for variant in (_attend, _scan):
            begin = time.perf_counter()
            variant(*arguments).block_until_ready()
            seconds[variant] = time.perf_counter() - begin
        _FASTEST[place] = min(seconds, key=seconds.get)
    return _FASTEST[place](*arguments)


def pads_to_few_shapes(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Pads queries to 16 rows so that few programs are compiled, and slices the new output."""
    scores = _scores(query, key, mask, is_causal, scale)
    padded = jnp.pad(scores, [(0, 0), (0, 0), (0, -query.shape[2] % 16), (0, 0)])
    return (_softmax(padded) @ _repeat_heads(value, query))[:, :, : query.shape[2]]


_WORKSPACES = {}


def copy_of_a_workspace(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps a NumPy workspace per shape and dtype, and returns a copy of it."""
    output = numpy.asarray(_attend(query, key, value, mask, is_causal, scale))
    place = output.shape, output.dtype
    if place not in _WORKSPACES:
        _WORKSPACES[place] = numpy.empty(*place)
    _WORKSPACES[place][...] = output
    return jnp.array(_WORKSPACES[place], copy=True)
