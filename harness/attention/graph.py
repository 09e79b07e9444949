"""Which stage follows from which, and by what formula: stated once, evaluated in balls.

    query, key, value    of multi_head_attention: X W + b, per head                      Vaswani et al. 2017, 3.2.2
    raw_scores           q k^T
    scores               a q k^T (a = 1/sqrt(D) as a real number, unless it is given)    Vaswani et al. 2017, 3.2.1
                         q W k^T                                                         Luong et al. 2015, 3.1
                         w . tanh(q Wq + k Wk + b)                                       Bahdanau et al. 2015, A.1.2
                         a q.k / (|q| |k|)                                               Graves et al. 2014, 3.3.1
    capped               c tanh(s / c)                                                   Gemma Team 2024, section 2
    biased, masked       s + b; -inf where the mask or causality (j <= i) forbids
    weights              e^(s_j) / sum e^(s_l); 0 in a row without a key
    log_sum_exp          log sum e^(s_l); -inf in a row without a key
    context, output      weights times value; heads side by side, times Wo plus bo
    grad_query .. bias   of attention_gradients: ``oracle_gradients``

Query heads may share a key and a value head: head h of H takes head h // (H / Hkv) (Ainslie et al. 2023, section 2.2).

A step whose option is not there hands its predecessor on, so the tree is the same for every operation: an operation's
inputs are its leaves. Two nodes are shared by stages and no stages themselves: ``product``, ``exponentials``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from flint import arb

from attncheck.attention import oracle_gradients
from attncheck.attention.balls import (
    BallArray,
    Exponentials,
    exponentials,
    from_entries,
    log_sum,
    merge_heads,
    normalised,
    outer_sum,
    unit_rows,
)
from attncheck.attention.problem import Problem

Node = BallArray | Exponentials


@dataclass(frozen=True)
class Step:
    """One node: the nodes that it follows from, and the formula on them."""

    follows: tuple[str, ...]
    formula: Callable[..., Node]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The nodes of one problem, each evaluated once and when it is asked for, at FLINT's current precision."""

    problem: Problem
    nodes: dict[str, Any] = field(default_factory=dict)

    def stage(self, name: str) -> Any:
        """Return the exact value of a node: a ``BallArray``, where it is a stage."""
        if name not in self.nodes:
            self.nodes[name] = self._evaluated(name)
        return self.nodes[name]

    def magnitude(self, name: str) -> BallArray:
        """Return the sum of the absolute terms of an evaluated stage; for a weight p that is p, for L it is 1 + |L|."""
        own = {name: self.nodes[name].mapped(of) for name, of in _OWN_MAGNITUDE.items() if name in self.nodes}
        magnitude: BallArray = Evaluation(replace(self.problem, absolute=True), own).stage(name)
        return magnitude

    def _evaluated(self, name: str) -> Node:
        problem = self.problem
        if name in problem.returned:
            return problem.balls(problem.returned[name])
        step = tree_of(problem.operation, problem.score, problem.softcap_follows).get(name)
        if step is None:
            return problem.balls(problem.array(name))
        return step.formula(problem, *(self.stage(each) for each in step.follows))


_OWN_MAGNITUDE: Mapping[str, Callable[[arb], arb]] = {
    "weights": abs,
    "slope": abs,
    "log_sum_exp": lambda entry: 1 + abs(entry),
}


@cache
def tree_of(operation: str, score: str, softcap_follows: str = "scores") -> Mapping[str, Step]:
    """Return the steps of an operation by node; what has no step is an input."""
    tree = {**_STEPS, **_LATE_SOFTCAP.get(softcap_follows, {})}
    if operation in ("softmax", "masking"):
        del tree["scores"]
    if operation == "scoring":
        tree["scores"] = _SCORES[score]
    if operation == "multi_head_attention":
        tree |= {name: Step((), _projection(name)) for name in ("query", "key", "value")}
        tree["output"] = Step(("context",), _output_projection)
    if operation == "attention_gradients":
        tree.update(_GRADIENTS)
    return tree


def nearest_returned(tree: Mapping[str, Step], stage: str, returned: Collection[str]) -> set[str]:
    """Return the stages among ``returned`` from which a stage follows, without another of them in between."""
    nearest: set[str] = set()
    for name in tree[stage].follows if stage in tree else ():
        nearest |= {name} if name in returned else nearest_returned(tree, name, returned)
    return nearest


def _product(_: Problem, query: BallArray, key: BallArray) -> BallArray:
    return query @ key.for_heads_of(query).transposed()


def _handed_on(_: Problem, node: BallArray) -> BallArray:
    return node


def _scaled(problem: Problem, product: BallArray) -> BallArray:
    scale = problem.options.get("scale")
    if scale is not None:
        return product.scaled(problem.number(scale))
    if problem.score == "dot":
        return product
    width = problem.array("query").shape[-1]
    if problem.operation == "multi_head_attention":
        width = problem.array("query_weight").shape[-1] // problem.heads_of("query")
    return product.scaled(1 / arb(width).sqrt())


def _general(problem: Problem, query: BallArray, key: BallArray) -> BallArray:
    return query @ problem.balls(problem.array("weight")) @ key.transposed()


def _cosine(problem: Problem, query: BallArray, key: BallArray) -> BallArray:
    cosines = unit_rows(query) @ unit_rows(key).transposed()
    scale = problem.options.get("scale")
    return cosines if scale is None else cosines.scaled(problem.number(scale))


