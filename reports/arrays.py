"""The arrays that runs kept, read one case at a time: a report of a million rows reads only what it draws."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.errors import ResultsError
from attncheck.results.parts import ArrayParts

Array = NDArray[Any]
Kept = tuple[str, str, str]
"""environment, implementation, stage; ``EXACT``, ``INPUTS`` and ``bound_name(class)`` take an implementation's place"""


@dataclass(frozen=True)
class KeptArrays:
    """Arrays of runs, by the runs' labels and directories; nothing is read before it is asked for."""

    directories: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def _parts(self) -> Mapping[str, ArrayParts]:
        return {environment: ArrayParts(directory) for environment, directory in self.directories.items()}

    def units(self) -> tuple[tuple[str, str], ...]:
        """Return the (case, dtype) of which something was kept, sorted; the arrays themselves are not read."""
        return tuple(sorted({unit for parts in self._parts.values() for unit in parts.units()}))

    def of(self, case: str, dtype: str) -> dict[Kept, Array]:
        """Return what was kept of one case in one dtype, empty where nothing was; arrays are read-only.

        What cannot be read is as if it were not kept: a report without a picture says more than none.
        """
        found: dict[Kept, Array] = {}
        for environment, parts in self._parts.items():
            with suppress(ResultsError):
                found |= {(environment, *key): array for key, array in parts.of(case, dtype).items()}
        return found


def error_ratio(computed: Array, reference: Array, allowed: Array) -> NDArray[np.float64]:
    """Return the error of every element over what is allowed; 1 is the limit. All three have one shape.

    ``reference`` is the exact answer and ``allowed`` the bound, or another implementation's array and both bounds'
    sum. NaN where nothing was judged, or where the exact answer leaves open what is right; infinite where NaN or
    infinity stands in one of the two alone.
    """
    from attncheck.judging.compare import absolute_difference, differing_nonfinite, quotient

    ratio = quotient(absolute_difference(computed, reference), allowed)
    ratio[differing_nonfinite(computed, reference)] = np.inf
    ratio[np.isposinf(allowed) | np.isnan(allowed)] = np.nan
    return ratio
