"""Kernels with 16-bit ends: inputs are widened to float32, results are rounded once, and what is between is stated.

In float64 and float32 nothing is rounded in between, so that one kernel serves all four dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutation.arithmetic import Store, exactly
from attncheck.mutation.variant import OPERATIONS, Steps, Variant
from attncheck.spec import ON_SCORES, STAGE_SPECS
from attncheck.spec import OPERATIONS as SPECS

NARROW = ("bfloat16", "float16")
ALL = ("float64", "float32", *NARROW)
NEVER_RETURNED = frozenset(ON_SCORES)
"""What a fused kernel holds in tiles and never as a whole."""
Inside: TypeAlias = Callable[[Store], Steps]
"""Makes the steps that run between the ends; it is handed how a number is stored in the format of the ends."""


def stored_as(dtype: np.dtype[Any]) -> Store:
    """Round to a 16-bit format and widen again."""
    return lambda array: array.astype(dtype).astype(array.dtype)


STATISTICS = frozenset(name for name, spec in STAGE_SPECS.items() if spec.may_be_wide)
"""What a kernel may return in float32, whatever its ends are."""


class Kernel(Variant):
    """A kernel that widens, computes and narrows, all but its ``wide`` stages; the steps of ``inside`` compute."""

    def __init__(
        self, inside: Inside, *, hidden: frozenset[str] = NEVER_RETURNED, wide: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(hidden=hidden)
        self._wide = wide
        self.steps = None  # they follow from the ends
        self._inside = inside
        self._variants: dict[str | None, Variant] = {}
        for name in OPERATIONS:
            self._offer(name, partial(self._between_ends, name))

    def _between_ends(self, name: str, *arrays: Any, **given: Any) -> Stages:
        ends = next((each.dtype for each in (*arrays, *given.values()) if _is_narrow(each)), None)
        variant = self._variant(ends)
        widened = {key: _widened(each) for key, each in given.items()}
        stages: Stages = getattr(variant, name)(*map(_widened, arrays), **widened)
        if ends is None:
            return stages
        wide = self._wide | (SPECS[name].statistics if name in SPECS else frozenset())
        return {stage: array if stage in wide else array.astype(ends) for stage, array in stages.items()}

    def _variant(self, ends: np.dtype[Any] | None) -> Variant:
        """Return what computes between ends of a format, which is made once."""
        name = None if ends is None else ends.name
        if name not in self._variants:
            self._variants[name] = Variant(self._inside(exactly if ends is None else stored_as(ends)))
        return self._variants[name]


def _is_narrow(given: Any) -> bool:
    return isinstance(given, np.ndarray) and given.dtype.name in NARROW


def _widened(given: Any) -> Any:
    return given.astype(np.float32) if _is_narrow(given) else given
