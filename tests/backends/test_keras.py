"""Keras on PyTorch and on JAX, each in a process of its own: right where it is judged, and what is refused is said."""

from __future__ import annotations

import pytest

from attncheck import check
from attncheck.backends import LIBRARIES

KERAS = LIBRARIES["keras"]
pytestmark = [pytest.mark.keras]


@pytest.mark.parametrize(("mode", "package"), [("torch_dpa", "torch"), ("jax_dpa", "jax")])
def test_attention_is_right_wherever_it_is_judged(mode: str, package: str) -> None:
    for each in ("keras", package):
        pytest.importorskip(each)
    result = check(f"keras.{mode}", cases=["attention", "scoring", "grouped_heads"], dtypes=["float32", "bfloat16"])
    assert result.agrees, result.explain()
    assert result.judged >= 5


def test_each_backend_is_configured_by_its_environment() -> None:
    modes = KERAS.all_modes
    assert {name: mode.environment["KERAS_BACKEND"] for name, mode in modes.items()} == {
        "torch_dpa": "torch",
        "jax_dpa": "jax",
    }
    assert all(mode.own_process for mode in modes.values())
