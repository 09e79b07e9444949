"""Ways to attend wrongly: faulty functions of the forward pass, which get what they need to go wrong.

The backend does all the rest. What is faulty with sinks beside it is asked for one more key, with a value of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.contract import EmptyRows, Stages
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.mask_forms import allowed_in
from attncheck.mutation.variant import Call, PerCall, Steps, within

Product: TypeAlias = Callable[[Array, Array], Array]
Average: TypeAlias = Callable[[Array, Array, Array], Array]
"""Averages the values, by the logits or the weights: ``average(logits, weights, value)``."""


def in_attention(steps_of: Callable[[Call], Steps]) -> Steps:
    """Replace steps of attention by what it is called with."""
    return {"attention": PerCall(steps_of)}


def where(is_asked: Callable[[Call], bool], steps: Steps) -> Steps:
    """Replace steps of attention where something is asked for."""
    return in_attention(lambda call: steps if is_asked(call) else {})


def with_groups(call: Call) -> bool:
    """Whether query heads share heads of keys and values."""
    return call.has_groups


def with_softcap(call: Call) -> bool:
    """Whether there is a softcap."""
    return call.softcap is not None


def with_window(call: Call) -> bool:
    """Whether there is a window."""
    return call.window is not None


def with_lengths(call: Call) -> bool:
    """Whether there are key lengths."""
    return call.key_lengths is not None


def with_past(call: Call) -> bool:
    """Whether keys come from a cache."""
    return call.past > 0


def with_bias(call: Call) -> bool:
    """Whether there is a bias."""
    return call.bias is not None


def inputs_changed(change: Callable[[Array, Array, Array], tuple[Array, Array, Array]]) -> Steps:
    """Change query, key and value, forwards and backwards; those of a past are changed as new ones are."""

    def attention(query: Array, key: Array, value: Array, **given: Any) -> Stages:
        if given.get("past_key") is not None:
            _, past_key, past_value = change(query, given["past_key"], given["past_value"])
            given |= {"past_key": past_key, "past_value": past_value}
        return numpy_backend.attention(*change(query, key, value), **given)

    def attention_gradients(query: Array, key: Array, value: Array, grad_output: Array, **given: Any) -> Stages:
        return numpy_backend.attention_gradients(*change(query, key, value), grad_output, **given)

    return {"attention": attention, "attention_gradients": attention_gradients}


def scored(score: Callable[[Array, Array, float], Stages]) -> Steps:
    """Score in another way, by ``score(query, key, factor)``, and cap what comes of it."""

    def dot_scores(query: Array, key: Array, *, scale: float | None = None, softcap: float | None = None) -> Stages:
        stages = score(query, key, numpy_backend._scale_of(query, scale))
        if softcap is not None:
            stages["capped"] = numpy_backend._cap(stages["scores"], softcap)
        return stages

    return {"dot_scores": dot_scores}


def scores_read_as(change: Callable[[Array], Array]) -> Steps:
    """Change the scaled scores."""

    def score(query: Array, key: Array, factor: float) -> Stages:
        stages = numpy_backend.dot_scores(query, key, scale=factor)
        return stages | {"scores": change(stages["scores"])}

    return scored(score)


def rows_read_as(
    change: Callable[[Array, Array], Array], is_asked: Callable[[EmptyRows], bool] = lambda empty_rows: True
) -> Steps:
    """Take the softmax of other logits: ``change(logits, seen)``.

    ``seen`` are the logits in which rows without a key have got what stands in for them.
    """

    def softmax(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
        seen = numpy_backend._fill_empty_rows(scores, sinks, empty_rows)
        return numpy_backend._softmax_with_sinks(change(scores, seen) if is_asked(empty_rows) else seen, sinks, "zero")

    return {"_softmax_with_sinks": softmax}


def logits_read_as(change: Callable[[Array], Array]) -> Steps:
    """Take the softmax of other logits, in which rows without a key have got what stands in for them."""
    return rows_read_as(lambda logits, seen: change(seen))


def normalised(normalise: Callable[[Array], Stages]) -> Steps:
    """Take another softmax, of logits in which rows without a key have got what stands in for them.

    A sink is one more key to it, and its column is cut off what it returns.
    """

    def softmax(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
        logits = numpy_backend._fill_empty_rows(scores, sinks, empty_rows)
        if sinks is None:
            return normalise(logits)
        stages = normalise(with_sink(logits, sinks))
        return stages | {"weights": stages["weights"][..., :-1]}

    return {"_softmax_with_sinks": softmax}


def sinks_read_as(change: Callable[[Array], Array]) -> Steps:
    """Take the sinks for others."""

    def softmax(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
        return numpy_backend._softmax_with_sinks(scores, None if sinks is None else change(sinks), empty_rows)

    return {"_softmax_with_sinks": softmax}


def with_sink(logits: Array, sinks: Array) -> Array:
    """Return the logits with a column for the sink of each head: (B, H, Lq, T + 1)."""
    column = np.broadcast_to(sinks[:, np.newaxis, np.newaxis], (*logits.shape[:-1], 1))
    return np.concatenate([logits, column.astype(logits.dtype)], axis=-1)


def maximum_read_as(maximum: Callable[[Array], Array]) -> Steps:
    """Subtract something else than a row's maximum, where the row has a key."""

    def row_maximum(scores: Array) -> Array:
        right = numpy_backend._row_maximum(scores)
        return np.where(right == -np.inf, right, maximum(scores))

    return {"_row_maximum": row_maximum}


