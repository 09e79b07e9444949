"""The masks of today's models, made from their definitions in ``mask_kinds.py``.

Sources: prefix LM, Raffel et al. 2020 (arXiv 1910.10683, section 3.2.1); images in text, the Gemma 3 and PaliGemma
models of transformers (``blockwise_overlay``); chunks, Llama 4 (``chunked_overlay``); first tokens, Xiao et al. 2024
(arXiv 2309.17453); dilated windows, Beltagy et al. 2020 (arXiv 2004.05150); blocks, Zaheer et al. 2020 (arXiv
2007.14062); trees, Miao et al. 2024 (arXiv 2305.09781).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading import mask_kinds as kinds
from attncheck.reading.yaml_scalars import FieldPath
from attncheck.spec import Shape

Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]
_Numbered = kinds.Images | kinds.ImageSpans | kinds.Segments | kinds.DocumentLengths
_TEXT = 0


class PatternFault(ValueError):
    """A pattern that cannot be made; ``field`` leads to what is wrong inside of its description."""

    def __init__(self, field: FieldPath, message: str) -> None:
        super().__init__(message)
        self.field = field


def mask_shape(source: kinds.AnyMaskPattern) -> Shape:
    """Return the shape of a mask without making it: (Lq, T), or (B, 1, Lq, T). Raises ``PatternFault``."""
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
            raise PatternFault(("window",), "bounds nothing on either side; expected a number of steps on one at least")
    return _with_batch((), *source.shape)


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
    """Return the shape of a mask of blocks. Raises ``PatternFault`` for a table with too few or too many blocks."""
    wanted = tuple(-(-length // size) for length, size in zip(shape, block_size, strict=True))
    if len(table) < 2 or table[-2:] != wanted:
        raise PatternFault(
            ("blocks",),
            f"expected a table of {wanted[0]}x{wanted[1]} blocks of {block_size[0]}x{block_size[1]} for {shape[0]} "
            f"queries and {shape[1]} keys, got shape {'x'.join(map(str, table)) or 'scalar'}",
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
    """Return the number of each key's image or segment, (T), or (B, T). Raises ``PatternFault``."""
    match source:
        case kinds.Images():
            field, numbers = "images", _numbers(source.images, "images", 2)
        case kinds.Segments():
            field, numbers = "segments", _numbers(source.segments, "segments", 2)
        case kinds.ImageSpans():
            field, numbers = "image_spans", _by_batch(source.image_spans, "image_spans", 2, source, _in_spans)
        case kinds.DocumentLengths():
            field = "document_lengths"
            numbers = _by_batch(source.document_lengths, field, 1, source, _in_documents)
    queries, keys = source.shape
    if numbers.ndim == 0 or numbers.shape[-1] != keys:
        raise PatternFault((field,), f"expected a number for each of {keys} keys, got {_show_shape(numbers)}")
    if source.offset + queries > keys:
        raise PatternFault(
            ("offset",),
            f"the last query would stand at position {source.offset + queries - 1}, and there are {keys} keys, "
            f"of which `{field}` tells the numbers",
        )
    return numbers


def _by_batch(
    given: Any,
    field: str,
    axes: int,
    source: kinds.Pattern,
    read: Callable[[Positions, FieldPath, int], Positions],
) -> Positions:
    """Read a description of so many axes once, or one for each element of the batch."""
    depth, inner = 0, given
    while isinstance(inner, list) and inner:
        depth, inner = depth + 1, inner[0]
    keys = source.shape[1]
    if depth <= axes:
        return read(_numbers(given, (field,), axes), (field,), keys)
    rows = [(_numbers(row, (field, number), axes), (field, number)) for number, row in enumerate(given)]
    return np.array([read(row, path, keys) for row, path in rows])


def _in_spans(spans: Positions, path: FieldPath, keys: int) -> Positions:
    """Number the keys of images from 1 on; 0 is text."""
    numbers = np.full(keys, _TEXT, np.int64)
    if spans.ndim != 2 or spans.shape[-1] != 2:
        raise PatternFault(path, f"expected a list of [begin, end], got {_show_shape(spans)}")
    for number, (begin, end) in enumerate(spans.tolist()):
        if not begin < end <= keys:
            raise PatternFault((*path, number), f"expected begin < end <= {keys}, got [{begin}, {end}]")
        if numbers[begin:end].any():
            raise PatternFault((*path, number), f"[{begin}, {end}] overlaps with an image before it")
        numbers[begin:end] = number + 1
    return numbers


def _in_documents(lengths: Positions, path: FieldPath, keys: int) -> Positions:
    """Number the keys of documents, the first with 0."""
    if lengths.ndim != 1 or lengths.sum() != keys:
        raise PatternFault(path, f"expected lengths of {keys} keys together, got {lengths.sum()}")
    return np.repeat(np.arange(len(lengths)), lengths)


def _show_shape(numbers: Positions) -> str:
    return "a single number" if numbers.ndim == 0 else f"{'x'.join(map(str, numbers.shape))} numbers"


def _parents(given: Any) -> Positions:
    """Read the parents of a tree's nodes, -1 for a child of the prefix. Raises ``PatternFault``."""
    parents = _numbers(given, "tree", 2, none=-1)
    if parents.ndim == 0:
        raise PatternFault(("tree",), "expected a list with the parent of each node")
    for place in map(tuple, np.argwhere(parents >= np.arange(parents.shape[-1]))):
        at = tuple(int(index) for index in place)
        raise PatternFault(
            ("tree", *at), f"expected null or the number of a node before node {at[-1]}, got {parents[place]}"
        )
    return parents


def _numbers(given: Any, field: str | FieldPath, most_axes: int, none: int | None = None) -> Positions:
    """Read nested lists of whole numbers of at least 0. Raises ``PatternFault`` at what is none."""
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
        raise PatternFault(path, f"expected {wanted}{lists}, got {'nothing' if given is None else repr(given)[:80]}")
    shapes = [_checked_shape(each, (*path, number), most_axes - 1, none) for number, each in enumerate(given)]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise PatternFault((*path, number), "ragged: expected as many numbers as in the first row")
    return (len(given), *shapes[0])
