"""The arrays of a random problem, each drawn by its row of the specification: by its axes and kind of numbers.

A regime is a distribution of numbers. It draws a query, a key and a value, (..., L, width), in float64. In
``NOISE_LIKE_REGIMES``, rounding errors behave like noise. The other regimes are structured: errors are correlated,
and statistics do not apply.

Some masks and biases are those of real models: by position, by block, by document. Random numbers seldom have such a
form, so they would not find faults that need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.reading.generated_arrays import alibi_slopes, find_relative_buckets
from attncheck.reading.lowering import Array, count_key_blocks, poison_unused_keys, repeat_block_numbers
from attncheck.reading.problem import Problem
from attncheck.searching.concrete import input_axes
from attncheck.searching.shapes import Random, Real
from attncheck.spec import (
    OPERATIONS,
    QUERY_KEY_VALUE,
    SCALE_PREFIX,
    STAGE_SPECS,
    InputSpec,
    Shape,
    dtype_of_input,
    score_kind,
)
from attncheck.spec.dtypes import largest_number

InputArrays = dict[str, Array]

QueryKeyValue: TypeAlias = tuple[Real, Real, Real]
_MAX_ROWS_FOR_LARGEST_LOGIT = 256
"""Products of so many rows of queries and of keys are measured."""


def _draw_normal(random: Random, *shapes: Shape) -> QueryKeyValue:
    query, key, value = (random.randn(*shape) for shape in shapes)
    return query, key, value


def _draw_changed_normal(change: Callable[[Random, Real, Real, Real], QueryKeyValue]) -> Callable[..., QueryKeyValue]:
    """Draw normal numbers, and change them."""
    return lambda random, *shapes: change(random, *_draw_normal(random, *shapes))


def _draw_independently(draw: Callable[[Random, Shape], Real]) -> Callable[..., QueryKeyValue]:
    """Draw query, key and value from the same distribution, independently."""

    def draw_all(random: Random, *shapes: Shape) -> QueryKeyValue:
        query, key, value = (draw(random, shape) for shape in shapes)
        return query, key, value

    return draw_all


def _draw_uniform(random: Random, *shapes: Shape) -> QueryKeyValue:
    low = random.choice([-1.0, 0.0])
    return _draw_independently(lambda random, shape: random.uniform(low, 1, shape))(random, *shapes)


def _scale_logits_to_80(random: Random, query: Real, key: Real, value: Real) -> QueryKeyValue:
    width = min(query.shape[-1], key.shape[-1])
    rows, columns = (array.reshape(-1, array.shape[-1])[:_MAX_ROWS_FOR_LARGEST_LOGIT, :width] for array in (query, key))
    largest = np.abs(rows @ columns.T).max(initial=1e-9) / math.sqrt(width)
    return query * (80 / largest), key, value


def _make_products_cancel(random: Random, query: Real, key: Real, value: Real) -> QueryKeyValue:
    """Make columns in pairs whose products cancel except for a small part."""
    half = min(query.shape[-1], key.shape[-1]) // 2
    query[..., half : 2 * half] = query[..., :half]
    key[..., half : 2 * half] = -key[..., :half] * (1 + 1e-3 * random.randn(*key[..., :half].shape))
    return query * 10 ** random.uniform(0, 2), key, value


def _add_common_offset(random: Random, query: Real, key: Real, value: Real) -> QueryKeyValue:
    """Make one column whose product adds nearly the same large number to every logit."""
    offset = math.sqrt(10 ** random.uniform(1, 3) * math.sqrt(query.shape[-1]))
    query[..., 0] += offset
    key[..., 0] += offset
    return query, key, value


def _repeat_keys(random: Random, query: Real, key: Real, value: Real) -> QueryKeyValue:
    keys = key.shape[-2]
    return query, key[..., random.randint(0, max(1, keys // 4), keys), :], value


def _draw_tiny(random: Random, *shapes: Shape) -> QueryKeyValue:
    """Draw products that underflow in float32, and weights that are nearly uniform."""
    query, key, value = (array * 10 ** random.uniform(-25, -2) for array in _draw_normal(random, *shapes))
    return query, key, value


REGIMES: Mapping[str, Callable[..., QueryKeyValue]] = {
    "normal": _draw_normal,
    "uniform": _draw_uniform,
    "peaky": _draw_changed_normal(lambda random, q, k, v: (q * random.uniform(4, 30), k, v)),
    "logits 80": _draw_changed_normal(_scale_logits_to_80),
    "tiny": _draw_tiny,
    "cancelling": _draw_changed_normal(_make_products_cancel),
    "common offset": _draw_changed_normal(_add_common_offset),
    "heavy-tailed": _draw_independently(lambda random, shape: random.standard_t(1.5, shape)),
    "repeated keys": _draw_changed_normal(_repeat_keys),
    "offset values": _draw_changed_normal(lambda random, q, k, v: (q, k, v + 10 ** random.uniform(1, 6))),
    "heavy values": _draw_changed_normal(lambda random, q, k, v: (q, k, v * np.exp(4 * random.randn(*v.shape)))),
    "small integers": _draw_independently(lambda random, shape: random.randint(-4, 5, shape).astype(np.float64)),
}

NOISE_LIKE_REGIMES = frozenset(
    {"normal", "uniform", "peaky", "logits 80", "common offset", "heavy-tailed", "heavy values"}
)


_LENGTH_AXES = frozenset({"B", "N", "H", "Hkv", "Lq", "Lk", "T", "P", "Np", "Lp", "Lr"})
"""Axes other than widths of vectors."""
_KEY_AXES = ("Lk", "T", "P", "Lp")
_SCORE_AXES = STAGE_SPECS["scores"].axes
_SHARE_OF_MINUS_INFINITY = 0.08
"""Share of logits of an added key that are minus infinity. A choice: with more, that key rarely has a weight."""
_MAX_SHARE_OF_CODE_RANGE = 0.9
"""Largest share of the range of a code format that inputs fill: below 1, as rounding the scale may enlarge codes."""
_MAX_BLOCK_SCALE_LOG2, _MAX_ZERO_POINT = 2.0, 4
"""Block scales are drawn from 1/4 to 4, zero points up to half the range of 4 bits. A choice: others are as valid."""
_MASK_BLOCK_SIZES = (1, 2, 3, 16, 64)
"""Sides of the blocks of block masks: small ones fit into drawn lengths, 16 and 64 are tile sizes of kernels."""
_SAFE_MAGNITUDE_RANGE = 0.05, 10.0
"""Range of the largest number of a vector for a cosine: its square is a normal number in every dtype."""


@dataclass
class DrawnInputs:
    """Draws the inputs of a problem; ``mask_and_bias_forms`` names the forms of masks and biases.

    ``has_noise_like_errors`` is false if an input makes rounding errors unlike noise. ``problem`` has the shapes.
    """

    problem: Problem
    random: Random
    has_noise_like_errors: bool = True
    mask_and_bias_forms: list[str] = field(default_factory=list)
    inputs: InputArrays = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lengths = self.problem.axis_lengths
        for name, array in self.problem.inputs.items():
            self._draw_input(name, self.problem.input_specs[name], array.shape)
        for name in self.inputs:
            if (
                self.problem.input_specs[name].scale_input in self.inputs
                and not self.problem.input_specs[name].is_per_block
            ):
                self._choose_code_scales(name)
        self._draw_related_inputs()

    def _draw_input(self, name: str, spec: InputSpec, shape: Shape) -> None:
        """Draw an input, and together with the first operand the others that belong to it."""
        if name in self.inputs:
            return
        axes = self._axes_of_input(name)
        if spec.is_boolean:
            self.inputs[name] = self._draw_mask(shape)
        elif spec.is_count:
            self.inputs[name] = self._draw_counts(spec, shape)
        elif "R" in axes:
            angles = self.random.uniform(-np.pi, np.pi, shape)
            both = {"cos": np.cos(angles), "sin": np.sin(angles)}
            self.inputs |= {
                table: both[table[-3:]] for table in self.problem.inputs if self._axes_of_input(table) == axes
            }
        elif axes == _SCORE_AXES:
            self.inputs[name] = self._draw_scores(shape) if spec.required else self._draw_bias(shape)
        elif spec.is_row_statistic:  # log-sum-exps of any size around any number
            around = float(self.random.choice([0, 0, -90, -120, -800, 90, 800]))
            self.inputs[name] = np.asarray(around + 10 ** self.random.uniform(-2, 2.5) * self.random.randn(*shape))
        elif operand_role(axes) is not None and not spec.is_per_block:
            self._draw_operands(name, axes, shape)
        else:
            self.inputs[name] = self._draw_parameters(spec, axes, shape)

    def _axes_of_input(self, name: str) -> tuple[str, ...]:
        return input_axes(self.problem.input_specs[name], self.problem.options)

    def _draw_operands(self, name: str, axes: tuple[str, ...], shape: Shape) -> None:
        """Draw a query together with the first key and the first value, and any other operand separately."""
        group = {**dict.fromkeys(QUERY_KEY_VALUE, ""), str(operand_role(axes)): name}
        if operand_role(axes) == QUERY_KEY_VALUE[0]:
            for operand in self.problem.inputs:
                role = operand_role(self._axes_of_input(operand))
                if role and not group[role] and self.problem.input_specs[operand].is_number:
                    group[role] = operand
        shapes, positions = [], []
        for operand in group.values():
            lengths = self.problem.inputs[operand].shape if operand else shape
            position = row_axis(self._axes_of_input(operand or name))
            shapes.append((*lengths[:position], *lengths[position + 1 : -1], lengths[position], lengths[-1]))
            positions.append(position)
        arrays = REGIMES[self.problem.drawing_regime](self.random, *shapes)
        for operand, array, position in zip(group.values(), arrays, positions, strict=True):
            if operand and operand not in self.inputs:
                kept = _rescale_unsafe_vectors(array) if self._has_cosine else array
                self.inputs[operand] = np.ascontiguousarray(np.moveaxis(kept, -2, position))

    @property
    def _has_cosine(self) -> bool:
        return score_kind(self.problem.operation, self.problem.options) == "cosine"

    def _draw_scores(self, shape: Shape) -> Array:
        """Draw scores of queries and keys of a regime, some of them forbidden."""
        *outer, queries, keys = shape
        width = int(self.random.randint(1, 33))
        shapes = ((*outer, length, width) for length in (queries, keys, keys))
        query, key, _ = REGIMES[self.problem.drawing_regime](self.random, *shapes)
        scores: Real = query @ key.swapaxes(-1, -2) / math.sqrt(width)
        if self.problem.input_specs.keys() == self.problem.inputs.keys() and self.random.rand() < 1 / 2:
            return np.where(self._draw_mask(shape), scores, -np.inf)
        return scores

    def _draw_parameters(self, spec: InputSpec, axes: tuple[str, ...], shape: Shape) -> Array:
        """Draw weights that keep the size of vectors, factors, biases, or logits of one more key."""
        random = self.random
        if spec.is_per_block:
            zeros = random.randint(-_MAX_ZERO_POINT, _MAX_ZERO_POINT + 1, shape).astype(np.float64)
            return (
                zeros if spec.scale_input else 2 ** random.uniform(-_MAX_BLOCK_SCALE_LOG2, _MAX_BLOCK_SCALE_LOG2, shape)
            )
        if len(axes) > 1 and not spec.is_broadcastable:
            return random.randn(*shape) / math.sqrt(shape[-2])
        if spec.neutral_value == 1 or (spec.is_broadcastable and spec.required):
            return random.uniform(-2, 2, shape)
        numbers = random.randn(*shape) * 10 ** random.uniform(-1, 1.3 if spec.may_be_infinite else 1)
        return (
            np.where(random.rand(*shape) < _SHARE_OF_MINUS_INFINITY, -np.inf, numbers)
            if spec.may_be_infinite
            else numbers
        )

    def _draw_counts(self, spec: InputSpec, shape: Shape) -> Array:
        """Draw counts of an axis, the limits of sequences along it, positions in it, or indices of its blocks."""
        random, most = self.random, self.lengths[spec.max_value_axis]
        if spec.axes == ("S1",):
            inner = random.randint(0, most + 1, shape[0] - 2)
            even = np.linspace(0, most, shape[0]).astype(np.int64)[1:-1]
            return np.array([0, *np.sort(inner if random.rand() < 1 / 2 else even), most], np.int64)
        if spec.is_index:  # a tenth of them name nothing
            blocks = count_key_blocks(self.problem.options, most)
            named = random.rand(*shape[:-1], max(blocks, shape[-1])).argsort(axis=-1)[..., : shape[-1]]
            return np.where((named < blocks) & (random.rand(*shape) < 0.9), named, -1)
        if len(spec.axes) > 1:
            return np.resize(random.permutation(most), shape)  # with more pages than there are, some are shared
        return random.randint(0, most + 1, shape)

    def _choose_code_scales(self, name: str) -> None:
        """Draw factors for all, for each head or for each key, so that an input fills the range of its format."""
        stem, options = SCALE_PREFIX[name], self.problem.options
        factor, blocks = f"{stem}_scale", f"{stem}_block_scale"
        array, shape = self.inputs[name], self.problem.inputs[factor].shape
        if blocks in self.inputs:
            array = array / repeat_block_numbers(self.inputs[blocks], array.shape)
        spec, inputs = self.problem.input_specs[name], self.problem.inputs
        spread = tuple(axis for axis, length in enumerate(shape) if length == 1)
        largest = np.abs(array).max(axis=-1).max(axis=spread, keepdims=True, initial=1e-9)
        most = _MAX_SHARE_OF_CODE_RANGE * largest_number(dtype_of_input(spec, inputs, options, ""))
        self.inputs[factor] = largest / most * self.random.uniform(1, 1.9)
        self.inputs[name] = array / self.inputs[factor][..., np.newaxis]

    def _draw_related_inputs(self) -> None:
        """Limit counts to their sequences, draw related parts, poison keys that no query may use, and share arrays."""
        inputs, random = self.inputs, self.random
        if "cu_seqlens_k" in inputs and "key_lengths" in inputs:
            inputs["key_lengths"] = np.minimum(inputs["key_lengths"], np.diff(inputs["cu_seqlens_k"]))
        if OPERATIONS[self.problem.operation].merges_parts:
            self._draw_parts()
        can_be_poisoned = "poison" in OPERATIONS[self.problem.operation].options and "key_scale" not in inputs
        if can_be_poisoned and "key_lengths" in inputs and random.rand() < 0.3:
            self.inputs = poison_unused_keys({"poison": "nan"}, inputs, "float64")
        if OPERATIONS[self.problem.operation].has_projections and random.rand() < 1 / 2:
            alike = {name: inputs["query"] for name in ("key", "value") if inputs[name].shape == inputs["query"].shape}
            if len(alike) == 2 and "past_key" not in inputs:
                self.inputs |= alike
                self.mask_and_bias_forms.append("self")

    def _draw_parts(self) -> None:
        """Replace the parts to merge by parts of one attention, or keep the drawn ones; some parts are empty."""
        outputs, log_sum_exps = (self.inputs[name] for name in ("outputs", "log_sum_exps"))
        random = self.random
        if random.rand() < 0.6:
            parts, *outer, width = outputs.shape
            keys = parts * int(random.randint(1, 5))
            shapes = [(*outer, 8), (*outer[:-1], keys, 8), (*outer[:-1], keys, width)]
            query, key, value = REGIMES[self.problem.drawing_regime](random, *shapes)
            edges = np.array([0, *np.sort(random.randint(0, keys + 1, parts - 1)), keys])
            merged = [
                numpy_backend.attention(query, key[:, :, begin:end], value[:, :, begin:end])
                for begin, end in pairwise(edges)
            ]
            outputs, log_sum_exps = (np.stack([part[name] for part in merged]) for name in ("output", "log_sum_exp"))
            self.mask_and_bias_forms.append("of attention")
        if random.rand() < 1 / 2:
            log_sum_exps = np.where(random.rand(*log_sum_exps.shape) < 0.2, -np.inf, log_sum_exps)
            self.mask_and_bias_forms.append("empty parts")
        poison = random.choice([0.0, 7.0, math.nan, math.inf])
        outputs = np.where(np.isneginf(log_sum_exps)[..., np.newaxis], poison, outputs)
        in_base = math.log(2) if self.problem.options.get("lse_base") == "2" else 1.0
        self.inputs |= {"outputs": outputs, "log_sum_exps": log_sum_exps / in_base}

    def _key_distances(self, queries: int, keys: int) -> NDArray[np.int64]:
        """Return position of key minus position of query; the first queries or the last ones align with the keys."""
        offset = self.lengths.get("P", 0) if self.random.rand() < 0.5 else max(keys - queries, 0)
        return np.arange(keys) - (offset + np.arange(queries))[:, np.newaxis]

    def _draw_mask(self, shape: Shape) -> Array:
        """Draw a mask; on scores it may mask whole keys, blocks or documents, and all keys of a row."""
        random = self.random
        if len(shape) != len(_SCORE_AXES):
            return np.asarray(random.rand(*shape) < random.choice([0.5, 0.8]))
        form = str(random.choice(["padding", "random", "random", "blocks", "documents"]))
        self.mask_and_bias_forms.append(f"mask {form}")
        batch, _, queries, keys = shape
        if form == "padding":
            allowed = np.arange(keys) < random.randint(1, keys + 1, (batch, 1, 1, 1))
        elif form == "blocks":
            tile = int(random.choice(_MASK_BLOCK_SIZES))
            table = random.rand(-(-queries // tile), -(-keys // tile)) < 0.6
            allowed = np.repeat(np.repeat(table, tile, 0), tile, 1)[:queries, :keys]
        elif form == "documents":
            allowed = self._draw_document_mask(queries, keys)
        else:
            allowed = random.rand(*shape) < random.choice([0.5, 0.9])
            allowed[..., random.rand(queries) < 0.1, :] = False  # rows without a key
        return np.ascontiguousarray(np.broadcast_to(allowed, shape))

    def _draw_document_mask(self, queries: int, keys: int) -> Array:
        """Mask all keys outside the query's document, causally or not, perhaps except for the first tokens."""
        random, distance = self.random, self._key_distances(queries, keys)
        edges = np.sort(random.randint(0, keys + 1, random.randint(1, 5)))
        of_key = np.searchsorted(edges, np.arange(keys), side="right")
        place = np.clip(np.arange(keys)[np.newaxis] - distance, 0, max(keys - 1, 0))
        allowed = of_key[place] == of_key
        if random.rand() < 0.5:
            allowed &= distance <= 0
        if random.rand() < 0.3:
            allowed[:, :2] |= distance[:, :2] <= 0
        return np.asarray(allowed)

    def _draw_bias(self, shape: Shape) -> Array:
        """Draw a bias: random, with minus infinity, by position, or the lowest number for forbidden keys."""
        random = self.random
        _, heads, queries, keys = shape
        form = str(random.choice(["", "", "", "with -inf", "ALiBi", "of buckets", "lowest"]))
        numbers: Array = random.randn(*shape) * 10 ** random.uniform(-2, 1)
        self.mask_and_bias_forms += [f"bias {form}"] if form else []
        self.has_noise_like_errors &= form in ("", "with -inf")
        if form == "with -inf":
            return np.where(random.rand(*shape) < 0.2, -np.inf, numbers)
        if form == "lowest":
            forbidden = random.rand(*shape) < 0.3
            forbidden[..., random.rand(queries) < 0.2, :] = True
            lowest = -largest_number(self.problem.dtype) if self.problem.dtype else -1e30
            return np.where(forbidden, lowest, 0.0)
        if form == "ALiBi":
            slopes = np.asarray(alibi_slopes(heads), np.float64)[:, np.newaxis, np.newaxis]
            numbers = -slopes * np.abs(self._key_distances(queries, keys))
        elif form == "of buckets":
            both, buckets = bool(random.rand() < 0.5), int(random.choice([4, 8, 32]))
            distance = self._key_distances(queries, keys)
            buckets_of_keys = find_relative_buckets(
                distance, buckets, int(random.choice([16, 128])), bidirectional=both
            )
            numbers = np.moveaxis(random.randn(buckets, heads)[buckets_of_keys], -1, 0)
        return np.ascontiguousarray(np.broadcast_to(numbers, shape))


