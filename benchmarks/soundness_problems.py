"""The soundness campaign's problems: those of any dtype, drawn by number, whose shapes are few.

Frameworks compile anew for each shape, JAX every single operation: shapes come from a pool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np

from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import format_shape, input_of_optional_gradients, stage_shapes
from attncheck.searching.concrete import required_features
from attncheck.searching.drawing import DrawnInputs
from attncheck.searching.problems import (
    DrawSettings,
    draw_problem_kind,
    draw_problem_outline,
    fits_in_dtype,
    is_wide_dtype,
    largest_intermediate,
    round_to_stored,
)
from attncheck.searching.shapes import DRAWN_HEADS, DRAWN_KERNEL_HEADS, KERNEL_WIDTHS, Dimensions, Random, max_scores
from attncheck.spec import OPERATIONS_PER_HEAD, Operation, Shape

SHAPES = 64
FEW_SHAPES = 40
"""For what is compiled, and for gradients, which are made of many more operations."""
_MANY_ENTRIES = 1 << 11
"""Shapes of more scores than this are rarer in proportion, for the oracle takes longer in proportion."""
_DECODING_SHARE = 0.1
_LARGE_SHARE = 0.005
_KERNEL_SHARE = 0.25
_KERNEL_SHAPES_PER_SHAPE = 3 / 8
_KERNEL_ENTRIES = 1 << 14
_TILES = (16, 16, 16, 64, 64, 128)
_KERNEL_BATCHES = (1, 2, 5, 17)
_DECODING = Dimensions(B=1, H=2, Lq=1, Lk=37, D=12, Dv=20, E=96, Ek=53, Ev=64, Eo=80, Hkv=2)
"""One query at a time, as a decoder asks: libraries take another way through their products for so few rows."""
_LARGE = (
    Dimensions(B=1, H=2, Lq=256, Lk=256, D=64, Dv=64, E=1, Ek=1, Ev=1, Eo=1, Hkv=2),
    Dimensions(B=1, H=1, Lq=512, Lk=512, D=128, Dv=128, E=1, Ek=1, Ev=1, Eo=1, Hkv=1),
)


@dataclass(frozen=True)
class PooledDraw(DrawSettings):
    """The source of the problems of a campaign: so many shapes, too."""

    shapes: int = SHAPES


@dataclass(frozen=True, eq=False)
class DrawnProblem(Problem):
    """A random problem of any dtype.

    ``supports_statistics`` says whether rounding errors of it add up as statistics have it.

    ``asked`` names the options and inputs, ``scores`` is the shape of the scores.
    """

    id: str = ""
    asked: str = ""
    scores: Shape = ()

    @property
    def stage_shapes(self) -> dict[str, Shape]:
        """The shape of every stage that may be returned."""
        of_inputs = input_of_optional_gradients(self.operation).items()
        own = {stage: self.inputs[name].shape for stage, name in of_inputs if name in self.inputs}
        return stage_shapes(self.operation, self.axis_lengths) | own

    def fits(self, dtype: str) -> bool:
        """Return whether the problem stays within the range of a dtype."""
        return is_wide_dtype(dtype) or fits_in_dtype(self._largest, dtype)

    @cached_property
    def _largest(self) -> float:
        return largest_intermediate(self)

    def stored(self, dtype: str) -> Mapping[str, Array]:
        """Round the inputs once to a dtype."""
        return round_to_stored(self.inputs, self.input_specs, self.options, dtype)


def draw_problem(draw: PooledDraw, number: int) -> DrawnProblem:
    """Draw the problem of a number, whatever dtype it is computed in."""
    random = np.random.RandomState([draw.seed, number])
    shape = partial(draw_dimensions, seed=draw.seed, shapes=draw.shapes)
    found = None
    while found is None:
        found = draw_problem_outline(draw_problem_kind(draw.kinds, random), "", random, draw_shape=shape)
    drawing = DrawnInputs(found, random)
    words = [
        word
        for word in required_features(found)
        if word not in {form.partition(" ")[0] for form in drawing.mask_and_bias_forms}
    ]
    names = " + ".join(sorted([*words, *drawing.mask_and_bias_forms])) or "nothing"
    lengths = found.axis_lengths
    scores = tuple(lengths.get(letter, lengths.get("N", 1)) for letter in ("B", "H", "Lq", "T"))
    place = f"{format_shape(scores)}/{draw.seed}-{number}"
    identity = f"soundness/{found.operation}/{found.drawing_regime}/{names}/{place}".replace(" ", "-")
    return DrawnProblem(
        *(found.operation, found.options, drawing.inputs, found.dtype),
        supports_statistics=found.supports_statistics and drawing.has_noise_like_errors,
        drawing_regime=found.drawing_regime,
        id=identity,
        asked=names,
        scores=scores,
    )


def draw_dimensions(own: Operation, axes: frozenset[str], random: Random, seed: int, shapes: int) -> Dimensions:
    """Draw the shape of a problem of an operation, whose inputs have these axes, from the first shapes of a seed."""
    if own.name in OPERATIONS_PER_HEAD and not own.computes_gradients and random.rand() < _LARGE_SHARE:
        return _LARGE[random.randint(len(_LARGE))]
    if own.has_projections and random.rand() < _DECODING_SHARE:
        return _DECODING
    if own.name in OPERATIONS_PER_HEAD and random.rand() < _KERNEL_SHARE:
        kernel_pool = _kernel_pool(seed, max(1, round(shapes * _KERNEL_SHAPES_PER_SHAPE)))
        return kernel_pool[random.randint(len(kernel_pool))]
    pool = _pool(seed, shapes)
    fitting = [dims for dims in pool if dims.score_count <= max_scores(own, axes, dims.score_count)]
    return fitting[random.randint(len(fitting))]


@lru_cache(maxsize=4)
def _pool(seed: int, shapes: int) -> tuple[Dimensions, ...]:
    """Draw the shapes of a campaign, two given ones among them."""
    random = np.random.RandomState([seed])
    pool = [Dimensions(*(1,) * 11), _DECODING]
    while len(pool) < shapes:
        batch, (heads, shared) = random.choice([1, 1, 2, 3]), DRAWN_HEADS[random.randint(len(DRAWN_HEADS))]
        queries, keys = _lengths(random, 256, 0.15)
        width, value_width = _lengths(random, 128, 0.4)  # kernels made by hand ask that these be alike
        models = np.exp(random.uniform(0, math.log(96), 4)).round()
        lengths = (batch, heads, queries, keys, width, value_width, *models, shared)
        dims = Dimensions(*(int(length) for length in lengths))
        if random.rand() < _MANY_ENTRIES / dims.score_count:
            pool.append(dims)
    return tuple(pool)


@lru_cache(maxsize=4)
def _kernel_pool(seed: int, shapes: int) -> tuple[Dimensions, ...]:
    """Draw shapes at which kernels change their path: widths of powers of two, lengths around the edges of tiles."""
    random = np.random.RandomState([seed, shapes])
    pool: list[Dimensions] = []
    while len(pool) < shapes:
        width, other = (int(each) for each in random.choice(KERNEL_WIDTHS, 2))
        heads, shared = DRAWN_KERNEL_HEADS[random.randint(len(DRAWN_KERNEL_HEADS))]
        queries, keys = _around_tiles(random, (1, 5)), _around_tiles(random, ())
        value_width = width if random.rand() < 0.6 else other
        batch = int(random.choice(_KERNEL_BATCHES))
        dims = Dimensions(batch, heads, queries, keys, width, value_width, 1, 1, 1, 1, shared)
        if dims.score_count <= _KERNEL_ENTRIES and random.rand() < _MANY_ENTRIES / dims.score_count:
            pool.append(dims)
    return tuple(pool)


def _around_tiles(random: Random, few: tuple[int, ...]) -> int:
    """Draw a length at the edge of a tile, or one of a few lengths."""
    if few and random.rand() < 0.4:
        return int(random.choice(few))
    tile = int(random.choice(_TILES))
    return int(random.choice((tile - 1, tile, tile + 1, 2 * tile + 1)))


def _lengths(random: Random, most: int, share_alike: float) -> tuple[int, int]:
    """Draw two lengths, log-uniform, mostly unlike each other: swapped axes hide where they are alike."""
    alike = random.rand() < share_alike
    while True:
        one, other = (int(length) for length in np.exp(random.uniform(0, math.log(most + 0.49), 2)).round())
        if alike:
            return one, one
        if one != other:
            return one, other
