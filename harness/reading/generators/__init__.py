"""Random numbers as documents draw them, reproduced without the software that they were drawn with.

A generator is a class that is made from a seed and has one method per distribution that it knows; drawing advances it.
To add one, write its module, add its line here and its name to ``case_model.Random``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.generators.numpy_legacy import NumpyLegacy
from attncheck.reading.generators.r import R
from attncheck.reading.generators.torch_cpu import TorchCpu

Generator = NumpyLegacy | R | TorchCpu

GENERATORS: Mapping[str, type[Generator]] = {"numpy-legacy": NumpyLegacy, "r": R, "torch": TorchCpu}


class DrawFault(ValueError):
    """A draw that the generator does not know, or whose parameters do not fit."""


def check_draw(generator: str, distribution: str, parameters: Mapping[str, object], shape: tuple[int, ...]) -> None:
    """Raise ``DrawFault`` unless the generator can make this draw; draws nothing."""
    known = distributions(generator)
    if distribution not in known:
        raise DrawFault(f"the generator {generator} has no {distribution}; expected one of {', '.join(known)}")
    wanted = known[distribution]
    for name in sorted(wanted - set(parameters)):
        raise DrawFault(f"{distribution} of {generator} needs {name}")
    for name in sorted(set(parameters) - wanted):
        raise DrawFault(f"{distribution} of {generator} takes no {name}")
    low, high = parameters.get("low"), parameters.get("high")
    if isinstance(low, int | float) and isinstance(high, int | float) and not low < high:
        raise DrawFault(f"expected low < high, got {low} and {high}")
    if generator == "torch" and distribution == "randn" and 0 < np.prod(shape) < TorchCpu.SMALLEST_RANDN:
        raise DrawFault(
            f"torch draws fewer than {TorchCpu.SMALLEST_RANDN} normal numbers by another method; "
            "expected a shape of at least as many"
        )


@cache
def distributions(generator: str) -> Mapping[str, frozenset[str]]:
    """Return what a generator can draw, and the parameters that each draw needs beside its shape."""
    methods = {name: member for name, member in vars(GENERATORS[generator]).items() if _is_distribution(name, member)}
    return {
        name: frozenset(inspect.signature(methods[name]).parameters) - {"self", "shape"} for name in sorted(methods)
    }


def draw(
    generator: Generator, distribution: str, shape: tuple[int, ...], parameters: Mapping[str, float]
) -> NDArray[Any]:
    """Draw an array and advance the generator. The draw has passed ``check_draw``."""
    array: NDArray[Any] = getattr(generator, distribution)(shape, **parameters)
    return array


def _is_distribution(name: str, member: object) -> bool:
    return not name.startswith("_") and inspect.isfunction(member)
