"""``numpy.random.seed`` and its functions: the RandomState stream, which NumPy has frozen (NEP 19)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_free: list[np.random.RandomState] = []
"""Generators that nobody draws from any more."""


class NumpyLegacy:
    """NumPy's legacy generator after ``numpy.random.seed(seed)``; float64 and int64, row order."""

    def __init__(self, seed: int) -> None:
        # A new one draws entropy first, which takes sixty times as long as to seed one that is there.
        self._state = _free.pop() if _free else np.random.RandomState(0)
        self._state.seed(seed)

    def __del__(self) -> None:
        _free.append(self._state)

    def rand(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Uniform on [0, 1)."""
        return self._state.random_sample(shape)

    def randn(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Standard normal, by the polar method."""
        return self._state.standard_normal(shape)

    def randint(self, shape: tuple[int, ...], low: int, high: int) -> NDArray[Any]:
        """Integers of [low, high)."""
        # The default dtype is the platform's long; the document's was 64 bits wide.
        return self._state.randint(low, high, size=shape, dtype=np.int64)

    def runif(self, shape: tuple[int, ...], low: float, high: float) -> NDArray[Any]:
        """Uniform on [low, high)."""
        return self._state.uniform(low, high, shape)
