"""Random problems, each made from a seed, its number and what is to be drawn alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.dtypes import rounded_once
from attncheck.reading.shapes import bind_axes, show, stage_shapes
from attncheck.searching.operands import LOWERED, draw_operands
from attncheck.searching.options import Inputs, draw_asked
from attncheck.searching.ranges import fits, is_wide, largest_step
from attncheck.searching.regimes import GENERIC, REGIMES
from attncheck.searching.shapes import draw_dimensions, some_as_modules
from attncheck.searching.tile_edges import draw_at_edges
from attncheck.spec import BY_SCORE, Shape, inputs_of, statistics_dtype

_KINDS = {
    "attention": 0.2,
    "quantized_attention": 0.03,
    "normalized_attention": 0.05,
    "latent_attention": 0.05,
    "packed_attention": 0.03,
    "packed_attention_gradients": 0.02,
    "paged_attention": 0.03,
    "attention_gradients": 0.2,
    "softmax": 0.08,
    "masking": 0.06,
    "multi_head_attention": 0.12,
    "merge_states": 0.06,
    "scaled_dot": 0.03,
    "dot": 0.03,
    "general": 0.03,
    "additive": 0.03,
    **dict.fromkeys(BY_SCORE, 0.02),
}
"""How often each operation, or kind of score, is drawn."""
_GROUPED = frozenset({*LOWERED, "attention", "attention_gradients", "multi_head_attention"})
_SCORES = frozenset({"scaled_dot", "dot", "general", "additive"})

OPERATIONS = tuple(dict.fromkeys("scoring" if kind in _SCORES else kind for kind in _KINDS))


@dataclass(frozen=True)
class Draw:
    """What problems are drawn from: a seed, so many shapes, and one operation or all of them.

    Without a number of shapes, each problem has a shape of its own, at the edges of tiles.
    """

    seed: int
    shapes: int | None
    operation: str | None = None

    @property
    def kinds(self) -> dict[str, float]:
        """How often each kind of problem is drawn."""
        drawn = {
            kind: share
            for kind, share in _KINDS.items()
            if self.operation in (None, kind) or (self.operation == "scoring" and kind in _SCORES)
        }
        return {kind: share / sum(drawn.values()) for kind, share in drawn.items()}


@dataclass(frozen=True, eq=False)
class Drawn:
    """One random problem; ``inputs`` in float64, masks boolean, lengths whole.

    ``supports_statistics`` says whether rounding errors of it add up as statistics have it.

    ``asked`` names the mask and the options, ``scores`` is the shape of the scores.
    """

    id: str
    number: int
    operation: str
    options: Mapping[str, Any]
    inputs: Mapping[str, NDArray[Any]]
    regime: str
    asked: str
    scores: Shape

    @property
    def supports_statistics(self) -> bool:
        """Whether the numbers are continuous and unstructured."""
        return self.regime in GENERIC

    @property
    def kind(self) -> str:
        """The operation, and the kind of score where that is one's own."""
        return f"{self.operation} {self.options['score']}" if "score" in self.options else self.operation

    @property
    def stage_shapes(self) -> dict[str, Shape]:
        """The shape of every stage that may be returned."""
        specs = inputs_of(self.operation, self.options.get("score"))
        shapes = {name: array.shape for name, array in self.inputs.items()}
        lengths = bind_axes(specs, shapes, self.options.get("heads"), self.options.get("kv_heads"))
        found = stage_shapes(self.operation, lengths)
        return found | {"grad_bias": shapes["bias"]} if "bias" in shapes else found

    def fits(self, dtype: str) -> bool:
        """Whether the problem stays within the range of a dtype."""
        return is_wide(dtype) or fits(self._largest, dtype)

    @cached_property
    def _largest(self) -> float:
        return largest_step(self.operation, self.options, self.inputs)

    def stored(self, dtype: str) -> Inputs:
        """Round the inputs once to a dtype."""
        specs = inputs_of(self.operation, self.options.get("score"))
        return {
            name: np.ascontiguousarray(
                rounded_once(array, statistics_dtype(dtype) if specs[name].statistics else dtype)
            )
            if array.dtype.kind == "f"
            else array
            for name, array in self.inputs.items()
        }


def draw_problem(draw: Draw, number: int) -> Drawn:
    """Draw the problem of a number."""
    random = np.random.RandomState([draw.seed, number])
    kind = str(random.choice(list(draw.kinds), p=list(draw.kinds.values())))
    regime = str(random.choice(list(REGIMES)))
    own = draw.shapes is None
    dims = draw_at_edges(kind, random) if own else draw_dimensions(kind, random, draw.seed, draw.shapes or 0)
    if kind not in _GROUPED:
        dims = dims.ungrouped
    if kind == "multi_head_attention":
        dims = some_as_modules(random, dims)
    asked = draw_asked(kind, random, dims)
    inputs = draw_operands(kind, regime, random, dims, asked) | asked.inputs
    if kind in _SCORES:
        asked.options["score"] = kind
    operation = "scoring" if kind in _SCORES else kind
    names = " + ".join(asked.names) or "nothing"
    place = f"{show(dims.scores)}/{draw.seed}-{number}"
    identity = f"soundness/{operation}/{regime}/{names}/{place}".replace(" ", "-")
    return Drawn(identity, number, operation, asked.options, inputs, regime, names, dims.scores)
