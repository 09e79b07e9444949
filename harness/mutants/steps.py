"""The reference in replaceable steps: each default is what ``numpy_backend`` does, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.rounding import Array


def scale_of(query: Array, explicit: float | None) -> float:
    """Return the factor on the raw scores."""
    return 1 / math.sqrt(query.shape[-1]) if explicit is None else explicit


def dot(query: Array, key: Array) -> Array:
    """Multiply every query with every key."""
    product: Array = query @ np.swapaxes(key, -1, -2)
    return product


def times(raw_scores: Array, scale: float) -> Array:
    """Scale the raw scores."""
    return raw_scores * scale


@dataclass(frozen=True)
class DotScore:
    """Scaled dot product."""

    dot: Callable[[Array, Array], Array] = dot
    apply_scale: Callable[[Array, float], Array] = times

    def __call__(self, query: Array, key: Array, scale: float) -> Stages:
        """Return raw_scores and scores."""
        raw_scores = self.dot(query, key)
        return {"raw_scores": raw_scores, "scores": self.apply_scale(raw_scores, scale)}


def cap(stages: Stages, softcap: float, scale: float) -> Array:
    """Bound the scores by a softcap; ``stages`` come before it, and their raw scores were multiplied with ``scale``."""
    capped: Array = softcap * np.tanh(stages["scores"] / softcap)
    return capped


@dataclass(frozen=True)
class CosineScore:
    """The cosine of the angle between query and key."""

    norm: Callable[[Array], Array] = lambda vectors: np.asarray(np.linalg.norm(vectors, axis=-1, keepdims=True))
    unit_query: Callable[[Array, Array], Array] = np.divide
    unit_key: Callable[[Array, Array], Array] = np.divide

    def __call__(self, query: Array, key: Array, scale: float | None) -> Array:
        """Return the scores."""
        cosine = dot(self.unit_query(query, self.norm(query)), self.unit_key(key, self.norm(key)))
        return cosine if scale is None else cosine * scale


def bilinear(query: Array, key: Array, weight: Array) -> Array:
    """Score by a bilinear form."""
    return dot(query @ weight, key)


@dataclass(frozen=True)
class AdditiveScore:
    """Additive score: a hidden layer on query part and key part, then a weighted sum."""

    activation: Callable[[Array], Array] = np.tanh
    hidden: Callable[[Array, Array, Callable[[Array], Array]], Array] = lambda q, k, activation: activation(q + k)

    def __call__(
        self, query: Array, key: Array, query_weight: Array, key_weight: Array, vector: Array, bias: Array | None
    ) -> Array:
        """Return the scores."""
        query_part = (query @ query_weight)[..., :, np.newaxis, :]  # (B, H, Lq, 1, A)
        key_part = (key @ key_weight)[..., np.newaxis, :, :]  # (B, H, 1, Lk, A)

        def activation(hidden: Array) -> Array:
            return self.activation(hidden if bias is None else hidden + bias)

        scores: Array = self.hidden(query_part, key_part, activation) @ vector
        return scores


@dataclass(frozen=True)
class Softmax:
    """Softmax over the keys, cut into its steps.

    ``maximum(logits, unmasked)`` also sees the logits as they were before the mask. ``log_sum_exp(maximum, total)``.
    """

    maximum: Callable[[Array, Array], Array] = lambda logits, unmasked: largest(logits)
    exponential: Callable[[Array], Array] = np.exp
    total: Callable[[Array], Array] = lambda exponentials: exponentials.sum(axis=-1, keepdims=True)
    divide: Callable[[Array, Array], Array] = lambda exponentials, total: exponentials / total
    log_sum_exp: Callable[[Array, Array], Array] = lambda maximum, total: maximum + np.log(total)

    def __call__(self, logits: Array, unmasked: Array) -> Stages:
        """Return weights and log_sum_exp."""
        empty = largest(logits) == -np.inf
        maximum = np.where(empty, -np.inf, self.maximum(logits, unmasked))
        exponentials = self.exponential(logits - np.where(empty, 0, maximum))
        total = np.where(empty, 1, self.total(exponentials))
        # An infinite maximum, of either sign, is the answer itself: inf + log(inf - inf) would be NaN.
        log_sum_exp = np.where(np.isinf(maximum), maximum, self.log_sum_exp(maximum, total))
        return {"weights": np.where(empty, 0, self.divide(exponentials, total)), "log_sum_exp": log_sum_exp[..., 0]}


def largest(logits: Array) -> Array:
    """Return each row's maximum, the axis kept."""
    return np.asarray(logits.max(axis=-1, keepdims=True, initial=-np.inf))


def average(logits: Array, weights: Array, value: Array) -> Array:
    """Average the values."""
    averaged: Array = weights @ value
    return averaged


def join(past: Array, new: Array) -> Array:
    """Put what is new behind the past."""
    return np.concatenate((past, new), axis=-2)


def join_both(past_key: Array, past_value: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Put new keys and values behind those of the past."""
    return join(past_key, key), join(past_value, value)


def repeat_heads(inputs: Array, heads: int) -> Array:
    """Give every query head its key or value head: head h gets h // (H / Hkv)."""
    kv_heads = inputs.shape[1]
    return inputs if kv_heads == heads else np.repeat(inputs, heads // kv_heads, axis=1)


def split_heads(inputs: Array, heads: int) -> Array:
    """Give every head its own part of the width."""
    batch, length, width = inputs.shape
    return inputs.reshape(batch, length, heads, width // heads).swapaxes(1, 2)  # (B, L, H*D) -> (B, H, L, D)


def merge_heads(context: Array) -> Array:
    """Lay the heads side by side."""
    batch, heads, length, width = context.shape
    return context.swapaxes(1, 2).reshape(batch, length, heads * width)  # (B, H, L, D) -> (B, L, H*D)


def project(inputs: Array, weight: Array, bias: Array | None) -> Array:
    """Multiply with a weight and add a bias."""
    projected: Array = inputs @ weight
    return projected if bias is None else projected + bias


def project_output(context: Array, merged: Array, weight: Array, bias: Array | None) -> Array:
    """Project the merged heads once more."""
    return project(merged, weight, bias)


DOT_SCORE = DotScore()
COSINE_SCORE = CosineScore()
ADDITIVE_SCORE = AdditiveScore()
SOFTMAX = Softmax()
