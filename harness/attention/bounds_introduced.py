"""Error bounds of one stage, its predecessors as the implementation returned them taken as exact.

    query, key, value        from the inputs                 capped, biased, masked   from the nearest logits before
    raw_scores, scores       from query, key                 weights, log_sum_exp     from the nearest logits
    context (of attention: output)  from weights, value      output                   from context

A stage that was not returned is skipped, and its own errors are allowed to the one that follows. A compiler may hand a
stage on before it is rounded for storage, or contract a t + b into one operation: what was returned then differs from
what was used. So a returned stage s^ enters with the error

    logits          u (|s^| [1, or 2 where storage is coarser than products: of t and of a t] + |s^ - b| [after a bias])
    query, key, value, context                   u |x^|                    u = max(u_s, u_o)

and given inputs with none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention import bounds_linear, bounds_output, bounds_rows, bounds_scores, bounds_softmax
from attncheck.attention.bounds_accumulated import (
    merge_heads,
    operand_bound,
    output_of_heads,
    projected_operand,
)
from attncheck.attention.bounds_logits import (
    LOGITS,
    Arrays,
    Options,
    allowed_keys,
    attention_scale,
    next_logit_error,
    next_logits,
    score_error,
    softmax,
)
from attncheck.attention.errors import Bound, LogitError, Operand, Real, as_float64, no_error, transposed
from attncheck.attention.rounding import RoundingModel


@dataclass(frozen=True, eq=False)
class _Returned:
    """One implementation's stages and what they were computed from, in float64."""

    operation: str
    options: Options
    given: Mapping[str, Real]
    stages: Mapping[str, Real]
    rounding: RoundingModel
    attended: NDArray[np.bool_] | None

    @property
    def stored_unit(self) -> float:
        return max(self.rounding.score_unit, self.rounding.output_unit)

    def operand(self, name: str) -> Operand:
        """Return query, key or value: as returned, or else as given; in multi_head_attention only as returned."""
        if name in self.stages:
            stored = self.stages[name]
            return Operand(stored, self.stored_unit * np.abs(stored), (self.stored_unit * stored) ** 2)
        return Operand(self.given[name])

    def chain(self) -> list[str]:
        """Return the logits that the options ask for."""
        asked = {
            "capped": self.options.get("softcap") is not None,
            "biased": "bias" in self.given,
            "masked": self.attended is not None,
        }
        return [stage for stage in LOGITS if asked.get(stage, True) or stage in self.stages]


def introduced_bound(  # noqa: PLR0917, one more than the oracle asks for: the policy
    operation: str,
    options: Options,
    inputs: Arrays,
    rounding: RoundingModel,
    returned: Arrays,
    exact: Real,
    stage: str,
    *,
    attended: NDArray[np.bool_] | None = None,
) -> Bound | None:
    """Bound the error of one stage against its exact value from the implementation's own previous stages.

    ``returned`` are all stages that the implementation returned, ``exact`` the exact value of ``stage`` from the
    nearest of them. ``attended`` (broadcasting to the scores) says which keys may be attended to, where ``mask`` and
    ``is_causal`` do not say it all. None where a predecessor is missing or, at an attended key, not finite; and for
    gradients, none of which follows from another.
    """
    if operation == "attention_gradients":
        return None
    given = {name: as_float64(array) for name, array in inputs.items() if array.dtype != bool}
    stages = {name: as_float64(array) for name, array in returned.items() if name != stage}
    allowed = _allowed(options, inputs, stages, exact if stage == "weights" else None) if attended is None else attended
    # What the implementation itself masked says who is attended to, rightly or not.
    allowed = None if "masked" in stages else allowed
    implementation = _Returned(operation, options, given, stages, rounding, allowed)
    with np.errstate(all="ignore"):
        try:
            return _bound(implementation, as_float64(exact), stage)
        except _NotFiniteError:
            return None


class _NotFiniteError(Exception):
    """A predecessor is missing or not finite."""


def _bound(own: _Returned, exact: Real, stage: str) -> Bound:
    heads = own.operation == "multi_head_attention"
    match stage:
        case "query" | "key" | "value":
            return operand_bound(projected_operand(stage, own.given, exact, own.rounding), exact)
        case "raw_scores":
            products = bounds_scores.products_of(_query(own), _shared(own, "key"), own.rounding)
            return bounds_scores.raw_scores(products, exact, own.rounding).bound(exact, own.rounding)
        case "scores" | "capped" | "biased" | "masked":
            return _logits(own, stage, exact)[1].bound(exact, own.rounding)
        case "weights" | "log_sum_exp":
            return _after_softmax(own, exact, stage)
    if heads and stage == "output":
        return _output_of_heads(own, exact)
    return _context(own, exact)


def _query(own: _Returned) -> Operand:
    return _finite(own.operand("query"), own, "query")


def _shared(own: _Returned, name: str) -> Operand:
    """Return keys or values, repeated for the query heads that share them."""
    return _finite(own.operand(name), own, name).for_query_heads(_query_heads(own))


def _query_heads(own: _Returned) -> int:
    if own.operation == "multi_head_attention":
        return int(own.options["heads"])
    query = own.given["query"]
    return query.shape[-3] if query.ndim > 2 else 1


def _finite(operand: Operand, own: _Returned, name: str) -> Operand:
    if own.operation == "multi_head_attention" and name not in own.stages:
        raise _NotFiniteError(name)
    if name in own.stages and not np.isfinite(operand.value).all():
        raise _NotFiniteError(name)
    return operand


