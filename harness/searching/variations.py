"""The problems of a search, one after the other: of several that are drawn, the one of which most is new.

What a search adds to a drawn problem: a dtype, more options and inputs of the specification, odd values, layouts.

Whatever an operation may have and a problem has not is given seldom, so that every option meets every other. What does
not fit together the loader refuses, and another problem is drawn.

What real models give: biases by position, masks of blocks and documents, uneven sequences, large pages, equal heads.

Random numbers seldom have such a form, and faults that need it would not be met.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin

import numpy as np

from attncheck.dtypes import largest_number, rounded_once
from attncheck.reading.case_maker import ONLY_WITH_SOME_SCORES
from attncheck.reading.generated_arrays import alibi_slopes, relative_buckets
from attncheck.reading.shapes import ShapeFault, repeated_axes
from attncheck.searching.concrete import Array, ConcreteCase, Seen
from attncheck.searching.problems import Draw, DrawnProblem, draw_problem
from attncheck.searching.shapes import FILLS, Random
from attncheck.spec import DEFAULT_SCORE, HEADS, OPERATIONS, OPTIONS, PROJECTIONS, InputSpec, score_kind

_CANDIDATES = 4
_TRIES = 256
"""Draws for a problem: many are needed where an implementation refuses most, or a dtype cannot hold them."""
_MAX_ELEMENTS = 1 << 16
"""Of all inputs together: exact answers of larger ones take seconds."""
_REFUSED_SHARE = 0.05
"""Of problems that an implementation seems to refuse, so many are asked all the same."""
_KNOWN_SHARE = 0.25
"""What is new of a problem that most likely fails as is known already counts so much."""


@dataclass
class ProblemSource:
    """Draws problems by number; the same ones for the same seed, as long as the same is noted of them.

    ``is_known`` says of a problem that a failure that was found explains what goes wrong in it, most likely, and
    ``lacks_of`` what an implementation lacks for it, as far as that is known without a call.
    """

    draw: Draw
    dtypes: Sequence[str]
    seen: Seen = field(default_factory=Seen)
    is_known: Callable[[ConcreteCase], bool] = lambda problem: False
    lacks_of: Callable[[ConcreteCase], Collection[str]] = lambda problem: ()

    def problem(self, number: int) -> ConcreteCase:
        """Return the problem of a number, and count it as asked."""
        candidates: list[ConcreteCase] = []
        others: list[ConcreteCase] = []
        takes_any = np.random.RandomState([self.draw.seed, number]).rand() < _REFUSED_SHARE
        for attempt in range(_TRIES):
            if len(candidates) == _CANDIDATES:
                break
            random = np.random.RandomState([self.draw.seed, number, attempt])
            drawn = draw_problem(self.draw, _TRIES * number + attempt)
            found = vary(drawn, self.dtypes, random)
            if found is not None and found.elements <= _MAX_ELEMENTS:
                (candidates if takes_any or self._is_wanted(found) else others).append(found)
        chosen = max(candidates or others[:_CANDIDATES], key=self._worth)
        self.seen.add(chosen)
        return chosen

    def _is_wanted(self, problem: ConcreteCase) -> bool:
        if self.seen.is_likely_refused(problem):
            return False
        lacks = self.lacks_of(problem)
        if lacks:
            self.seen.note(problem, is_refused=True, lacks=lacks)
        return not lacks

    def _worth(self, problem: ConcreteCase) -> float:
        return self.seen.novelty(problem) * (_KNOWN_SHARE if self.is_known(problem) else 1)


_MORE_OPTIONS = 0.04
_MORE_INPUTS = 0.03
_SPECIAL = 0.12
_LAYOUT = 0.15
_NOT_ADDED = frozenset({"score", "projections", "poison", *HEADS})
"""Options that say how a file writes arrays, or that others follow from."""
_NUMBERS: Mapping[str, Callable[[Random], float]] = {
    "scale": lambda random: float(random.choice([0.0, 1.0, 0.5, 2.0, -1.0, random.uniform(-1, 2)])),
    "softcap": lambda random: float(random.choice([0.5, 1.0, 5.0, 10 ** random.uniform(-1, 2)])),
    "mask_fill": lambda random: float(random.choice(FILLS)),
    "epsilon": lambda random: float(10.0 ** random.uniform(-6, 0)),
}


def vary(drawn: DrawnProblem, dtypes: Sequence[str], random: Random) -> ConcreteCase | None:
    """Return a drawn problem in one of some dtypes, with what else is drawn for it; None where none can hold it."""
    dtype = str(random.choice(list(dtypes)))
    if not drawn.fits(dtype):
        return None
    options, specs = dict(drawn.options), _specs_of(drawn)
    narrow = {array.dtype.name for name, array in drawn.inputs.items() if specs[name].eight_bits}
    if narrow:  # one format for all that is stored in 8 bits
        options["stored_as"] = min(narrow)
    stored = drawn.stored(dtype)
    problem = ConcreteCase(
        drawn.operation,
        {name: value for name, value in options.items() if value is not False},
        {name: _exact(array, specs[name], options.get("stored_as")) for name, array in stored.items()},
        dtype,
        supports_statistics=drawn.supports_statistics,
        regime=drawn.regime,
    )
    for change in (_more_inputs, with_structure, _more_options, _special, _memory_layout):
        problem = change(problem, random)
    return problem


def _specs_of(drawn: DrawnProblem) -> Mapping[str, InputSpec]:
    return ConcreteCase(drawn.operation, drawn.options, {}, "").specs


def _exact(array: Array, spec: InputSpec, eight_bits: str | None) -> Array:
    if not spec.is_number:
        return array
    wide: Array = array.astype(np.float64)
    return rounded_once(wide, str(eight_bits)).astype(np.float64) if spec.eight_bits else wide


def _more_options(problem: ConcreteCase, random: Random) -> ConcreteCase:
    options = dict(problem.options)
    score = score_kind(problem.operation, options) if problem.operation == "scoring" else DEFAULT_SCORE
    for name in sorted(OPERATIONS[problem.operation].options - _NOT_ADDED - options.keys()):
        spec = OPTIONS[name]
        fits = name not in ONLY_WITH_SOME_SCORES or score in ONLY_WITH_SOME_SCORES[name]
        if random.rand() < _MORE_OPTIONS and fits and (spec.needs is None or spec.needs in problem.inputs):
            options[name] = _value_of(name, random)
    return replace(problem, options=options)


def _value_of(name: str, random: Random) -> Any:
    kind = OPTIONS[name].type
    if kind is bool:
        return True
    if kind is float:
        return _NUMBERS[name](random)
    if get_origin(kind) is tuple:  # a window
        left, right = (None if random.rand() < 0.3 else int(random.randint(0, 9)) for _ in range(2))
        return (4, None) if left is right is None else (left, right)
    return str(random.choice(list(get_args(kind))))


def _more_inputs(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Give optional inputs that a problem has not: masks, biases, lengths, sinks, whatever their axes are."""
    inputs = dict(problem.inputs)
    try:
        lengths = problem.lengths
    except ShapeFault:
        return problem
    for name, spec in problem.specs.items():
        if name in inputs or spec.required or spec.needs is not None or random.rand() >= _MORE_INPUTS:
            continue
        shape = tuple(_length_of(letter, lengths) for letter in spec.axes)
        if 0 in shape:
            continue
        inputs[name] = _drawn_input(spec, shape, problem.dtype, random, lengths.get(spec.at_most, 0))
    return replace(problem, inputs=inputs)


