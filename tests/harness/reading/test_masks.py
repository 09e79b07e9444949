"""The masks of today's models, each against a plain loop over queries and keys, written from its definition."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.errors import CaseError
from attncheck.reading import array_kinds as kinds
from attncheck.reading import mask_kinds
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_exact_inputs
from attncheck.reading.masks import make_mask, mask_shape

Load = Callable[[str | bytes], list[Case]]
Seen = Callable[[int, int, int], bool]
"""Whether an element of the batch lets the query at a position see a key."""

LENGTH = st.integers(0, 9)
OFFSET = st.integers(0, 5)
SIDE = st.none() | st.integers(0, 4)


def _loop(seen: Seen, batch: int, queries: int, keys: int, offset: int) -> NDArray[np.bool_]:
    mask = np.zeros((batch, 1, queries, keys), bool)
    for entry in range(batch):
        for query in range(queries):
            for key in range(keys):
                mask[entry, 0, query, key] = seen(entry, offset + query, key)
    return mask


def _check(source: mask_kinds.AnyMaskPattern, seen: Seen, batch: int | None = None) -> None:
    assert isinstance(source, mask_kinds.Pattern)
    made = make_mask(source)
    assert made.dtype == bool
    assert made.shape == mask_shape(source)
    assert made.ndim == (2 if batch is None else 4)
    wanted = _loop(seen, batch or 1, *source.shape, source.offset)
    np.testing.assert_array_equal(made, wanted[0, 0] if batch is None else wanted)


@given(window=st.lists(SIDE, min_size=2, max_size=2), shape=st.tuples(LENGTH, LENGTH), offset=OFFSET)
def test_a_sliding_window(window: list[int | None], shape: tuple[int, int], offset: int) -> None:
    left, right = window

    def seen(entry: int, query: int, key: int) -> bool:
        return (left is None or key >= query - left) and (right is None or key <= query + right)

    _check(mask_kinds.SlidingWindow(sliding_window=window, shape=list(shape), offset=offset), seen)


@given(
    prefix=st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1, max_size=3),
    shape=st.tuples(LENGTH, LENGTH),
    offset=OFFSET,
)
def test_a_prefix_lm(prefix: int | list[int], shape: tuple[int, int], offset: int) -> None:
    lengths = prefix if isinstance(prefix, list) else [prefix]

    def seen(entry: int, query: int, key: int) -> bool:
        return key <= query or key < lengths[entry]

    batch = len(lengths) if isinstance(prefix, list) else None
    _check(mask_kinds.PrefixLM(prefix_lm=prefix, shape=list(shape), offset=offset), seen, batch)


@st.composite
def _numbers_of_keys(draw: st.DrawFn) -> tuple[list[list[int]], bool, int, int]:
    """Numbers of keys for each of the batch, whether they are given once for all, the number of queries, the offset."""
    keys = draw(st.integers(1, 9))
    offset = draw(st.integers(0, keys))
    rows = draw(st.lists(st.lists(st.integers(0, 3), min_size=keys, max_size=keys), min_size=1, max_size=3))
    return rows, draw(st.booleans()), draw(st.integers(0, keys - offset)), offset


@given(drawn=_numbers_of_keys())
def test_images_in_text(drawn: tuple[list[list[int]], bool, int, int]) -> None:
    rows, once, queries, offset = drawn

    def seen(entry: int, query: int, key: int) -> bool:
        same_image = rows[entry][query] == rows[entry][key] and rows[entry][key] > 0
        return key <= query or same_image

    images = rows[0] if once else rows
    source = mask_kinds.Images(images=images, shape=[queries, len(rows[0])], offset=offset)
    _check(source, seen, None if once else len(rows))


@given(drawn=_numbers_of_keys())
def test_segments(drawn: tuple[list[list[int]], bool, int, int]) -> None:
    rows, once, queries, offset = drawn

    def seen(entry: int, query: int, key: int) -> bool:
        return rows[entry][query] == rows[entry][key]

    segments = rows[0] if once else rows
    source = mask_kinds.Segments(segments=segments, shape=[queries, len(rows[0])], offset=offset)
    _check(source, seen, None if once else len(rows))


@given(drawn=_numbers_of_keys())
def test_images_by_where_they_begin_and_end(drawn: tuple[list[list[int]], bool, int, int]) -> None:
    rows, once, queries, offset = drawn
    spans, alike = [], []
    for row in rows:
        runs = [(number, len(list(run))) for number, run in groupby(row)]
        ends = np.cumsum([length for _, length in runs]).tolist()
        spans.append([[end - length, end] for (number, length), end in zip(runs, ends, strict=True) if number])
        alike.append([place + 1 if number else 0 for place, (number, length) in enumerate(runs) for _ in range(length)])
    if not all(spans):
        return
    shape = [queries, len(rows[0])]
    source = mask_kinds.ImageSpans(image_spans=spans[0] if once else spans, shape=shape, offset=offset)
    same = mask_kinds.Images(images=alike[0] if once else alike, shape=shape, offset=offset)
    np.testing.assert_array_equal(make_mask(source), make_mask(same))


@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), min_size=1, max_size=3),
    once=st.booleans(),
)
def test_documents_by_their_lengths(lengths: list[list[int]], once: bool) -> None:
    keys = max(map(sum, lengths))
    filled = [[*row, keys - sum(row)] for row in lengths]
    numbers = [[number for number, length in enumerate(row) for _ in range(length)] for row in filled]
    source = mask_kinds.DocumentLengths(document_lengths=filled[0] if once else filled, shape=[keys, keys])
    same = mask_kinds.Segments(segments=numbers[0] if once else numbers, shape=[keys, keys])
    np.testing.assert_array_equal(make_mask(source), make_mask(same))


@given(
    chunk=st.integers(1, 5),
    padding=st.none() | st.integers(0, 6) | st.lists(st.integers(0, 6), min_size=1, max_size=3),
    shape=st.tuples(LENGTH, LENGTH),
    offset=OFFSET,
)
def test_chunks(chunk: int, padding: int | list[int] | None, shape: tuple[int, int], offset: int) -> None:
    begins = padding if isinstance(padding, list) else [padding or 0]

    def seen(entry: int, query: int, key: int) -> bool:
        return key <= query and (query - begins[entry]) // chunk == (key - begins[entry]) // chunk

    source = mask_kinds.Chunked(chunked=chunk, left_padding=padding, shape=list(shape), offset=offset)
    _check(source, seen, len(begins) if isinstance(padding, list) else None)


@given(first=st.integers(0, 4), left=st.integers(0, 4), shape=st.tuples(LENGTH, LENGTH), offset=OFFSET)
def test_first_tokens_that_are_kept(first: int, left: int, shape: tuple[int, int], offset: int) -> None:
    def seen(entry: int, query: int, key: int) -> bool:
        return key <= query and (key < first or query - key <= left)

    _check(mask_kinds.FirstTokens(first_tokens=first, left=left, shape=list(shape), offset=offset), seen)


@given(
    dilation=st.integers(1, 4),
    window=st.lists(SIDE, min_size=2, max_size=2).filter(lambda window: window != [None, None]),
    shape=st.tuples(LENGTH, LENGTH),
    offset=OFFSET,
)
def test_a_dilated_window(dilation: int, window: list[int | None], shape: tuple[int, int], offset: int) -> None:
    left, right = (30 if side is None else side for side in window)

    def seen(entry: int, query: int, key: int) -> bool:
        return any(key == query + step * dilation for step in range(-left, right + 1))

    _check(mask_kinds.Dilated(dilated=dilation, window=window, shape=list(shape), offset=offset), seen)


@st.composite
def _trees(draw: st.DrawFn) -> list[list[int | None]]:
    nodes = draw(st.integers(1, 8))
    parents = [st.none() if node == 0 else st.none() | st.integers(0, node - 1) for node in range(nodes)]
    return draw(st.lists(st.tuples(*parents).map(list), min_size=1, max_size=3))


@given(trees=_trees(), once=st.booleans(), committed=st.integers(0, 4))
def test_a_tree_of_drafted_tokens(trees: list[list[int | None]], once: bool, committed: int) -> None:
    nodes = len(trees[0])

    def sees(tree: list[int | None], query: int, key: int) -> bool:
        node: int | None = query
        while node is not None:
            if node == key:
                return True
            node = tree[node]
        return False

    wanted = np.ones((len(trees), 1, nodes, committed + nodes), bool)
    for entry, tree in enumerate(trees):
        for query in range(nodes):
            for key in range(nodes):
                wanted[entry, 0, query, committed + key] = sees(tree, query, key)
    source = mask_kinds.Tree(tree=trees[0] if once else trees, committed=committed)
    made = make_mask(source)
    assert made.shape == mask_shape(source)
    np.testing.assert_array_equal(made, wanted[0, 0] if once else wanted)


SOFTMAX = """\
title: Masks of every kind
source: {kind: derivation, title: Made for this test}
operation: masking
defaults: {random: {generator: numpy-legacy, seed: 3}}
cases:
  - name: The case at hand