def _additive(problem: Problem, query: BallArray, key: BallArray) -> BallArray:
    query_part = query @ problem.balls(problem.array("query_weight"))
    key_part = key @ problem.balls(problem.array("key_weight"))
    if "score_bias" in problem.inputs:
        query_part = query_part + problem.balls(problem.array("score_bias"), query_part.shape)
    hidden = outer_sum(query_part, key_part)  # (B, H, Lq, Lk, A)
    vector = problem.balls(problem.array("score_vector")[:, np.newaxis])
    scores = hidden.mapped(arb.tanh) @ vector  # (B, H, Lq, Lk, 1)
    return from_entries(scores.shape[:-1], scores.entries())


def _capped(problem: Problem, scores: BallArray) -> BallArray:
    if problem.options.get("softcap") is None:
        return scores
    cap = problem.number(problem.options["softcap"])
    capped = scores.scaled(1 / cap).mapped(arb.tanh).scaled(cap)
    if capped.attended is None:
        return capped
    flags = zip(capped.entries(), capped.attended.ravel().tolist(), strict=True)  # the tanh of -inf is -1
    return from_entries(capped.shape, [entry if attended else -cap for entry, attended in flags])


def _biased(problem: Problem, capped: BallArray) -> BallArray:
    return capped + problem.balls(problem.inputs["bias"], capped.shape) if "bias" in problem.inputs else capped


def _masked(problem: Problem, biased: BallArray) -> BallArray:
    return biased.restricted_to(problem.allowed(biased.shape))


def _projection(name: str) -> Callable[[Problem], BallArray]:
    def project(problem: Problem) -> BallArray:
        inputs, weight = problem.array(name), problem.array(f"{name}_weight")
        heads = problem.heads_of(name)
        per_head = weight.reshape(weight.shape[0], heads, -1).swapaxes(0, 1)  # (E, H*D) -> (H, E, D)
        projected = problem.balls(inputs[:, np.newaxis]) @ problem.balls(per_head)  # (B, H, L, D)
        if f"{name}_bias" not in problem.inputs:
            return projected
        bias = problem.array(f"{name}_bias").reshape(heads, 1, -1)  # (H*D,) -> (H, 1, D)
        return projected + problem.balls(bias, projected.shape)

    return project


def _mean(_: Problem, weights: BallArray, value: BallArray) -> BallArray:
    return weights @ value.for_heads_of(weights)


def _output_projection(problem: Problem, context: BallArray) -> BallArray:
    merged = merge_heads(context)
    if "output_weight" not in problem.inputs:
        return merged
    output = merged @ problem.balls(problem.array("output_weight"))
    if "output_bias" not in problem.inputs:
        return output
    return output + problem.balls(problem.array("output_bias"), output.shape)


def _exponentials(problem: Problem, logits: BallArray) -> Exponentials:
    return exponentials(logits, uniform=problem.has_uniform_rows)


_STEPS: Mapping[str, Step] = {
    "product": Step(("query", "key"), _product),
    "raw_scores": Step(("product",), _handed_on),
    "scores": Step(("product",), _scaled),
    "capped": Step(("scores",), _capped),
    "biased": Step(("capped",), _biased),
    "masked": Step(("biased",), _masked),
    "exponentials": Step(("masked",), _exponentials),
    "weights": Step(("exponentials",), lambda _, powers: normalised(powers)),
    "log_sum_exp": Step(("exponentials",), lambda _, powers: log_sum(powers)),
    "context": Step(("weights", "value"), _mean),
    "output": Step(("context",), _handed_on),
}

_SCORES: Mapping[str, Step] = {
    "dot": _STEPS["scores"],
    "scaled_dot": _STEPS["scores"],
    "general": Step(("query", "key"), _general),
    "additive": Step(("query", "key"), _additive),
    "cosine": Step(("query", "key"), _cosine),
}

_LATE_SOFTCAP: Mapping[str, Mapping[str, Step]] = {
    "biased": {
        "biased": Step(("scores",), _biased),
        "capped": Step(("biased",), _capped),
        "masked": Step(("capped",), _masked),
    },
    "masked": {
        "biased": Step(("scores",), _biased),
        "masked": Step(("biased",), _masked),
        "capped": Step(("masked",), _capped),
        "exponentials": Step(("capped",), _exponentials),
    },
}
"""Where others put the softcap: behind the bias, or behind bias and mask, which then forbids nothing altogether."""

_GRADIENTS: Mapping[str, Step] = {
    "grad_weights": Step(("grad_output", "value"), oracle_gradients.grad_weights),
    "grad_logits": Step(("weights", "grad_weights", "masked"), oracle_gradients.grad_logits),
    "slope": Step(("scores",), oracle_gradients.slope),
    "grad_scores": Step(("grad_logits", "slope"), oracle_gradients.grad_scores),
    "grad_products": Step(("grad_scores",), _scaled),
    "grad_query": Step(("grad_products", "key"), oracle_gradients.grad_query),
    "grad_key": Step(("grad_products", "query", "key"), oracle_gradients.grad_key),
    "grad_value": Step(("weights", "grad_output", "value"), oracle_gradients.grad_value),
    "grad_bias": Step(("grad_logits",), oracle_gradients.grad_bias),
}
