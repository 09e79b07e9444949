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
"""

from __future__ import annotations

from collections.abc import Mapping

from attncheck.attention.bias import exact_grad_bias
from attncheck.attention.products import exact_grad_key, exact_grad_query
from attncheck.attention.scores import exact_scaled
from attncheck.attention.softcap import exact_grad_scores, exact_slope
from attncheck.attention.softmax import exact_grad_logits
from attncheck.attention.step import Node, Step
from attncheck.attention.weighted_mean import exact_grad_value, exact_grad_weights

GRADIENTS: Mapping[str, Node] = {
    "grad_weights": Node(Step(exact_grad_weights), ("grad_output", "value")),
    "grad_logits": Node(Step(exact_grad_logits), ("weights", "grad_weights", "masked")),
    "slope": Node(Step(exact_slope, magnitude=abs), ("scores",)),
    "grad_scores": Node(Step(exact_grad_scores), ("grad_logits", "slope")),
    "grad_products": Node(Step(exact_scaled), ("grad_scores",)),
    "grad_query": Node(Step(exact_grad_query), ("grad_products", "key")),
    "grad_key": Node(Step(exact_grad_key), ("grad_products", "query", "key")),
    "grad_value": Node(Step(exact_grad_value), ("weights", "grad_output", "value")),
    "grad_bias": Node(Step(exact_grad_bias), ("grad_logits",)),
}
