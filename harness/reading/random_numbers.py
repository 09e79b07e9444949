"""Random numbers as documents draw them, reproduced without the software that they were drawn with.

A generator is a class that is made from a seed and has one method per distribution that it knows; drawing advances it.
To add one, write its class, add its line to ``GENERATORS`` and its name to ``model.Random``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from flint import arb


def words_from_state(state: NDArray[np.uint32]) -> Callable[[int], NDArray[np.uint64]]:
    """Return a function that gives the next n 32-bit words after the 624 words of ``state``."""
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": state, "pos": 624}}
    return twister.random_raw


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


Generator = NumpyLegacy | R | TorchCpu

GENERATORS: Mapping[str, type[Generator]] = {"numpy-legacy": NumpyLegacy, "r": R, "torch": TorchCpu}


def check_draw(generator: str, distribution: str, parameters: Mapping[str, object], shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless the generator can make this draw; draws nothing."""
    known = distributions(generator)
    if distribution not in known:
        raise ValueError(f"the generator {generator} has no {distribution}; expected one of {', '.join(known)}")
    wanted = known[distribution]
    for name in sorted(wanted - set(parameters)):
        raise ValueError(f"{distribution} of {generator} needs {name}")
    for name in sorted(set(parameters) - wanted):
        raise ValueError(f"{distribution} of {generator} takes no {name}")
    low, high = parameters.get("low"), parameters.get("high")
    if isinstance(low, int | float) and isinstance(high, int | float) and not low < high:
        raise ValueError(f"expected low < high, got {low} and {high}")
    if generator == "torch" and distribution == "randn" and 0 < np.prod(shape) < TorchCpu.SMALLEST_RANDN:
        raise ValueError(
            f"torch draws fewer than {TorchCpu.SMALLEST_RANDN} normal numbers by another method; "
            "expected a shape of at least as many"
        )


@cache
def distributions(generator: str) -> Mapping[str, frozenset[str]]:
    """Return what a generator can draw, and the parameters that each draw needs beside its shape."""
    methods = sorted(inspect.getmembers(GENERATORS[generator], inspect.isfunction))
    public = {name: inspect.signature(method).parameters for name, method in methods if not name.startswith("_")}
    return {name: frozenset(parameters) - {"self", "shape"} for name, parameters in public.items()}
