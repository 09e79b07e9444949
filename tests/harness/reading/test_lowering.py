"""What options mean, and what packed sequences and paged caches are, against loops over queries and keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.reading.lowering import poison_unused_keys
from attncheck.reading.problem import Problem

Array = NDArray[Any]
HEADS, WIDTH = 2, 3
ALIGNMENTS = [None, "top_left", "bottom_right"]


def offset_of(options: dict[str, Any], queries: int, keys: int, past: int) -> int:
    """The position of the first query: behind the past, at the first key, or such that the last stands at the last."""
    return {None: past, "top_left": 0, "bottom_right": keys - queries}[options.get("alignment")]


def definition(options: dict[str, Any], inputs: dict[str, Array], offset: int, shape: tuple[int, ...]) -> Array:
    """Which query may attend to which key, (B, H, Lq, T), with the first query at ``offset`` or where it is said."""
    allowed = np.ones(shape, dtype=bool)
    left, right = options.get("window") or (None, None)
    for batch, head, query, key in product(*map(range, shape)):
        place = query + (inputs["query_offsets"][batch] if "query_offsets" in inputs else offset)
        rules = [
            not options.get("is_causal") or key <= place,
            left is None or place - left <= key,
            right is None or key <= place + right,
        ]
        if "key_lengths" in inputs:
            rules.append(key < inputs["key_lengths"][batch])
        if "query_mask" in inputs:
            rules.append(np.broadcast_to(inputs["query_mask"], (shape[0], shape[2]))[batch, query])
        if "mask" in inputs:
            rules.append(np.broadcast_to(inputs["mask"], shape)[batch, head, query, key])
        allowed[batch, head, query, key] = all(rules)
    return allowed


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Array], tuple[int, ...], int]:
    """Return options and inputs of an attention, the shape of its scores, and the length of its past."""
    batch, queries, keys = (draw(st.integers(0, 4), label=name) for name in ("B", "Lq", "Lk"))
    past = draw(st.none() | st.integers(0, 3), label="P")
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (batch, HEADS, queries, keys + (past or 0))
    inputs: dict[str, Array] = {
        "query": random.standard_normal((batch, HEADS, queries, WIDTH)),
        "key": random.standard_normal((batch, HEADS, keys, WIDTH)),
        "value": random.standard_normal((batch, HEADS, keys, WIDTH)),
    }
    if past is not None:
        inputs |= {f"past_{name}": random.standard_normal((batch, HEADS, past, WIDTH)) for name in ("key", "value")}
    ones = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    if draw(st.booleans(), label="mask"):
        spread = tuple(1 if one else length for one, length in zip(ones, shape, strict=True))
        inputs["mask"] = random.random(spread) < 0.7
    if draw(st.booleans(), label="key_lengths"):
        inputs["key_lengths"] = random.integers(0, shape[-1] + 1, batch)
    if draw(st.booleans(), label="query_mask"):
        inputs["query_mask"] = random.random((1 if ones[0] else batch, queries)) < 0.7
    options: dict[str, Any] = {}
    if draw(st.booleans(), label="causal"):
        options["is_causal"] = draw(st.booleans())
    sides = st.none() | st.integers(0, 5)
    if draw(st.booleans(), label="window"):
        options["window"] = draw(st.tuples(sides, sides).filter(lambda pair: pair != (None, None)))
    alignment = draw(st.sampled_from(ALIGNMENTS))
    if alignment and (options.get("is_causal") or "window" in options):
        options["alignment"] = alignment
    elif draw(st.booleans(), label="query_offsets"):
        inputs["query_offsets"] = random.integers(0, 6, batch)
    return options, inputs, shape, past or 0


Drawn = tuple[dict[str, Any], dict[str, Array], tuple[int, ...], int]


@given(problem=problems())
def test_essentially_a_case_is_one_mask_and_one_set_of_keys(problem: Drawn) -> None:
    options, inputs, shape, past = problem
    plain = Problem("attention", options, inputs).canonical()
    assert set(plain.options) <= {"is_causal"}
    assert set(plain.inputs) <= {"query", "key", "value", "mask"}
    wanted = definition(options, inputs, offset_of(options, shape[2], shape[3], past), shape)
    # What is left means itself: j <= i, and the mask.
    np.testing.assert_array_equal(definition(plain.options, plain.inputs, 0, shape), wanted)
    for name in ("key", "value"):
        parts = [inputs[part] for part in (f"past_{name}", name) if part in inputs]
        np.testing.assert_array_equal(plain.inputs[name], np.concatenate(parts, axis=2))


@given(problem=problems(), seed=st.integers(0, 9))
def test_some_rows_of_a_case_attend_to_what_they_attend_to_in_the_whole(problem: Drawn, seed: int) -> None:
    options, inputs, shape, past = problem
    rows = np.flatnonzero(np.random.RandomState(seed).rand(shape[2]) < 0.5)
    plain = Problem("attention", options, inputs).canonical(rows)
    assert not plain.options.get("is_causal")
    wanted = definition(options, inputs, offset_of(options, shape[2], shape[3], past), shape)[:, :, rows]
    np.testing.assert_array_equal(definition(plain.options, plain.inputs, 0, wanted.shape), wanted)
    np.testing.assert_array_equal(plain.inputs["query"], inputs["query"][:, :, rows])
    whole = Problem("attention", options, inputs).canonical()
    for name in ("key", "value"):
        np.testing.assert_array_equal(plain.inputs[name], whole.inputs[name])


@given(problem=problems())
def test_what_is_delivered_means_the_same_to_a_function_that_counts_from_the_past(problem: Drawn) -> None:
    options, inputs, shape, past = problem
    called = Problem("attention", options, inputs).as_call()
    assert set(called.options) <= {"is_causal", "window"}
    assert "query_mask" not in called.inputs
    assert not (called.options.get("is_causal") and past) or "query_offsets" in inputs
    wanted = definition(options, inputs, offset_of(options, shape[2], shape[3], past), shape)
    np.testing.assert_array_equal(definition(called.options, called.inputs, past, shape), wanted)
    kept = set(inputs) - {"query_mask", "mask"}
    assert kept <= set(called.inputs)
    assert all(called.inputs[name] is inputs[name] for name in kept)


@given(problem=problems())
def test_nothing_that_is_given_is_changed(problem: Drawn) -> None:
    options, inputs, _, _ = problem
    before = dict(options), {name: (array, array.copy()) for name, array in inputs.items()}
    for form in (Problem.as_call, Problem.canonical):
        form(Problem("attention", options, inputs))
    assert (options, set(inputs)) == (before[0], set(before[1]))
    for name, (array, copy) in before[1].items():
        assert inputs[name] is array
        np.testing.assert_array_equal(array, copy)


@st.composite
def packed(draw: st.DrawFn) -> Problem:
    """Draw packed sequences, some of them empty, with keys that are not used."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=4))
    queries, keys = np.array(lengths).T
    used = np.array([draw(st.integers(0, length)) for length in keys])
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    inputs = {
        "query": random.normal(size=(1, 4, queries.sum(), 3)),
        "key": random.normal(size=(1, 2, keys.sum(), 3)),
        "value": random.normal(size=(1, 2, keys.sum(), 2)),
        "cu_seqlens_q": np.concatenate([[0], np.cumsum(queries)]),
        "cu_seqlens_k": np.concatenate([[0], np.cumsum(keys)]),
        "key_lengths": used,
    }
    return Problem("packed_attention", draw(options()), inputs)


