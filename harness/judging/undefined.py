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

from attncheck.attention.flags import Flags, any_of
from attncheck.attention.problem import MAY_BE_MINUS_INFINITY, Problem
from attncheck.attention.walk import Walk, reach_walk, reach_walk_from
from attncheck.judging.special_rows import scores_shape
from attncheck.oracle.enclosure import Enclosure
from attncheck.reading.shapes import optional_gradients
from attncheck.spec import (
    LOGITS,
    NORMALIZATIONS,
    PROJECTIONS,
    ROTATIONS,
    STAGE_SPECS,
    SUMS_OF_QUERIES,
    Shape,
    computed_stages,
    score_kind,
)

Array = NDArray[Any]
Inputs = Mapping[str, Array]
Options = Mapping[str, Any]

_LOGITS = frozenset({*PROJECTIONS, *NORMALIZATIONS, *ROTATIONS, *LOGITS})
"""Stages of which every key has its own elements: what reaches these is no matter of masks."""

_SPOILT_TOGETHER: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys({*SUMS_OF_QUERIES, *optional_gradients("attention_gradients")}, (-2, -1)),
    **{name: () for name, spec in STAGE_SPECS.items() if spec.axes[-1] in {"Lq", "H"}},
}
"""Axes along which one NaN tells what became of the others: the last one, except for these stages. A softmax may give 0
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
            flags = flags & ~(behind & ~any_of(odd, _SPOILT_TOGETHER.get(stage, -1)))
        if not flags.any():
            return exact
        high, low = np.where(flags, np.nan, exact.high), np.where(flags, 0.0, exact.low)
        return Enclosure(high, low, np.where(flags, np.inf, exact.radius))

    def without_undefined(self, stage: str, returned: Array) -> Array:
        """Set to 0 what is not finite by right in a returned stage, so that other elements can be followed from it."""
        by_right = self.of(stage, returned.shape) & ~np.isfinite(returned.astype(np.float64))
        return np.where(by_right, np.zeros((), returned.dtype), returned)


def find_undefined(operation: str, options: Options, inputs: Inputs) -> Undefined | None:
    """Find what is undefined in a problem in canonical form, without NaN in whole query rows; None if nothing is."""
    flags: dict[str, Flags] = {}
    reasons = []
    for name, array in inputs.items():
        if array.dtype == np.bool_:
            continue
        odd = is_odd(name, array)
        if odd.any():
            reasons.append(f"{name} {NONFINITE}")
        if name in ("query", "key") and score_kind(operation, options) == "cosine":
            without_direction = ~(array != 0).any(axis=-1, keepdims=True)
            if without_direction.any():
                reasons.append(f"{name} {NO_DIRECTION}")
            odd = odd | without_direction
        flags[name] = odd
    if not reasons:
        return None
    found = {name: each for name, each in flags.items() if each.any()}
    problem = Problem.of(operation, options, inputs)
    flags = {name: problem.input_with_added(name, each) for name, each in flags.items()}
    stages = _stages(reach_walk(problem, flags, None), problem)
    if "key" not in inputs or operation == "scoring":  # nothing is masked
        return Undefined(found, "; ".join(reasons), stages)
    *leading, keys = scores_shape(operation, options, inputs)
    attended = ~problem.unattended((*leading, keys + problem.added_keys))
    by_selection = _stages(reach_walk(problem, flags, attended), problem)
    return Undefined(
        found, "; ".join(reasons), stages, {stage: by_selection[stage] for stage in by_selection.keys() - _LOGITS}
    )


def is_odd(name: str, array: Array) -> Flags:
    """Return where an input holds NaN or infinity; -inf in scores and bias forbids a key, and is no oddity."""
    odd: Flags = ~np.isfinite(array)
    return odd & (array != -np.inf) if name in MAY_BE_MINUS_INFINITY else odd


def _stages(walk: Walk, problem: Problem) -> dict[str, Flags]:
    """Return the flags of every stage, in shapes that broadcast to the stages' own."""
    stages = computed_stages(problem.operation, problem.options, problem.inputs)
    return {stage: problem.without_added(stage, walk.node(stage)) for stage in stages}


def follow_scores(operation: str, options: Options, inputs: Inputs, scores: Flags) -> dict[str, Flags]:
    """Follow flags of scores, (B, H, Lq, T), to every stage behind them, in shapes that broadcast to the stages'."""
    problem = Problem.of(operation, options, inputs)
    known = {stage: problem.with_added(stage, scores) for stage in ("scores", "raw_scores")}
    return _stages(reach_walk_from(problem, known), problem)
