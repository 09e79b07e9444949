"""The 32-bit Mersenne Twister from a given state (Matsumoto and Nishimura 1998), by NumPy's implementation of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def words_from_state(state: NDArray[np.uint32]) -> Callable[[int], NDArray[np.uint64]]:
    """Return a function that gives the next n 32-bit words after the 624 words of ``state``."""
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": state, "pos": 624}}
    return twister.random_raw
