"""What is true of one case in one dtype: exact stages, and the error bounds of every numerical class that is judged.

Both are worked out once and serve all implementations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.judging.bounds import Bound, accumulated_bounds, introduced_bound
from attncheck.harness.judging.enclosure import Enclosure
from attncheck.harness.judging.formats import FORMATS
from attncheck.harness.judging.oracle import PrecisionExhausted, exact_from, exact_stages
from attncheck.harness.judging.oracle_problem import OutsideDomain
from attncheck.harness.judging.policies import policy_for

Array = NDArray[Any]
Stages = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Truth:
    """The exact stages of one computation, from its inputs as stored.

    ``generic`` inputs are continuous and unstructured, so that statistics of rounding errors apply. ``outside`` says
    why there is no exact answer, where there is none; ``exact`` is then empty.
    """

    operation: str
    options: Mapping[str, Any]
    inputs: Stages
    dtype: str
    generic: bool
    exact: Mapping[str, Enclosure]
    outside: str = ""
    _bounds: dict[str, dict[str, Bound]] = field(default_factory=dict)

    def bounds(self, numerical_class: str) -> Mapping[str, Bound]:
        """Return the bounds of every stage for a numerical class."""
        if numerical_class not in self._bounds:
            policy = policy_for(numerical_class, self.dtype)
            values = {stage: enclosure.high for stage, enclosure in self.exact.items()}
            self._bounds[numerical_class] = accumulated_bounds(
                self.operation, self.options, self.inputs, policy, values
            )
        return self._bounds[numerical_class]

    def introduced(self, stage: str, returned: Stages, numerical_class: str) -> tuple[Enclosure, Bound] | None:
        """Return a stage's exact value from an implementation's own stages before it, and the bound for that step.

        None where those are not finite, or not there.
        """
        earlier = {name: array for name, array in returned.items() if name != stage}
        try:
            exact = exact_from(self.operation, self.options, self.inputs, earlier, stage)
        except (OutsideDomain, PrecisionExhausted):
            return None
        if exact is None:
            return None
        policy = policy_for(numerical_class, self.dtype)
        bound = introduced_bound(self.operation, self.options, self.inputs, policy, earlier, exact.high, stage)
        return None if bound is None else (exact, bound)


def find_truth(operation: str, options: Mapping[str, Any], inputs: Stages, dtype: str, *, generic: bool) -> Truth:
    """Evaluate the oracle for one computation."""
    try:
        exact = exact_stages(operation, options, inputs)
    except (OutsideDomain, PrecisionExhausted) as error:
        return Truth(operation, options, inputs, dtype, generic, {}, str(error))
    return Truth(operation, options, inputs, dtype, generic, exact)


def within_range(exact: Enclosure, array: Array) -> NDArray[np.bool_]:
    """Return where the exact value can be judged: finite, enclosed, and no larger than the format's largest number."""
    judged: NDArray[np.bool_] = np.isfinite(exact.radius) & (np.abs(exact.high) <= FORMATS[str(array.dtype)].largest)
    return judged
