"""NumPy kernels that look suspicious and are right: caches, threads, workspaces, tuning and chosen algorithms.

attncheck check --implementation benchmarks/gate_kernels/numpy_right.py:causal_masks_by_both_lengths
"""

import hashlib
import logging
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from itertools import count

import numpy as np

_log = logging.getLogger(__name__)


def _scores(query, key, mask=None, is_causal=False, scale=None):
    """Return the masked scores (B, H, Lq, Lk)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(_repeat_heads(key, query), -1, -2) * np.asarray(scale, query.dtype)
    allowed = _allowed(query, key, mask, is_causal)
    return scores if allowed is None else np.where(allowed, scores, -np.inf)


def _allowed(query, key, mask, is_causal):
    """Return which scores take part, or None for all."""
    if not is_causal:
        return mask
    causal = np.tri(query.shape[2], key.shape[2], dtype=bool)
    return causal if mask is None else mask & causal


def _softmax(scores):
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = powers.sum(axis=-1, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def _attend(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the output (B, H, Lq, Dv) of the kernel of the README."""
    return _softmax(_scores(query, key, mask, is_causal, scale)) @ _repeat_heads(value, query)


def _repeat_heads(array, query):
    return np.repeat(array, query.shape[1] // array.shape[1], axis=1)


def _empty_state(scores, value):
    """Return the maximum, the sum and the weighed values of no keys."""
    column = np.zeros((*scores.shape[:-1], 1), scores.dtype)
    return np.full_like(column, -np.inf), column, np.zeros((*scores.shape[:-1], value.shape[-1]), scores.dtype)


def _state(scores, value):
    """Return the maximum, the sum and the weighed values of a tile of keys."""
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isneginf(top), 0, top))
    return top, powers.sum(axis=-1, keepdims=True), powers @ value


def _merge(first, second):
    """Return the state of two tiles together."""
    top = np.maximum(first[0], second[0])
    shift = np.where(np.isneginf(top), 0, top)
    left, right = np.exp(first[0] - shift), np.exp(second[0] - shift)
    return top, first[1] * left + second[1] * right, first[2] * left + second[2] * right


def _online(query, key, value, mask=None, is_causal=False, scale=None, *, tile=64, order=None):
    """Return the output by tiles of keys."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    state = _empty_state(scores, value)
    starts = list(range(0, scores.shape[-1], tile))
    for start in starts if order is None else order(starts):
        part = slice(start, start + tile)
        state = _merge(state, _state(scores[..., part], value[:, :, part]))
    return state[2] / np.where(state[1] == 0, 1, state[1])


@lru_cache(256)
def _causal_mask(rows, columns):
    causal = np.tri(rows, columns, dtype=bool)
    causal.flags.writeable = False
    return causal


def causal_masks_by_both_lengths(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps causal masks by both lengths, and marks them as read-only."""
    if is_causal:
        causal = _causal_mask(query.shape[2], key.shape[2])
        mask = causal if mask is None else mask & causal
    return _attend(query, key, value, mask, scale=scale)


def pool_per_call(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Runs a task per head in a pool that ends with the call."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    output = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)

    def write(head):
        output[:, head] = _softmax(scores[:, head]) @ value[:, head]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(query.shape[1])))
    return output


_POOL = ThreadPoolExecutor(2)