"""


def _mask(load_text: Load, mask: str, queries: int = 4, keys: int = 6, name: str = "mask") -> NDArray[Any]:
    inputs = f"inputs: {{scores: {{constant: 0, shape: [2, 3, {queries}, {keys}]}}, {name}: {mask}}}"
    [case] = load_text(f"{SOFTMAX}    {inputs}\n")
    made = make_exact_inputs(case)[name]
    assert made.array.shape == case.input_shapes[name]
    assert not made.radius.any()
    return made.array


@settings(max_examples=25)
@given(
    table=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=2),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    cut=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_table_of_blocks(
    load_text: Load, table: list[list[bool]], block: tuple[int, int], cut: tuple[int, int]
) -> None:
    queries, keys = 2 * block[0] - min(cut[0], block[0] - 1), 3 * block[1] - min(cut[1], block[1] - 1)
    given_table = str([[int(each) for each in row] for row in table])
    made = _mask(
        load_text,
        f"{{blocks: {{values: {given_table}}}, block_size: [{block[0]}, {block[1]}], shape: [{queries}, {keys}]}}",
        queries,
        keys,
    )
    for query in range(queries):
        for key in range(keys):
            assert made[0, 0, query, key] == table[query // block[0]][key // block[1]]


def test_a_table_of_blocks_may_be_drawn_for_each_head(load_text: Load) -> None:
    table = "{draw: randint, low: 0, high: 2, shape: [2, 3, 2, 3]}"
    made = _mask(load_text, f"{{blocks: {table}, block_size: [2, 2], shape: [4, 6]}}")
    drawn = np.random.RandomState(3).randint(0, 2, (2, 3, 2, 3))
    np.testing.assert_array_equal(made, drawn.repeat(2, -1).repeat(2, -2))


WINDOW = "{sliding_window: [1, 0], shape: [4, 6], offset: 2}"
DOCUMENTS = "{segments: [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], shape: [4, 6], offset: 2}"


def test_masks_are_put_together(load_text: Load) -> None:
    window, documents = _mask(load_text, WINDOW), _mask(load_text, DOCUMENTS)
    np.testing.assert_array_equal(_mask(load_text, f"{{any_of: [{WINDOW}, {DOCUMENTS}]}}"), (window + documents) > 0)
    np.testing.assert_array_equal(_mask(load_text, f"{{all_of: [{WINDOW}, {DOCUMENTS}]}}"), window * documents)
    bias = _mask(load_text, f"{{as_bias: {{all_of: [{WINDOW}, {DOCUMENTS}]}}}}", name="bias")
    np.testing.assert_array_equal(bias, np.where(window * documents, 0, -np.inf))


def test_the_image_mask_of_gemma_3_in_a_layer_with_a_window(load_text: Load) -> None:
    images = "{images: [0, 1, 1, 1, 0, 2], shape: [6, 6]}"
    made = _mask(load_text, f"{{all_of: [{images}, {{sliding_window: [1, null], shape: [6, 6]}}]}}", 6)
    wanted = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(made[0, 0], wanted)


SHAPE = "shape: [4, 6]"
FAULTS = {
    "{prefix_lm: [1, x], shape: [4, 6]}": (
        "inputs.mask.prefix_lm[1]",
        "expected a whole number from 0 to 2147483648, got 'x'",
    ),
    "{prefix_lm: [[1]], shape: [4, 6]}": ("inputs.mask.prefix_lm[0]", "expected a whole number from 0 to 2147483648"),
    "{prefix_lm: -1, shape: [4, 6]}": ("inputs.mask.prefix_lm", "or a list of them, got -1"),
    "{prefix_lm: true, shape: [4, 6]}": ("inputs.mask.prefix_lm", "or a list of them, got True"),
    "{prefix_lm: [1, 2, 3], shape: [4, 6]}": (
        "inputs.mask",
        "shape 3x1x4x6 does not broadcast to 2x3x4x6",
    ),
    "{prefix_lm: 3, shape: [4]}": ("inputs.mask.shape", "expected at least 2 items, got [4]"),
    "{prefix_lm: 3}": ("inputs.mask.shape", "this field is missing"),
    "{prefix_lm: 3, shape: [4, 6], left: 2}": ("inputs.mask.left", "unknown field"),
    "{images: [0, 1, 1], shape: [4, 6]}": ("inputs.mask.images", "expected a number for each of 6 keys, got 3 numbers"),
    "{images: 1, shape: [4, 6]}": ("inputs.mask.images", "expected a number for each of 6 keys, got a single number"),
    "{images: [[0, 0, 0, 0, 0, 0], [1]], shape: [4, 6]}": ("inputs.mask.images[1]", "ragged"),
    "{segments: [0, 1, 1, 1, 1, 1], shape: [4, 6], offset: 3}": (
        "inputs.mask.offset",
        "the last query would stand at position 6, and there are 6 keys, of which `segments` tells the numbers",
    ),
    "{image_spans: [[1, 3], [2, 4]], shape: [4, 6]}": (
        "inputs.mask.image_spans[1]",
        "[2, 4] overlaps with an image before it",
    ),
    "{image_spans: [[[1, 3]], [[2, 7]]], shape: [4, 6]}": (
        "inputs.mask.image_spans[1][0]",
        "expected begin < end <= 6, got [2, 7]",
    ),
    "{image_spans: [1, 3], shape: [4, 6]}": (
        "inputs.mask.image_spans",
        "expected a list of [begin, end], got 2 numbers",
    ),
    "{document_lengths: [[3, 3], [3, 4]], shape: [4, 6]}": (
        "inputs.mask.document_lengths[1]",
        "expected lengths of 6 keys together, got 7",
    ),
    "{document_lengths: [3, x], shape: [4, 6]}": ("inputs.mask.document_lengths[1]", "expected a whole number from 0"),
    "{chunked: 0, shape: [4, 6]}": ("inputs.mask.chunked", "expected a value greater than 0, got 0"),
    "{first_tokens: 2, shape: [4, 6]}": ("inputs.mask.left", "this field is missing"),
    "{dilated: 2, window: [null, null], shape: [4, 6]}": ("inputs.mask.window", "bounds nothing on either side"),
    "{tree: [null, 1], committed: 4}": (
        "inputs.mask.tree[1]",
        "expected null or the number of a node before node 1, got 1",
    ),
    "{tree: [[null, 0], [null, 2]]}": ("inputs.mask.tree[1][1]", "before node 1, got 2"),
    "{tree: 0}": ("inputs.mask.tree", "expected a list with the parent of each node"),
    "{tree: [null, 0, 0, 1], committed: 1}": ("inputs.mask", "shape 1x1x4x5 does not broadcast to 2x3x4x6"),
    "{blocks: {values: [[1, 0]]}, block_size: [2, 2], shape: [4, 6]}": (
        "inputs.mask.blocks",
        "expected a table of 2x3 blocks of 2x2 for 4 queries and 6 keys, got shape 1x2",
    ),
    "{blocks: {values: [[1, 0, 2], [1, 1, 1]]}, block_size: [2, 2], shape: [4, 6]}": (
        "inputs.mask.blocks.values[0][2]",
        "a mask is boolean (true = may attend), got 2",
    ),
    "{blocks: {draw: randn, shape: x}, block_size: [2, 2], shape: [4, 6]}": (
        "inputs.mask.blocks.shape",
        "expected a list, got 'x'",
    ),
    "{any_of: [{values: [0.5]}]}": ("inputs.mask.any_of[0].values[0]", "a mask is boolean (true = may attend)"),
    "{any_of: []}": ("inputs.mask.any_of", "expected at least 1 item"),
    "{as_bias: {values: [1, 0, 1, 1, 1, 1]}}": ("inputs.mask", "a mask is boolean (true = may attend), got a bias"),
    "{alibi: 3, shape: [4, 6]}": ("inputs.mask", "a mask is boolean (true = may attend), got a bias (alibi)"),
    "{prefix_lm: 3, shape: [4, 6], times: 2}": ("inputs.mask", "a mask is boolean; it takes no sum, times or plus"),
    "{prefix_lm: 3, shape: [100000, 100000]}": ("inputs.mask", "10000000000 elements; expected at most 67108864"),
}


@pytest.mark.parametrize("mask", FAULTS)
def test_what_is_wrong_with_a_mask_is_said(load_text: Load, mask: str) -> None:
    with pytest.raises(CaseError) as error:
        _mask(load_text, mask)
    [fault] = error.value.faults
    assert fault.field == FAULTS[mask][0]
    assert FAULTS[mask][1] in fault.message
    assert fault.line == 7


@pytest.mark.parametrize("name", ["bias", "scores"])
def test_a_mask_in_the_place_of_numbers_is_refused(load_text: Load, name: str) -> None:
    inputs = {"scores": "{constant: 0, shape: [4, 6]}", "mask": WINDOW, name: WINDOW}
    text = f"{SOFTMAX}    inputs: {{{', '.join(f'{key}: {each}' for key, each in inputs.items())}}}\n"
    with pytest.raises(CaseError, match=r"expected numbers, got a mask \(sliding_window\); give it as `mask`"):
        load_text(text)


def test_what_is_not_a_mask_is_no_bias_of_0_and_minus_infinity(load_text: Load) -> None:
    with pytest.raises(CaseError, match=r"bias.as_bias.values\[0\]: a mask is boolean"):
        _mask(load_text, "{as_bias: {values: [3, 0, 0, 0, 0, 0]}}", name="bias")


def test_every_kind_of_mask_is_known_as_one() -> None:
    assert {kinds.KINDS[kind] for kind in kinds.MASK_KINDS} >= set(mask_kinds.MASK_PATTERNS)
