"""The gradients of attention: the vector-Jacobian product of its output with ``grad_output``, in balls.

With p the weights, g = grad_output, c the softcap of the scores s and a their scale:

    grad_weights    dp = g v^T                          grad_scores      ds = dlogits sech(s / c)^2, or dlogits
    delta           sum_j p_j dp_j                      grad_products    a ds
    grad_logits     p (dp - delta)                      grad_query       a ds k
    grad_value      p^T g                               grad_key         a ds^T q
    grad_bias       dlogits, summed over the axes along which the bias was spread

The query heads that share a key and value head add their parts of its gradient up. The Jacobian of a softmax is
diag(p) - p p^T, that of c tanh(s / c) is sech(s / c)^2. Where the weight is the exact 0 the gradient of the logit is 0
as well: masked keys, and rows without a key. The row sum of g and the output would be the same delta (Dao et al. 2022,
"FlashAttention", appendix B.4).
"""

from __future__ import annotations

import math

import numpy as np
from flint import arb

from attncheck.attention.balls import BallArray, from_entries
from attncheck.attention.problem import Problem

_ZERO = arb(0)


def grad_weights(_: Problem, grad_output: BallArray, value: BallArray) -> BallArray:
    """Return (B, H, Lq, Lk)."""
    return grad_output @ value.for_heads_of(grad_output).transposed()


def grad_logits(problem: Problem, weights: BallArray, grad_weights: BallArray, masked: BallArray) -> BallArray:
    """Return p (dp - sum p dp), of magnitudes p (|dp| + sum p |dp|); 0 at masked keys, were a row of them uniform."""
    gradients: list[arb] = []
    for p, dp in zip(weights.rows(), grad_weights.rows(), strict=True):
        delta = sum((weight * gradient for weight, gradient in zip(p, dp, strict=True)), _ZERO)
        delta = -delta if problem.absolute else delta
        gradients += [weight * (gradient - delta) for weight, gradient in zip(p, dp, strict=True)]
    if masked.attended is not None:
        flags = zip(gradients, masked.attended.ravel().tolist(), strict=True)
        gradients = [gradient if attended else _ZERO for gradient, attended in flags]
    return from_entries(weights.shape, gradients)


def slope(problem: Problem, scores: BallArray) -> BallArray:
    """Return the derivative of the softcap: 1 without one."""
    if problem.options.get("softcap") is None:
        return scores.mapped(lambda _: arb(1))
    cap = problem.number(problem.options["softcap"])
    return scores.mapped(lambda score: (score / cap).sech() ** 2)


def grad_scores(problem: Problem, grad_logits: BallArray, slope: BallArray) -> BallArray:
    """Go back through the softcap."""
    if problem.options.get("softcap") is None:
        return grad_logits
    pairs = zip(grad_logits.entries(), slope.entries(), strict=True)
    return from_entries(grad_logits.shape, [gradient * steep for gradient, steep in pairs])


def grad_query(_: Problem, grad_products: BallArray, key: BallArray) -> BallArray:
    """Return (B, H, Lq, D)."""
    return grad_products @ key.for_heads_of(grad_products)


def grad_key(_: Problem, grad_products: BallArray, query: BallArray, key: BallArray) -> BallArray:
    """Return (B, Hkv, Lk, D)."""
    return _summed_in_groups(grad_products.transposed() @ query, key.shape[-3])


def grad_value(_: Problem, weights: BallArray, grad_output: BallArray, value: BallArray) -> BallArray:
    """Return (B, Hkv, Lk, Dv)."""
    return _summed_in_groups(weights.transposed() @ grad_output, value.shape[-3])


def grad_bias(problem: Problem, grad_logits: BallArray) -> BallArray:
    """Return the gradient in the shape of the bias, of rank 2 at least."""
    shape = problem.array("bias").shape
    whole = (1,) * (len(grad_logits.shape) - len(shape)) + shape
    axes = tuple(axis for axis, length in enumerate(whole) if length == 1)
    entries = np.empty(math.prod(grad_logits.shape), dtype=object)
    entries[:] = grad_logits.entries()
    summed = np.add.reduce(entries.reshape(grad_logits.shape), axis=axes, keepdims=True, initial=_ZERO)
    return from_entries(np.atleast_2d(np.empty(shape)).shape, summed.ravel().tolist())


def _summed_in_groups(balls: BallArray, heads: int) -> BallArray:
    """Add the heads of each group up: (B, H, L, D) -> (B, Hkv, L, D)."""
    group = balls.shape[-3] // heads
    if group == 1:
        return balls
    starts = range(0, len(balls.matrices), group)
    sums = [sum(balls.matrices[start + 1 : start + group], balls.matrices[start]) for start in starts]
    return BallArray((*balls.shape[:-3], heads, *balls.shape[-2:]), sums)
