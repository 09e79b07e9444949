"""A truth that many implementations are held against, one after the other: no exact step is worked out twice.

Most faults change a single step. All stages before it are the reference's, and so are the steps between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from attncheck.attention.bounds import Bound
from attncheck.judging.judge_stages import failing_elements, in_order
from attncheck.judging.truth import Array, Stages, Truth, digest, is_measured
from attncheck.oracle.enclosure import Enclosure

Step: TypeAlias = tuple[Enclosure, Bound] | None
_BESIDE = frozenset({"log_sum_exp"})
"""Stages that no other follows from."""


@dataclass(frozen=True, eq=False)
class RememberingTruth(Truth):
    """The same truth, its exact steps kept by what they start from.

    Behind a step that is itself proved wrong nothing more is to be learnt: its followers have no exact step.
    """

    _steps: dict[Any, Step] = field(default_factory=dict)
    _wrong: dict[Any, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, truth: Truth) -> RememberingTruth:
        """Return a truth that remembers."""
        return cls(**{item.name: getattr(truth, item.name) for item in fields(Truth)})

    def introduced(self, stage: str, returned: Stages, rounding_model: str) -> Step:
        """Return a stage's exact value from the stages before it, and its bound; None behind a step that is wrong."""
        order = in_order(returned)
        before = [name for name in order[: order.index(stage)] if name not in _BESIDE]
        keys = {name: (name, rounding_model, digest(returned[name])) for name in before}
        past: tuple[Any, ...] = (rounding_model,)  # the first stage follows from no other, but its bound is of a class
        for name in before:
            if self._is_wrong(name, returned[name], past, keys[name]):
                return None
            past = (*past, keys[name])
        if (stage, past) not in self._steps:
            self._steps[stage, past] = super().introduced(stage, returned, rounding_model)
        return self._steps[stage, past]

    def _is_wrong(self, stage: str, array: Array, past: tuple[Any, ...], key: Any) -> bool:
        """Whether a stage is proved wrong by its own step, or by the places where it is not finite."""
        if (past, key) not in self._wrong:
            self._wrong[past, key] = self._finds_wrong(stage, array, past, key[1])
        return self._wrong[past, key]

    def _finds_wrong(self, stage: str, array: Array, past: tuple[Any, ...], rounding_model: str) -> bool:
        if stage not in self.exact:
            return False
        finite = np.isfinite(array.astype(np.float64)) & np.isfinite(self.exact[stage].high)
        step = self._steps.get((stage, past))
        if step is None:
            return bool((failing_elements(self, stage, array, rounding_model) & ~finite).any())
        exact, bound = step
        with np.errstate(invalid="ignore"):  # infinity against infinity is out of range
            beyond = is_measured(exact, bound, self.dtype) & (exact.error_of(array) - exact.radius > bound.worst)
        return bool(beyond.any())