def _length_of(axis: str, lengths: Mapping[str, int]) -> int:
    product = 1
    for letter in axis.split("*"):
        product *= lengths.get(letter, 0)
    return product


def _drawn_input(spec: InputSpec, shape: tuple[int, ...], dtype: str, random: Random, most: int) -> Array:
    if spec.broadcast:
        kept = random.rand(len(shape)) < 0.6
        shape = tuple(length if keep else 1 for length, keep in zip(shape, kept, strict=True))
    if spec.boolean:
        return np.asarray(random.rand(*shape) < random.choice([0.5, 0.9]))
    if spec.whole:
        return np.asarray(random.randint(0, most + 1, shape), np.int64)
    numbers = np.asarray(rounded_once(random.randn(*shape), dtype)).astype(np.float64)
    if spec.may_be_infinite and random.rand() < 0.3:
        numbers = np.where(random.rand(*shape) < 0.3, -np.inf, numbers)
    return numbers


def _special(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Put odd values into one input: zeros, ties, the ends of the range, NaN and infinity in a query or a value."""
    if random.rand() >= _SPECIAL:
        return problem
    numbers = [name for name in problem.inputs if problem.specs[name].is_number and problem.inputs[name].size]
    plain = [name for name in numbers if not (problem.specs[name].statistics or problem.specs[name].eight_bits)]
    if not plain:
        return problem
    name, kind = str(random.choice(plain)), str(random.choice(list(_SPECIALS)))
    changed = _SPECIALS[kind](problem.inputs[name].copy(), problem.dtype, random)
    with np.errstate(over="ignore"):
        stored = rounded_once(changed, problem.dtype).astype(np.float64)
    return replace(
        problem, inputs={**problem.inputs, name: stored}, supports_statistics=False, special=f"{kind} in {name}"
    )


def _of_row(value: float) -> Callable[[Array, str, Random], Array]:
    """Put a number into one row of the last axis but one, or somewhere in it."""

    def put(array: Array, dtype: str, random: Random) -> Array:
        rows = array.reshape(-1, array.shape[-1])
        rows[random.randint(len(rows)), random.randint(rows.shape[1])] = value
        return rows.reshape(array.shape)

    return put


def _scaled_to(size: Callable[[str], float]) -> Callable[[Array, str, Random], Array]:
    def put(array: Array, dtype: str, random: Random) -> Array:
        finite = np.abs(array[np.isfinite(array)])
        factor = size(dtype) / max(float(finite.max(initial=0.0)), 1e-30)
        return np.asarray(array * factor)

    return put


_SPECIALS: Mapping[str, Callable[[Array, str, Random], Array]] = {
    "NaN": _of_row(np.nan),
    "infinity": _of_row(np.inf),
    "minus infinity": _of_row(-np.inf),
    "zeros": lambda array, dtype, random: np.zeros_like(array),
    "ones": lambda array, dtype, random: np.ones_like(array),
    "minus zeros": lambda array, dtype, random: np.where(random.rand(*array.shape) < 0.5, -0.0, array),
    "equal rows": lambda array, dtype, random: (
        np.broadcast_to(array[..., :1, :], array.shape).copy() if array.ndim > 1 else array
    ),
    "large numbers": _scaled_to(lambda dtype: largest_number(dtype) ** 0.4),
    "small numbers": _scaled_to(lambda dtype: 1 / largest_number(dtype)),
}


def _memory_layout(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Lay inputs out otherwise than row by row; where all slices are alike, along a stride of 0."""
    numbers = [name for name in problem.inputs if problem.specs[name].is_number and problem.inputs[name].size]
    if random.rand() >= _LAYOUT:
        return problem
    layouts = dict(problem.memory_layout)
    for name in numbers:
        if random.rand() < 0.5:
            continue
        possible = ["strided"] + ["transposed"] * (problem.inputs[name].ndim == 4)
        possible += ["broadcast"] * bool(repeated_axes(problem.inputs[name]))
        layouts[name] = str(random.choice(possible))
    return replace(problem, memory_layout=layouts)


_SHARE = 0.3
_PAGES = (8, 16, 64, 128, 129, 256)
_MAX_SLOTS = 1 << 10
_TILES = (1, 2, 3, 16, 64)

Structure = Callable[[ConcreteCase, Random], ConcreteCase | None]


def with_structure(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Give a problem, seldom, one of the forms that it can have."""
    if random.rand() >= _SHARE:
        return problem
    names = [name for name, (needed, _) in _STRUCTURES.items() if needed in (*problem.specs, problem.operation)]
    if not names:
        return problem
    _, change = _STRUCTURES[str(random.choice(names))]
    return change(problem, random) or problem


def _positions(problem: ConcreteCase, random: Random) -> tuple[Array, int, int]:
    """Return how far each key stands behind each query, (Lq, T); queries begin at 0, or so that they end last."""
    queries, keys = problem.lengths["Lq"], problem.lengths["T"]
    offset = problem.lengths.get("P", 0) if random.rand() < 0.5 else max(keys - queries, 0)
    return np.arange(keys) - (offset + np.arange(queries))[:, np.newaxis], queries, keys


def _biased(problem: ConcreteCase, bias: Array) -> ConcreteCase:
    with np.errstate(over="ignore"):
        stored = rounded_once(np.asarray(bias, np.float64), problem.dtype).astype(np.float64)
    return replace(problem, inputs={**problem.inputs, "bias": stored}, supports_statistics=False)


def _alibi(problem: ConcreteCase, random: Random) -> ConcreteCase:
    distance, _, _ = _positions(problem, random)
    slopes = np.asarray(alibi_slopes(problem.lengths["H"]), np.float64)
    return _biased(problem, -slopes[np.newaxis, :, np.newaxis, np.newaxis] * np.abs(distance))


def _by_buckets(problem: ConcreteCase, random: Random) -> ConcreteCase:
    distance, _, _ = _positions(problem, random)
    both, buckets = bool(random.rand() < 0.5), int(random.choice([4, 8, 32]))
    found = relative_buckets(distance, buckets, int(random.choice([16, 128])), bidirectional=both)
    return _biased(problem, np.moveaxis(random.randn(buckets, problem.lengths["H"])[found], -1, 0)[np.newaxis])


def _least_finite(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Forbid by the least finite number, as ``finfo(dtype).min`` in models' code; some rows have nothing else."""
    _, queries, keys = _positions(problem, random)
    forbidden = random.rand(1, 1, queries, keys) < 0.3
    forbidden[..., random.rand(queries) < 0.2, :] = True
    return _biased(problem, np.where(forbidden, -largest_number(problem.dtype), 0.0))


def _masked(problem: ConcreteCase, mask: Array) -> ConcreteCase:
    return problem.with_inputs(mask=np.asarray(mask, bool).reshape(1, 1, *mask.shape))


def _blocks(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Allow and forbid whole tiles of queries and keys."""
    _, queries, keys = _positions(problem, random)
    tile = int(random.choice(_TILES))
    table = random.rand(-(-queries // tile), -(-keys // tile)) < 0.6
    return _masked(problem, np.repeat(np.repeat(table, tile, 0), tile, 1)[:queries, :keys])


def _documents(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Let a query see its own document, causally or not, and perhaps the first tokens too."""
    distance, queries, keys = _positions(problem, random)
    edges = np.sort(random.randint(0, keys + 1, random.randint(1, 5)))
    of_key = np.searchsorted(edges, np.arange(keys), side="right")
    place = np.clip(np.arange(keys)[np.newaxis] - distance, 0, max(keys - 1, 0))
    allowed = of_key[place] == of_key if keys else np.zeros((queries, 0), bool)
    if random.rand() < 0.5:
        allowed &= distance <= 0
    if random.rand() < 0.3:
        allowed[:, :2] |= distance[:, :2] <= 0
    return _masked(problem, allowed)


def _uneven_sequences(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Cut packed queries and keys anywhere, so that some sequences are empty or short of keys."""
    inputs, sequences = dict(problem.inputs), len(problem.inputs["cu_seqlens_q"]) - 1
    for name, of in (("cu_seqlens_q", "query"), ("cu_seqlens_k", "key")):
        length = inputs[of].shape[2]
        inner = np.sort(random.randint(0, length + 1, sequences - 1))
        inputs[name] = np.array([0, *inner, length], np.int64)
    if "key_lengths" in inputs:
        inputs["key_lengths"] = np.minimum(inputs["key_lengths"], np.diff(inputs["cu_seqlens_k"]))
    return replace(problem, inputs=inputs)


def _large_pages(problem: ConcreteCase, random: Random) -> ConcreteCase | None:
    """Lay a cache out in pages of another size, its keys over and over until these are full."""
    inputs, page = dict(problem.inputs), int(random.choice(_PAGES))
    table, slots = inputs["block_table"], inputs["key_pages"].shape[1]
    batch, width = table.shape
    pages, lengths = -(-width * slots // page), inputs["key_lengths"]
    if batch * pages * page > _MAX_SLOTS:
        return None
    for name in ("key_pages", "value_pages"):
        rows = inputs[name][table].reshape(batch, width * slots, *inputs[name].shape[2:])
        usable = np.where(np.isfinite(rows), rows, 0.5)
        repeated = usable[:, np.arange(pages * page) % (width * slots)]
        inputs[name] = repeated.reshape(batch * pages, page, *rows.shape[2:])
    inputs["block_table"] = np.arange(batch * pages).reshape(batch, pages)
    inputs["key_lengths"] = random.randint(0, pages * page + 1, lengths.shape)
    return replace(problem, inputs=inputs, supports_statistics=False)


def _square_projection(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Make latent vectors as wide as the keys, or the values, that come of them."""
    width = problem.lengths[str(random.choice(["D", "Dv"]))]
    inputs = {**problem.inputs, "latent": problem.inputs["latent"][..., :width]}
    for name in ("key_projection", "value_projection"):
        inputs[name] = problem.inputs[name][:, :width]
    return replace(problem, inputs=inputs)


def _equal_slices(problem: ConcreteCase, random: Random) -> ConcreteCase | None:
    """Make all heads, entries or rows of an input alike, and lay it out with a stride of 0."""
    wide = [name for name in PROJECTIONS if problem.inputs[name].ndim == 4]
    found = [(name, axis) for name in wide for axis in range(3) if problem.inputs[name].shape[axis] > 1]
    if not found:
        return None
    name, axis = found[random.randint(len(found))]
    array = problem.inputs[name]
    alike = np.broadcast_to(array.take([0], axis), array.shape).copy()
    return replace(
        problem,
        inputs={**problem.inputs, name: alike},
        memory_layout={**problem.memory_layout, name: "broadcast"},
        supports_statistics=False,
    )


_STRUCTURES: Mapping[str, tuple[str, Structure]] = {
    "ALiBi": ("bias", _alibi),
    "relative buckets": ("bias", _by_buckets),
    "least finite bias": ("bias", _least_finite),
    "mask of blocks": ("mask", _blocks),
    "mask of documents": ("mask", _documents),
    "uneven sequences": ("cu_seqlens_q", _uneven_sequences),
    "large pages": ("block_table", _large_pages),
    "square projection": ("latent", _square_projection),
    "equal slices": ("value", _equal_slices),
}
"""The forms, each with the input of an operation that can have it."""
