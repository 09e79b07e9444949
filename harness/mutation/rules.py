"""What common tolerances would have said of the same arrays, compared with the correctly rounded answer.

``|got - exact| <= absolute + relative |exact|``, the formula of all three; ``numpy.allclose`` and
``torch.testing.assert_close`` by default also refuse NaN, and both pass equal infinities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attncheck.mutation.arithmetic import Array


@dataclass(frozen=True)
class Tolerance:
    """A relative and an absolute tolerance."""

    relative: float
    absolute: float


_ASSERT_CLOSE = {
    "float64": Tolerance(1e-7, 1e-7),
    "float32": Tolerance(1.3e-6, 1e-5),
    "bfloat16": Tolerance(1.6e-2, 1e-5),
    "float16": Tolerance(1e-3, 1e-5),
}

RULES = ("assert_close", "allclose", "rtol_1e_3")


def tolerances(dtype: str) -> Mapping[str, Tolerance]:
    """Return each rule's tolerance in a dtype."""
    return {"assert_close": _ASSERT_CLOSE[dtype], "allclose": Tolerance(1e-5, 1e-8), "rtol_1e_3": Tolerance(1e-3, 1e-7)}


def rejected_by_rules(got: Array, exact: Array, dtype: str) -> dict[str, bool]:
    """Return which rules find that an array is not the exact answer."""
    if got.shape != exact.shape:
        return dict.fromkeys(RULES, True)
    wide, truth = got.astype(np.float64), exact.astype(np.float64)
    same, finite = wide == truth, np.isfinite(wide) & np.isfinite(truth)
    with np.errstate(all="ignore"):
        distance = np.abs(wide - truth)
        return {
            name: not bool(np.all(same | (finite & (distance <= rule.absolute + rule.relative * np.abs(truth)))))
            for name, rule in tolerances(dtype).items()
        }
