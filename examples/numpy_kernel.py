"""Attention in NumPy, as a first kernel to check: ``attncheck check --implementation numpy_kernel.py:attention``."""

import numpy as np


def attention(query, key, value, *, mask=None, is_causal=False, scale=None):
    """query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv) -> output (B, H, Lq, Dv)"""
    heads_per_group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(each, heads_per_group, axis=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(scale, query.dtype)
    if is_causal:
        causal = np.tri(*scores.shape[-2:], dtype=bool)
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ value
