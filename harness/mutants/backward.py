"""The gradients in replaceable steps: each default is what ``numpy_backend`` does, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.mask_steps import MaskRequest
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import times


@dataclass(frozen=True)
class Saved:
    """What the forward pass leaves behind.

    query (B, H, Lq, D), key (B, H, T, D) and value (B, H, T, Dv), repeated for the heads that share them. ``stages``
    are all of the forward pass, those too that are not returned; ``allowed`` broadcasts to the scores. ``seen`` are the
    logits with what stands in for rows without a key.
    """

    query: Array
    key: Array
    value: Array
    stages: Stages
    request: MaskRequest
    allowed: Array
    kv_heads: int
    seen: Array | None = None

    @property
    def weights(self) -> Array:
        """The weights, (B, H, Lq, T)."""
        weights: Array = self.stages["weights"]
        return weights

    @property
    def unmasked(self) -> Array:
        """The logits before anything was forbidden."""
        return next(self.stages[name] for name in ("biased", "capped", "scores") if name in self.stages)

    @property
    def masked(self) -> Array:
        """The logits with -inf for what is forbidden, rows without a key too."""
        logits: Array = self.stages.get("masked", self.unmasked)
        return logits

    @property
    def logits(self) -> Array:
        """What the softmax saw."""
        return self.masked if self.seen is None else self.seen

    @property
    def log_sum_exp(self) -> Array:
        """The rows' log_sum_exp, an axis for the keys kept: (B, H, Lq, 1)."""
        statistics: Array = self.stages["log_sum_exp"][..., np.newaxis]
        return statistics


def grad_weights(saved: Saved, grad_output: Array) -> Array:
    """Go back through the average."""
    gradient: Array = grad_output @ np.swapaxes(saved.value, -1, -2)
    return gradient


def delta(saved: Saved, grad_output: Array, weights: Array, grad_weights: Array) -> Array:
    """Sum p dp over the keys."""
    total: Array = (weights * grad_weights).sum(axis=-1, keepdims=True)
    return total


def grad_logits(weights: Array, grad_weights: Array, delta: Array) -> Array:
    """Go back through the softmax."""
    gradient: Array = weights * (grad_weights - delta)
    return gradient


def selected(saved: Saved, gradient: Array) -> Array:
    """Return the gradient of the logits where a mask selects: no score decides on a row's weights that has no key."""
    if saved.request.empty_rows == "zero":  # what is multiplied with a weight of 0 is 0 already
        return gradient
    return np.where(saved.masked == -np.inf, 0.0, gradient)


def slope(saved: Saved, softcap: float) -> Array:
    """Return the derivative of the softcap."""
    steep: Array = 1 - (saved.stages["capped"] / softcap) ** 2
    return steep


def for_query(grad_scores: Array, saved: Saved) -> Array:
    """Multiply the gradient of the raw scores with the keys."""
    gradient: Array = grad_scores @ saved.key
    return gradient


def for_rows(by_key: Array, by_query: Array) -> Array:
    """Sum over the queries: (B, H, Lq, T), (B, H, Lq, W) -> (B, H, T, W)."""
    gradient: Array = np.swapaxes(by_key, -1, -2) @ by_query
    return gradient


def sum_heads(gradient: Array, kv_heads: int) -> Array:
    """Add up what the query heads of a group contribute to the head that they share."""
    summed: Array = in_groups(gradient, kv_heads).sum(axis=2)
    return summed


def in_groups(gradient: Array, kv_heads: int) -> Array:
    """Give the query heads of a group an axis of their own: (B, H, ..) -> (B, Hkv, H / Hkv, ..)."""
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, kv_heads, heads // kv_heads, *rest)


def for_bias(grad_logits: Array, bias: Array) -> Array:
    """Add up the gradient along the axes along which the bias was spread."""
    axes = tuple(axis for axis, length in enumerate(bias.shape) if length == 1)
    gradient: Array = grad_logits.sum(axis=axes, keepdims=True)
    return gradient


@dataclass(frozen=True)
class Backward:
    """The vector-Jacobian product of attention, cut into its steps.

    ``weights`` are the softmax's own or made again, ``value_weights(saved, weights)`` those that meet the gradient of
    the output. ``query_scale`` and ``key_scale`` multiply the gradient of the scores.
    """

    weights: Callable[[Saved], Array] = lambda saved: saved.weights
    grad_weights: Callable[[Saved, Array], Array] = grad_weights
    delta: Callable[[Saved, Array, Array, Array], Array] = delta
    grad_logits: Callable[[Array, Array, Array], Array] = grad_logits
    selected: Callable[[Saved, Array], Array] = selected
    slope: Callable[[Saved, float], Array] = slope
    query_scale: Callable[[Array, float], Array] = times
    key_scale: Callable[[Array, float], Array] = times
    query: Callable[[Array, Saved], Array] = for_query
    key: Callable[[Array, Array], Array] = for_rows
    value: Callable[[Array, Array], Array] = for_rows
    value_weights: Callable[[Saved, Array], Array] = lambda saved, weights: weights
    sum_key_heads: Callable[[Array, int], Array] = sum_heads
    sum_value_heads: Callable[[Array, int], Array] = sum_heads
    bias: Callable[[Array, Array], Array] = for_bias
    bias_logits: Callable[[Saved, Array], Array] = lambda saved, grad_logits: grad_logits

    def __call__(self, saved: Saved, grad_output: Array) -> Stages:
        """Return the gradients of query, key, value and, where there is one, of the bias."""
        weights, grad_weights = self.weights(saved), self.grad_weights(saved, grad_output)
        delta = self.delta(saved, grad_output, weights, grad_weights)
        grad_logits = self.selected(saved, self.grad_logits(weights, grad_weights, delta))
        softcap, scale, bias = saved.request.softcap, saved.request.scale, saved.request.bias
        grad_scores = grad_logits if softcap is None else grad_logits * self.slope(saved, softcap)
        by_key = self.key(self.key_scale(grad_scores, scale), saved.query)
        by_value = self.value(self.value_weights(saved, weights), grad_output)
        gradients: Stages = {
            "grad_query": self.query(self.query_scale(grad_scores, scale), saved),
            "grad_key": self.sum_key_heads(by_key, saved.kv_heads),
            "grad_value": self.sum_value_heads(by_value, saved.kv_heads),
        }
        if bias is not None:
            gradients["grad_bias"] = self.bias(self.bias_logits(saved, grad_logits), bias)
        return gradients


def backward_by(product: Callable[[Array, Array], Array]) -> Backward:
    """Use another matrix product throughout."""

    def sum_over_queries(by_key: Array, by_query: Array) -> Array:
        return product(np.swapaxes(by_key, -1, -2), by_query)

    return Backward(
        grad_weights=lambda saved, grad_output: product(grad_output, np.swapaxes(saved.value, -1, -2)),
        query=lambda grad_scores, saved: product(grad_scores, saved.key),
        key=sum_over_queries,
        value=sum_over_queries,
    )


BACKWARD = Backward()
