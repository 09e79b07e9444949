"""Error bounds of every stage, followed from the inputs of a case, operation by operation.

In multi_head_attention the errors E_q, E_k of the projections move a score by at most

    |a| ( E_q |k|^T + (|q| + E_q) E_k^T )

which joins D; E_v joins the output (``bounds_output``), whose bound goes through the output projection.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

import numpy as np

from attncheck.attention import bounds_linear, bounds_output, bounds_rows, bounds_scores, bounds_softmax
from attncheck.attention.bounds_gradients import gradient_bounds
from attncheck.attention.bounds_logits import Arrays, Options, logit_errors, operands_of, score_error
from attncheck.attention.errors import Bound, LogitError, Operand, Real, as_float64, no_error, settle
from attncheck.attention.rounding import RoundingModel


def accumulated_bounds(
    operation: str,
    options: Options,
    inputs: Arrays,
    rounding: RoundingModel,
    exact: Mapping[str, Real],
    stages: Collection[str] | None = None,
) -> dict[str, Bound]:
    """Bound the error of every stage against the exact answer from the inputs.

    ``inputs`` are as stored, ``exact`` the exact stages rounded to float64, of which all are needed that ``stages``
    (by default all of them) follow from. Where the exact value is not finite, the bound is 0.
    """
    given = {name: as_float64(array) for name, array in inputs.items() if array.dtype != bool}
    wanted = set(exact if stages is None else stages)
    with np.errstate(all="ignore"):
        match operation:
            case "softmax":
                bounds = _softmax(given["scores"], no_error(given["scores"].shape), rounding, exact, wanted)
            case "masking":
                errors = logit_errors("scores", no_error(given["scores"].shape), given, options, rounding, exact)
                bounds = {name: error.bound(exact[name], rounding) for name, error in errors.items()}
            case "attention_gradients":
                bounds = gradient_bounds(options, inputs, rounding, exact, wanted)
            case "multi_head_attention":
                bounds = _multi_head_attention(given, options, rounding, exact, wanted)
            case _:
                bounds = attention_bounds(operands_of(given), given, options, rounding, exact, wanted)
    return {name: bounds[name] for name in exact if name in wanted and name in bounds}


def attention_bounds(
    operands: Mapping[str, Operand],
    given: Mapping[str, Real],
    options: Options,
    rounding: RoundingModel,
    exact: Mapping[str, Real],
    wanted: Set[str],
) -> dict[str, Bound]:
    """Bound ``scoring`` and ``attention``, and the inside of ``multi_head_attention``."""
    bounds: dict[str, Bound] = {}
    if "raw_scores" in wanted:
        raw = exact["raw_scores"]
        products = bounds_scores.products_of(operands["query"], operands["key"], rounding)
        bounds["raw_scores"] = bounds_scores.raw_scores(products, raw, rounding).bound(raw, rounding)
    if not wanted - {"raw_scores"}:
        return bounds
    error = score_error(operands, given, options, rounding, exact["scores"])
    errors = logit_errors("scores", error, given, options, rounding, exact)
    bounds |= {name: each.bound(exact[name], rounding) for name, each in errors.items() if name in wanted}
    last = list(errors)[-1]
    if wanted & {"weights", "log_sum_exp", "context", "output"}:
        bounds |= _softmax(exact[last], errors[last], rounding, exact, wanted, operands.get("value"))
    return bounds


def _softmax(
    logits: Real,
    error: LogitError,
    rounding: RoundingModel,
    exact: Mapping[str, Real],
    wanted: Set[str],
    value: Operand | None = None,
) -> dict[str, Bound]:
    """Bound what follows from the last logits."""
    rows = bounds_rows.rows_of(logits, exact["weights"], exact["log_sum_exp"], error, rounding)
    bounds = {}
    if "weights" in wanted:
        bounds["weights"] = bounds_softmax.weights_bound(rows, exact["weights"], rounding)
    if "log_sum_exp" in wanted:
        bounds["log_sum_exp"] = bounds_softmax.log_sum_exp_bound(rows, exact["log_sum_exp"], rounding)
    if value is not None and wanted & {"context", "output"}:
        name = "context" if "context" in exact else "output"
        bounds[name] = bounds_output.output_bound(rows, value, exact[name], rounding)
    return bounds


def _multi_head_attention(
    given: Mapping[str, Real], options: Options, rounding: RoundingModel, exact: Mapping[str, Real], wanted: Set[str]
) -> dict[str, Bound]:
    operands = {name: projected_operand(name, given, exact[name], rounding) for name in ("query", "key", "value")}
    bounds = {name: operand_bound(operand, exact[name]) for name, operand in operands.items() if name in wanted}
    heads = exact["query"].shape[1]
    shared = {name: operand.for_query_heads(heads) for name, operand in operands.items()}
    inner = wanted | {"context"} if "output" in wanted else wanted
    bounds |= attention_bounds(shared, given, options, rounding, exact, inner)
    if "output" in wanted:
        bounds["output"] = output_of_heads(exact["context"], bounds["context"], given, exact["output"], rounding)
    return bounds


def projected_operand(name: str, given: Mapping[str, Real], exact: Real, rounding: RoundingModel) -> Operand:
    """Bound one projection, ``exact`` (B, H, L, D)."""
    batch, heads, length, width = exact.shape
    merged = merge_heads(exact)
    flat = bounds_linear.projected(
        Operand(given[name]), given[f"{name}_weight"], given.get(f"{name}_bias"), merged, rounding
    )

    def split(array: Real | None) -> Real:
        assert array is not None
        return array.reshape(batch, length, heads, width).swapaxes(1, 2)  # (B, L, H*D) -> (B, H, L, D)

    return Operand(exact, split(flat.worst), split(flat.variance))


def output_of_heads(
    context: Real, bound: Bound, given: Mapping[str, Real], exact: Real, rounding: RoundingModel
) -> Bound:
    """Bound the output projection of the heads' contexts (B, H, Lq, Dv), whose own bound is given.

    The errors of one context row have common causes, its weights: their scales add up as if all of one sign, which no
    correlation exceeds; those of different heads are independent.
    """
    weight = given.get("output_weight")
    if weight is None:
        return Bound(merge_heads(bound.worst), merge_heads(bound.scale))
    heads, width = context.shape[1], context.shape[-1]
    per_head = bound.scale @ np.abs(weight).reshape(heads, width, -1)  # (B, H, Lq, Eo)
    inputs = Operand(merge_heads(context), merge_heads(bound.worst))
    carried = (per_head**2).sum(axis=1)
    return operand_bound(
        bounds_linear.projected(inputs, weight, given.get("output_bias"), exact, rounding, carried), exact
    )


def operand_bound(operand: Operand, exact: Real) -> Bound:
    """Return the bound of a computed operand."""
    assert operand.worst is not None
    assert operand.variance is not None
    return settle(exact, operand.worst, operand.variance, 0.0)


def merge_heads(array: Real) -> Real:
    """Lay the heads side by side: (B, H, L, D) -> (B, L, H*D)."""
    batch, heads, length, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, length, heads * width)