@st.composite
def paged(draw: st.DrawFn) -> Problem:
    """Draw a cache whose tables name pages in any order, some of them twice, and none in places that are not used."""
    page, width, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pages = draw(st.integers(width, 6))
    table = np.array([draw(st.lists(st.integers(0, pages - 1), min_size=width, max_size=width)) for _ in range(batch)])
    used = np.array([draw(st.integers(0, page * width)) for _ in range(batch)])
    if draw(st.booleans()):
        table = np.where(page * np.arange(width) < used[:, np.newaxis], table, -1)
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    inputs = {
        "query": random.normal(size=(batch, 4, draw(st.integers(1, 4)), 3)),
        "key_pages": random.normal(size=(pages, page, 2, 3)),
        "value_pages": random.normal(size=(pages, page, 2, 2)),
        "block_table": table,
        "key_lengths": used,
    }
    return Problem("paged_attention", draw(options()), inputs)


@st.composite
def ragged(draw: st.DrawFn) -> Problem:
    """Draw a cache, and a number of queries for each of its tables, which may be 0."""
    pages = draw(paged())
    counts = [draw(st.integers(0, 4)) for _ in pages.inputs["block_table"]]
    rows = np.concatenate(
        [entry[:, :1].repeat(count, 1) for entry, count in zip(pages.inputs["query"], counts, strict=True)], 1
    )
    query = rows[np.newaxis] + np.arange(rows.shape[1])[:, np.newaxis] / 4
    limits = np.concatenate([[0], np.cumsum(counts)])
    if draw(st.booleans()):
        slots = pages.inputs["block_table"].shape[1] * pages.inputs["key_pages"].shape[1]
        tree_mask = np.random.default_rng(len(limits)).random((limits[-1], slots)) < 0.6
        pages = pages.with_inputs(tree_mask=tree_mask)
    return Problem("ragged_paged_attention", pages.options, {**pages.inputs, "query": query, "cu_seqlens_q": limits})


