"""Faults of the backward pass: the softmax's Jacobian, the scale, the softcap's slope, the weights in dv."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.backward import BACKWARD, Saved
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import largest, times
from attncheck.mutants.variant import Variant, with_backward


def _changed(change: Callable[[Stages], Stages]) -> Variant:
    """Change what comes out at the end."""
    return Variant(backward=lambda saved, grad_output: change(BACKWARD(saved, grad_output)))


def _row_sum(total: Callable[[Array], Array]) -> Variant:
    """Sum p dp in another way."""
    return with_backward(delta=lambda saved, grad_output, weights, gradient: total(weights * gradient))


def _mean(terms: Array) -> Array:
    return np.asarray(terms.sum(axis=-1, keepdims=True) / max(1, terms.shape[-1]))


def _unnormalised(saved: Saved, weights: Array) -> Array:
    maximum = largest(saved.logits)
    return np.asarray(np.exp(saved.logits - np.where(np.isinf(maximum), 0, maximum)))


def _dropped_out(saved: Saved, weights: Array) -> Array:
    """Drop one weight of ten, and enlarge the others."""
    kept = np.arange(weights.size).reshape(weights.shape) % 10 != 3
    return np.asarray(weights * kept * np.asarray(1 / 0.9, weights.dtype))


def _slope(steep: Callable[[Array, Array], Array]) -> Variant:
    """Take another slope of the softcap, from the scores and the hyperbolic tangent, both over the cap."""
    return with_backward(
        slope=lambda saved, cap: steep(saved.stages["scores"] / cap, saved.stages["capped"] / cap),
    )


def _heads_and_length_swapped_where_equal(gradients: Stages) -> Stages:
    swapped = dict(gradients)
    for name in ("grad_key", "grad_value"):
        if gradients[name].shape[1] == gradients[name].shape[2]:
            swapped[name] = np.swapaxes(gradients[name], 1, 2)
    return swapped


def _first_batch_entry_only(gradients: Stages) -> Stages:
    kept = {name: gradient.copy() for name, gradient in gradients.items()}
    for gradient in kept.values():
        gradient[1:] = 0
    return kept


MUTANTS = (
    Mutant(
        "row_sum_missing_in_the_gradient",
        "gradients",
        "the softmax's Jacobian taken for diag(p): Odyssey#2134",
        _row_sum(lambda terms: np.zeros_like(terms[..., :1])),
        "grad_query",
    ),
    Mutant(
        "row_sum_of_the_gradient_averaged",
        "gradients",
        "the mean over the keys for their sum",
        _row_sum(_mean),
        "grad_query",
    ),
    Mutant(
        "row_sum_of_the_gradient_over_queries",
        "gradients",
        "delta over the wrong axis: annotated_deep_learning#146's kind",
        _row_sum(lambda terms: np.asarray(terms.sum(axis=-2, keepdims=True))),
        "grad_query",
    ),
    Mutant(
        "row_sum_of_the_gradient_in_the_first_16_keys",
        "gradients",
        "delta of the first block alone: FlagGems#898's kind",
        _row_sum(lambda terms: np.asarray(terms[..., :16].sum(axis=-1, keepdims=True))),
        "grad_query",
    ),
    Mutant(
        "row_sum_of_the_gradient_unweighted",
        "gradients",
        "sum dp for sum p dp",
        with_backward(delta=lambda saved, grad_output, weights, gradient: _mean(gradient)),
        "grad_query",
    ),
    Mutant(
        "gradient_stops_at_the_softmax",
        "gradients",
        "a softmax without a backward pass, gradients silently absent: candle#3724",
        with_backward(grad_logits=lambda weights, gradient, delta: np.zeros_like(weights)),
        "grad_query",
    ),
    Mutant(
        "gradient_of_the_logits_without_weights",
        "gradients",
        "dp - delta, not multiplied with p",
        with_backward(grad_logits=lambda weights, gradient, delta: np.where(weights == 0, 0, gradient - delta)),
        "grad_query",
    ),
    Mutant(
        "query_gradient_without_scale",
        "gradients",
        "the chain rule without its factor, for dq: cntkx#10's kind",
        with_backward(query_scale=lambda gradient, scale: gradient),
        "grad_query",
        diagnosis=("gradients-unscaled",),
    ),
    Mutant(
        "key_gradient_without_scale",
        "gradients",
        "the chain rule without its factor, for dk: GenerativeModels#146's kind",
        with_backward(key_scale=lambda gradient, scale: gradient),
        "grad_key",
        diagnosis=("gradients-unscaled",),
    ),
    Mutant(
        "key_gradient_scaled_twice",
        "gradients",
        "an already scaled query enters dk, and the scale once more",
        with_backward(key_scale=lambda gradient, scale: times(times(gradient, scale), scale)),
        "grad_key",
        diagnosis=("gradients-scaled-twice",),
    ),
    Mutant(
        "gradient_scale_off_by_1e_5",
        "gradients",
        "a constant printed with five digits in the backward pass",
        with_backward(
            query_scale=lambda gradient, scale: times(gradient, scale * (1 + 1e-5)),
            key_scale=lambda gradient, scale: times(gradient, scale * (1 + 1e-5)),
        ),
        "grad_query",
        WIDE,
    ),
    Mutant(
        "value_gradient_from_unnormalised_weights",
        "gradients",
        "exp(s - m) for the weights in dv",
        with_backward(value_weights=_unnormalised),
        "grad_value",
    ),
    Mutant(
        "value_gradient_from_dropped_out_weights",
        "gradients",
        "dropout is active in the backward pass alone: pytorch#124464's kind",
        with_backward(value_weights=_dropped_out),
        "grad_value",
    ),
    Mutant(
        "key_and_value_gradients_with_heads_and_length_swapped",
        "gradients",
        "transposed twice, silent where L == H: diffusers#14341",
        _changed(_heads_and_length_swapped_where_equal),
        "grad_key",
    ),
    Mutant(
        "gradients_zero_beyond_the_first_batch_entry",
        "gradients",
        "zeros for batch > 0: pytorch#139462's kind",
        _changed(_first_batch_entry_only),
        "grad_query",
    ),
    Mutant(
        "softcap_slope_missing",
        "gradients",
        "the backward pass forgets the softcap: vllm#7425's kind",
        _slope(lambda scores, tanh: np.ones_like(tanh)),
        "grad_query",
    ),
    Mutant(
        "softcap_slope_not_squared",
        "gradients",
        "1 - tanh for 1 - tanh^2",
        _slope(lambda scores, tanh: np.asarray(1 - tanh)),
        "grad_query",
    ),
    Mutant(
        "softcap_slope_of_uncapped_scores",
        "gradients",
        "1 - x^2 from the saved input where the saved output is due",
        _slope(lambda scores, tanh: np.asarray(1 - scores * scores)),
        "grad_query",
    ),
)
