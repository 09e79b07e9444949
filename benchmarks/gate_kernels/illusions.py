"""Transcription errors that a check at one fixed shape does not see, rebuilt from public descriptions.

"The Correctness Illusion in LLM-Generated GPU Kernels" (Sarkar, arXiv:2606.20128, 2026) describes attention without its
scale, an online softmax that does not rescale what it has added, a softmax that does not mask its last tile, and a
product that overwrites its accumulator. The last three kernels make the same kinds of error in other reductions.

attncheck gate benchmarks/gate_kernels/illusions.py:attention_without_scale
"""

import numpy as np
from numpy_right import online_softmax

_TILE = 16


def _scores(query, key, mask, is_causal, scale):
    key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(scale, query.dtype)
    if is_causal:
        causal = np.tri(*scores.shape[-2:], dtype=bool)
        mask = causal if mask is None else mask & causal
    return scores if mask is None else np.where(mask, scores, scores.dtype.type(-np.inf))


def _powers(scores):
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    return np.exp(scores - np.where(np.isfinite(top), top, 0))


def _divide(numerator, total):
    return numerator / np.where(total == 0, 1, total)


def _values(query, value):
    return np.repeat(value, query.shape[1] // value.shape[1], axis=1)


def attention_without_scale(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Forgets the division by the root of the head width."""
    scale = 1.0 if scale is None else scale
    return online_softmax(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


def online_softmax_without_rescale(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Does not rescale the output so far if a later tile has a larger maximum; right for one tile of keys."""
    scores, value = _scores(query, key, mask, is_causal, scale), _values(query, value)
    top = np.full((*scores.shape[:-1], 1), -np.inf, scores.dtype)
    total, output = np.zeros_like(top), np.zeros((*scores.shape[:-1], value.shape[-1]), scores.dtype)
    for start in range(0, scores.shape[-1], _TILE):
        part = scores[..., start : start + _TILE]
        top = np.maximum(top, part.max(axis=-1, keepdims=True))
        powers = np.exp(part - np.where(np.isneginf(top), 0, top))
        total = total + powers.sum(axis=-1, keepdims=True)
        output = output + powers @ value[:, :, start : start + _TILE]
    return _divide(output, total)


def softmax_counts_the_padding(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Pads the scores of the last tile with zeros, and counts their weights; right for whole tiles of keys."""
    scores, value = _scores(query, key, mask, is_causal, scale), _values(query, value)
    padding = -scores.shape[-1] % _TILE
    padded = np.concatenate([scores, np.zeros((*scores.shape[:-1], padding), scores.dtype)], axis=-1)
    powers = _powers(padded)
    return _divide(powers[..., : scores.shape[-1]] @ value, powers.sum(axis=-1, keepdims=True))


def product_overwrites_its_accumulator(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Assigns the product of each tile of D in place of adding it; right for one tile."""
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    for start in range(0, max(width, 1), _TILE):
        part = slice(start, start + _TILE)
        scores = _scores(query[..., part], key[..., part], mask, is_causal, scale)
    powers = _powers(scores)
    return _divide(powers @ _values(query, value), powers.sum(axis=-1, keepdims=True))


def sum_of_the_last_tile(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Divides by the sum of the last tile of weights; right for one tile of keys."""
    powers = _powers(_scores(query, key, mask, is_causal, scale))
    last = (max(powers.shape[-1], 1) - 1) // _TILE * _TILE
    return _divide(powers @ _values(query, value), powers[..., last:].sum(axis=-1, keepdims=True))


def maximum_of_the_first_tile(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Subtracts the maximum of the first tile of scores: larger scores in later tiles overflow."""
    scores = _scores(query, key, mask, is_causal, scale)
    top = scores[..., :_TILE].max(axis=-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return _divide(powers @ _values(query, value), powers.sum(axis=-1, keepdims=True))


def rows_of_whole_tiles(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes only whole tiles of queries, and leaves the rest at zero; right for whole tiles of queries."""
    output = online_softmax(query, key, value, mask=mask, is_causal=is_causal, scale=scale)
    output[:, :, max(output.shape[2] // _TILE, 1) * _TILE :] = 0
    return output
