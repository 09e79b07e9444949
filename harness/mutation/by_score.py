"""Faults of attention by a bilinear, an additive or a cosine score, from the score network to the mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.contract import EmptyRows, Stages
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.mutant import mutant
from attncheck.mutation.variant import Steps
from attncheck.spec import LOGITS, STAGES

_faulty_by_score = partial(mutant, "attention by score", at="scores")
Attend: TypeAlias = Callable[[Stages, Array, dict[str, Any], EmptyRows], Stages]


def _network(change: Callable[..., tuple[Array, Array, Array]]) -> Steps:
    """Change the arrays of the small network: ``change(query_weight, key_weight, score_vector)``."""

    def score(
        query: Array,
        key: Array,
        query_weight: Array,
        key_weight: Array,
        score_vector: Array,
        *,
        score_bias: Array | None = None,
    ) -> Stages:
        network = change(query_weight, key_weight, score_vector)
        return numpy_backend.additive_scores(query, key, *network, score_bias=score_bias)

    return {"additive_scores": score}


def _turned(weight: Array) -> Array:
    """Transpose what is square; where it is not, a real implementation would refuse."""
    return weight.T if weight.shape[0] == weight.shape[1] else weight


@_faulty_by_score(
    "additive_scores",
    at="scores",
    defect="1/sqrt(D) of the dot product is applied to a score that has no scale",
    diagnosis="score-scaled",
)
def additive_scores_over_root_of_width(query: Array, *arrays: Array, **named: Any) -> Stages:
    scores = numpy_backend.additive_scores(query, *arrays, **named)["scores"]
    return {"scores": np.asarray(scores / query.shape[-1] ** 0.5).astype(scores.dtype)}


@_faulty_by_score("general_scores", at="scores", defect="1/sqrt(D) of the dot product beside the bilinear weight")
def bilinear_scores_over_root_of_width(
    query: Array, key: Array, weight: Array, *, score_bias: Array | None = None
) -> Stages:
    scores = numpy_backend.general_scores(query, key, weight, score_bias=score_bias)["scores"]
    return {"scores": np.asarray(scores / query.shape[-1] ** 0.5).astype(scores.dtype)}


def _attending(change: Callable[[Attend], Attend]) -> Steps:
    """Do what follows on the scores in another way."""
    return {"_attend": change(numpy_backend._attend)}


@_faulty_by_score(
    _attending,
    at="masked",
    defect="structure: the score network is masked, and its scores are not: 0 has a weight",
    diagnosis="masked-at-zero",
)
def masked_scores_set_to_zero(attend: Attend) -> Attend:
    """Multiply the scores by the mask: what is forbidden has the score 0, and the weight e^0."""

    def attended(stages: Stages, value: Array, masks: dict[str, Any], empty_rows: EmptyRows) -> Stages:
        right = numpy_backend.mask_scores(stages["scores"], **masks)
        if "masked" not in right:
            return attend(stages, value, masks, empty_rows)
        before = right["biased"] if "biased" in right else stages["scores"]
        flat = np.where(np.isneginf(right["masked"]) & ~np.isneginf(before), np.zeros((), before.dtype), before)
        later = attend({"scores": flat}, value, {}, empty_rows)
        return {
            **stages,
            **right,
            "masked": flat,
            **{name: array for name, array in later.items() if name not in LOGITS},
        }

    return attended


def _on_padded_keys(name: str) -> Steps:
    """Set padded keys to 0 in front of the score, and forbid none: the layers' answer to 0 has a weight."""
    right = getattr(numpy_backend, name)

    def attention(query: Array, key: Array, *arrays: Array, key_lengths: Array | None = None, **given: Any) -> Stages:
        if key_lengths is None:
            return dict(right(query, key, *arrays, **given))
        is_used = np.arange(key.shape[-2]) < key_lengths[:, np.newaxis]
        zeroed = np.where(is_used[:, np.newaxis, :, np.newaxis], key, np.zeros((), key.dtype))
        stages = dict(right(query, zeroed, *arrays, **given))
        stages["masked"] = next(stages[stage] for stage in LOGITS[::-1] if stage in stages)
        return {name: stages[name] for name in sorted(stages, key=STAGES.index)}

    return {name: attention}


for _name in ("additive_attention", "general_attention"):
    _faulty_by_score(
        _on_padded_keys,
        at="scores",
        defect="structure: padded annotations are set to zero, and take part in the softmax",
        name=f"padded_keys_zeroed_before_{_name}",
    )(_name)


@_faulty_by_score(_attending, at="output", defect="structure: the context is made of scores, not of weights")
def values_averaged_by_scores(attend: Attend) -> Attend:
    def attended(stages: Stages, value: Array, masks: dict[str, Any], empty_rows: EmptyRows) -> Stages:
        found = attend(stages, value, masks, empty_rows)
        scores = found["scores"]
        shares = np.where(found["weights"] == 0, np.zeros((), scores.dtype), scores)
        return found | {"output": np.asarray(shares @ value)}

    return attended


@_faulty_by_score(
    _attending,
    at="weights",
    defect="the softmax runs over the queries: labml#146's kind",
    diagnosis="softmax-over-queries",
)
def attention_by_score_normalised_over_queries(attend: Attend) -> Attend:
    def attended(stages: Stages, value: Array, masks: dict[str, Any], empty_rows: EmptyRows) -> Stages:
        found = attend(stages, value, masks, empty_rows)
        logits = next(found[stage] for stage in LOGITS[::-1] if stage in found)
        turned = numpy_backend.softmax(np.swapaxes(logits, -1, -2), empty_rows=empty_rows)["weights"]
        weights = np.ascontiguousarray(np.swapaxes(turned, -1, -2))
        return found | {"weights": weights, "output": np.asarray(weights @ value)}

    return attended


def _keys_for_values(name: str) -> Steps:
    """Average the keys, where they have the shape of the values."""
    right = getattr(numpy_backend, name)

    def attention(query: Array, key: Array, value: Array, *arrays: Array, **given: Any) -> Stages:
        return dict(right(query, key, key if key.shape == value.shape else value, *arrays, **given))

    return {name: attention}


for _name in ("general_attention", "additive_attention", "cosine_attention"):
    _faulty_by_score(
        _keys_for_values,
        at="output",
        defect="structure: the encoder's states are keys and values in the paper, and so the keys are averaged",
        diagnosis="value-read-as-key",
        name=f"keys_averaged_by_{_name}",
    )(_name)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_by_score(_network, "additive_weights_exchanged",
    "structure: Wq k + Wk q, silent where both weights have one shape",
    lambda query_weight, key_weight, vector: (key_weight, query_weight, vector)
        if query_weight.shape == key_weight.shape else (query_weight, key_weight, vector),
    diagnosis="score-weights-exchanged")
_faulty_by_score(_network, "additive_query_weight_transposed",
    "structure: the layout of torch.nn.Linear, (A, D), where the weight is square",
    lambda query_weight, key_weight, vector: (_turned(query_weight), key_weight, vector),
    diagnosis="score-query-weight-transposed")
_faulty_by_score(_network, "additive_key_weight_transposed",
    "structure: the layout of torch.nn.Linear, (A, Dk), where the weight is square",
    lambda query_weight, key_weight, vector: (query_weight, _turned(key_weight), vector),
    diagnosis="score-key-weight-transposed")
