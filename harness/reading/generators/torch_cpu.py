"""torch's CPU generator after ``torch.manual_seed``: ``rand`` and ``randn`` in float32.

Source: PyTorch, aten/src/ATen/core/MT19937RNGEngine.h (seeding as in the reference Mersenne Twister),
aten/src/ATen/core/TransformationHelper.h (``uniform_real``: the low 24 bits of a word, times 2^-24) and
aten/src/ATen/native/cpu/DistributionTemplates.h (``normal_fill``: Box-Muller on blocks of 16 uniforms, of which the
first eight are radii and the last eight angles; a last block that is not full is drawn anew).

torch's builds differ among themselves in the last bits of ``randn``, because each vector unit has its own logarithm and
cosine. Here every step is rounded correctly to float32, so the numbers are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.generators.mersenne_twister import words_from_state

if TYPE_CHECKING:
    from flint import arb

_BLOCK = 16
_TWO_PI = np.float32(2 * np.pi)


class TorchCpu:
    """torch's CPU generator after ``torch.manual_seed(seed)``; float32, row order."""

    SMALLEST_RANDN = _BLOCK

    def __init__(self, seed: int) -> None:
        # RandomState(seed) has the reference initialisation of the twister, which torch uses too.
        state = np.random.RandomState(seed).get_state(legacy=False)["state"]["key"]
        self._words = words_from_state(state)

    def rand(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Uniform on [0, 1), bit for bit."""
        return self._uniform(int(np.prod(shape))).reshape(shape)

    def randn(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Standard normal, at least 16 numbers; torch's own builds come within 2^-20 of it."""
        size = int(np.prod(shape))
        uniform = self._uniform(size)
        normal = np.empty(size, dtype=np.float32)
        full = size - size % _BLOCK
        normal[:full] = _box_muller(uniform[:full])
        if size > full:
            normal[-_BLOCK:] = _box_muller(self._uniform(_BLOCK))
        return normal.reshape(shape)

    def _uniform(self, size: int) -> NDArray[np.float32]:
        return (self._words(size) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)


def _box_muller(uniform: NDArray[np.float32]) -> NDArray[np.float32]:
    radii, angles = np.split(uniform.reshape(-1, _BLOCK), 2, axis=1)
    from flint import arb  # few cases draw normal numbers

    logarithm = _rounded_once(1 - radii, np.log, arb.log)
    radius = np.sqrt(-2 * logarithm)  # IEEE 754 rounds a square root correctly
    theta = _TWO_PI * angles
    cosine = _rounded_once(theta, np.cos, arb.cos)
    sine = _rounded_once(theta, np.sin, arb.sin)
    return np.concatenate([radius * cosine, radius * sine], axis=1).ravel()


def _rounded_once(
    argument: NDArray[np.float32],
    function: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    exact_function: Callable[[arb], arb],
) -> NDArray[np.float32]:
    """Evaluate a function of float32 numbers, correctly rounded to float32.

    float64 is good to a few of its own units, which decides the rounding except very close to the middle between two
    float32 numbers; there, interval arithmetic decides.
    """
    from flint import arb, ctx

    close = function(argument.astype(np.float64))
    rounded = close.astype(np.float32)
    slack = 8 * np.spacing(np.abs(close))
    undecided = (close - slack).astype(np.float32) != (close + slack).astype(np.float32)
    for index in zip(*np.nonzero(undecided), strict=True):
        # 128 bits are far more than the distance of such a value from the middle ever needs here.
        with ctx.workprec(128):
            exact = exact_function(arb(float(argument[index])))
            low, high = (_float32_nearest(exact, side) for side in (-1, 1))
        assert low == high, "the value lies exactly in the middle, which log, cos and sin of float32 numbers never do"
        rounded[index] = low
    return rounded


def _float32_nearest(exact: arb, side: int) -> np.float32:
    """Round an enclosure's lower (-1) or upper (1) end to float32."""
    from flint import arb

    end = exact.lower() if side < 0 else exact.upper()
    near = np.float32(float(end))
    # float() rounded to float64 first; step to the float32 that is closest to the end itself.
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda candidate: abs(end - arb(float(candidate))).mid())