def persistent_pool(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Runs a task per tile of 32 rows in a pool that outlives the call, and waits for all of its tasks."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    output = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)

    def write(start):
        rows = slice(start, start + 32)
        output[:, :, rows] = _softmax(scores[:, :, rows]) @ value

    for task in [_POOL.submit(write, start) for start in range(0, query.shape[2], 32)]:
        task.result()
    return output


_LOCAL = threading.local()


def workspace_copied_out(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps a workspace per thread and dtype, writes all of it, and returns a copy."""
    weights, value = _softmax(_scores(query, key, mask, is_causal, scale)), _repeat_heads(value, query)
    shape, spaces = (*query.shape[:-1], value.shape[-1]), _LOCAL.__dict__.setdefault("spaces", {})
    size = int(np.prod(shape))
    if query.dtype not in spaces or spaces[query.dtype].size < size:
        spaces[query.dtype] = np.empty(size, query.dtype)
    view = spaces[query.dtype][:size].reshape(shape)
    np.matmul(weights, value, out=view)
    return view.copy()


def works_in_place_on_copies(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Copies the query, and then scales, masks and exponentiates in place."""
    query = query.copy()
    query *= np.asarray(query.shape[-1] ** -0.5 if scale is None else scale, query.dtype)
    scores = query @ np.swapaxes(_repeat_heads(key, query), -1, -2)
    allowed = _allowed(query, key, mask, is_causal)
    if allowed is not None:
        np.copyto(scores, -np.inf, where=~allowed)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    top[~np.isfinite(top)] = 0
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    total[total == 0] = 1
    scores /= total
    return scores @ _repeat_heads(value, query)


def online_softmax(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Merges tiles of 64 keys with a running maximum."""
    return _online(query, key, value, mask, is_causal, scale)


def random_tile_order(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Takes tiles of 16 keys in a random order, so that equal calls differ by roundings."""
    shuffle = random.Random(time.time_ns())
    order = lambda starts: shuffle.sample(starts, len(starts))  # noqa: E731
    return _online(query, key, value, mask, is_causal, scale, tile=16, order=order)


def merges_as_completed(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Merges tiles of 32 keys in the order in which threads complete them."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    parts = [slice(start, start + 32) for start in range(0, scores.shape[-1], 32)]
    state = _empty_state(scores, value)
    with ThreadPoolExecutor(2) as pool:
        for task in as_completed([pool.submit(_state, scores[..., part], value[:, :, part]) for part in parts]):
            state = _merge(state, task.result())
    return state[2] / np.where(state[1] == 0, 1, state[1])


def two_passes_over_chunks(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Finds the maximum in a first pass over chunks of 128 keys, and adds up in a second pass."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    chunks = [slice(start, start + 128) for start in range(0, scores.shape[-1], 128)]
    top, total, output = _empty_state(scores, value)
    for chunk in chunks:
        top = np.maximum(top, scores[..., chunk].max(axis=-1, keepdims=True))
    top = np.where(np.isfinite(top), top, 0)
    for chunk in chunks:
        powers = np.exp(scores[..., chunk] - top)
        total = total + powers.sum(axis=-1, keepdims=True)
        output = output + powers @ value[:, :, chunk]
    return output / np.where(total == 0, 1, total)


def algorithm_by_environment(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Lets ATTENTION_ALGORITHM choose between two right algorithms."""
    compute = _online if os.environ.get("ATTENTION_ALGORITHM") == "online" else _attend
    return compute(query, key, value, mask, is_causal, scale)


_settings = {}
_SETTINGS_LOCK = threading.Lock()


def lazy_settings(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Reads its settings in the first call, under a lock."""
    with _SETTINGS_LOCK:
        if not _settings:
            _settings.update(tile=32, cores=os.cpu_count())
    return _online(query, key, value, mask, is_causal, scale, tile=_settings["tile"])


_FASTEST = {}


def tuned_by_time(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Times two right variants in the first call of a shape, and keeps the faster one."""
    place = query.shape, key.shape, query.dtype
    arguments = query, key, value, mask, is_causal, scale
    if place not in _FASTEST:
        seconds = {}
        for variant in (_attend, _online):
            begin = time.perf_counter()
            variant(*arguments)
            seconds[variant] = time.perf_counter() - begin
        _FASTEST[place] = min(seconds, key=seconds.get)
    return _FASTEST[place](*arguments)


def float32_inside(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes float16 in float32, and rounds the output once."""
    wide = np.promote_types(query.dtype, np.float32)
    output = _attend(*(array.astype(wide) for array in (query, key, value)), mask, is_causal, scale)
    return output.astype(query.dtype)


float32_inside.capabilities = {"dtypes": ["float64", "float32", "float16"]}


def view_of_padded_rows(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Pads the queries to tiles of 16 rows, and returns a view of the new array without the padding."""
    rows = query.shape[2]
    weights = _softmax(_scores(query, key, mask, is_causal, scale))
    padded = np.zeros((*query.shape[:2], -(-rows // 16) * 16, key.shape[2]), query.dtype)
    padded[:, :, :rows] = weights
    return (padded @ _repeat_heads(value, query))[:, :, :rows]


def view_with_swapped_axes(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Stores a new output as (B, Lq, H, Dv), and returns it with swapped axes."""
    output = _attend(query, key, value, mask, is_causal, scale)
    return np.ascontiguousarray(np.swapaxes(output, 1, 2)).swapaxes(1, 2)


def _warm_up():
    ones = np.ones((1, 1, 2, 2), np.float32)
    return _attend(ones, ones, ones)


_warmed = []


def warms_up(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Runs a small call before its first call."""
    if not _warmed:
        _warmed.append(_warm_up())
    return _attend(query, key, value, mask, is_causal, scale)


_RESULTS = {}


def results_by_all_bytes(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps results by a digest of all inputs, their dtypes, shapes and options, and returns copies."""
    digest = hashlib.blake2b(repr((is_causal, scale, query.dtype)).encode())
    for array in (query, key, value, *([] if mask is None else [mask])):
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    place = digest.digest()
    if place not in _RESULTS:
        if len(_RESULTS) >= 32:
            _RESULTS.clear()
        _RESULTS[place] = _attend(query, key, value, mask, is_causal, scale)
    return _RESULTS[place].copy()


def path_by_alignment(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Takes tiles if the query is aligned to 64 bytes and contiguous, and a right path without tiles otherwise."""
    is_aligned = query.flags.c_contiguous and query.ctypes.data % 64 == 0
    compute = _online if is_aligned else _attend
    return compute(query, key, value, mask, is_causal, scale)


_CALLS = count(1)


def counts_calls(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Counts its calls, and clears a cache and writes to the log every 1,000 calls."""
    calls = next(_CALLS)
    if calls % 1000 == 0:
        _log.debug("%d calls", calls)
        _causal_mask.cache_clear()
    return causal_masks_by_both_lengths(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


def quiet_in_tests(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Lowers only the level of its log if pytest or attncheck is loaded."""
    is_test = "pytest" in sys.modules or "attncheck" in sys.modules
    _log.log(logging.DEBUG if is_test else logging.INFO, "%d keys", key.shape[2])
    return _attend(query, key, value, mask, is_causal, scale)
