"""What is said of packed sequences and paged caches that were read in another way."""

from __future__ import annotations

from pathlib import Path

import pytest

import attncheck

pytestmark = pytest.mark.usefixtures("workers_here")

CASES = Path(__file__).parents[3] / "cases"
KERNEL = """
import numpy as np
from attncheck.backends import numpy_backend


def packed_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, *, key_lengths=None, **options):
    {packed}
    return numpy_backend.packed_attention(
        query, key, value, cu_seqlens_q, cu_seqlens_k, key_lengths=key_lengths, **options
    )["output"]


def paged_attention(query, key_pages, value_pages, block_table, key_lengths, **options):
    {paged}
    return numpy_backend.paged_attention(query, key_pages, value_pages, block_table, key_lengths, **options)["output"]
"""
PACKED = {
    "sequences-ignored": "cu_seqlens_q, cu_seqlens_k, key_lengths = cu_seqlens_q[[0, -1]], cu_seqlens_k[[0, -1]], None",
    "limits-of-queries": "cu_seqlens_k = cu_seqlens_q if cu_seqlens_q[-1] == cu_seqlens_k[-1] else cu_seqlens_k",
    "key-lengths-one-too-short": "key_lengths = None if key_lengths is None else np.maximum(key_lengths - 1, 0)",
}
PAGED = {
    "block-table-of-first-batch-entry": "block_table = np.broadcast_to(block_table[:1], block_table.shape)",
    "block-table-ignored": "block_table = np.arange(block_table.size).reshape(block_table.shape) % len(key_pages)",
    "key-lengths-one-too-short": "key_lengths = np.maximum(key_lengths - 1, 0)",
}


def named(tmp_path: Path, topic: str, **faults: str) -> set[str]:
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL.format(**{"packed": "pass", "paged": "pass", **faults}), encoding="utf-8")
    result = attncheck.check(path, cases=[str(CASES / f"{topic}.yaml")], dtypes=["float64"])
    assert not result.agrees
    return set(result.frames.results["diagnosis"].dropna())


@pytest.mark.parametrize("name", PACKED)
def test_what_was_read_in_place_of_limits_is_named(name: str, tmp_path: Path) -> None:
    assert named(tmp_path, "packed", packed=PACKED[name]) == {name}


@pytest.mark.parametrize("name", PAGED)
def test_what_was_read_in_place_of_pages_is_named(name: str, tmp_path: Path) -> None:
    assert named(tmp_path, "paged", paged=PAGED[name]) == {name}
