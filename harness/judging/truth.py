"""The truth of one case in one dtype: exact stages, error bounds, and the elements without an exact answer.

The idea. A verdict needs three facts about each element of a stage: the exact value, the largest error that rounding
can cause, and whether an exact value exists at all. They depend on the inputs and on the rounding model, and not on any
result. So they are computed once, and all implementations of the case share them.

How a truth is made (``find_truth``):

1. Choose the query rows to judge: all of them, or some that stand for all on large shapes (``attention/sampling.py``).
2. Make the canonical form: one mask, one set of keys and values (``Problem.canonical``).
3. Find NaN and infinity in the inputs, and replace them by ones. The exact arithmetic accepts only finite numbers.
4. Evaluate the exact stages of that form (``exact_stages.py``), or read them from the store.
5. Follow the replaced elements through the operation, and withdraw the exact value of every element that they reach
   (``undefined.py``). Rows without a key get the value of their convention, or none.
6. On request, bound the errors of the stages for a rounding model (``stage_bounds.py``).

The judge uses three methods, for a stage with the returned values r, the exact values x and the bound B:

* ``stage_reference``: x and B from the inputs of the case. If |r - x| > B for any element, the stage is wrong.
* ``step_reference``: x and B from the stages that the implementation itself returned before this one. If |r - x| > B
  here, too, this step is wrong; otherwise the error comes from an earlier stage.
* ``reason_not_judged``: the reason why an element has no exact value, in words.

Why an exact answer, and not a reference implementation: a reference rounds as much as any float64 implementation, and
a fault in it would make every correct result wrong. The price is time: on a small shape, the exact answer costs about
150 times as much as NumPy in float64 (``attention/oracle.py``). This is why rows are sampled, answers are stored, and a
step is evaluated again only if the returned stages before it differ.

If several results are right, the truth depends on the result: a kernel that adds a mask returns NaN where one that
selects returns a number. ``reference`` then takes the returned array and chooses the matching answer.

``docs/numerics.md`` has the exact answer in section 2, the bounds in 4 to 6, and elements without an answer in 7.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from attncheck.attention.exact_array import Enclosure
from attncheck.attention.oracle import PrecisionExhausted
from attncheck.attention.problem import OutsideDomain
from attncheck.common.store import NO_STORE, Store
from attncheck.judging.exact_stages import Array, ExactStages, Stages, evaluate_exact_stages
from attncheck.judging.stage_bounds import StageBounds, StageReference
from attncheck.judging.undefined import JudgedProblem, UndefinedParts, find_undefined, make_judged_problem
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs, make_problem_of_case
from attncheck.reading.problem import Problem
from attncheck.spec.rounding import FORMATS

_STAGES_ROUNDED_ONCE = frozenset({"capped", "biased"})
"""Steps with one rounding per element, of a rounded number: without a sum, statistics do not apply."""


@dataclass(frozen=True, eq=False)
class Truth:
    """The exact stages of one computation, from its inputs as stored, their bounds, and undefined elements.

    If it ``supports_statistics``, inputs are continuous and unstructured, so that statistics of rounding errors apply.
    ``no_answer_reason`` is the reason why there is no exact answer, if there is none. Further answers are cached in the
    ``store``. ``declared_conventions`` describes the conventions that an implementation declares, if this is the truth
    under them.
    """

    judged_problem: JudgedProblem
    stages: ExactStages
    bounds: StageBounds
    undefined: UndefinedParts
    supports_statistics: bool
    no_answer_reason: str = ""
    store: Store = NO_STORE
    declared_conventions: str = ""
    cached_readings: dict[str, Any] = field(default_factory=dict, init=False)
    """Cached results of other readings of the case (``readings.py``), for all implementations that fail it."""

    @cached_property
    def exact(self) -> Mapping[str, Enclosure]:
        """The exact answer of every stage; its radius is infinite if there is none."""
        return self.undefined.withdraw_undefined(self.stages.enclosures)

    @cached_property
    def with_wide_statistics(self) -> Truth:
        """The truth for implementations whose log_sum_exp is float32, and so are its last roundings."""
        return replace(self, bounds=replace(self.bounds, has_wide_statistics=True))

    def for_returned_dtypes(self, stages: Stages) -> Truth:
        """Return the truth for an implementation: another one if its log_sum_exp is wider than its outputs."""
        return self.with_wide_statistics if self.bounds.has_wider_stage(stages) else self

    def stage_reference(self, stage: str, rounding_model: str, returned: Array | None = None) -> StageReference:
        """Return the exact answer of a stage with its bound; if several are right, the one that was returned."""
        exact, bound, dtype = (
            self.exact[stage],
            self.bounds.bounds_by_stage(rounding_model)[stage],
            self.bounds.stage_dtype(stage),
        )
        if returned is not None:
            exact = self.undefined.withdraw_or_select_returned(stage, self.stages.enclosures[stage], returned)
            dtype = str(returned.dtype)
        return StageReference(exact, bound, dtype, self.supports_statistics)

    def step_reference(self, stage: str, returned: Stages, rounding_model: str) -> StageReference | None:
        """Return a stage's exact value from an implementation's own stages before it, and the bound for that step.

        ``returned`` are stages of the rows that are judged. None if a stage before it is not finite, or missing.
        """
        clean = {name: self.undefined.zero_undefined(name, array) for name, array in returned.items()}
        step = self.stages.evaluate_step(stage, clean)
        bounds = None if step is None else self.bounds.step_bounds(step, rounding_model)
        if step is None or bounds is None:
            return None
        value = self.undefined.withdraw_undefined_of_step(stage, step.exact_values[stage], step.earlier_stages)
        has_statistics = self.supports_statistics and stage not in _STAGES_ROUNDED_ONCE
        return StageReference(value, bounds[stage], self.bounds.stage_dtype(stage), has_statistics)

    def reason_not_judged(self, stage: str, index: tuple[int, ...]) -> str:
        """Return why an element of a stage cannot be judged."""
        if stage not in self.exact:
            return self.no_answer_reason or f"none is known for a stage of this name: {stage}"
        exact = self.exact[stage]
        if not np.isfinite(exact.radius[index]):
            return self.undefined.describe_reason(stage, exact.shape, index) or "it is beyond the range of float64"
        dtype = self.bounds.stage_dtype(stage)
        is_beyond = np.abs(exact.high[index]) > FORMATS[dtype].largest
        return f"it is beyond the range of {dtype}" if is_beyond else "no finite bound is known for its error"


def find_truth(
    problem: Problem, *, whole: bool = False, returned: Collection[str] | None = None, store: Store = NO_STORE
) -> Truth:
    """Evaluate the oracle for one problem, and prepare its bounds in the problem's dtype.

    Args:
        problem: The problem, with its dtype.
        whole: Whether all query rows are judged; on large shapes, some are by default.
        returned: The stages that any implementation returned, None for all. On large shapes no other stage is
            evaluated if that saves the score matrix. Without any, none is evaluated.
        store: Keeps exact stages from one run to the next.

    Example:
        >>> ones, values = np.ones((1, 1, 2, 4)), np.array([[[[1.0], [4.0]]]])
        >>> inputs = {"query": ones, "key": ones, "value": values}
        >>> truth = find_truth(Problem("attention", {"is_causal": True}, inputs, "float64"))
        >>> truth.exact["output"].high.tolist()  # the mean of the values so far
        [[[[1.0], [2.5]]]]
        >>> bool((truth.bounds.bounds_by_stage("native")["output"].max_error < 1e-14).all())
        True
    """
    judged, outside = make_judged_problem(problem, whole=whole), ""
    try:
        stages = evaluate_exact_stages(judged.canonical, judged.judged_rows, returned, store)
    except (OutsideDomain, PrecisionExhausted) as error:
        judged, stages, outside = replace(judged, judged_rows=None), ExactStages(judged.canonical), str(error)
    return truth_of_stages(judged, stages, outside=outside, store=store)


def truth_of_stages(judged: JudgedProblem, stages: ExactStages, *, outside: str = "", store: Store = NO_STORE) -> Truth:
    """Return the truth of a problem whose exact stages are known."""
    undefined = UndefinedParts(elements=judged.undefined_elements) if outside else find_undefined(judged)
    assert judged.called_problem.dtype, "error bounds need a dtype"
    bounds = StageBounds(stages, judged.called_problem.dtype, undefined.uniform_rows)
    # Masking rounds once, when it adds the bias: without a sum, statistics do not apply.
    has_statistics = judged.called_problem.supports_statistics and judged.canonical.operation != "masking"
    return Truth(judged, stages, bounds, undefined, has_statistics, outside, store)


def truth_of_case(
    case: Case, inputs: RoundedInputs, returned: Collection[str] | None = None, store: Store = NO_STORE
) -> Truth:
    """Evaluate the oracle for a case on its inputs in a dtype: in all rows if the case expects numbers.

    ``returned`` are the stages that any implementation returned; by default those that the case judges.
    """
    stages = case.judged_stages if returned is None else returned
    if stages is not None:
        stages = {*stages, *(expected.of for expected in case.expected)}
    return find_truth(make_problem_of_case(case, inputs), whole=bool(case.expected), returned=stages, store=store)


def truth_of_reading(case_truth: Truth, problem: Problem) -> Truth:
    """Return the truth of a case under another reading, ``problem``, on the same judged rows."""
    whole, returned = (
        case_truth.judged_problem.judged_rows is None,
        case_truth.exact if case_truth.stages.inner_stages else None,
    )
    read = replace(problem, dtype=case_truth.bounds.dtype, supports_statistics=case_truth.supports_statistics)
    truth = find_truth(read, whole=whole, returned=returned, store=case_truth.store)
    return truth.with_wide_statistics if case_truth.bounds.has_wide_statistics else truth
