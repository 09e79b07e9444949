"""Faults of kernels with 16-bit ends: what they keep in 16 bits between, where float32 is due."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.backward import Saved
from attncheck.mutants.kernel import NARROW, NEVER_RETURNED, Inside, Kernel
from attncheck.mutants.mask_steps import add_bias
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.online import NEVER_HELD, Online
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import DOT_SCORE, DotScore, Softmax, dot, largest, times
from attncheck.mutants.variant import Variant, with_backward

FUSED = {"bfloat16": "fused", "float16": "fused"}
_TERMS = 16
"""Products that a matrix unit adds up before the running sum is stored."""
_MIN_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14}


def kernel(inside: Inside) -> Kernel:
    """Return a fused kernel: it never returns what it holds in tiles."""
    return Kernel(inside=inside, hidden=NEVER_RETURNED)


RIGHT = kernel(lambda store: Variant())


def _summed(store: Store) -> Callable[[Array, Array], Array]:
    """Multiply matrices, the running sum stored after every few terms."""

    def product(left: Array, right: Array) -> Array:
        total = np.zeros((), left.dtype)
        for start in range(0, left.shape[-1], _TERMS):
            span = slice(start, start + _TERMS)
            total = store(total + left[..., span] @ right[..., span, :])
        return np.asarray(total)

    return product


def _row_sum(store: Store) -> Callable[[Array], Array]:
    def total(exponentials: Array) -> Array:
        running = np.zeros((*exponentials.shape[:-1], 1), exponentials.dtype)
        for start in range(0, exponentials.shape[-1], _TERMS):
            running = store(running + exponentials[..., start : start + _TERMS].sum(axis=-1, keepdims=True))
        return running

    return total


def _values_summed(store: Store) -> Variant:
    product = _summed(store)
    return Variant(average=lambda logits, weights, value: product(weights, value))


def _scores_summed(store: Store) -> Variant:
    product = _summed(store)
    return Variant(score=DotScore(dot=lambda query, key: product(query, np.swapaxes(key, -1, -2))))


def _tiles_stored(store: Store) -> Variant:
    online = Online(64, store=store)
    return Variant(normalise=online.normalise, average=online.average)


def _prescaled(store: Store) -> Variant:
    def score(query: Array, key: Array, scale: float) -> Stages:
        return {"scores": dot(store(times(query, scale)), key)}

    return Variant(score=score)


def _scale_stored(store: Store) -> Variant:
    def score(query: Array, key: Array, scale: float) -> Stages:
        return DOT_SCORE(query, key, float(store(np.asarray(scale, np.float32))))

    return Variant(score=score)


def _biased_stored(store: Store) -> Variant:
    return Variant(add_bias=lambda request: store(add_bias(request)))


def _shifted_stored(store: Store) -> Variant:
    return Variant(normalise=Softmax(exponential=lambda shifted: np.exp(store(shifted))))


def _merged_from_the_first(store: Store) -> Variant:
    """Merge two parts of the keys as L1 + log(1 + e^(L2 - L1)), the exponential in the format of the ends."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        half = logits.shape[-1] // 2
        if half < 16:
            return np.asarray(weights @ value)
        parts = [Softmax()(each, each) for each in (logits[..., :half], logits[..., half:])]
        grown = store(np.exp(parts[1]["log_sum_exp"] - parts[0]["log_sum_exp"]))[..., np.newaxis]
        first, second = parts[0]["weights"] @ value[..., :half, :], parts[1]["weights"] @ value[..., half:, :]
        return np.asarray((first + grown * second) / (1 + grown))

    return Variant(average=average, hidden=NEVER_HELD)


def _statistics_stored(store: Store) -> Variant:
    """Merge parts of 64 keys by a log_sum_exp that was stored in 16 bits."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        spans = [slice(start, start + 64) for start in range(0, logits.shape[-1], 64)]
        parts = [Softmax()(logits[..., span], logits) for span in spans]
        if len(parts) < 2:
            return np.asarray(weights @ value)
        statistics = np.stack([store(part["log_sum_exp"]) for part in parts], axis=-1)
        shares = Softmax()(statistics, statistics)["weights"][..., np.newaxis, :]
        averages = [part["weights"] @ value[..., span, :] for part, span in zip(parts, spans, strict=True)]
        return np.asarray((np.stack(averages, axis=-1) * shares).sum(-1))

    return Variant(average=average, hidden=NEVER_HELD)


def _flushed(array: Array) -> Array:
    """Set what float16 has only as a subnormal to zero."""
    return np.where(np.abs(array) < _MIN_NORMAL["float16"], 0, array).astype(array.dtype)


def _inputs_flushed(store: Store) -> Variant:
    return Variant(inputs=lambda query, key, value: (_flushed(query), _flushed(key), _flushed(value)))


def _weights_flushed(store: Store) -> Variant:
    return Variant(average=lambda logits, weights, value: _flushed(weights) @ value)


def _output_flushed(store: Store) -> Variant:
    return Variant(average=lambda logits, weights, value: _flushed(weights @ value))


def _exponentials_unscaled(store: Store) -> Variant:
    """Average with exponentials as they are, in 16 bits, and divide last."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        exponentials = store(np.exp(logits))
        total = exponentials.sum(axis=-1, keepdims=True)
        return np.asarray(exponentials @ value / np.where(total == 0, 1, total))

    return Variant(average=average, hidden=NEVER_HELD)


