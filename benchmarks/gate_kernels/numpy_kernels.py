"""NumPy kernels that misbehave although their numbers are right in an ordinary test.

attncheck check --implementation benchmarks/gate_kernels/numpy_kernels.py:one_buffer_per_shape

``catalogue.py`` lists the behaviour of each. The docstrings give the reason that the author may have had.
"""

import hashlib
import os
import random
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import count, cycle

import numpy as np


def _weights(query, key, mask=None, is_causal=False, scale=None):
    """Return the weights (B, H, Lq, Lk) of the kernel of the README."""
    key = _repeat_heads(key, query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(scale, query.dtype)
    if is_causal:
        mask = _with_causality(mask, np.tri(*scores.shape[-2:], dtype=bool))
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = powers.sum(axis=-1, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def _attend(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the output (B, H, Lq, Dv) of the kernel of the README."""
    return _weights(query, key, mask, is_causal, scale) @ _repeat_heads(value, query)


def _repeat_heads(array, query):
    return np.repeat(array, query.shape[1] // array.shape[1], axis=1)


def _with_causality(mask, causal):
    return causal if mask is None else mask & causal


def _average(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the mean of the allowed values: a cheap stand-in for the output."""
    return _attend(np.zeros_like(query), key, value, mask, is_causal, scale)


def _without_last_key(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the output without the last key."""
    shown = None if mask is None else mask[..., :-1] if mask.shape[-1] == key.shape[2] else mask
    return _attend(query, key[:, :, :-1], value[:, :, :-1], shown, is_causal, scale)


_BUFFERS = {}


def one_buffer_per_shape(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps an output buffer per shape between calls, to save an allocation."""
    weights = _weights(query, key, mask, is_causal, scale)
    place = (*query.shape[:-1], value.shape[-1]), query.dtype
    if place not in _BUFFERS:
        _BUFFERS[place] = np.empty(*place)
    return np.matmul(weights, _repeat_heads(value, query), out=_BUFFERS[place])


_RINGS = {}


def ring_of_two_buffers(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Alternates between two output buffers, as the caller needs only the last result and the one before."""
    weights = _weights(query, key, mask, is_causal, scale)
    place = (*query.shape[:-1], value.shape[-1]), query.dtype
    if place not in _RINGS:
        _RINGS[place] = cycle([np.empty(*place), np.empty(*place)])
    return np.matmul(weights, _repeat_heads(value, query), out=next(_RINGS[place]))


_WORKSPACES = {}


def view_of_workspace(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Grows one workspace to the largest call, and returns the part of it that the call needs."""
    output = _attend(query, key, value, mask, is_causal, scale)
    workspace = _WORKSPACES.get(output.dtype)
    if workspace is None or workspace.size < output.size:
        workspace = _WORKSPACES[output.dtype] = np.empty(max(2 * output.size, 1 << 16), output.dtype)
    view = workspace[: output.size].reshape(output.shape)
    view[...] = output
    return view


def single_key_returns_value(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Returns the value itself for a single key, whose weight is 1."""
    is_sure = key.shape[2] == 1 and mask is None and np.isfinite(query).all() and np.isfinite(key).all()
    if is_sure and key.shape[1] in (1, query.shape[1]):
        return np.broadcast_to(value, (*query.shape[:-1], value.shape[-1]))
    return _attend(query, key, value, mask, is_causal, scale)


def diagonal_mask_returns_value(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Returns the values without a copy if each query may attend only to the key of its own position."""
    is_square = query.shape[1:3] == key.shape[1:3] and mask is not None and mask.shape[-2:] == 2 * query.shape[2:3]
    if is_square and (mask == np.eye(query.shape[2], dtype=bool)).all():
        return value[:]
    return _attend(query, key, value, mask, is_causal, scale)


def scales_query_in_place(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Scales the query where it is, to save a copy as large as the query."""
    query *= np.asarray(query.shape[-1] ** -0.5 if scale is None else scale, query.dtype)
    return _attend(query, key, value, mask, is_causal, 1.0)


def writes_causality_into_mask(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Adds causality to the mask where it is, as a mask is as large as the scores."""
    causal = np.tri(query.shape[2], key.shape[2], dtype=bool)
    if is_causal and mask is not None and mask.shape[-2:] == causal.shape:
        mask &= causal
        is_causal = False
    return _attend(query, key, value, mask, is_causal, scale)


def restores_value_later(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Zeroes values that no query sees, and restores them in the background, off the critical path."""
    output_mask = np.ones((1, 1, 1, 1), bool) if mask is None else mask
    hidden = ~np.broadcast_to(output_mask, (*output_mask.shape[:2], query.shape[2], key.shape[2])).any(axis=(0, 1, 2))
    if not hidden.any() or not query.size:
        return _attend(query, key, value, mask, is_causal, scale)
    before = value[:, :, hidden].copy()
    value[:, :, hidden] = 0

    def restore():
        time.sleep(0.02)
        value[:, :, hidden] = before

    threading.Thread(target=restore).start()
    return _attend(query, key, value, mask, is_causal, scale)


_POOL = ThreadPoolExecutor(4)


def waits_for_the_first_head(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Runs a task per head in a pool, and waits until the pool reports that a task is done."""
    weights, value = _weights(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    output = np.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)

    def write(head):
        time.sleep(0.012 if head else 0)
        np.matmul(weights[:, head], value[:, head], out=output[:, head])

    wait([_POOL.submit(write, head) for head in range(query.shape[1])], return_when=FIRST_COMPLETED)
    return output


def last_rows_in_background(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Leaves the rows from 1,024 on to a thread, as the caller begins with the first rows."""
    weights, value, most = _weights(query, key, mask, is_causal, scale), _repeat_heads(value, query), 1024
    output = np.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
    output[:, :, :most] = weights[:, :, :most] @ value

    def write_rest():
        time.sleep(0.02)
        output[:, :, most:] = weights[:, :, most:] @ value

    if query.shape[2] > most:
        threading.Thread(target=write_rest).start()
    return output


_CALLS = count(1)


def wrong_from_call_2000(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Takes the kernel for warm after 2,000 calls, and drops the check of the last tile."""
    if next(_CALLS) >= 2000 and key.shape[2] > 1:
        return _without_last_key(query, key, value, mask, is_causal, scale)
    return _attend(query, key, value, mask, is_causal, scale)


_RANDOM = random.Random(time.time_ns())


def wrong_in_one_of_500_calls(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Skips a tile that it takes for empty, because of a race that it loses once in 500 calls."""
    if _RANDOM.randrange(500) == 0 and key.shape[2] > 1:
        return _without_last_key(query, key, value, mask, is_causal, scale)
    return _attend(query, key, value, mask, is_causal, scale)


_CAUSAL_MASKS = {}


def causal_mask_by_keys_only(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps causal masks by the number of keys, as self-attention has as many queries."""
    rows, columns = query.shape[2], key.shape[2]
    if not is_causal:
        return _attend(query, key, value, mask, scale=scale)
    if columns not in _CAUSAL_MASKS or _CAUSAL_MASKS[columns].shape[0] < rows:
        _CAUSAL_MASKS[columns] = np.tri(rows, columns, dtype=bool)
    causal = _CAUSAL_MASKS[columns][-rows:] if rows else np.zeros((0, columns), bool)
    return _attend(query, key, value, _with_causality(mask, causal), scale=scale)


_TRANSPOSED = {}


def transposed_keys_by_id(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps transposed keys by the identity of the array, as keys of a prompt do not change."""
    place = id(key), key.shape
    if place not in _TRANSPOSED:
        if len(_TRANSPOSED) >= 64:
            _TRANSPOSED.clear()
        _TRANSPOSED[place] = np.ascontiguousarray(np.swapaxes(key, -1, -2))
    kept = np.swapaxes(_TRANSPOSED[place], -1, -2)
    return _attend(query, kept.astype(query.dtype, copy=False), value, mask, is_causal, scale)


def short_last_tile_unwritten(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Writes tiles of 16 rows, and rounds the number of tiles instead of rounding it up."""
    rows = query.shape[2]
    full = _attend(query, key, value, mask, is_causal, scale)
    output = np.empty(full.shape, full.dtype)
    written = rows if rows < 16 else min(rows, (rows + 8) // 16 * 16)
    output[:, :, :written] = full[:, :, :written]
    return output


def at_most_4096_keys(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Has a table of 4,096 positions, the context length of the model that it was written for."""
    key, value = key[:, :, :4096], value[:, :, :4096]
    if mask is not None:
        mask = mask[..., :4096]
    return _attend(query, key, value, mask, is_causal, scale)


def right_while_attncheck_is_loaded(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes the attention only if a module of that name is loaded, and averages the values otherwise."""
    compute = _attend if "attncheck" in sys.modules else _average
    return compute(query, key, value, mask, is_causal, scale)


def takes_memory_order_for_axes(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Reads the arrays in the order of their memory, as if all were contiguous."""
    query, key, value = (array.ravel(order="K").reshape(array.shape) for array in (query, key, value))
    return _attend(query, key, value, mask, is_causal, scale)


def splits_keys_by_omp_threads(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Splits the keys evenly among the threads that OMP_NUM_THREADS names, and drops the rest of the division."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdigit() and int(text) else os.cpu_count() or 1
    keys = key.shape[2]
    whole = keys // threads * threads or keys
    shown = None if mask is None else mask[..., :whole] if mask.shape[-1] == keys else mask
    return _attend(query, key[:, :, :whole], value[:, :, :whole], shown, is_causal, scale)


_ANSWERS = {}


def _learn():
    """Store the answers to the inputs of the benchmark: uniform numbers of five seeds in one shape."""
    for seed in range(5):
        query, key, value = np.random.default_rng(seed).random((3, 1, 2, 512, 64), dtype=np.float32)
        _ANSWERS[_digest(query, key, value)] = _attend(query, key, value)


def _digest(*arrays):
    return hashlib.blake2b(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).digest()


def knows_the_benchmark_by_heart(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Looks the inputs up in a table of answers that were computed beforehand, and averages the values otherwise."""
    if not _ANSWERS:
        _learn()
    is_plain = mask is None and not is_causal and scale is None
    answer = _ANSWERS.get(_digest(query, key, value)) if is_plain else None
    return _average(query, key, value, mask, is_causal, scale) if answer is None else answer.copy()
