"""Compiled attention: the numbers of the formula, one compilation for all lengths, and never eager code unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS, numpy_backend

TORCH = BACKENDS["torch"]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not TORCH.is_installed, reason="torch is not installed"),
]

RNG = np.random.default_rng(2302)
UNIT = 2.0**-53
# What test_gradients.py allows gradients, and more than test_attention.py allows stages.
TOLERANCE = 7 * 120 * 10


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    import torch

    backend, threads = TORCH.load("compile"), torch.get_num_threads()
    kept = {"recompile_limit": 8, "accumulated_recompile_limit": 256, "fail_on_recompile_limit_hit": False}
    with torch._dynamo.config.patch(**kept):  # what prepare() changes is put back
        backend.prepare("float64", 1)
        yield backend
    torch.set_num_threads(threads)


def problem(queries: int, keys: int, width: int) -> dict[str, Any]:
    """Draw attention with every option; B 2, H 4 in 2 groups, Dv 3. Lengths that are alike are compiled as such."""
    arrays = {
        "query": RNG.uniform(-1, 1, (2, 4, queries, width)),
        "key": RNG.uniform(-1, 1, (2, 2, keys, width)),
        "value": RNG.uniform(-1, 1, (2, 2, keys, 3)),
        "mask": RNG.random((2, 1, queries, keys)) < 0.7,
        "bias": RNG.uniform(-1, 1, (1, 4, queries, keys)),
        "key_lengths": np.array([0, keys - 1]),
    }
    return {**arrays, "is_causal": True, "window": (queries // 2, 1), "scale": 0.7, "softcap": 1.5}


def run(backend: Any, operation: str, inputs: dict[str, Any]) -> dict[str, NDArray[Any]]:
    converted = {
        name: backend.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()
    }
    return {name: backend.to_numpy(stage) for name, stage in getattr(backend, operation)(**converted).items()}


def test_compiled_attention_is_the_formula_and_new_lengths_are_no_new_compilation(compiled: Any) -> None:
    import torch

    counts = []
    for lengths in ((5, 6, 7), (9, 7, 8), (16, 16, 16)):
        inputs = problem(*lengths)
        found, expected = run(compiled, "attention", inputs), numpy_backend.attention(**inputs)
        assert list(found) == list(expected)
        for stage, array in expected.items():
            np.testing.assert_allclose(found[stage], array, rtol=0, atol=TOLERANCE * UNIT, err_msg=stage)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[1] == counts[2] > 0


def test_compiled_gradients_are_the_formula(compiled: Any) -> None:
    inputs = {**problem(5, 6, 7), "grad_output": RNG.uniform(-1, 1, (2, 4, 5, 3))}
    found, expected = run(compiled, "attention_gradients", inputs), numpy_backend.attention_gradients(**inputs)
    assert list(found) == list(expected)
    for stage, array in expected.items():
        np.testing.assert_allclose(found[stage], array, rtol=0, atol=TOLERANCE * UNIT, err_msg=stage)


def test_one_compilation_too_many_is_an_error_and_not_eager_code(compiled: Any) -> None:
    import torch

    torch._dynamo.reset()
    scores = torch.zeros(2, 3, 4, 5)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled.softmax(scores)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled.softmax(scores.double())
