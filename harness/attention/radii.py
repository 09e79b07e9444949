"""How far an exact result moves when every input moves by its radius: the allowance for printed, rounded inputs.

A document that prints its inputs rounded computed with other numbers than it shows; so does a float32 run of a float64
document. Each input x then stands for any x' with |x' - x| <= r. For every stage the walk gives a radius R such that
the exact stage of x' differs from the exact stage of x by at most R, by the radius rules of the steps:

    product      |x'y' - xy| <= |x| ry + rx |y| + rx ry, summed over the inner axis
    sum, scale   radii add; |a| r
    tanh         |tanh z' - tanh z| <= min(r, 2), its slope being at most 1; c tanh(z / c) moves by at most min(r, 2 c)

and those of ``softmax`` and ``other_scores``. They hold for radii of any size, not to first order; they are
evaluated in float64, whose own rounding is far below any digit that a document prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attncheck.attention.errors import Ball, Real
from attncheck.attention.problem import Problem
from attncheck.attention.walk import radius_walk
from attncheck.reading.inputs import Inputs
from attncheck.reading.lowering import canonical_form, rows_of_tables
from attncheck.spec import BY_SCORE, OPERATIONS, computed_stages

PROPAGATED = frozenset(
    {"scoring", "softmax", "masking", "attention", "multi_head_attention", "merge_states", *BY_SCORE}
)
"""Operations whose results may be given as numbers."""


def propagate(operation: str, options: Mapping[str, Any], inputs: Inputs) -> dict[str, Ball]:
    """Return every stage of the operation as balls, from inputs with their radii; gradients have none."""
    if operation not in PROPAGATED:
        raise AssertionError(f"no propagation for the operation {operation}")
    if OPERATIONS[operation].has_parts:  # laid out as scores and values, as the parts are
        inputs = Inputs(inputs.arrays, canonical_form(operation, options, inputs.radius).inputs)
    posed = canonical_form(operation, options, inputs.arrays)
    # What a query without a key gives is no part of a problem in canonical form.
    options = {**posed.options, "empty_rows": options.get("empty_rows")}
    problem = Problem.of(operation, options, posed.inputs).in_float64()
    offsets = {name: inputs.arrays[name] for name in ("query_offsets",) if name in inputs.arrays}
    tables = rows_of_tables({**inputs.arrays, **inputs.radius, **offsets}, of_past=(0, 0))
    is_projected = OPERATIONS[operation].has_projections
    radii = {
        name: problem.input_with_added(
            name, tables[name] if name in tables else _radius(inputs, name, is_projected=is_projected)
        )
        for name, array in problem.inputs.items()
        if array.dtype != np.bool_
    }
    with np.errstate(all="ignore"):
        walk = radius_walk(problem, radii)
        computed = computed_stages(operation, options, problem.inputs)
        return {stage: _without_added(problem, stage, walk.node(stage)) for stage in computed}


def _without_added(problem: Problem, stage: str, ball: Ball) -> Ball:
    return Ball(problem.without_added(stage, ball.value), problem.without_added(stage, ball.radius))


def _radius(inputs: Inputs, name: str, *, is_projected: bool) -> Real:
    """Return the radii of an input, those of the past in front; behind projections that is an input of its own."""
    if name.startswith("cached_") and name not in inputs.radius:
        return inputs.radius[name.replace("cached", "past")]
    own, past = inputs.radius[name], inputs.radius.get(f"past_{name}")
    return own if past is None or is_projected else np.concatenate([past, own], axis=-2)
