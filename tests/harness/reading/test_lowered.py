"""Packed sequences and paged caches become plain attention, exactly; what does not fit together is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.reading.canonical import AttentionProblem
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.lowered import _LAID_OUT_BY, lowered, poisoned
from attncheck.reading.selection import select_cases
from attncheck.spec import OPERATIONS

Array = NDArray[Any]


@st.composite
def packed(draw: st.DrawFn) -> AttentionProblem:
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
    return AttentionProblem(draw(options()), inputs)


@st.composite
def paged(draw: st.DrawFn) -> AttentionProblem:
    """Draw a cache whose tables name pages in any order, some of them twice."""
    page, width, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pages = draw(st.integers(width, 6))
    table = np.array([draw(st.lists(st.integers(0, pages - 1), min_size=width, max_size=width)) for _ in range(batch)])
    used = np.array([draw(st.integers(0, page * width)) for _ in range(batch)])
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    inputs = {
        "query": random.normal(size=(batch, 4, draw(st.integers(1, 4)), 3)),
        "key_pages": random.normal(size=(pages, page, 2, 3)),
        "value_pages": random.normal(size=(pages, page, 2, 2)),
        "block_table": table,
        "key_lengths": used,
    }
    return AttentionProblem(draw(options()), inputs)


def options() -> st.SearchStrategy[dict[str, Any]]:
    side = st.one_of(st.none(), st.integers(0, 3))
    windows = st.tuples(side, side).filter(lambda window: window != (None, None))
    return st.fixed_dictionaries({}, optional={"is_causal": st.just(True), "window": windows, "scale": st.just(0.5)})


def by_loops(posed: AttentionProblem) -> Array:
    """Attend key by key, from the definition: (B, H, Lq, Dv)."""
    inputs, query = posed.inputs, posed.inputs["query"]
    value = inputs.get("value", inputs.get("value_pages"))
    assert value is not None
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    for b, h, i in np.ndindex(query.shape[:3]):
        rows = list(keys_of(posed, b, h // 2, i))
        scores = [query[b, h, i] @ key * posed.options.get("scale", 3**-0.5) for key, _ in rows]
        weights = np.exp(scores) / np.exp(scores).sum() if rows else []
        output[b, h, i] = sum((weight * own for weight, (_, own) in zip(weights, rows, strict=True)), np.zeros(2))
    return output


def keys_of(posed: AttentionProblem, b: int, head: int, i: int) -> Any:
    """Yield the keys and values that a query sees."""
    inputs = posed.inputs
    if "block_table" in inputs:
        page, used, queries = inputs["key_pages"].shape[1], inputs["key_lengths"][b], inputs["query"].shape[2]
        for t in range(used):
            if is_near(posed, used - queries + i, t):
                slot = inputs["block_table"][b, t // page], t % page, head
                yield inputs["key_pages"][slot], inputs["value_pages"][slot]
        return
    starts, limits = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    sequence = max(s for s in range(len(starts) - 1) if starts[s] <= i < starts[s + 1])
    used, queries = inputs["key_lengths"][sequence], starts[sequence + 1] - starts[sequence]
    for t in range(used):
        if is_near(posed, used - queries + i - starts[sequence], t):
            at = 0, head, limits[sequence] + t
            yield inputs["key"][at], inputs["value"][at]


def is_near(posed: AttentionProblem, position: int, key: int) -> bool:
    left, right = posed.options.get("window") or (None, None)
    is_left = left is None or key >= position - left
    is_right = right is None or key <= position + right
    return is_left and is_right and not (posed.options.get("is_causal") and key > position)


@given(packed())
@settings(max_examples=150, deadline=None)
def test_packed_sequences_are_attention_with_one_mask(posed: AttentionProblem) -> None:
    operation, plain = lowered("packed_attention", posed)
    assert operation == "attention"
    assert plain.options.keys() <= {"scale"}
    output = numpy_backend.attention(**plain.inputs, **plain.options)["output"]
    assert np.allclose(output, by_loops(posed), rtol=1e-12, atol=1e-12)


@given(paged())
@settings(max_examples=150, deadline=None)
def test_paged_caches_are_attention_to_what_they_hold(posed: AttentionProblem) -> None:
    operation, plain = lowered("paged_attention", posed)
    assert operation == "attention"
    output = numpy_backend.attention(**plain.inputs, **plain.options)["output"]
    assert np.allclose(output, by_loops(posed), rtol=1e-12, atol=1e-12)


@given(st.one_of(packed(), paged()), st.sampled_from(["nan", "large"]))
@settings(max_examples=100, deadline=None)
def test_poison_is_where_no_query_can_see_it_and_nowhere_else(posed: AttentionProblem, poison: str) -> None:
    operation = "paged_attention" if "block_table" in posed.inputs else "packed_attention"
    inputs = poisoned({"poison": poison}, posed.inputs, "float32")
    assert np.array_equal(by_loops(posed), by_loops(AttentionProblem(posed.options, inputs)))
    before, after = (lowered(operation, AttentionProblem({}, each))[1].inputs for each in (posed.inputs, inputs))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    changed = [name for name in inputs if not np.array_equal(inputs[name], posed.inputs[name])]
    assert set(changed) <= {"key", "value", "key_pages", "value_pages"}
    for name in changed:
        was_changed = inputs[name] != posed.inputs[name]
        assert (
            np.isnan(inputs[name][was_changed]).all() if poison == "nan" else (inputs[name][was_changed] == 1e30).all()
        )


def test_large_poison_is_a_number_that_the_dtype_has() -> None:
    [case] = select_cases(["paged/slots-and-pages-that-nobody-uses-hold-large-numbers"]).cases
    exact = make_exact_inputs(case)
    for dtype, largest in (("float16", 65504.0), ("float32", np.float32(1e30))):
        found = convert_inputs(case, exact, dtype).arrays["value_pages"]
        assert found.max() == largest


FILE = """\
title: Sequences
source: {{kind: derivation, title: Sequences, notes: [none]}}
operation: {operation}
defaults: {{random: {{generator: numpy-legacy, seed: 1}}}}
cases:
  - name: Something that does not fit
    inputs: {{{inputs}}}