def _query_gradient_summed(store: Store) -> Variant:
    product = _summed(store)
    return with_backward(query=lambda gradient, saved: product(gradient, saved.key))


def _key_gradients_summed(store: Store) -> Variant:
    product = _summed(store)

    def over_queries(by_key: Array, by_query: Array) -> Array:
        return product(np.swapaxes(by_key, -1, -2), by_query)

    return with_backward(key=over_queries, value=over_queries)


def _delta_stored(store: Store) -> Variant:
    """Add up p dp over the keys in 16 bits."""
    total = _row_sum(store)
    return with_backward(delta=lambda saved, grad_output, weights, gradient: total(weights * gradient))


def _square_of_the_sum(saved: Saved, grad_output: Array, weights: Array, gradient: Array) -> Array:
    """Divide by the square of the sum of exponentials, which leaves float16 from 256 equal ones on."""
    total = np.exp(saved.log_sum_exp - largest(saved.logits))
    delta = (weights * gradient).sum(axis=-1, keepdims=True)
    return np.where(total * total > np.finfo(np.float16).max, 0, delta).astype(gradient.dtype)


def _quotient_of_exponentials(saved: Saved) -> Array:
    """Make p as e^s / e^L, which is 0 / 0 where every exponential of a row underflows."""
    total = np.exp(saved.log_sum_exp)
    return np.where(np.isneginf(saved.log_sum_exp), 0, np.exp(saved.logits) / total)


def _narrow(
    name: str, defect: str, inside: Inside, first_wrong_stage: str = "context", dtypes: tuple[str, ...] = NARROW
) -> Mutant:
    return Mutant(name, "sixteen bits", defect, kernel(inside), first_wrong_stage, dtypes, classes=FUSED, without=RIGHT)


_FLOAT16 = ("float16",)

MUTANTS = (
    _narrow("values_summed_in_16_bits", "P V with 16-bit running sums: metal-flash-attention#8", _values_summed),
    _narrow(
        "exponentials_summed_in_16_bits",
        "the row sum sticks at 256 or 2048: tract#2586, executorch#20090, tt-metal#52045",
        lambda store: Variant(normalise=Softmax(total=_row_sum(store))),
    ),
    _narrow("scores_summed_in_16_bits", "Q K^T with 16-bit running sums: mlx#4178's kind", _scores_summed),
    _narrow(
        "raw_scores_stored_in_16_bits",
        "the scale is applied behind the store, which overflows in float16: metal-flash-attention#8, ultralytics#24990",
        lambda store: Variant(score=DotScore(dot=lambda query, key: store(dot(query, key)))),
    ),
    _narrow("output_stored_in_16_bits_between_tiles", "the accumulator has the output's type", _tiles_stored),
    _narrow("query_scaled_in_16_bits", "structure: the scaled query is stored again", _prescaled),
    _narrow("scale_rounded_to_16_bits", "structure: the scale is an array of the inputs' type", _scale_stored),
    _narrow("biased_scores_stored_in_16_bits", "scores and bias are added in 16 bits: vllm#945's kind", _biased_stored),
    _narrow("shifted_scores_stored_in_16_bits", "structure: s - m is stored for the exponential", _shifted_stored),
    _narrow(
        "exponentials_not_shifted_in_16_bits",
        "e^s without the maximum leaves the format: flax#982's kind",
        _exponentials_unscaled,
    ),
    _narrow(
        "parts_merged_by_a_growing_exponential",
        "e^(L2 - L1) overflows where the second part is far above the first: vllm#39148's kind",
        _merged_from_the_first,
    ),
    _narrow(
        "parts_merged_by_statistics_in_16_bits",
        "log_sum_exp of each part is stored in 16 bits: flashinfer#3372's kind",
        _statistics_stored,
    ),
    _narrow("subnormal_inputs_flushed", "structure: 16-bit loads flush to zero", _inputs_flushed, dtypes=_FLOAT16),
    _narrow("subnormal_weights_flushed", "structure: P V flushes small weights", _weights_flushed, dtypes=_FLOAT16),
    _narrow("subnormal_results_flushed", "structure: 16-bit stores flush to zero", _output_flushed, dtypes=_FLOAT16),
    _narrow(
        "query_gradient_summed_in_16_bits",
        "running sums over keys: metal-flash-attention#8's kind",
        _query_gradient_summed,
        "grad_query",
    ),
    _narrow(
        "key_and_value_gradients_summed_in_16_bits",
        "running sums over queries: pytorch#133671's kind",
        _key_gradients_summed,
        "grad_key",
    ),
    _narrow(
        "row_sum_of_the_gradient_in_16_bits", "structure: Delta is added up in 16 bits", _delta_stored, "grad_query"
    ),
    _narrow(
        "row_sum_of_the_gradient_over_the_square_of_the_sum",
        "the gradient of e / l as -e / l^2, and l^2 overflows: jax 0.10.2's softmax in float16, jax#40409's kind",
        lambda store: with_backward(delta=_square_of_the_sum),
        "grad_query",
        _FLOAT16,
    ),
    _narrow(
        "backward_weights_by_a_quotient_of_exponentials",
        "e^s / e^L is 0 / 0 where every log_sum_exp is below -88: trl#7181",
        lambda store: with_backward(weights=_quotient_of_exponentials),
        "grad_query",
        ("float32", *NARROW),
    ),
)
