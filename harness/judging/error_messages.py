"""The words for errors that are too large."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.elements import written_ratio
from attncheck.judging.tiers import Measured, Tier
from attncheck.oracle.enclosure import Enclosure

Array = NDArray[Any]


def explain_errors(accumulated: Measured, introduced: Measured | None) -> str:
    """Say how large the errors of a stage are, and whether they are its own."""
    if introduced is None or not accumulated.tier.fails:
        return _format_error(
            "against the exact answer" if introduced is None else "in this step", introduced or accumulated
        )
    if introduced.tier.fails:
        return _format_error("in this step", introduced)
    return (
        f"{_format_error('against the exact answer', accumulated)}; this step is right, the error comes from before it"
    )


def explain_without_bound(stage: str, array: Array, exact: Enclosure, elements: NDArray[np.bool_], against: str) -> str:
    """Say what is wrong in places where no error is possible at all: a quotient would be infinite."""
    error = np.where(elements, exact.error_of(array), 0.0)
    largest, count = float(error.max()), int(elements.sum())
    if stage == "weights" and not exact.high[elements].any():
        keys = "a masked key has weight" if count == 1 else f"{count} masked keys have weight"
        return f"{keys}, up to {largest:.3g}: a key that may not be attended to must have exactly 0"
    what = "the exact answer" if against == "exact" else "this step"
    return f"off by up to {largest:.3g} where {what} needs no rounding, so that no error is possible ({count} elements)"


def _format_error(against: str, measured: Measured) -> str:
    if measured.tier is Tier.PROVEN:
        return f"{written_ratio(measured.ratio)} times the largest error that is possible {against}"
    return (
        f"errors too large to be rounding {against}: largest {measured.largest_z:.3g} sigma, "
        f"root mean square {measured.mean_z:.3g} sigma over {measured.elements} elements"
    )