def options() -> st.SearchStrategy[dict[str, Any]]:
    side = st.one_of(st.none(), st.integers(0, 3))
    windows = st.tuples(side, side).filter(lambda window: window != (None, None))
    return st.fixed_dictionaries({}, optional={"is_causal": st.just(True), "window": windows, "scale": st.just(0.5)})


def by_definition(problem: Problem) -> Array:
    """Attend in each sequence on its own, to the keys that are used: (B, H, Lq, Dv)."""
    inputs, query = problem.inputs, problem.inputs["query"]
    value = inputs["value"] if "value" in inputs else inputs["value_pages"]
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    for entry, used in enumerate(inputs["key_lengths"]):
        if "block_table" in inputs:
            pages = (inputs[name][inputs["block_table"][entry]] for name in ("key_pages", "value_pages"))
            own_keys, own_values = (each.reshape(-1, *each.shape[2:]).swapaxes(0, 1)[:, :used] for each in pages)
        else:
            first = inputs["cu_seqlens_k"][entry]
            own_keys, own_values = (inputs[name][0, :, first : first + used] for name in ("key", "value"))
        place: Any = (entry, slice(None), slice(None))
        if "cu_seqlens_q" in inputs:
            place = (0, slice(None), slice(*inputs["cu_seqlens_q"][entry : entry + 2]))
        own_keys, own_values = (each.repeat(2, axis=0) for each in (own_keys, own_values))
        shape = (1, 4, query[place].shape[1], used)
        seen = definition(problem.options, {}, used - shape[2], shape)[0]
        if "tree_mask" in inputs:
            seen = seen & inputs["tree_mask"][place[2], :used]
        powers = np.exp(query[place] @ own_keys.swapaxes(1, 2) * problem.options.get("scale", 3**-0.5)) * seen
        total = powers.sum(-1, keepdims=True)
        output[place] = powers / np.where(total, total, 1) @ own_values
    return output


@given(packed() | paged() | ragged())
def test_packed_sequences_and_paged_caches_are_attention_with_one_mask(problem: Problem) -> None:
    plain = problem.without_layout()
    assert plain.operation == "attention"
    assert plain.options.keys() <= {"scale"}
    output = numpy_backend.attention(**plain.inputs, **plain.options)["output"]
    assert np.allclose(output, by_definition(problem), rtol=1e-12, atol=1e-12)


