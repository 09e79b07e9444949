"""Ways to go back wrongly: faulty functions of the backward pass, by what the forward pass has left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Stages
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import Product
from attncheck.mutation.mask_forms import allowed_in
from attncheck.mutation.variant import Call, PerCall, Step, Steps, Variant


def in_gradients(steps_of: Callable[[Call], Steps]) -> Steps:
    """Replace steps of the gradients by what they are called with, and by the stages of the forward pass."""
    return {"attention_gradients": PerCall(steps_of)}


def weights_again(logits: Array, log_sum_exp: Array) -> Array:
    """Make the weights from logits and log_sum_exp (B, H, Lq, 1); a row without any key has none."""
    exponentials = np.exp(logits - np.where(np.isinf(log_sum_exp), 0, log_sum_exp))
    return np.where(np.isneginf(log_sum_exp), 0, exponentials)


def weights_remembered(weights: Callable[[Call], Array]) -> Steps:
    """Go back with other weights than those of the forward pass."""
    return in_gradients(lambda call: {"attention": stages_remembered(call, weights(call))})


def stages_remembered(call: Call, weights: Array) -> Step:
    """Return a forward pass that has run already, except for its weights."""
    stages = call.stages | {"weights": weights}
    return lambda *arrays, **given: stages


def delta_read_as(delta: Callable[[Call, Array], Array]) -> Steps:
    """Take something else for the sum of the terms p dp over the keys: ``delta(call, terms)``."""
    return in_gradients(lambda call: {"_row_sum": lambda terms: delta(call, terms)})


def delta_from_output(call: Call) -> Array:
    """Return sum p dp as g o: Dao et al. 2022, FlashAttention, appendix B.4."""
    return numpy_backend._row_sum(call.grad_output * call.stages["output"])


def weights_made_again(call: Call, allowed: Array) -> Array:
    """Return the weights of a backward pass that makes them from scores that are masked in another way."""
    if np.array_equal(allowed, allowed_in(call)):
        return call.weights
    return weights_again(np.where(allowed, call.unmasked, -np.inf), call.log_sum_exp)


def in_groups(gradient: Array, kv_heads: int) -> Array:
    """Give the query heads of a group an axis of their own: (B, H, ..) -> (B, Hkv, H / Hkv, ..)."""
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, kv_heads, heads // kv_heads, *rest)


def gradients_read_as(change: Callable[[Stages], Stages]) -> Steps:
    """Change what comes out at the end of the backward pass."""
    return {"attention_gradients": lambda *arrays, **given: change(numpy_backend.attention_gradients(*arrays, **given))}


def value_weights_read_as(change: Callable[[Call, Array], Array]) -> Steps:
    """Let the gradient of the output meet other weights, in the gradient of the values alone."""

    def steps(call: Call) -> Steps:
        def sum_over_queries(weights: Array, rows: Array) -> Array:
            return numpy_backend._sum_over_queries(change(call, weights), rows)

        return {"_sum_over_queries": sum_over_queries}

    return only("grad_value", in_gradients(steps))


def bias_logits_read_as(change: Callable[[Call, Array], Array]) -> Steps:
    """Sum other gradients of the logits up for the bias."""

    def steps(call: Call) -> Steps:
        def sum_broadcast(gradient: Array, bias: Array) -> Array:
            return numpy_backend._sum_broadcast(change(call, gradient), bias)

        return {"_sum_broadcast": sum_broadcast}

    return in_gradients(steps)


def only(names: str | Iterable[str], steps: Steps) -> Steps:
    """Take some gradients from a faulty backward pass, and the others from the right one."""
    faulty, chosen = Variant(steps), (names,) if isinstance(names, str) else tuple(names)

    def attention_gradients(*arrays: Any, **given: Any) -> Stages:
        other = faulty.attention_gradients(*arrays, **given)
        return numpy_backend.attention_gradients(*arrays, **given) | {name: other[name] for name in chosen}

    return {"attention_gradients": attention_gradients}


def of_keys(product: Product) -> Steps:
    """Sum over queries in another way, for the keys."""
    return only("grad_key", {"_sum_over_queries": product})


def of_values(product: Product) -> Steps:
    """Sum over queries in another way, for the values."""
    return only("grad_value", {"_sum_over_queries": product})