"""
PACKED = {
    "query": "{draw: randn, shape: [1, 2, 5, 3]}",
    "key": "{draw: randn, shape: [1, 2, 6, 3]}",
    "value": "{draw: randn, shape: [1, 2, 6, 3]}",
    "cu_seqlens_q": "{values: [0, 2, 5]}",
    "cu_seqlens_k": "{values: [0, 2, 6]}",
}
PAGED = {
    "query": "{draw: randn, shape: [2, 2, 1, 3]}",
    "key_pages": "{draw: randn, shape: [4, 2, 2, 3]}",
    "value_pages": "{draw: randn, shape: [4, 2, 2, 3]}",
    "block_table": "{values: [[0, 1], [2, 3]]}",
    "key_lengths": "{values: [4, 1]}",
}


@pytest.mark.parametrize(
    ("operation", "changes", "field", "message"),
    [
        (
            "packed_attention",
            {"cu_seqlens_q": "{values: [0, 2, 4]}"},
            "cu_seqlens_q",
            "limits from 0 to 5, the length of query",
        ),
        ("packed_attention", {"cu_seqlens_k": "{values: [1, 2, 6]}"}, "cu_seqlens_k", "got 1 to 6"),
        (
            "packed_attention",
            {"cu_seqlens_k": "{values: [0, 4, 2, 6]}", "cu_seqlens_q": "{values: [0, 1, 2, 5]}"},
            "cu_seqlens_k",
            "none is smaller than the one before",
        ),
        ("packed_attention", {"cu_seqlens_k": "{values: [0, 6]}"}, "cu_seqlens_k", "S1"),
        ("packed_attention", {"cu_seqlens_k": "{values: [0, 7]}"}, "cu_seqlens_k", "S1"),
        (
            "packed_attention",
            {"cu_seqlens_k": "{values: [0, 9, 6]}"},
            "cu_seqlens_k",
            "at most 6, as there are 6 keys, got 9",
        ),
        (
            "packed_attention",
            {"key_lengths": "{values: [2, 4, 1]}"},
            "key_lengths",
            "one for each of 2 sequences, got 3",
        ),
        (
            "packed_attention",
            {"key_lengths": "{values: [3, 4]}"},
            "key_lengths",
            "sequence 0 has 2 keys, of which 3 cannot be used",
        ),
        ("packed_attention", {"query": "{draw: randn, shape: [2, 2, 5, 3]}"}, "", "to be 2 as in query, got 1"),
        (
            "paged_attention",
            {"block_table": "{values: [[0, 1], [4, 3]]}"},
            "block_table",
            "uses a page that is not there",
        ),
        (
            "paged_attention",
            {"block_table": "{values: [[0, 1], [5, 3]]}"},
            "block_table",
            "at most 4, as there are 4 pages, got 5",
        ),
        (
            "paged_attention",
            {"key_lengths": "{values: [5, 1]}"},
            "key_lengths",
            "at most 4, as there are 4 keys, got 5",
        ),
        ("paged_attention", {"block_table": "{values: [[0, 1]]}"}, "block_table", "axis B"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, operation: str, changes: dict[str, str], field: str, message: str
) -> None:
    given = {**(PACKED if operation == "packed_attention" else PAGED), **changes}
    inputs = ", ".join(f"{name}: {text}" for name, text in given.items())
    (tmp_path / "cases.yaml").write_text(FILE.format(operation=operation, inputs=inputs))
    selection = select_cases([str(tmp_path / "cases.yaml")])
    assert not selection.cases
    [fault] = selection.faults
    assert message in str(fault)
    assert field in str(fault)


def test_a_table_may_name_no_page_where_none_is_used(tmp_path: Path) -> None:
    given = {**PAGED, "block_table": "{values: [[0, 1], [2, 4]]}"}
    inputs = ", ".join(f"{name}: {text}" for name, text in given.items())
    (tmp_path / "cases.yaml").write_text(FILE.format(operation="paged_attention", inputs=inputs))
    assert len(select_cases([str(tmp_path / "cases.yaml")]).cases) == 1


def test_no_number_is_expected_of_what_is_lowered(tmp_path: Path) -> None:
    inputs = ", ".join(f"{name}: {text}" for name, text in PAGED.items())
    text = FILE.format(operation="paged_attention", inputs=inputs) + "    expect: [{stage: output, printed: '1'}]\n"
    (tmp_path / "cases.yaml").write_text(text)
    [fault] = select_cases([str(tmp_path / "cases.yaml")]).faults
    assert "held against the exact answer alone" in str(fault)


def test_every_operation_that_lowers_to_another_is_laid_out() -> None:
    assert set(_LAID_OUT_BY) == {name for name, own in OPERATIONS.items() if own.is_lowered}
