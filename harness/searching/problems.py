"""Random problems, each made from a seed, its number and what is to be drawn alone.

Random parts of attention: outputs and log-sum-exps to base e or 2, some of them empty.

Random packed sequences, paged caches, keys of 8 bits, norms and latent vectors, made of plain attention.

The arrays that a random problem works on, for every operation and kind of score.

Whether a random problem stays within the range of a dtype: beyond it no implementation owes an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.dtypes import EIGHT_BITS, largest_number, rounded_once
from attncheck.execution.operations import run_operation
from attncheck.reading.lowering import Problem
from attncheck.reading.shapes import bind_axes, show, stage_shapes
from attncheck.searching.shapes import (
    GENERIC,
    MASKS,
    REGIMES,
    Dimensions,
    DrawnOptions,
    Inputs,
    Random,
    Real,
    draw_asked,
    draw_at_edges,
    draw_dimensions,
    draw_mask,
    raw_scores,
    some_as_modules,
    split_past,
)
from attncheck.spec import BY_SCORE, PROJECTIONS, Shape, inputs_of, statistics_dtype

MAX_PARTS = 40
_EMPTY_SHARE = 0.2
_BASE_TWO_SHARE = 0.4
_OF_ATTENTION_SHARE = 0.6
_POISONS = (0.0, 7.0, math.nan, math.inf)


def draw_parts(regime: str, random: Random, dims: Dimensions, asked: DrawnOptions) -> Inputs:
    """Draw what attention gives for parts of its keys, or outputs and log-sum-exps that follow from nothing."""
    if random.rand() < _OF_ATTENTION_SHARE:
        outputs, log_sum_exps = _of_attention(regime, random, dims)
        asked.names.append("of attention")
    else:
        outputs, log_sum_exps = _of_nothing(regime, random, dims)
    if random.rand() < 1 / 2:
        log_sum_exps = np.where(random.rand(*log_sum_exps.shape) < _EMPTY_SHARE, -np.inf, log_sum_exps)
        asked.names.append("empty parts")
    poison = _POISONS[random.randint(len(_POISONS))]
    outputs = np.where(np.isneginf(log_sum_exps)[..., np.newaxis], poison, outputs)
    if random.rand() < _BASE_TWO_SHARE:
        asked.options["lse_base"], log_sum_exps = "2", log_sum_exps / math.log(2)
        asked.names.append("base 2")
    return {"outputs": outputs, "log_sum_exps": log_sum_exps}


def _of_attention(regime: str, random: Random, dims: Dimensions) -> tuple[Real, Real]:
    """Attend to parts of the keys, between edges at random: some may be empty, or have one key."""
    query, key, value = REGIMES[regime](random, dims.ungrouped)
    parts = int(random.randint(1, min(MAX_PARTS, dims.Lk + 1) + 1))
    edges = [0, *sorted(random.randint(0, dims.Lk + 1, parts - 1)), dims.Lk]
    spans = [slice(*edge) for edge in pairwise(edges)]
    found = [numpy_backend.attention(query, key[:, :, span], value[:, :, span]) for span in spans]
    return np.stack([part["output"] for part in found]), np.stack([part["log_sum_exp"] for part in found])


def _of_nothing(regime: str, random: Random, dims: Dimensions) -> tuple[Real, Real]:
    """Draw outputs as a regime draws values, and log-sum-exps of any size around any number."""
    parts = int(random.randint(1, min(MAX_PARTS, dims.Lk + 1) + 1))
    *_, value = REGIMES[regime](random, replace(dims.ungrouped, B=parts * dims.B, Lk=dims.Lq))
    shape = (parts, dims.B, dims.H, dims.Lq)
    around = float(random.choice([0, 0, -90, -120, -800, 90, 800]))
    log_sum_exps: Real = around + 10 ** random.uniform(-2, 2.5) * random.randn(*shape)
    return value.reshape(*shape, dims.Dv), log_sum_exps


Array = NDArray[Any]

_LARGEST_CODE = 400
_PAGES = (1, 3, 4, 16)
_SOME_UNUSED = 0.5
_SOME_ROTATED = 0.7
_SOME_RAGGED = 0.5
"""Of packs, so many whose sequences have lengths of their own, and no keys that are not used."""


def lay_out(kind: str, random: Random, operands: Inputs, asked: DrawnOptions) -> Inputs:
    """Make every batch entry a sequence of a pack, or of a paged cache with keys that are not used; or round keys."""
    if kind == "quantized_attention":
        return _quantized(random, operands)
    if kind == "normalized_attention":
        return _normalized(random, operands, asked)
    if kind == "latent_attention":
        return _latent(random, operands, asked)
    keys = operands["key"].shape[2]
    batch = len(operands["key"])
    used = np.full(batch, keys)
    if random.rand() < _SOME_UNUSED:
        used = random.randint(0, keys + 1, batch)
        asked.names.append("lengths")
    if random.rand() < _SOME_UNUSED:
        asked.options["is_causal"] = True
        asked.names.append("causal")
    return (_paged if kind == "paged_attention" else _packed)(random, operands, used)


def _normalized(random: Random, operands: Inputs, asked: DrawnOptions) -> Inputs:
    """Normalise queries and keys in any way, some with weights."""
    asked.options["norm"] = str(random.choice(("rms", "l2")))
    asked.options["epsilon"] = float(10.0 ** random.uniform(-6, 0))
    is_full = random.rand() < _SOME_UNUSED
    asked.options["norm_over"] = "full" if is_full else "head"
    asked.names += [asked.options["norm"], asked.options["norm_over"]]
    if "rotary_cos" in asked.inputs and random.rand() < _SOME_UNUSED:
        asked.options["norm_after_rotation"] = True
        asked.names.append("rotated first")
    weights = {}
    for name in ("query", "key"):
        if random.rand() < _SOME_UNUSED:
            _, heads, _, width = operands[name].shape
            weights[f"{name}_norm_weight"] = random.uniform(-2, 2, width * (heads if is_full else 1))
    return {**operands, **weights}


def _latent(random: Random, operands: Inputs, asked: DrawnOptions) -> Inputs:
    """Take keys and values of the first head for latent vectors; a rotated part is as large as the rest."""
    query, key, value = (operands[name] for name in PROJECTIONS)
    latent = np.concatenate([key[:, 0], value[:, 0]], axis=-1)
    size = 1 / np.sqrt(latent.shape[-1])
    inputs: Inputs = {"query": query, "latent": latent}
    for name, width in (("key", key.shape[-1]), ("value", value.shape[-1])):
        inputs[f"{name}_projection"] = size * random.randn(query.shape[1], latent.shape[-1], width)
    if random.rand() < _SOME_ROTATED:
        width = int(random.randint(1, 9))
        for name, array in (("query", query), ("key", latent)):
            inputs[f"{name}_rotary"] = np.std(array) * random.randn(*array.shape[:-1], width)
        asked.names.append("rotated part")
    return inputs


def _packed(random: Random, operands: Inputs, used: Array) -> Inputs:
    """Put the entries one after the other: whole, with lengths of keys, or each only as long as it is used."""
    queries, keys = (np.full(len(used), operands[name].shape[2]) for name in ("query", "key"))
    is_ragged = random.rand() < _SOME_RAGGED
    if is_ragged:
        queries, keys = random.randint(1, queries + 1), used
    found = {name: _joined(array, keys if name in ("key", "value") else queries) for name, array in operands.items()}
    found |= {"cu_seqlens_q": _limits(queries), "cu_seqlens_k": _limits(keys)}
    return found if is_ragged else found | {"key_lengths": used}


def _joined(array: Array, lengths: Array) -> Array:
    """Join the first rows of every entry, (B, H, L, D), to one entry."""
    entries = [entry[:, :length] for entry, length in zip(array, lengths, strict=True)]
    return np.concatenate(entries, axis=1)[np.newaxis]


def _limits(lengths: Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)])


def _paged(random: Random, operands: Inputs, used: Array) -> Inputs:
    page = int(random.choice(_PAGES))
    batch, _, keys, _ = operands["key"].shape
    width = -(-keys // page)
    order = random.permutation(batch * width + 2)  # two pages are nobody's
    table = order[: batch * width].reshape(batch, width)
    inputs: Inputs = {"query": operands["query"], "block_table": table, "key_lengths": used}
    for name in ("key", "value"):
        rows = operands[name].swapaxes(1, 2)  # (B, Lk, Hkv, D)
        padded = np.concatenate([rows, np.zeros((batch, width * page - keys, *rows.shape[2:]))], axis=1)
        pages = np.full((len(order), page, *rows.shape[2:]), np.nan)
        pages[table.ravel()] = padded.reshape(-1, page, *rows.shape[2:])
        inputs[f"{name}_pages"] = pages
    return inputs


def _quantized(random: Random, operands: Inputs) -> Inputs:
    """Round keys and values to 8 bits, with a scale for all, for each head or for each key."""
    inputs = {"query": operands["query"]}
    for name in ("key", "value"):
        array = operands[name]
        axes = ((0, 1, 2, 3), (0, 2, 3), (3,))[random.randint(3)]
        largest = np.abs(array).max(axis=axes, keepdims=True, initial=1e-9)
        scale = largest / _LARGEST_CODE * random.uniform(1, 1.9)
        inputs[name] = rounded_once(array / scale, str(random.choice(list(EIGHT_BITS))))
        inputs[f"{name}_scale"] = scale[..., 0]
    return inputs


LOWERED = {
    "packed_attention": "",
    "packed_attention_gradients": "attention_gradients",
    "paged_attention": "",
    "quantized_attention": "",
    "normalized_attention": "",
    "latent_attention": "",
}
"""Operations of sequences, and what their operands are drawn as; none has a past."""
_GROUPED_PROJECTIONS = 0.5
"""Of shapes that have grouped heads."""
_SELF = 0.5
"""Of modules with as many queries as keys, so many attend to what they query."""
_LENGTHS = 0.05, 10.0
"""The largest number of a vector that has a cosine lies between: its square is a normal number in every dtype."""


def draw_operands(kind: str, regime: str, random: Random, dims: Dimensions, asked: DrawnOptions) -> Inputs:
    """Draw what an operation works on; heads and a past are further options."""
    match kind:
        case "softmax":
            return {"scores": _masked_scores(regime, random, dims, asked)}
        case "masking":
            return {"scores": _scores(regime, random, dims)}
        case "multi_head_attention" | "merge_states":
            return (draw_parts if kind == "merge_states" else _projected)(regime, random, dims, asked)
        case "attention" | "attention_gradients":
            return _attended(kind, regime, random, dims, asked)
    if kind in LOWERED:
        return lay_out(kind, random, _attended(LOWERED[kind], regime, random, dims, asked), asked)
    scored = _scored(kind.removesuffix("_attention"), regime, random, dims)
    return scored | {"value": REGIMES[regime](random, dims)[-1]} if kind in BY_SCORE else scored


def _attended(kind: str, regime: str, random: Random, dims: Dimensions, asked: DrawnOptions) -> Inputs:
    inputs: Inputs = dict(zip(PROJECTIONS, REGIMES[regime](random, dims), strict=True))
    if dims.Hkv < dims.H:
        asked.names.append("grouped")
    if kind == "attention_gradients":
        *_, grad_output = REGIMES[regime](random, replace(dims.ungrouped, Lk=dims.Lq))
        return inputs | {"grad_output": grad_output}
    if kind == "attention":
        inputs, has_past = split_past(inputs, random)
        if has_past:
            asked.names.append("past")
    return inputs


def _scores(regime: str, random: Random, dims: Dimensions) -> Real:
    query, key, _ = REGIMES[regime](random, dims)
    return raw_scores(query, key) / math.sqrt(dims.D)


def _masked_scores(regime: str, random: Random, dims: Dimensions, asked: DrawnOptions) -> Real:
    mask = str(random.choice(MASKS))
    asked.names.append(mask)
    masks = draw_mask(mask, random, dims)
    scores = _scores(regime, random, dims) + masks.get("bias", 0.0)
    allowed = np.tri(dims.Lq, dims.Lk, dtype=bool) if mask == "causal" else masks.get("mask", np.True_)
    masked: Real = np.where(allowed, scores, -np.inf)
    return masked


def _scored(kind: str, regime: str, random: Random, dims: Dimensions) -> Inputs:
    query, key, _ = REGIMES[regime](random, dims)
    if kind == "cosine":  # of a vector of length 0 there is none
        return {"query": _with_length(query), "key": _with_length(key)}
    if kind in ("scaled_dot", "dot"):
        return {"query": query, "key": key}
    key = key[..., : dims.E]  # the key's own width, Dk
    key_width = key.shape[-1]
    if kind == "general":
        inputs = {"query": query, "key": key, "weight": _weight(random, dims.D, key_width)}
        bias = random.randn(query.shape[1] if random.rand() < 0.5 else 1)
        return inputs | {"score_bias": bias} if random.rand() < 0.5 else inputs
    hidden = 1 + dims.Ek % 12
    inputs = {
        "query": query,
        "key": key,
        "query_weight": _weight(random, dims.D, hidden),
        "key_weight": _weight(random, key_width, hidden),
        "score_vector": random.randn(hidden),
    }
    return inputs | {"score_bias": random.randn(hidden)} if random.rand() < 0.5 else inputs


def _with_length(vectors: Real) -> Real:
    """Give vectors a length that no dtype loses, (..., L, 1), by their own direction; those of zeros become ones.

    Of vectors of ones in their place, rounding errors would all be the same, and no statistics.
    """
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
    has_length = (largest > _LENGTHS[0]) & (largest < _LENGTHS[1])
    turned = np.divide(vectors, largest, out=np.ones_like(vectors), where=largest > 0)
    return np.where(has_length, vectors, turned)


def _projected(regime: str, random: Random, dims: Dimensions, asked: DrawnOptions) -> Inputs:
    """Draw the inputs of multi-head attention; the regime is that of what is projected."""
    asked.options["heads"], shared = dims.H, dims.H
    if dims.Hkv < dims.H and random.rand() < _GROUPED_PROJECTIONS:
        asked.options["kv_heads"] = shared = dims.Hkv
        asked.names.append("grouped")
    outer = Dimensions(dims.B, 1, dims.Lq, dims.Lk, max(dims.E, dims.Ek), dims.Ev, *(1,) * 5)
    query, key, value = (array[:, 0] for array in REGIMES[regime](random, outer))
    is_self = dims.is_module and dims.Lq == dims.Lk and random.rand() < _SELF
    if is_self:
        key = value = query
    inputs: Inputs = {
        **dict(zip(PROJECTIONS, (query[..., : dims.E], key[..., : dims.Ek], value), strict=True)),
        "query_weight": _weight(random, dims.E, dims.H * dims.D),
        "key_weight": _weight(random, dims.Ek, shared * dims.D),
        "value_weight": _weight(random, dims.Ev, shared * dims.Dv),
    }
    if not is_self:
        _split_cache(inputs, random, (dims.B, shared, dims.D, dims.Dv), asked)
    biased, projected = random.rand(2) < 0.5
    projected = projected or dims.is_module
    size = 10 ** random.uniform(-1, 1)  # beside products of about 1; a library may begin its sums with the bias
    if biased:
        for name in PROJECTIONS:
            inputs[f"{name}_bias"] = size * random.randn(inputs[f"{name}_weight"].shape[1])
    if projected:
        inputs["output_weight"] = _weight(random, dims.H * dims.Dv, dims.Eo)
    if biased and projected:
        inputs["output_bias"] = size * random.randn(dims.Eo)
    return inputs


def _split_cache(inputs: Inputs, random: Random, shape: tuple[int, int, int, int], asked: DrawnOptions) -> None:
    """Put, seldom, a cache of projected keys and values in the place of the first half of what is projected."""
    parts, has_past = split_past(inputs, random)
    if not has_past:
        return
    batch, heads, width, value_width = shape
    past = parts["past_key"].shape[-2]
    inputs |= {name: parts[name] for name in ("key", "value")}
    inputs["past_key"] = random.randn(batch, heads, past, width)
    inputs["past_value"] = random.randn(batch, heads, past, value_width)
    asked.names.append("past")


def _weight(random: Random, rows: int, columns: int) -> Real:
    weight: Real = random.randn(rows, columns) / math.sqrt(rows)
    return weight


_BEYOND_ALL = 1e30


def largest_step(operation: str, options: Mapping[str, Any], inputs: Mapping[str, Array]) -> float:
    """Return the largest number that is stored on the way, by NumPy in float64."""
    found = 0.0
    with np.errstate(all="ignore"):
        for array in _steps(operation, options, inputs):
            finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else np.zeros(0)
            found = max(found, float(finite.max(initial=0.0)))
    return found


def is_wide(dtype: str) -> bool:
    """Whether a dtype holds whatever the regimes can draw."""
    return largest_number(dtype) > _BEYOND_ALL


def fits(largest: float, dtype: str) -> bool:
    """Whether a dtype holds a number, and twice that: roundings, and other orders of multiplying."""
    return largest < largest_number(dtype) / 2


def _multiplied(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """Multiply stored keys and values with their factors."""
    factors = {name: f"{name}_factor" for name in ("key", "value") if f"{name}_factor" in inputs}
    kept = {name: array for name, array in inputs.items() if name not in factors.values()}
    return kept | {name: inputs[name] * inputs[factor] for name, factor in factors.items()}


def _steps(operation: str, options: Mapping[str, Any], inputs: Mapping[str, Array]) -> Iterator[Array]:
    if operation == "normalized_attention":  # attention has no norm
        yield from inputs.values()
        yield from run_operation(numpy_backend, operation, inputs, options).values()
        return
    if operation == "latent_attention":
        yield from _of_both_forms(options, inputs)
        return
    problem = Problem(operation, options, inputs).lowered()
    operation, options, inputs = problem.operation, problem.options, _multiplied(problem.inputs)
    yield from inputs.values()
    plain = Problem(operation, options, inputs).called()
    yield from run_operation(numpy_backend, operation, plain.inputs, plain.options).values()
    if operation == "attention_gradients":
        forward = {name: array for name, array in plain.inputs.items() if name != "grad_output"}
        yield from run_operation(numpy_backend, "attention", forward, plain.options).values()
        yield raw_scores(inputs["grad_output"], inputs["value"])  # the gradient of the weights
    if operation in {"scoring", *BY_SCORE}:  # what the score's own layers give
        for operand, weight in (("query", "weight"), ("query", "query_weight"), ("key", "key_weight")):
            if weight in inputs:
                yield inputs[operand] @ inputs[weight]


def _of_both_forms(options: Mapping[str, Any], inputs: Mapping[str, Array]) -> Iterator[Array]:
    """Yield what is stored where keys and values are made of latent vectors, and where they are not."""
    yield from inputs.values()
    latent, projection = inputs["latent"][:, np.newaxis], inputs["key_projection"]
    stages = run_operation(numpy_backend, "latent_attention", inputs, options)
    yield from stages.values()
    yield from (latent @ inputs[f"{name}_projection"] for name in ("key", "value"))
    absorbed = inputs["query"] @ projection.swapaxes(-1, -2)
    yield absorbed
    yield absorbed @ latent.swapaxes(-1, -2)  # the rotated parts may cancel much of it
    yield stages["weights"] @ latent


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
class DrawnProblem(Problem):
    """A random problem; ``inputs`` in float64, masks boolean, lengths whole.

    ``supports_statistics`` says whether rounding errors of it add up as statistics have it.

    ``asked`` names the mask and the options, ``scores`` is the shape of the scores.
    """

    id: str
    number: int
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

    def stored(self, dtype: str) -> Mapping[str, Array]:
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


def draw_problem(draw: Draw, number: int) -> DrawnProblem:
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
    return DrawnProblem(operation, asked.options, inputs, identity, number, regime, names, dims.scores)