@given(packed() | paged() | ragged(), st.sampled_from(["nan", "large"]))
def test_poison_is_where_no_query_can_see_it_and_nowhere_else(problem: Problem, poison: str) -> None:
    inputs = poison_unused_keys({"poison": poison}, problem.inputs, "float32")
    assert np.array_equal(by_definition(problem), by_definition(replace(problem, inputs=inputs)))
    before, after = (
        replace(problem, options={}, inputs=each).without_layout().inputs for each in (problem.inputs, inputs)
    )
    assert all(np.array_equal(before[name], after[name]) for name in before)
    changed = {name for name in inputs if not np.array_equal(inputs[name], problem.inputs[name])}
    assert changed <= {"key", "value", "key_pages", "value_pages"}
    for name in changed:
        new = inputs[name][inputs[name] != problem.inputs[name]]
        assert (np.isnan(new) if poison == "nan" else new == 1e30).all()


@st.composite
def chosen(draw: st.DrawFn) -> Problem:
    """Draw indices of keys or of blocks, some of them none, for each head, for all heads, or for all queries."""
    batch, queries, keys = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(0, 7))
    block, width = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = (batch, draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, queries])), width)
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    blocks = -(-keys // block)
    named = [random.permutation(max(blocks, width))[:width] for _ in range(batch * shape[1] * shape[2])]
    indices = np.array(named).reshape(shape)
    inputs = {
        "query": random.normal(size=(batch, 4, queries, 3)),
        "key": random.normal(size=(batch, 2, keys, 3)),
        "value": random.normal(size=(batch, 2, keys, 2)),
        "key_indices": np.where((indices < blocks) & (random.random(shape) < 0.7), indices, -1),
        "key_lengths": random.integers(0, keys + 1, batch),
    }
    more = draw(options())
    if more.keys() & {"is_causal", "window"} and draw(st.booleans()):
        inputs["query_offsets"] = random.integers(0, 5, batch)
    return Problem("sparse_attention", more | ({"block_size": block} if block > 1 else {}), inputs)


def query_by_query(problem: Problem) -> Array:
    """Attend to the keys that each query names, one after the other: (B, H, Lq, Dv)."""
    inputs, query, block = problem.inputs, problem.inputs["query"], problem.options.get("block_size", 1)
    shape = (*query.shape[:3], inputs["key"].shape[2])
    rules = {name: inputs[name] for name in ("key_lengths", "query_offsets") if name in inputs}
    seen = definition(problem.options, rules, 0, shape)
    indices = np.broadcast_to(inputs["key_indices"], (shape[0], 2, shape[2], inputs["key_indices"].shape[-1]))
    output = np.zeros((*shape[:3], 2))
    for batch, head, row in product(*map(range, shape[:3])):
        named = [key for index in indices[batch, head // 2, row] if index >= 0 for key in _keys_of(index, block)]
        own = [key for key in named if key < shape[3] and seen[batch, head, row, key]]
        scores = inputs["key"][batch, head // 2, own] @ query[batch, head, row]
        powers = np.exp(scores * problem.options.get("scale", 3**-0.5))
        output[batch, head, row] = powers @ inputs["value"][batch, head // 2, own] / (powers.sum() or 1)
    return output


def _keys_of(index: int, block: int) -> range:
    return range(index * block, (index + 1) * block)


@given(chosen())
def test_chosen_keys_are_attention_with_one_mask(problem: Problem) -> None:
    plain = problem.without_layout()
    assert plain.operation == "attention"
    assert not {"key_indices", "block_size"} & {*plain.inputs, *plain.options}
    wanted = query_by_query(problem)
    for backend, of in ((numpy_backend.attention, plain), (numpy_backend.sparse_attention, problem)):
        assert np.allclose(backend(**of.inputs, **of.options)["output"], wanted, rtol=1e-12, atol=1e-12)