def operand_role(axes: tuple[str, ...]) -> str | None:
    """Return the role of an input with rows of vectors along queries or keys, by its axes; None for other inputs.

    Example:
        >>> [operand_role(axes) for axes in (("B", "H", "Lq", "D"), ("B", "Hkv", "Lk", "Dv"), ("B", "H", "Lq", "Lk"))]
        ['query', 'value', None]
    """
    if len(axes) < 3 or axes[-1] in _LENGTH_AXES or not {"Lq", *_KEY_AXES} & set(axes):
        return None
    return "value" if axes[-1].endswith("v") else "query" if "Lq" in axes else "key"


def row_axis(axes: tuple[str, ...]) -> int:
    """Return the position of the axis of an operand's rows."""
    return next(axes.index(letter) for letter in ("Lq", *_KEY_AXES) if letter in axes)


def _rescale_unsafe_vectors(vectors: Real) -> Real:
    """Rescale vectors (..., L, width) whose length may underflow or overflow in a dtype; zeros become ones.

    They keep their direction: vectors of ones would all have the same rounding errors, and statistics would not apply.
    """
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
    has_length = (largest > _SAFE_MAGNITUDE_RANGE[0]) & (largest < _SAFE_MAGNITUDE_RANGE[1])
    turned = np.divide(vectors, largest, out=np.ones_like(vectors), where=largest > 0)
    return np.where(has_length, vectors, turned)
