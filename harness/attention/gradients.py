"""The gradients of attention: the vector-Jacobian product of its output with ``grad_output``, by the steps' transposes.

With p the weights, g = grad_output, c the softcap of the scores s and a their scale:

    grad_weights    dp = g v^T                          grad_scores      ds = dlogits sech(s / c)^2, or dlogits
    delta           sum_j p_j dp_j                      grad_products    a ds
    grad_logits     p (dp - delta)                      grad_query       a ds k
    grad_value      p^T g                               grad_key         a ds^T q
    grad_bias       dlogits, summed over the axes along which the bias was spread

The query heads that share a key and value head add their parts of its gradient up. Where the weight is the exact 0 the
gradient of the logit is 0 as well: masked keys, and rows without a key. The row sum of g and the output would be the
same delta (Dao et al. 2022, "FlashAttention", appendix B.4).

``backward_weights`` are the weights once more, as a backward pass uses them. Errors go the same way, but what perturbed
exponents do to ds k is looked at as a whole, for equal keys leave no gradient: the states behind each other keep what
they were made of.
"""

from __future__ import annotations

from collections.abc import Mapping

from attncheck.attention.backward_mean import GRAD_WEIGHTS
from attncheck.attention.backward_products import GRAD_BIAS, GRAD_KEY, GRAD_QUERY, GRAD_VALUE
from attncheck.attention.backward_softcap import GRAD_SCORES, SLOPE
from attncheck.attention.backward_softmax import GRAD_LOGITS
from attncheck.attention.backward_weights import BACKWARD_WEIGHTS
from attncheck.attention.flags import handed_on
from attncheck.attention.scores import exact_scaled, scaled_value
from attncheck.attention.step import Node, Step

GRADIENTS: Mapping[str, Node] = {
    "grad_weights": Node(GRAD_WEIGHTS, ("grad_output", "value")),
    "backward_weights": Node(BACKWARD_WEIGHTS, ("weights", "query", "key", "scores")),
    "grad_logits": Node(GRAD_LOGITS, ("backward_weights", "grad_weights", "masked")),
    "slope": Node(SLOPE, ("scores",)),
    "grad_scores": Node(GRAD_SCORES, ("grad_logits", "slope")),
    # What the scale rounds counts with the sums: it may be in front of them, behind them, or in what is added up.
    "grad_products": Node(
        Step(exact_scaled, scaled_value, lambda _, scores: scores, reach=handed_on), ("grad_scores",)
    ),
    "grad_query": Node(GRAD_QUERY, ("grad_products", "key")),
    "grad_key": Node(GRAD_KEY, ("grad_products", "query", "key")),
    "grad_value": Node(GRAD_VALUE, ("backward_weights", "grad_output", "value")),
    "grad_bias": Node(GRAD_BIAS, ("grad_logits",)),
}
