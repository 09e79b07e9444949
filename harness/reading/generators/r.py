"""R's ``set.seed`` and ``runif``, in R's default configuration (Mersenne Twister).

Source: R, src/main/RNG.c: ``RNG_Init`` scrambles the seed 50 times by s <- 69069 s + 1 (mod 2^32) and then takes 625
further values of the same recurrence, the first of which is replaced by the position 624; ``MT_genrand`` multiplies a
32-bit word by 2.3283064365386963e-10 and ``fixup`` keeps the result inside (0, 1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.generators.mersenne_twister import words_from_state

_WORD_TO_UNIT = 2.3283064365386963e-10
_HALF_STEP = 0.5 * 2.328306437080797e-10
_INITIAL_SCRAMBLING = 50
_STATE_WORDS = 624


class R:
    """R's generator after ``set.seed(seed)``; float64, column order."""

    def __init__(self, seed: int) -> None:
        words = []
        for step in range(_INITIAL_SCRAMBLING + 1 + _STATE_WORDS):
            seed = (69069 * seed + 1) % 2**32
            if step > _INITIAL_SCRAMBLING:
                words.append(seed)
        self._words = words_from_state(np.array(words, dtype=np.uint32))

    def runif(self, shape: tuple[int, ...], low: float, high: float) -> NDArray[np.float64]:
        """Uniform on (low, high); ``matrix(runif(n, low, high), nrow, ncol)`` fills by columns."""
        unit = np.clip(self._words(int(np.prod(shape))) * _WORD_TO_UNIT, _HALF_STEP, 1 - _HALF_STEP)
        numbers: NDArray[np.float64] = low + (high - low) * unit
        return numbers.reshape(shape, order="F")
