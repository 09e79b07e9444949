"""PyTorch kernels that misbehave although their numbers are right in an ordinary test.

attncheck check --implementation benchmarks/gate_kernels/torch_kernels.py:buffer_of_a_module

``catalogue.py`` lists the behaviour of each. The docstrings give the reason that the author may have had. Kernels that
call the attention of PyTorch are in ``torch_delegates.py``.
"""

import random
import sys
import threading
import time
from itertools import count

import torch

framework = "torch"


def _weights(query, key, mask=None, is_causal=False, scale=None):
    """Return the weights (B, H, Lq, Lk)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ _repeat_heads(key, query).transpose(-1, -2) * scale
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if not scores.shape[-1]:
        return scores
    top = scores.amax(dim=-1, keepdim=True)
    powers = torch.exp(scores - torch.where(torch.isfinite(top), top, 0))
    total = powers.sum(dim=-1, keepdim=True)
    return powers / torch.where(total == 0, 1, total)


def _attend(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the output (B, H, Lq, Dv)."""
    return _weights(query, key, mask, is_causal, scale) @ _repeat_heads(value, query)


def _repeat_heads(array, query):
    return array.repeat_interleave(query.shape[1] // array.shape[1], dim=1)


def _average(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the mean of the allowed values: a cheap stand-in for the output."""
    return _attend(torch.zeros_like(query), key, value, mask, is_causal, scale)


def _without_last_key(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the output without the last key."""
    shown = None if mask is None else mask[..., :-1] if mask.shape[-1] == key.shape[2] else mask
    return _attend(query, key[:, :, :-1], value[:, :, :-1], shown, is_causal, scale)


class _Module(torch.nn.Module):
    """A module whose buffer is the output of its last call."""

    def __init__(self):
        super().__init__()
        self.output = None

    def forward(self, query, key, value, mask, is_causal, scale):
        """Return the buffer."""
        weights, shape = _weights(query, key, mask, is_causal, scale), (*query.shape[:-1], value.shape[-1])
        if self.output is None or self.output.shape != shape or self.output.dtype != query.dtype:
            self.output = torch.empty(shape, dtype=query.dtype)
        return torch.matmul(weights, _repeat_heads(value, query), out=self.output)


_MODULE = _Module()


def buffer_of_a_module(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps the output in the module, as graphs that are replayed need a fixed address."""
    return _MODULE(query, key, value, mask, is_causal, scale)


_BUCKETS = {}


def view_of_a_bucket(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps one padded output for all lengths of a bucket of 64 rows, and returns the rows of the call."""
    rows = query.shape[2]
    shape = *query.shape[:2], -(-rows // 64) * 64, value.shape[-1]
    if (shape, query.dtype) not in _BUCKETS:
        _BUCKETS[shape, query.dtype] = torch.zeros(shape, dtype=query.dtype)
    view = _BUCKETS[shape, query.dtype][:, :, :rows]
    view.copy_(_attend(query, key, value, mask, is_causal, scale))
    return view


def single_key_is_expanded(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Expands the value of a single key, whose weight is 1, instead of a product."""
    is_sure = key.shape[2] == 1 and mask is None and bool(torch.isfinite(query).all() and torch.isfinite(key).all())
    if is_sure and key.shape[1] in (1, query.shape[1]):
        return value.expand(*query.shape[:-1], value.shape[-1])
    return _attend(query, key, value, mask, is_causal, scale)


def scales_query_in_place(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Scales the query with mul_, to save a copy as large as the query."""
    query.mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    return _attend(query, key, value, mask, is_causal, 1.0)


def zeroes_hidden_values(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Zeroes the values that no query sees, so that padding with NaN does no harm."""
    if mask is not None and query.numel():
        shown = mask.expand(*mask.shape[:2], query.shape[2], key.shape[2]).any(dim=2).any(dim=1)
        value.masked_fill_(~shown[:, None, :, None], 0)
    return _attend(query, key, value, mask, is_causal, scale)


def last_tile_in_background(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Returns as soon as the full tiles of 32 rows are done, and writes a shorter last tile in a thread."""
    weights, value = _weights(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    first = query.shape[2] // 32 * 32
    output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    output[:, :, :first] = weights[:, :, :first] @ value

    def write_rest():
        time.sleep(0.015)
        output[:, :, first:] = weights[:, :, first:] @ value

    if 0 < first < query.shape[2]:
        threading.Thread(target=write_rest).start()
    else:
        output[:, :, first:] = weights[:, :, first:] @ value
    return output


_CALLS_BY_SHAPE = {}


def float16_after_64_calls_of_a_shape(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Takes a shape for hot after 64 calls, and then stores its scores in half the bits."""
    calls = _CALLS_BY_SHAPE.setdefault((query.shape, key.shape), count(1))
    if next(calls) > 64:
        scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
        return _attend(scaled.half().to(query.dtype), key.half().to(key.dtype), value, mask, is_causal, 1.0)
    return _attend(query, key, value, mask, is_causal, scale)


_RANDOM = random.Random(time.time_ns())


def wrong_in_one_of_300_calls(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Loses the last key to a race between two streams once in 300 calls."""
    if key.shape[2] > 1 and _RANDOM.random() < 1 / 300:
        return _without_last_key(query, key, value, mask, is_causal, scale)
    return _attend(query, key, value, mask, is_causal, scale)


_PREPARED = {}


def prepared_keys_by_address(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps transposed keys by address and shape, as a cache of keys stays where it is."""
    place = key.data_ptr(), key.shape, key.dtype
    if place not in _PREPARED:
        if len(_PREPARED) >= 64:
            _PREPARED.clear()
        _PREPARED[place] = key.transpose(-1, -2).contiguous()
    return _attend(query, _PREPARED[place].transpose(-1, -2), value, mask, is_causal, scale)


_SCALES = {}


def scales_by_two_digits(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps scales as tensors by two digits, as comparing floats is fragile."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    place = round(scale, 2), query.dtype
    if place not in _SCALES:
        _SCALES[place] = torch.tensor(scale, dtype=query.dtype)
    return _attend(query, key, value, mask, is_causal, _SCALES[place])


def rows_without_keys_unwritten(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Skips rows that may attend to no key, as no reader looks at them."""
    full = _attend(query, key, value, mask, is_causal, scale)
    output = torch.empty_like(full)
    if mask is None:
        return output.copy_(full)
    has_keys = mask.expand(*mask.shape[:3], key.shape[2]).any(dim=-1, keepdim=True).expand(full.shape)
    output[has_keys] = full[has_keys]
    return output


def at_most_256_features(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Loads 256 features of a head into registers, the widest head of the models that it was written for."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attend(query[..., :256], key[..., :256], value, mask, is_causal, scale)


def right_below_a_frame_of_attncheck(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes the attention only if a caller's file has that name in its path, and averages the values otherwise."""
    frame, is_checked = sys._getframe(1), False
    while frame is not None and not is_checked:
        is_checked, frame = "attncheck" in frame.f_code.co_filename, frame.f_back
    compute = _attend if is_checked else _average
    return compute(query, key, value, mask, is_causal, scale)


def splits_rows_by_threads(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Splits the rows evenly among the threads of PyTorch, and leaves the rest of the division at 0."""
    threads = torch.get_num_threads()
    output = _attend(query, key, value, mask, is_causal, scale)
    output[:, :, query.shape[2] // threads * threads :] = 0
    return output


def ignores_the_storage_offset(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Passes the start of the storage to the kernel, as most tensors begin there."""
    query, key, value = (array.as_strided(array.shape, array.stride(), 0) for array in (query, key, value))
    return _attend(query, key, value, mask, is_causal, scale)
