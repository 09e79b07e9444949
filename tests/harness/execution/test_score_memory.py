"""Score matrices that would not fit: told from the shapes, before any framework is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attncheck.backends import Mode
from attncheck.execution.limits import scores_too_large
from attncheck.execution.worker import Task

LENGTH = 32_768
HOLDS, TILES = Mode("eager", "some_module", "modular"), Mode("flash", "some_module", "in tiles", holds_scores=False)


def task(operation: str = "attention", dtype: str = "float32", **options: Any) -> Task:
    """One head of 32,768 queries and keys that take no memory."""
    zero = np.broadcast_to(np.zeros((), dtype), (1, 1, LENGTH, 64))
    return Task(operation, options, dict.fromkeys(("query", "key", "value"), zero))


# raw_scores, scores, weights, and with causality masked: 2^30 scores each.
@pytest.mark.parametrize(("options", "dtype", "gibibytes"), [
    ({}, "float32", 12),
    ({"is_causal": True}, "float32", 16),
    ({"is_causal": True}, "float64", 32),
    ({"is_causal": True, "softcap": 2.0}, "float16", 10),
])  # fmt: skip
def test_what_the_stages_alone_take_is_the_limit(options: dict[str, Any], dtype: str, gibibytes: int) -> None:
    asked = task(dtype=dtype, **options)
    assert scores_too_large(HOLDS, asked, gibibytes * 2**30) is None
    found = scores_too_large(HOLDS, asked, gibibytes * 2**30 - 1)
    assert found is not None
    assert found.verdict == "unsupported"
    assert f"would hold 1,073,741,824 scores in {3 + len(options)} stages, {gibibytes}.0 GiB" in found.message


def test_a_kernel_that_takes_scores_in_tiles_is_asked() -> None:
    assert scores_too_large(TILES, task(), 1) is None


def test_heads_and_the_past_count() -> None:
    zero = np.broadcast_to(np.float32(0), (2, 16, 8))
    inputs = dict.fromkeys(("query", "key", "value"), zero)
    projected = Task("multi_head_attention", {"heads": 4}, inputs)
    elements, stages = 2 * 4 * 16 * 16, 3
    assert scores_too_large(HOLDS, projected, elements * stages * 4) is None
    assert scores_too_large(HOLDS, projected, elements * stages * 4 - 1) is not None
    per_head = {name: array[:, np.newaxis] for name, array in inputs.items()}
    past = Task("attention", {}, {**per_head, "past_key": per_head["key"], "past_value": per_head["value"]})
    elements = 2 * 16 * 32
    assert scores_too_large(HOLDS, past, elements * stages * 4) is None
    assert scores_too_large(HOLDS, past, elements * stages * 4 - 1) is not None


def test_gradients_return_no_scores_and_hold_them() -> None:
    found = scores_too_large(HOLDS, task("attention_gradients"), 8 * 2**30 - 1)
    assert found is not None
    assert "in 2 stages, 8.0 GiB" in found.message
    assert scores_too_large(HOLDS, task("attention_gradients"), 8 * 2**30) is None


def test_scores_that_are_given_are_there_already() -> None:
    given = Task("softmax", {}, {"scores": np.broadcast_to(np.float32(0), (1, 1, LENGTH, LENGTH))})
    assert scores_too_large(HOLDS, given, 1) is None
