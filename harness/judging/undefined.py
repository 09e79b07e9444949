"""Elements without an exact answer, because an input that they follow from has none.

NaN and infinity among the inputs (other than -inf in scores and bias, which forbids a key) and a vector of length 0
under a cosine leave undefined what is computed from them, and nothing else: a query its own row, a key its column of
scores and every row of weights, a value its column of the output. This module follows them through the operation as
flags, one per element and stage. The oracle gets ones in their place, and its answer is then withdrawn where a flag is.

What a key or value that may not be attended does to a row, no contract says: selection leaves it out, addition of -inf
and multiplication by 0 make NaN of it. So a row that nothing else reaches holds NaN or infinity, of which nothing is
said, or it has the numbers that it has without that key, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.problem import MAY_BE_MINUS_INFINITY, Problem
from attncheck.judging.special_rows import scores_shape
from attncheck.oracle.enclosure import Enclosure
from attncheck.spec import Shape

Array = NDArray[Any]
Flags = NDArray[np.bool_]
Inputs = Mapping[str, Array]
Options = Mapping[str, Any]

_LOGITS = frozenset({"query", "key", "value", "raw_scores", "scores", "capped", "biased", "masked"})
"""Stages of which every key has its own elements: what reaches these is no matter of masks."""

_SPOILT_TOGETHER: Mapping[str, tuple[int, ...]] = {
    "log_sum_exp": (),
    **dict.fromkeys(("grad_key", "grad_value", "grad_bias"), (-2, -1)),
}
"""Axes along which one NaN tells what became of the others: the last one, but for these stages. A softmax may give 0
beside a NaN, as TensorFlow's does, so that a sum over queries is NaN for some keys alone."""

NONFINITE = "holds NaN or an infinity that no mask explains"
NO_DIRECTION = "has a vector of length 0, which has no direction"
BEHIND_A_MASK = (
    "only keys that may not be attended hold NaN or infinity: what adds to their scores or multiplies by their weights "
    "makes NaN of it, and what leaves them out does not"
)


@dataclass(frozen=True, eq=False)
class Undefined:
    """Which elements of inputs are undefined, and of stages; ``reason`` says why, in the words of a message.

    ``by_selection`` are those of them that are undefined even where keys that may not be attended are left out.
    """

    inputs: Mapping[str, Flags]
    reason: str
    stages: Mapping[str, Flags] = field(default_factory=dict)
    by_selection: Mapping[str, Flags] = field(default_factory=dict)

    def filled(self, inputs: Inputs) -> dict[str, Array]:
        """Return the inputs with ones where they are undefined."""
        return {
            name: np.where(self.inputs[name], np.ones((), array.dtype), array) if name in self.inputs else array
            for name, array in inputs.items()
        }

    def of(self, stage: str, shape: Shape) -> Flags:
        """Return which elements of a stage are undefined."""
        return np.broadcast_to(self.stages.get(stage, np.zeros((), dtype=np.bool_)), shape)

    def behind_a_mask(self, stage: str, shape: Shape) -> Flags:
        """Return which elements only keys reach that may not be attended, so that without them these are defined."""
        if stage not in self.by_selection:
            return np.zeros(shape, dtype=np.bool_)
        return self.of(stage, shape) & ~np.broadcast_to(self.by_selection[stage], shape)

    def withdrawn(self, stage: str, exact: Enclosure, returned: Array | None = None) -> Enclosure:
        """Take the exact value back where the stage is undefined.

        Where it is so only behind a mask, that depends on what was ``returned``: a row that holds NaN or infinity there
        is undefined, and so is a head of a sum over queries; any other has its exact value.
        """
        flags = self.of(stage, exact.shape)
        if returned is not None:
            behind = self.behind_a_mask(stage, exact.shape)
            odd = behind & ~np.isfinite(returned.astype(np.float64))
            flags = flags & ~(behind & ~_any(odd, _SPOILT_TOGETHER.get(stage, -1)))
        if not flags.any():
            return exact
        high, low = np.where(flags, np.nan, exact.high), np.where(flags, 0.0, exact.low)
        return Enclosure(high, low, np.where(flags, np.inf, exact.radius))

    def without_undefined(self, stage: str, returned: Array) -> Array:
        """Set to 0 what is not finite by right in a returned stage, so that other elements can be followed from it."""
        by_right = self.of(stage, returned.shape) & ~np.isfinite(returned.astype(np.float64))
        return np.where(by_right, np.zeros((), returned.dtype), returned)