def reciprocal_read_as(reciprocal: Callable[[Array], Array]) -> Steps:
    """Multiply the exponentials with something made of their sum, where the backend divides by it."""

    def normalise(logits: Array) -> Stages:
        stages, exponentials = with_exponentials(logits)
        total = numpy_backend._row_sum(exponentials)
        weights = np.where(total == 0, 0, exponentials * reciprocal(np.where(total == 0, 1, total)))
        return stages | {"weights": weights}

    return normalised(normalise)


def with_exponentials(logits: Array) -> tuple[Stages, Array]:
    """Return the stages of the softmax, and the exponentials that it adds up."""
    seen: list[Array] = []

    def row_sum(exponentials: Array) -> Array:
        seen.append(exponentials)
        return numpy_backend._row_sum(exponentials)

    stages: Stages = within(numpy_backend._softmax_with_sinks, _row_sum=row_sum)(logits, None, "zero")
    return stages, seen[0]


def weights_read_as(change: Callable[[Array], Array]) -> Steps:
    """Change the weights between softmax and average; a softmax alone returns what it should."""
    return in_attention(lambda call: _weights_behind_the_softmax(call, change))


def weights_where_allowed(number: float) -> Steps:
    """Give the keys that may not be attended to this weight, behind the softmax."""

    def steps(call: Call) -> Steps:
        def change(weights: Array) -> Array:
            return np.where(allowed_in(call), weights, np.asarray(number, weights.dtype))

        return _weights_behind_the_softmax(call, change)

    return in_attention(steps)


def _weights_behind_the_softmax(call: Call, change: Callable[[Array], Array]) -> Steps:
    right = call.step("_softmax_with_sinks")

    def softmax(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
        stages: Stages = right(scores, sinks, empty_rows)
        return stages | {"weights": change(stages["weights"])}

    return {"_softmax_with_sinks": softmax}


def averaged(average: Average) -> Steps:
    """Average the values in another way, which may look at the logits; a sink is one more key with a value of 0."""

    def steps(call: Call) -> Steps:
        seen: list[Array] = []
        right = call.step("_softmax_with_sinks")

        def softmax(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
            seen.append(numpy_backend._fill_empty_rows(scores, sinks, empty_rows))
            stages: Stages = right(scores, sinks, empty_rows)
            return stages

        def weighted_sum(weights: Array, value: Array) -> Array:
            if call.sinks is None:
                return average(seen[-1], weights, value)
            # Of no keys there is no first one to take the shape of.
            value = np.concatenate([value, np.zeros((*value.shape[:-2], 1, value.shape[-1]), value.dtype)], axis=-2)
            weights = np.concatenate([weights, np.zeros((*weights.shape[:-1], 1), weights.dtype)], axis=-1)
            return average(with_sink(seen[-1], call.sinks), weights, value)

        return {"_softmax_with_sinks": softmax, "_weighted_sum": weighted_sum}

    return in_attention(steps)


def outputs_read_as(change: Callable[[Array], Array]) -> Steps:
    """Change the average of the values, before it is projected."""
    return {"attention._weighted_sum": lambda weights, value: change(weights @ value)}


def values_read_as(change: Callable[[Array], Array]) -> Steps:
    """Change the values when they are averaged."""
    return {"attention._weighted_sum": lambda weights, value: weights @ change(value)}


def with_score_bias(scores: Array, score_bias: Array | None) -> Stages:
    """Add the bias of a bilinear score, where there is one."""
    return {"scores": scores if score_bias is None else scores + score_bias[:, np.newaxis, np.newaxis]}


def products_by(product: Product) -> Steps:
    """Use another product of matrices throughout, except for the additive score's."""

    def dot(query: Array, key: Array) -> Array:
        return product(query, np.swapaxes(key, -1, -2))

    def general_scores(query: Array, key: Array, weight: Array, *, score_bias: Array | None = None) -> Stages:
        return with_score_bias(dot(product(query, weight), key), score_bias)

    def project(inputs: Array, weight: Array, bias: Array | None) -> Array:
        projected = product(inputs, weight)
        return projected if bias is None else np.asarray(projected + bias)

    return {
        "_dot": dot,
        "general_scores": general_scores,
        "_weighted_sum": product,
        "_sum_over_queries": lambda weights, rows: product(np.swapaxes(weights, -1, -2), rows),
        "_project": project,
    }


def grouped_by(product: Product) -> Steps:
    """Multiply query heads with the heads that they share by one product, and repeat nothing."""

    def dot(left: Array, right: Array) -> Array:
        return product(left, np.swapaxes(right, -1, -2))

    return {
        "_repeat_heads": lambda key, value, heads: (key, value),
        "dot_scores._dot": dot,
        "attention._weighted_sum": product,
        "attention_gradients._dot": dot,
        "attention_gradients._weighted_sum": product,
    }
