"""Merges what attention gave for parts of the keys: split-KV, ring, cascade and chunked prefill."""

import numpy as np


def merge_states(outputs, log_sum_exps, *, lse_base="e"):
    """outputs (N, B, H, Lq, Dv), log_sum_exps (N, B, H, Lq), -inf where a part has no key -> those of all keys"""
    power, logarithm = (np.exp, np.log) if lse_base == "e" else (np.exp2, np.log2)
    highest = log_sum_exps.max(axis=0)
    shift = np.where(np.isneginf(highest), 0, highest)  # of no key at all: -inf minus -inf would be NaN
    powers = power(log_sum_exps - shift)
    total = powers.sum(axis=0)
    outputs = np.where(np.isneginf(log_sum_exps)[..., np.newaxis], 0, outputs)  # whatever an empty part gave
    mean = (powers[..., np.newaxis] * outputs).sum(axis=0) / np.where(total == 0, 1, total)[..., np.newaxis]
    with np.errstate(divide="ignore"):
        return {"log_sum_exp": shift + logarithm(total), "output": mean.astype(outputs.dtype)}