def _logits(own: _Returned, last: str, exact: Real | None) -> tuple[Real, LogitError]:
    """Return a stage of the logits, in float64, and its error from the nearest stage before it.

    ``exact`` is that stage where it is known; None where a later one is asked for, and it may itself be returned.
    """
    chain = own.chain()
    place = chain.index(last) if last in chain else len(chain)
    before = chain[:place] if exact is not None else chain[: place + 1]
    start = next((stage for stage in reversed(before) if stage in own.stages or _is_given(own, stage)), None)
    if start is None:
        value, error = _computed_scores(own, exact if last == "scores" else None)
        start = "scores"
    else:
        value, error = _stored_logits(own, start)
    values = {start: value}
    for stage in chain[chain.index(start) + 1 : place + 1]:
        values[stage] = (
            exact
            if exact is not None and stage == last
            else next_logits(stage, value, own.options, own.given, own.attended)
        )
        error = next_logit_error(stage, error, own.options, own.rounding, values, value)
        value = values[stage]
    return value, error


def _is_given(own: _Returned, stage: str) -> bool:
    return stage == "scores" and own.operation in ("softmax", "masking")


def _computed_scores(own: _Returned, exact: Real | None) -> tuple[Real, LogitError]:
    operands = {"query": _query(own), "key": _shared(own, "key")}
    if exact is None:
        query, key = operands["query"].value, operands["key"].value
        exact = attention_scale(own.options, query.shape[-1]) * (query @ transposed(key))
    return exact, score_error(operands, own.given, own.options, own.rounding, exact)


def _stored_logits(own: _Returned, stage: str) -> tuple[Real, LogitError]:
    if stage not in own.stages:
        return own.given[stage], no_error(own.given[stage].shape)
    value, unit = own.stages[stage], own.stored_unit
    attended = value > -np.inf
    if own.attended is not None:
        attended = attended & own.attended
    if not np.isfinite(value[attended]).all() or np.isnan(value).any():
        raise _NotFiniteError(stage)
    size = np.where(attended, np.abs(value), 0.0)
    size = size * (2 if unit > own.rounding.accumulate_unit else 1)
    if stage in ("biased", "masked") and "bias" in own.given:
        size = size + np.where(attended, np.abs(np.where(attended, value, 0.0) - own.given["bias"]), 0.0)
    zero = np.zeros_like(value)
    return value, LogitError(unit * size, (unit * size) ** 2, zero, zero)


def _rows(own: _Returned) -> bounds_rows.Rows:
    logits, error = _logits(own, own.chain()[-1], None)
    logits = logits if own.attended is None else np.where(own.attended, logits, -np.inf)
    weights, log_sum_exp = softmax(logits)
    return bounds_rows.rows_of(logits, weights, log_sum_exp, error, own.rounding)


def _after_softmax(own: _Returned, exact: Real, stage: str) -> Bound:
    if stage == "weights":
        return bounds_softmax.weights_bound(_rows(own), exact, own.rounding)
    return bounds_softmax.log_sum_exp_bound(_rows(own), exact, own.rounding)


def _context(own: _Returned, exact: Real) -> Bound:
    value = _shared(own, "value")
    if "weights" not in own.stages:
        return bounds_output.output_bound(_rows(own), value, exact, own.rounding)
    weights = own.stages["weights"]
    expected = np.isfinite(exact).any(axis=-1)
    # An empty row may hold NaN by convention; then its exact context does, too.
    if not np.isfinite(weights[np.broadcast_to(expected, weights.shape[:-1])]).all():
        raise _NotFiniteError("weights")
    return bounds_output.mean_bound(Operand(weights), value, exact, own.rounding)


def _output_of_heads(own: _Returned, exact: Real) -> Bound:
    if "context" in own.stages:
        context, unit = own.stages["context"], own.stored_unit
        if not np.isfinite(context).all():
            raise _NotFiniteError("context")
        merged = Operand(merge_heads(context), unit * np.abs(merge_heads(context)), (unit * merge_heads(context)) ** 2)
        weight = own.given.get("output_weight")
        if weight is None:
            return operand_bound(merged, exact)
        projected = bounds_linear.projected(merged, weight, own.given.get("output_bias"), exact, own.rounding)
        return operand_bound(projected, exact)
    value = _shared(own, "value").value
    weights = own.stages["weights"] if "weights" in own.stages else _rows(own).weights
    context = weights @ np.where(np.isfinite(value), value, 0.0)
    return output_of_heads(context, _context(own, context), own.given, exact, own.rounding)


def _allowed(options: Options, inputs: Arrays, stages: Mapping[str, Any], weights: Any) -> NDArray[np.bool_] | None:
    """Return which keys may be attended to, from what is known; None where nothing forbids any."""
    if not options.get("is_causal"):
        return inputs.get("mask")
    shape = next((stages[name].shape for name in (*LOGITS, "raw_scores", "weights") if name in stages), None)
    shape = np.shape(weights) if shape is None and weights is not None else shape
    shape = np.shape(inputs["scores"]) if shape is None and "scores" in inputs else shape
    lengths = shape[-2:] if shape is not None else (inputs["query"].shape[-2], inputs["key"].shape[-2])
    return allowed_keys(options, inputs, lengths)