def find_undefined(operation: str, options: Options, inputs: Inputs) -> Undefined | None:
    """Find what is undefined in a problem in essential form, without NaN in whole query rows; None if nothing is."""
    flags: dict[str, Flags] = {}
    reasons = []
    for name, array in inputs.items():
        if array.dtype == np.bool_:
            continue
        odd = is_odd(name, array)
        if odd.any():
            reasons.append(f"{name} {NONFINITE}")
        if operation == "scoring" and options.get("score") == "cosine":
            without_direction = ~(array != 0).any(axis=-1, keepdims=True)
            if without_direction.any():
                reasons.append(f"{name} {NO_DIRECTION}")
            odd = odd | without_direction
        flags[name] = odd
    if not reasons:
        return None
    found = {name: each for name, each in flags.items() if each.any()}
    stages = _stages(operation, options, flags, None)
    if "key" not in inputs or operation == "scoring":  # nothing is masked
        return Undefined(found, "; ".join(reasons), stages)
    attended = ~Problem.of(operation, options, inputs).unattended(scores_shape(operation, options, inputs))
    by_selection = _stages(operation, options, flags, attended)
    return Undefined(
        found, "; ".join(reasons), stages, {stage: by_selection[stage] for stage in by_selection.keys() - _LOGITS}
    )


def is_odd(name: str, array: Array) -> Flags:
    """Return where an input holds NaN or infinity; -inf in scores and bias forbids a key, and is no oddity."""
    odd: Flags = ~np.isfinite(array)
    return odd & (array != -np.inf) if name in MAY_BE_MINUS_INFINITY else odd


def _stages(operation: str, options: Options, inputs: Mapping[str, Flags], attended: Flags | None) -> dict[str, Flags]:
    """Follow flags of the inputs to every stage, in shapes that broadcast to the stages' own.

    Where it is said which keys are ``attended``, (B, H, Lq, T), no others reach a row.
    """
    if operation == "multi_head_attention":
        return _of_multi_head_attention(options, inputs, attended)
    stages = _of_logits(inputs)
    if operation in ("scoring", "masking"):
        return stages
    row = _row(stages["masked"], attended)
    stages |= {"weights": row, "log_sum_exp": row[..., 0]}
    if operation == "attention":
        stages["output"] = row | _mean(_per_head(inputs["value"], row), attended)
    if operation == "attention_gradients":
        stages |= _of_gradients(inputs, row, attended)
    return stages


def follow_scores(operation: str, options: Options, inputs: Inputs, scores: Flags) -> dict[str, Flags]:
    """Follow flags of scores, (B, H, Lq, T), to every stage behind them, in shapes that broadcast to the stages'."""
    row = _any(scores, -1)
    stages = dict.fromkeys(("raw_scores", "scores", "capped", "biased", "masked"), scores)
    stages |= {"weights": row, "log_sum_exp": row[..., 0]}
    none: dict[str, Flags] = {name: np.zeros(array.shape, dtype=np.bool_) for name, array in inputs.items()}
    if operation == "attention":
        stages["output"] = row
    if operation == "attention_gradients":
        stages |= _of_gradients(none, row, None)
    if operation == "multi_head_attention":
        stages["context"] = row
        merged = np.swapaxes(row, 1, 2)[..., 0]  # (B, Lq, H): the projection has every head in it
        width = none["value_weight"].shape[-1] // int(options.get("kv_heads") or options["heads"])
        whole = np.repeat(merged, width, axis=-1)
        stages["output"] = _any(merged, -1) if "output_weight" in none else whole
    return stages


def _row(logits: Flags, attended: Flags | None) -> Flags:
    """Follow the logits of a row to its softmax: (..., Lq, 1)."""
    return _any(logits if attended is None else logits & attended, -1)


def _mean(value: Flags, attended: Flags | None) -> Flags:
    """Follow values to the means that they are part of: (..., Lq, Dv), or one row for all."""
    if attended is None:
        return _any(value, -2)
    return np.asarray(attended.astype(np.float32) @ value.astype(np.float32) > 0)


