"""What real models give: biases by position, masks of blocks and documents, uneven sequences, large pages, equal heads.

Random numbers seldom have such a form, and faults that need it would not be met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from attncheck.reading.dtypes import largest_number, rounded_once
from attncheck.reading.position_biases import alibi_slopes, relative_buckets
from attncheck.searching.concrete import Array, ConcreteCase
from attncheck.searching.shapes import Random
from attncheck.spec import PROJECTIONS

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
    return problem.changed(inputs={**problem.inputs, "bias": stored}, supports_statistics=False)


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
    return problem.changed(inputs={**problem.inputs, "mask": np.asarray(mask, bool).reshape(1, 1, *mask.shape)})


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
    return problem.changed(inputs=inputs)


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
    return problem.changed(inputs=inputs, supports_statistics=False)


def _square_projection(problem: ConcreteCase, random: Random) -> ConcreteCase:
    """Make latent vectors as wide as the keys, or the values, that come of them."""
    width = problem.lengths[str(random.choice(["D", "Dv"]))]
    inputs = {**problem.inputs, "latent": problem.inputs["latent"][..., :width]}
    for name in ("key_projection", "value_projection"):
        inputs[name] = problem.inputs[name][:, :width]
    return problem.changed(inputs=inputs)


def _equal_slices(problem: ConcreteCase, random: Random) -> ConcreteCase | None:
    """Make all heads, entries or rows of an input alike, and lay it out with a stride of 0."""
    wide = [name for name in PROJECTIONS if problem.inputs[name].ndim == 4]
    found = [(name, axis) for name in wide for axis in range(3) if problem.inputs[name].shape[axis] > 1]
    if not found:
        return None
    name, axis = found[random.randint(len(found))]
    array = problem.inputs[name]
    alike = np.broadcast_to(array.take([0], axis), array.shape).copy()
    return problem.changed(
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
