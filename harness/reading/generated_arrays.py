"""Arrays that a few numbers describe: masks of today's models, ALiBi and relative position biases.

Sources of masks: prefix LM, Raffel et al. 2020 (arXiv 1910.10683, section 3.2.1); images in text, the Gemma 3 and
PaliGemma models of transformers (``blockwise_overlay``); chunks, Llama 4 (``chunked_overlay``); first tokens, Xiao et
al. 2024 (arXiv 2309.17453); dilated windows, Beltagy et al. 2020 (arXiv 2004.05150); blocks, Zaheer et al. 2020 (arXiv
2007.14062); trees, Miao et al. 2024 (arXiv 2305.09781).

Sources of biases: ALiBi, Press et al. 2022 (arXiv 2108.12409) with the authors' code for heads that are no power of
two; the relative buckets of T5, Raffel et al. 2020 (arXiv 1910.10683) with ``_relative_position_bucket`` of the
authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading import array_kinds as kinds
from attncheck.reading.array_kinds import Alibi, Pattern, RelativeBuckets
from attncheck.reading.shapes import FieldFault, show
from attncheck.reading.stored_arrays import MAX_STORED
from attncheck.reading.yaml_reader import FieldPath
from attncheck.spec import Shape

Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]
_Numbered = kinds.Images | kinds.ImageSpans | kinds.Segments | kinds.DocumentLengths
_TEXT = 0


def mask_shape(source: kinds.AnyMaskPattern) -> Shape:
    """Return the shape of a mask without making it: (Lq, T), or (B, 1, Lq, T). Raises ``FieldFault``."""
    match source:
        case kinds.Tree():
            parents = _parents(source.tree)
            nodes = parents.shape[-1]
            return _with_batch(parents.shape[:-1], nodes, source.committed + nodes)
        case kinds.PrefixLM():
            return _with_batch(_numbers(source.prefix_lm, "prefix_lm", 1).shape, *source.shape)
        case kinds.Images() | kinds.ImageSpans() | kinds.Segments() | kinds.DocumentLengths():
            return _with_batch(numbers_of_keys(source).shape[:-1], *source.shape)
        case kinds.Chunked() if source.left_padding is not None:
            return _with_batch(_numbers(source.left_padding, "left_padding", 1).shape, *source.shape)
        case kinds.Dilated() if source.window == [None, None]:
            raise FieldFault("window", "bounds nothing on either side; expected a number of steps on one at least")
    return _with_batch((), *source.shape)


def make_pattern(source: kinds.Array) -> NDArray[np.float64]:
    """Return the numbers of a mask or bias that follows from positions alone."""
    return make_alibi(source) if isinstance(source, Alibi) else np.asarray(make_mask(source), np.float64)  # type: ignore[arg-type]


def spread_table(source: kinds.Blocks | RelativeBuckets, table: NDArray[Any]) -> NDArray[Any]:
    """Look up the entry of a table for every query and key: that of its block, or of its distance's bucket."""
    if isinstance(source, RelativeBuckets):
        return make_bucket_bias(source, table)
    return make_blocks(table, source.block_size, source.shape)


def make_mask(source: kinds.AnyMaskPattern) -> Mask:
    """Return the mask that a description means, of the shape that ``mask_shape`` says."""
    shape = mask_shape(source)
    if isinstance(source, kinds.Tree):
        return _tree(_parents(source.tree), source.committed).reshape(shape)
    queries, keys = source.shape
    query = source.offset + np.arange(queries)[:, np.newaxis]
    return np.broadcast_to(_rule(source, query, np.arange(keys)), shape).copy()