def _of_logits(inputs: Mapping[str, Flags]) -> dict[str, Flags]:
    """Follow queries, keys, the weights of small networks, and the bias to the logits: a row and a column each."""
    if "scores" in inputs:
        scores = inputs["scores"]
    else:
        query = _any(inputs["query"], -1)
        key = np.swapaxes(_any(_per_head(inputs["key"], query), -1), -1, -2)
        shared = ("weight", "query_weight", "key_weight", "score_vector", "score_bias")
        scores = query | key | any(bool(inputs[name].any()) for name in shared if name in inputs)
    biased = scores | inputs["bias"] if "bias" in inputs else scores
    return {"raw_scores": scores, "scores": scores, "capped": scores, "biased": biased, "masked": biased}


def _of_multi_head_attention(options: Options, inputs: Mapping[str, Flags], attended: Flags | None) -> dict[str, Flags]:
    heads = int(options["heads"])
    kv_heads = int(options.get("kv_heads") or heads)
    projected = {
        name: _projected(inputs, name, own) for name, own in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    }
    bias = {"bias": inputs["bias"]} if "bias" in inputs else {}
    stages = {**projected, **_of_logits({"query": projected["query"], "key": projected["key"], **bias})}
    row = _row(stages["masked"], attended)
    stages |= {"weights": row, "log_sum_exp": row[..., 0]}
    context = stages["context"] = row | _mean(_per_head(projected["value"], row), attended)
    merged = np.swapaxes(context, 1, 2)  # (B, Lq, H, Dv)
    merged = merged.reshape(*merged.shape[:2], -1)
    stages["output"] = _linear(merged, inputs, "output") if "output_weight" in inputs else merged
    return stages


def _projected(inputs: Mapping[str, Flags], name: str, heads: int) -> Flags:
    flags = _linear(inputs[name], inputs, name)
    return np.swapaxes(flags.reshape(*flags.shape[:2], heads, -1), 1, 2)  # (B, L, H*D) -> (B, H, L, D)


def _linear(given: Flags, inputs: Mapping[str, Flags], name: str) -> Flags:
    """Follow X W + b: (B, L, E) to (B, L, F)."""
    flags: Flags = _any(given, -1) | _any(inputs[f"{name}_weight"], -2)
    return flags | inputs[f"{name}_bias"] if f"{name}_bias" in inputs else flags


def _of_gradients(inputs: Mapping[str, Flags], row: Flags, attended: Flags | None) -> dict[str, Flags]:
    """Follow rows of weights, values and the output's gradient; sums over queries collect all of a head's rows."""
    grad_output, kv_heads = inputs["grad_output"], inputs["key"].shape[-3]
    values = _mean(_any(_per_head(inputs["value"], row), -1), attended)
    grad_logits = row | _any(grad_output, -1) | values
    stages = {
        "grad_query": grad_logits,
        "grad_key": _per_group(_any(grad_logits, -2), kv_heads),
        "grad_value": _per_group(_any(row | grad_output, -2), kv_heads),
    }
    if "bias" in inputs:
        bias = inputs["bias"]
        axes = tuple(axis for axis, length in enumerate(bias.shape[:-1]) if length == 1)
        stages["grad_bias"] = _any(grad_logits, axes)
    return stages


def _per_head(flags: Flags, of: Flags) -> Flags:
    """Give every query head the flags of the key or value head that its group shares."""
    heads, own = of.shape[-3], flags.shape[-3]
    return flags if own == heads else np.repeat(flags, heads // own, axis=-3)


def _per_group(flags: Flags, kv_heads: int) -> Flags:
    """Collect the query heads that share a key or value head: (B, H, L, D) -> (B, Hkv, L, D)."""
    batch, _, *rest = flags.shape
    return _any(flags.reshape(batch, kv_heads, -1, *rest), 2)[:, :, 0]


def _any(flags: Flags, axis: int | tuple[int, ...]) -> Flags:
    """Reduce axes to whether any is set; they stay, of length 1."""
    return np.asarray(np.any(flags, axis=axis, keepdims=True))
