"""The stages of attention, in the order in which it computes them, and their axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from attncheck.spec.inputs import GATED_INPUTS, INPUTS_ON_ROWS, SCORES_AXES, Axes


@dataclass(frozen=True)
class StageSpec:
    """A named intermediate. ``part`` is the part of the computation that it belongs to.

    ``axes`` are those of a computation per head; ``Operation.stage_axes`` has others. One that ``may_be_wide`` is a
    statistic of rows: in a dtype of 16 bits it may be returned in float32, as fused kernels do.
    """

    name: str
    part: Literal["projections", "normalizations", "rotations", "logits", "softmax", "means", "gradients"]
    axes: Axes
    may_be_wide: bool = False


STAGE_SPECS: Mapping[str, StageSpec] = {
    each.name: each
    for each in (
        StageSpec("query", "projections", ("B", "H", "Lq", "D")),
        StageSpec("key", "projections", ("B", "Hkv", "Lk", "D")),
        StageSpec("value", "projections", ("B", "Hkv", "Lk", "Dv")),
        StageSpec("normalized_query", "normalizations", ("B", "H", "Lq", "D")),
        StageSpec("normalized_key", "normalizations", ("B", "Hkv", "Lk", "D")),
        StageSpec("rotated_query", "rotations", ("B", "H", "Lq", "D")),
        StageSpec("rotated_key", "rotations", ("B", "Hkv", "T", "D")),
        StageSpec("raw_scores", "logits", SCORES_AXES),
        StageSpec("scores", "logits", SCORES_AXES),
        StageSpec("capped", "logits", SCORES_AXES),
        StageSpec("biased", "logits", SCORES_AXES),
        StageSpec("masked", "logits", SCORES_AXES),
        StageSpec("weights", "softmax", SCORES_AXES),
        StageSpec("log_sum_exp", "softmax", ("B", "H", "Lq"), may_be_wide=True),
        StageSpec("context", "means", ("B", "H", "Lq", "Dv")),
        StageSpec("output", "means", ("B", "H", "Lq", "Dv")),
        *(
            StageSpec(f"grad_{name}", "gradients", spec.axes)
            for name, spec in GATED_INPUTS.items()
            if spec.differentiable
        ),
    )
}
STAGES = tuple(STAGE_SPECS)
"""Every stage, in the order in which attention computes them, then the gradients."""


def stages_of(part: str) -> tuple[str, ...]:
    """Return the stages of a part of the computation, in its order."""
    return tuple(name for name, spec in STAGE_SPECS.items() if spec.part == part)


PROJECTIONS, NORMALIZATIONS, ROTATIONS = map(stages_of, ("projections", "normalizations", "rotations"))
LOGITS, MEANS, GRADIENTS = map(stages_of, ("logits", "means", "gradients"))
ON_SCORES = tuple(name for name, spec in STAGE_SPECS.items() if spec.axes == SCORES_AXES and spec.part != "gradients")
"""Stages of the scores' shape."""
SUMS_OF_QUERIES = tuple(name for name in GRADIENTS if "Lk" in STAGE_SPECS[name].axes)
"""Gradients that every query row of a head has a part in."""
THROUGH_SCORES = tuple(name for name in GRADIENTS if name.removeprefix("grad_") in {"query", "key", *INPUTS_ON_ROWS})
"""Gradients that come through a row's scores; that of the values follows from its weights alone."""


def query_axis(stage: str) -> int | None:
    """Return the axis of a stage that counts query rows, from the end; None for those of keys and values."""
    axes = STAGE_SPECS[stage].axes if stage in STAGE_SPECS else SCORES_AXES
    return axes.index("Lq") - len(axes) if "Lq" in axes else None


@cache
def key_axis(stage: str) -> int | None:
    """Return the axis of a stage that counts keys, from the end; None without one, or where its length may be 1."""
    name = stage.removeprefix("grad_")
    if stage not in STAGE_SPECS or (name != stage and GATED_INPUTS[name].broadcast):
        return None
    axes = STAGE_SPECS[stage].axes
    return next((axes.index(letter) - len(axes) for letter in ("T", "Lk") if letter in axes), None)


def stage_position(stage: str) -> int:
    """Return a stage's position in the order of computation; names of their own, and derived quantities, come last."""
    return STAGES.index(stage) if stage in STAGES else len(STAGES)