def make_blocks(table: NDArray[Any], block_size: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
    """Repeat every entry of a table, (..., blocks of queries, blocks of keys), over its block; cut at the lengths."""
    (of_queries, of_keys), (queries, keys) = block_size, shape
    rows, columns = np.arange(queries) // of_queries, np.arange(keys) // of_keys
    return table[..., rows[:, np.newaxis], columns]


def blocks_shape(table: Shape, block_size: Sequence[int], shape: Sequence[int]) -> Shape:
    """Return the shape of a mask of blocks. Raises ``FieldFault`` for a table with too few or too many blocks."""
    wanted = tuple(-(-length // size) for length, size in zip(shape, block_size, strict=True))
    if len(table) < 2 or table[-2:] != wanted:
        raise FieldFault(
            "blocks",
            f"expected a table of {wanted[0]}x{wanted[1]} blocks of {block_size[0]}x{block_size[1]} for {shape[0]} "
            f"queries and {shape[1]} keys, got shape {show(table)}",
        )
    return (*table[:-2], *shape)


def _rule(source: Any, query: Positions, key: Positions) -> Mask:
    """Return who sees whom, for positions of queries, (Lq, 1), and of keys, (T)."""
    match source:
        case kinds.SlidingWindow():
            seen = _within(source.sliding_window, key - query)
        case kinds.PrefixLM():
            seen = (key <= query) | (key < _of_batch(_numbers(source.prefix_lm, "prefix_lm", 1)))
        case kinds.Images() | kinds.ImageSpans():
            of_query, of_key = _at_positions(numbers_of_keys(source), query)
            seen = (key <= query) | ((of_query == of_key) & (of_key != _TEXT))
        case kinds.Segments() | kinds.DocumentLengths():
            of_query, of_key = _at_positions(numbers_of_keys(source), query)
            seen = of_query == of_key
        case kinds.Chunked():
            begin = _of_batch(_numbers(source.left_padding or 0, "left_padding", 1))
            seen = (key <= query) & ((query - begin) // source.chunked == (key - begin) // source.chunked)
        case kinds.FirstTokens():
            seen = (key <= query) & ((key < source.first_tokens) | (key >= query - source.left))
        case kinds.Dilated():
            steps, gap = np.divmod(key - query, source.dilated)
            seen = _within(source.window, steps) & (gap == 0)
        case _:
            raise AssertionError(f"a mask of unknown kind: {source!r}")
    return np.asarray(seen)


def _within(window: Sequence[int | None], distance: Positions) -> Mask:
    left, right = window
    within = np.ones(distance.shape, bool)
    if left is not None:
        within &= distance >= -left
    if right is not None:
        within &= distance <= right
    return within


def _tree(parents: Positions, committed: int) -> Mask:
    """Return who sees whom among a prefix and the nodes behind it, (B, 1, N, committed + N)."""
    batch, nodes = parents.reshape(-1, parents.shape[-1]), parents.shape[-1]
    seen = np.zeros((len(batch), nodes, nodes), bool)
    for node in range(nodes):  # a parent comes before its children, so that its own row is complete
        has_parent = batch[:, node] >= 0
        seen[has_parent, node] = seen[has_parent, batch[has_parent, node]]
        seen[:, node, node] = True
    prefix = np.ones((len(batch), nodes, committed), bool)
    return np.concatenate([prefix, seen], axis=-1)[:, np.newaxis]


def _with_batch(batch: Shape, queries: int, keys: int) -> Shape:
    return (*batch, 1, queries, keys) if batch else (queries, keys)


def _of_batch(numbers: Positions) -> Positions:
    return numbers.reshape(*numbers.shape, 1, 1, 1) if numbers.ndim else numbers


def _at_positions(numbers: Positions, query: Positions) -> tuple[Positions, Positions]:
    """Return the numbers of queries, (..., Lq, 1), and of keys, (..., 1, T), by their positions."""
    of_query = numbers[..., query[:, 0]][..., np.newaxis]
    of_key = numbers[..., np.newaxis, :]
    return (of_query[:, np.newaxis], of_key[:, np.newaxis]) if numbers.ndim == 2 else (of_query, of_key)


def numbers_of_keys(source: _Numbered) -> Positions:
    """Return the number of each key's image or segment, (T), or (B, T). Raises ``FieldFault``."""
    field = kinds.kind_of(source)
    given = getattr(source, field)
    if isinstance(source, kinds.Images | kinds.Segments):
        numbers = _numbers(given, field, 2)
    else:
        axes, read = (2, _in_spans) if isinstance(source, kinds.ImageSpans) else (1, _in_documents)
        numbers = _by_batch(given, field, axes, source, read)
    queries, keys = source.shape
    if numbers.ndim == 0 or numbers.shape[-1] != keys:
        raise FieldFault(field, f"expected a number for each of {keys} keys, got {_show_shape(numbers)}")
    if source.offset + queries > keys:
        raise FieldFault(
            "offset",
            f"the last query would stand at position {source.offset + queries - 1}, and there are {keys} keys, "
            f"of which `{field}` tells the numbers",
        )
    return numbers


def _by_batch(
    given: Any, field: str, axes: int, source: kinds.Pattern, read: Callable[[Positions, FieldPath, int], Positions]
) -> Positions:
    """Read a description of so many axes once, or one for each element of the batch."""
    depth, inner = 0, given
    while isinstance(inner, list) and inner:
        depth, inner = depth + 1, inner[0]
    keys = source.shape[1]
    if keys > MAX_STORED:
        raise FieldFault("shape", f"{keys} keys are too many; expected at most {MAX_STORED} elements")
    if depth <= axes:
        return read(_numbers(given, (field,), axes), (field,), keys)
    rows = [(_numbers(row, (field, number), axes), (field, number)) for number, row in enumerate(given)]
    return np.array([read(row, path, keys) for row, path in rows])


def _in_spans(spans: Positions, path: FieldPath, keys: int) -> Positions:
    """Number the keys of images from 1 on; 0 is text."""
    numbers = np.full(keys, _TEXT, np.int64)
    if spans.ndim != 2 or spans.shape[-1] != 2:
        raise FieldFault(path, f"expected a list of [begin, end], got {_show_shape(spans)}")
    for number, (begin, end) in enumerate(spans.tolist()):
        if not begin < end <= keys:
            raise FieldFault((*path, number), f"expected begin < end <= {keys}, got [{begin}, {end}]")
        if numbers[begin:end].any():
            raise FieldFault((*path, number), f"[{begin}, {end}] overlaps with an image before it")
        numbers[begin:end] = number + 1
    return numbers


def _in_documents(lengths: Positions, path: FieldPath, keys: int) -> Positions:
    """Number the keys of documents, the first with 0."""
    if lengths.ndim != 1 or lengths.sum() != keys:
        raise FieldFault(path, f"expected lengths of {keys} keys together, got {lengths.sum()}")
    return np.repeat(np.arange(len(lengths)), lengths)


def _show_shape(numbers: Positions) -> str:
    return "a single number" if numbers.ndim == 0 else f"{'x'.join(map(str, numbers.shape))} numbers"


def _parents(given: Any) -> Positions:
    """Read the parents of a tree's nodes, -1 for a child of the prefix. Raises ``FieldFault``."""
    parents = _numbers(given, "tree", 2, none=-1)
    if parents.ndim == 0:
        raise FieldFault("tree", "expected a list with the parent of each node")
    for place in map(tuple, np.argwhere(parents >= np.arange(parents.shape[-1]))):
        at = tuple(int(index) for index in place)
        raise FieldFault(
            ("tree", *at), f"expected null or the number of a node before node {at[-1]}, got {parents[place]}"
        )
    return parents


def _numbers(given: Any, field: str | FieldPath, most_axes: int, none: int | None = None) -> Positions:
    """Read nested lists of whole numbers of at least 0. Raises ``FieldFault`` at what is none."""
    shape = _checked_shape(given, (field,) if isinstance(field, str) else field, most_axes, none)
    flat = given
    for _ in shape[1:]:
        flat = [number for row in flat for number in row]
    numbers = [none if number is None else number for number in (flat if shape else [flat])]
    return np.array(numbers, np.int64).reshape(shape)


def _checked_shape(given: Any, path: FieldPath, most_axes: int, none: int | None) -> Shape:
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= kinds.MAX_POSITION:
        return ()
    if given is None and none is not None:
        return ()
    if not isinstance(given, list) or most_axes == 0 or not given:
        wanted = f"a whole number from 0 to {kinds.MAX_POSITION}{'' if none is None else ' or null'}"
        lists = f", or {'lists' if most_axes > 1 else 'a list'} of them" if most_axes else ""
        raise FieldFault(path, f"expected {wanted}{lists}, got {'nothing' if given is None else repr(given)[:80]}")
    shapes = [_checked_shape(each, (*path, number), most_axes - 1, none) for number, each in enumerate(given)]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise FieldFault((*path, number), "ragged: expected as many numbers as in the first row")
    return (len(given), *shapes[0])


Numbers = NDArray[np.float64]
MAX_BUCKETS = 512
_DIGITS = 60


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head, each the float64 next to it.

    For n heads, a power of two, head h has 2^(-8 (h + 1) / n). For another number, the largest power of two n below it
    has its slopes first, and the rest has every other slope of 2n heads.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [_power_of_two(-8 * (head + 1), below) for head in range(below)]
    return slopes + [_power_of_two(-8 * (2 * head + 1), 2 * below) for head in range(heads - below)]


def _power_of_two(exponent: int, divisor: int) -> float:
    """Return 2^(exponent / divisor), rounded once, the same on every machine."""
    with localcontext() as context:
        context.prec = _DIGITS
        return float(Decimal(2) ** (Decimal(exponent) / divisor))


def alibi_shape(source: Alibi) -> Shape:
    """Return the shape of an ALiBi bias, (H, Lq, T)."""
    return (source.alibi, *source.shape)


def make_alibi(source: Alibi) -> Numbers:
    """Return minus slope times distance for each head, query and key."""
    slopes = np.array(alibi_slopes(source.alibi))[:, np.newaxis, np.newaxis]
    return np.asarray(-(slopes * np.abs(_distance(source))) + 0.0)  # no negative zero


def largest_of_alibi(source: Alibi) -> float:
    """Return a bound on the numbers of an ALiBi bias, in magnitude."""
    below = 1 << (source.alibi.bit_length() - 1)
    largest = _power_of_two(-8, below if source.alibi == below else 2 * below)
    return largest * (source.offset + sum(source.shape))


def bucket_shape(source: RelativeBuckets, table: Shape) -> Shape:
    """Return the shape of a bias of relative buckets, (H, Lq, T). Raises ``FieldFault``."""
    if len(table) != 2:
        raise FieldFault("relative_buckets", f"expected a table (buckets, H), got shape {show(table)}")
    buckets, least = table[0], 4 if source.bidirectional else 2
    if not least <= buckets <= MAX_BUCKETS or (source.bidirectional and buckets % 2):
        even = "an even number of " if source.bidirectional else ""
        raise FieldFault(
            "relative_buckets", f"expected {even}{least} to {MAX_BUCKETS} rows, one for each bucket, got {buckets}"
        )
    exact = _exact_buckets(buckets, source.bidirectional)
    if source.max_distance <= exact:
        raise FieldFault(
            "max_distance", f"expected more than {exact}, as distances below that have a bucket of their own"
        )
    return (table[1], *source.shape)


def make_bucket_bias(source: RelativeBuckets, table: NDArray[Any]) -> NDArray[Any]:
    """Look up the number of each distance's bucket: (buckets, H) -> (H, Lq, T)."""
    buckets = relative_buckets(_distance(source), len(table), source.max_distance, bidirectional=source.bidirectional)
    return np.moveaxis(table[buckets], -1, 0)


def relative_buckets(
    distance: NDArray[np.int64], buckets: int, max_distance: int, *, bidirectional: bool
) -> NDArray[np.int64]:
    """Return the bucket of each distance j - p, exactly.

    Half of the buckets hold one distance each. The other half is as wide as a geometric sequence up to
    ``max_distance``: of e exact buckets and m others, distance n is in bucket e + floor(m log(n / e) / log(M / e)), at
    most the last. Integers tell where that floor steps, so that no logarithm is rounded.
    """
    first: NDArray[np.int64] = np.zeros(distance.shape, np.int64)
    back = np.maximum(-distance, 0)
    exact = _exact_buckets(buckets, bidirectional)
    if bidirectional:
        buckets //= 2
        first, back = np.where(distance > 0, buckets, 0), np.abs(distance)
    steps = np.array(_steps(exact, buckets - exact, max_distance), np.int64)
    wide = exact + np.searchsorted(steps, back, side="right")
    return np.asarray(first + np.where(back < exact, back, wide))


@lru_cache
def _steps(exact: int, others: int, max_distance: int) -> list[int]:
    """Return the least distance of each bucket behind the first one that holds several distances."""
    return [_least(exact, others, max_distance, step) for step in range(1, others)]


def _least(exact: int, others: int, max_distance: int, step: int) -> int:
    """Return the least n with others * log(n / exact) >= step * log(max_distance / exact)."""
    wanted = max_distance**step * exact ** (others - step)  # n^others >= this
    low, high = exact, max_distance
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**others >= wanted else (middle + 1, high)
    return low


def _exact_buckets(buckets: int, bidirectional: bool) -> int:
    return (buckets // 2 if bidirectional else buckets) // 2


def _distance(source: Pattern) -> NDArray[np.int64]:
    """Return how far each key stands behind each query, j - p: (Lq, T)."""
    queries, keys = source.shape
    return np.asarray(np.arange(keys) - (source.offset + np.arange(queries))[:, np.newaxis])
