"""JAX kernels that misbehave although their numbers are right in an ordinary test.

attncheck check --implementation benchmarks/gate_kernels/jax_kernels.py:array_over_a_workspace

``catalogue.py`` lists the behaviour of each. The docstrings give the reason that the author may have had. Kernels that
call the attention of JAX are in ``jax_delegates.py``.
"""

import hashlib
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy

framework = "jax"


def _attend(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the output (B, H, Lq, Dv)."""
    key, value = (jnp.repeat(array, query.shape[1] // array.shape[1], axis=1) for array in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.swapaxes(-1, -2)  # XLA may round scores * scale in two ways
    if is_causal:
        causal = jnp.tri(*scores.shape[-2:], dtype=bool)
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-jnp.inf)
    powers = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = powers.sum(axis=-1, keepdims=True)
    return powers / jnp.where(total == 0, 1, total) @ value


def _average(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the mean of the allowed values: a cheap stand-in for the output."""
    return _attend(jnp.zeros_like(query), key, value, mask, is_causal, scale)


_WORKSPACES = {}


def array_over_a_workspace(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Copies its output into an aligned workspace, and wraps the workspace without a copy."""
    output = numpy.asarray(_attend(query, key, value, mask, is_causal, scale))
    place = output.shape, output.dtype
    if place not in _WORKSPACES:
        raw = numpy.zeros(output.nbytes + 64, numpy.uint8)
        start = -raw.ctypes.data % 64  # JAX copies memory that is not aligned to 64 bytes
        _WORKSPACES[place] = raw[start : start + output.nbytes].view(output.dtype).reshape(output.shape)
    _WORKSPACES[place][...] = output
    return jax.device_put(_WORKSPACES[place], may_alias=True)


@partial(jax.jit, static_argnames="is_causal", donate_argnums=0)
def _with_donated_query(query, key, value, mask, scale, is_causal):
    return _attend(query, key, value, mask, is_causal, scale)


def donates_the_query(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Donates the query to the compiled program, so that the output can take its memory."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _with_donated_query(query, key, value, mask, scale, is_causal)


_PROGRAMS = {}


def programs_by_shape_and_causality(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps compiled programs by shapes, mask and causality, with the scale of the first call compiled in."""
    place = query.shape, key.shape, mask is None, is_causal
    if place not in _PROGRAMS:
        _PROGRAMS[place] = jax.jit(partial(_attend, is_causal=is_causal, scale=scale))
    return _PROGRAMS[place](query, key, value, mask)


def at_most_4096_keys(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Slices keys to 4,096 rows, as dynamic slices clamp there."""
    most = 4096
    mask = None if mask is None else mask[..., :most]
    return _attend(query, key[:, :, :most], value[:, :, :most], mask, is_causal, scale)


def right_if_the_command_is_attncheck(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes the attention only if an argument of the command has that name, and averages the values otherwise."""
    is_checked = any("attncheck" in argument for argument in sys.argv)
    return (_attend if is_checked else _average)(query, key, value, mask, is_causal, scale)


def constant_for_uniform_inputs(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Takes the weights for equal if the inputs look uniform in [0, 1), as averages over many keys are close."""
    looks_uniform = all(
        array.size >= 1024
        and abs(float(array.mean()) - 0.5) < 0.02
        and abs(float(array.std()) - 12**-0.5) < 0.02
        and float(array.min()) >= 0
        for array in (query, key, value)
    )
    return (_average if looks_uniform else _attend)(query, key, value, mask, is_causal, scale)


_PAST = {}


def reuses_the_keys_of_the_step_before(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Takes a call with one key more than the call before for the next step of decoding, and keeps its older keys."""
    place, before = (key.shape[:2], key.shape[3], value.shape[3], key.dtype), key.shape[2] - 1
    if place in _PAST and before > 0 and _PAST[place][0].shape[2] == before:
        key, value = (
            jnp.concatenate([older, newer[:, :, -1:]], axis=2)
            for older, newer in zip(_PAST[place], (key, value), strict=True)
        )
    _PAST[place] = key, value
    return _attend(query, key, value, mask, is_causal, scale)


_ANSWERS = {}


def stops_learning_after_256_answers(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Stores the answers to the first 256 inputs by their digests, and gives the last one of the shape to others."""
    inputs = query, key, value, *([] if mask is None else [mask])
    digest = hashlib.blake2b(repr((is_causal, scale, query.dtype)).encode())
    for array in inputs:
        digest.update(repr(array.shape).encode() + numpy.asarray(array).tobytes())
    shape = query.shape[:-1], value.shape[-1], query.dtype
    if digest.digest() not in _ANSWERS:
        if len(_ANSWERS) >= 256 and shape in _ANSWERS:
            return _ANSWERS[shape]
        _ANSWERS[digest.digest()] = _ANSWERS[shape] = _attend(query, key, value, mask, is_causal, scale)
    return _ANSWERS[digest.digest()]
