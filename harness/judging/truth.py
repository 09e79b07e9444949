"""What is true of one case in one dtype: exact stages, and the error bounds of every numerical class that is judged.

Both are worked out once and serve all implementations. On large shapes some query rows stand for all (``sampling``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.judging.bounds import Bound, accumulated_bounds, introduced_bound
from attncheck.harness.judging.bounds_logits import LOGITS
from attncheck.harness.judging.enclosure import Enclosure
from attncheck.harness.judging.formats import FORMATS
from attncheck.harness.judging.oracle import PrecisionExhausted, exact_from, exact_stages
from attncheck.harness.judging.oracle_problem import OutsideDomain
from attncheck.harness.judging.policies import policy_for
from attncheck.harness.judging.sampling import Rows, problem_of_rows, queries_of, sampled_rows
from attncheck.harness.judging.special_rows import DEFAULT_EMPTY_ROWS, SpecialRows, special_rows, without_nan
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import Inputs
from attncheck.harness.reading.lowering import Posed, essential

Array = NDArray[Any]
Stages = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Truth:
    """The exact stages of one computation, from its inputs as stored.

    ``generic`` inputs are continuous and unstructured, so that statistics of rounding errors apply. ``outside`` says
    why there is no exact answer, where there is none; ``exact`` is then empty. Where ``query_rows`` are given, exact
    values and bounds are those of these rows alone, and of whole stages that have no query rows.

    ``posed`` is the computation as it was asked for; ``options`` and ``inputs`` are its essential form, with one mask
    and without NaN. ``solved`` are the oracle's own stages, ``exact`` the same with what ``special`` rows give.
    """

    operation: str
    options: Mapping[str, Any]
    inputs: Stages
    dtype: str
    generic: bool
    exact: Mapping[str, Enclosure]
    outside: str = ""
    query_rows: Rows | None = None
    posed: Posed | None = None
    solved: Mapping[str, Enclosure] = field(default_factory=dict)
    special: SpecialRows | None = None
    _bounds: dict[str, dict[str, Bound]] = field(default_factory=dict)

    @property
    def queries(self) -> int:
        """The number of query rows of the whole computation."""
        return queries_of(self.inputs)

    @cached_property
    def _judged(self) -> tuple[Mapping[str, Any], Stages]:
        """The options and inputs of what is judged."""
        if self.query_rows is None:
            return self.options, self.inputs
        return problem_of_rows(self.operation, self.options, self.inputs, self.query_rows)

    def bounds(self, numerical_class: str) -> Mapping[str, Bound]:
        """Return the bounds of every stage for a numerical class."""
        if numerical_class not in self._bounds:
            policy = policy_for(numerical_class, self.dtype)
            values = {stage: enclosure.high for stage, enclosure in (self.solved or self.exact).items()}
            options, inputs = self._judged
            flat, given = self._with_uniform_rows(values), self._with_uniform_rows(inputs)
            bounds = accumulated_bounds(self.operation, options, given, policy, flat)
            self._bounds[numerical_class] = {
                stage: _where_finite(bound, values[stage]) for stage, bound in bounds.items()
            }
        return self._bounds[numerical_class]

    def _with_uniform_rows(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Give the logits of rows whose weights are uniform by convention: all the same, which one does not matter."""
        special = self.special
        if special is None or special.convention != "uniform":
            return dict(values)

        def flat(stage: str, array: Array) -> Array:
            return np.where(special.places(stage, array.shape, special.empty) & (array == -np.inf), 0, array)

        return {stage: flat(stage, array) if stage in LOGITS else array for stage, array in values.items()}

    def introduced(self, stage: str, returned: Stages, numerical_class: str) -> tuple[Enclosure, Bound] | None:
        """Return a stage's exact value from an implementation's own stages before it, and the bound for that step.

        ``returned`` are stages of the rows that are judged. None where those are not finite, or not there.
        """
        special = self.special
        earlier = {
            name: array if special is None else special.cleaned(name, array)
            for name, array in returned.items()
            if name != stage
        }
        try:
            exact = exact_from(self.operation, *self._judged, earlier, stage)
        except (OutsideDomain, PrecisionExhausted):
            return None
        if exact is None:
            return None
        policy = policy_for(numerical_class, self.dtype)
        bound = introduced_bound(self.operation, *self._judged, policy, earlier, exact.high, stage)
        if bound is None:
            return None
        return (exact if special is None else special.marked_step(stage, exact, earlier)), bound


def find_truth(
    operation: str, options: Mapping[str, Any], inputs: Stages, dtype: str, *, generic: bool, whole: bool = False
) -> Truth:
    """Evaluate the oracle for one computation; on large shapes for some query rows, unless it has to be ``whole``."""
    posed, lowered = Posed(dict(options), dict(inputs)), essential(operation, options, inputs)
    convention = str(options.get("empty_rows") or DEFAULT_EMPTY_ROWS)
    if convention == "uniform":
        lowered.options["empty_rows"] = convention
    base = Truth(operation, lowered.options, without_nan(lowered.inputs), dtype, generic, {}, posed=posed)
    rows = None if whole else sampled_rows(operation, base.options, base.inputs)
    try:
        solved = exact_stages(operation, base.options, base.inputs, query_rows=None if rows is None else rows.tolist())
    except (OutsideDomain, PrecisionExhausted) as error:
        return replace(base, outside=str(error))
    special = special_rows(operation, lowered.options, lowered.inputs, convention, rows)
    if not special:
        return replace(base, exact=solved, query_rows=rows)
    exact = {stage: special.marked(stage, enclosure) for stage, enclosure in solved.items()}
    return replace(base, exact=exact, query_rows=rows, solved=solved, special=special)


def truth_of_case(case: Case, dtype: str, inputs: Inputs) -> Truth:
    """Evaluate the oracle for a case in a dtype: whole where numbers are expected, each of which is judged."""
    whole = bool(case.expected)
    return find_truth(case.operation, case.options, inputs.arrays, dtype, generic=case.generic, whole=whole)


def within_range(exact: Enclosure, array: Array) -> NDArray[np.bool_]:
    """Return where the exact value can be judged: finite, enclosed, and no larger than the format's largest number."""
    judged: NDArray[np.bool_] = np.isfinite(exact.radius) & (np.abs(exact.high) <= FORMATS[str(array.dtype)].largest)
    return judged


def _where_finite(bound: Bound, exact: Array) -> Bound:
    """Return a bound of 0 where the exact value is not finite: such values are compared, not measured."""
    finite = np.isfinite(exact)
    return bound if finite.all() else Bound(np.where(finite, bound.worst, 0.0), np.where(finite, bound.scale, 0.0))
