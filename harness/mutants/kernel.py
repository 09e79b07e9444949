"""Kernels with 16-bit ends: inputs are widened to float32, results are rounded once, and what is between is stated.

In float64 and float32 nothing is rounded in between, so that one kernel serves all four dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.rounding import Store, exactly
from attncheck.mutants.variant import Variant
from attncheck.spec import ON_SCORES

NARROW = ("bfloat16", "float16")
ALL = ("float64", "float32", *NARROW)
NEVER_RETURNED = frozenset(ON_SCORES)
"""What a fused kernel holds in tiles and never as a whole."""
Inside = Callable[[Store], Variant]
"""Makes what runs between the ends; it is handed how a number is stored in the format of the ends."""


def stored_as(dtype: np.dtype[Any]) -> Store:
    """Round to a 16-bit format and widen again."""
    return lambda array: array.astype(dtype).astype(array.dtype)


@dataclass(frozen=True)
class Kernel(Variant):
    """A kernel that widens, computes and narrows; ``inside`` computes, and its own ``hidden`` stages count, too."""

    inside: Inside = lambda store: Variant()

    def dot_scores(self, *arrays: Any, **given: Any) -> Stages:
        """Score by scaled dot product."""
        return self._between_ends("dot_scores", arrays, given)

    def cosine_scores(self, *arrays: Any, **given: Any) -> Stages:
        """Score by the cosine of the angle between query and key."""
        return self._between_ends("cosine_scores", arrays, given)

    def general_scores(self, *arrays: Any, **given: Any) -> Stages:
        """Score by a bilinear form."""
        return self._between_ends("general_scores", arrays, given)

    def additive_scores(self, *arrays: Any, **given: Any) -> Stages:
        """Score by a small feed-forward network."""
        return self._between_ends("additive_scores", arrays, given)

    def mask_scores(self, *arrays: Any, **given: Any) -> Stages:
        """Add the bias, then set what may not be attended to -inf."""
        return self._between_ends("mask_scores", arrays, given)

    def softmax(self, *arrays: Any, **given: Any) -> Stages:
        """Normalise each row over the keys."""
        return self._between_ends("softmax", arrays, given)

    def attention(self, *arrays: Any, **given: Any) -> Stages:
        """Score, mask, normalise and average the values."""
        return self._between_ends("attention", arrays, given)

    def attention_gradients(self, *arrays: Any, **given: Any) -> Stages:
        """Differentiate by hand, from the last stage to the first."""
        return self._between_ends("attention_gradients", arrays, given)

    def multi_head_attention(self, *arrays: Any, **given: Any) -> Stages:
        """Project, attend in every head, merge the heads and project once more."""
        return self._between_ends("multi_head_attention", arrays, given)

    def _between_ends(self, name: str, arrays: tuple[Any, ...], given: dict[str, Any]) -> Stages:
        ends = next((each.dtype for each in (*arrays, *given.values()) if _is_narrow(each)), None)
        inside = self.inside(exactly if ends is None else stored_as(ends))
        stages: Stages = getattr(inside, name)(
            *map(_widened, arrays), **{key: _widened(each) for key, each in given.items()}
        )
        if ends is not None:
            stages = {stage: array.astype(ends) for stage, array in stages.items()}
        return self._visible(stages)


def _is_narrow(given: Any) -> bool:
    return isinstance(given, np.ndarray) and given.dtype.name in NARROW


def _widened(given: Any) -> Any:
    return given.astype(np.float32) if _is_narrow(given) else given
