"""The truth of one case in one dtype: exact stages, and the error bounds of every rounding model that is judged.

Both are worked out once and serve all implementations. On large shapes some query rows stand for all (``sampling``),
and where nobody returned a stage with an axis of keys, keys are taken in blocks. How well the inputs determine a number
follows from its bound beside the number itself: ``docs/numerics.md``, section 7, on condition.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import (
    Bound,
    accumulated_bounds,
    bounds_by_rows,
    bounds_of,
    for_bounds,
    introduced_bounds,
)
from attncheck.attention.exact_array import Enclosure
from attncheck.attention.oracle import (
    PrecisionExhausted,
    are_blocked,
    exact_from,
    exact_results,
    exact_stages,
    predecessors,
)
from attncheck.attention.problem import LOGITS, Computation, OutsideDomain
from attncheck.attention.sampling import ADDS_QUERIES_UP, Rows, every_row_counts, queries_of, sampled_rows
from attncheck.common.store import NO_STORE, Store
from attncheck.judging.remembered import (
    enclosures_from_bytes,
    enclosures_to_bytes,
    key_of,
)
from attncheck.judging.undefined_rows import (
    BEHIND_A_MASK,
    UndefinedElements,
    UndefinedRows,
    find_undefined_elements,
    find_undefined_rows,
    is_odd,
    without_nan,
    without_overflown,
)
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs, problem_of
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import score_elements
from attncheck.spec import (
    DEFAULT_EMPTY_ROWS,
    GRADIENTS,
    OPERATIONS,
    THROUGH_SCORES,
    computed_stages,
    stage_dtype,
    wide_dtype,
)
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import FORMATS, RoundingModel

Array = NDArray[Any]
Stages = Mapping[str, Array]

MAX_WHOLE = 1 << 22
"""Elements of a score matrix of which all rows are judged, because gradients add them up or their numbers are known.
The exact answer of so many takes half a minute and gigabytes."""


@dataclass(frozen=True, eq=False)
class Truth:
    """The exact stages of one computation, from its inputs as stored.

    Where ``supports_statistics``, inputs are continuous and unstructured, so that statistics of rounding errors apply.
    ``outside`` says why there is no exact answer, where there is none; ``exact`` is then empty. Where ``query_rows``
    are given, of so many ``queries``, inputs, exact values and bounds are those of these rows alone, and of whole
    stages that have no query rows.

    ``problem`` is the one that was asked for, laid out, and ``called`` the one that it was before; ``canonical`` is its
    canonical form, with one mask and without NaN. ``solved`` are the oracle's own stages, ``exact`` the same with what
    ``undefined_rows`` give and without ``undefined_elements``. ``inner`` are stages between, in float64, where the
    score matrix is too large for more. Exact stages that were found before come out of the ``store``. One that
    ``has_wide_statistics`` is for implementations that return log_sum_exp in float32 beside outputs of 16 bits.
    ``read_as`` says how an implementation reads the case that declares to read it otherwise.
    """

    canonical: Problem
    dtype: str
    supports_statistics: bool
    exact: Mapping[str, Enclosure]
    outside: str = ""
    query_rows: Rows | None = None
    queries: int = 0
    problem: Problem | None = None
    called: Problem | None = None
    solved: Mapping[str, Enclosure] = field(default_factory=dict)
    undefined_rows: UndefinedRows | None = None
    undefined_elements: UndefinedElements | None = None
    inner: Stages = field(default_factory=dict)
    store: Store = NO_STORE
    has_wide_statistics: bool = False
    read_as: str = ""
    _bounds: dict[str, dict[str, Bound]] = field(default_factory=dict)
    _from_inputs: dict[RoundingModel, tuple[Stages, Mapping[str, Bound]]] = field(default_factory=dict)
    """Exact stages, and their bounds from the inputs alone, as they were worked out."""
    _known_steps: dict[tuple[Any, ...], Mapping[str, Enclosure] | None] = field(default_factory=dict)
    _last_step_bounds: dict[tuple[Any, ...], Mapping[str, Bound] | None] = field(default_factory=dict)
    of_readings: dict[str, Any] = field(default_factory=dict)
    """What other readings of the case come to (``readings.py``), for all implementations that fail it."""

    @property
    def operation(self) -> str:
        """The operation of the canonical form."""
        return self.canonical.operation

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the canonical form."""
        return self.canonical.options

    @property
    def inputs(self) -> Stages:
        """The inputs of the canonical form."""
        return self.canonical.inputs

    @property
    def holds_nonfinite(self) -> bool:
        """Whether the inputs as they were asked for hold NaN or infinity, except for -inf where it forbids a key."""
        return self.problem is not None and any(
            is_odd(name, array).any() for name, array in self.problem.inputs.items()
        )

    @cached_property
    def computation(self) -> Computation:
        """The computation that the oracle evaluates."""
        return Computation.of(self.canonical)

    @cached_property
    def wide_computation(self) -> Computation:
        """The same for bounds."""
        return for_bounds(self.computation)

    def dtype_of(self, stage: str) -> str:
        """Return the dtype in which a stage is returned."""
        own = stage_dtype(self.operation, stage, self.dtype)
        return (wide_dtype(stage, own) if self.has_wide_statistics else None) or own

    def for_returned(self, stages: Stages) -> Truth:
        """Return the truth for an implementation: another where it returns a wider log_sum_exp than its outputs."""
        if self.has_wide_statistics or not any(self._is_wide(stage, array) for stage, array in stages.items()):
            return self
        return self.with_wide_statistics()

    def with_wide_statistics(self) -> Truth:
        """Return the truth for implementations whose log_sum_exp is float32, and so are its last roundings."""
        found: Truth = self.of_readings.setdefault("wide statistics", self._with_wide_statistics())
        return found

    def _with_wide_statistics(self) -> Truth:
        return replace(self, has_wide_statistics=True, _bounds={}, of_readings={})

    def _is_wide(self, stage: str, array: Array) -> bool:
        wide = wide_dtype(stage, stage_dtype(self.operation, stage, self.dtype))
        return wide is not None and str(array.dtype) == wide

    def rounding(self, rounding_model: str) -> RoundingModel:
        """Return a rounding model by its name, in the dtype of the inputs."""
        rounding = rounding_model_named(rounding_model, self.dtype)
        return replace(rounding, wide_statistics=True) if self.has_wide_statistics else rounding

    def bounds(self, rounding_model: str) -> Mapping[str, Bound]:
        """Return the bounds of every stage for a rounding model."""
        if rounding_model not in self._bounds:
            values = {stage: enclosure.high for stage, enclosure in (self.solved or self.exact).items()}
            self._bounds[rounding_model] = self._found_bounds(rounding_model, values)
        return self._bounds[rounding_model]

    def _found_bounds(self, rounding_model: str, values: Stages) -> dict[str, Bound]:
        rounding = self.rounding(rounding_model)
        flat, given = self._with_uniform_rows({**self.inner, **values}), self._with_uniform_rows(self.inputs)
        is_uniform = self.undefined_rows is not None and self.undefined_rows.convention == "uniform"
        if self.inner:
            bounds = bounds_by_rows(replace(self.canonical, inputs=given), rounding, flat, tuple(values))
        else:
            computation = Computation.of(replace(self.canonical, inputs=given)) if is_uniform else self.wide_computation
            bounds = bounds_of(computation, rounding, flat, tuple(flat)) | self._bounds_of_uniform_sums(rounding, flat)
            bounds = self._without_overflown(rounding, bounds)
            if not is_uniform and not OPERATIONS[self.operation].has_projections:
                self._from_inputs[rounding] = values, bounds
        return {stage: _where_finite(bound, values[stage]) for stage, bound in bounds.items()}

    def _without_overflown(self, rounding: RoundingModel, bounds: Mapping[str, Bound]) -> dict[str, Bound]:
        """Leave without a bound what follows from scores that the format in which they are stored cannot hold."""
        raw = (self.solved or self.exact).get("raw_scores")
        scores = None if raw is None else raw.high
        return without_overflown(self.canonical, rounding, scores, bounds)

    def _bounds_of_uniform_sums(self, rounding: RoundingModel, exact: Mapping[str, Array]) -> dict[str, Bound]:
        """Return the bounds of the gradients that follow from weights alone: uniform ones take part, without a key."""
        undefined_rows, stages = self.undefined_rows, [each for each in exact if each in _OF_WEIGHTS]
        if undefined_rows is None or undefined_rows.convention != "uniform" or not stages:
            return {}
        problem = undefined_rows.with_equal_scores(self.options)
        return accumulated_bounds(problem, rounding, exact, stages)

    def exact_for(self, stage: str, returned: Array) -> Enclosure:
        """Return a stage's exact values, where several are right the one that was returned."""
        exact = self.exact[stage] if self.undefined_elements is None else self.solved[stage]
        if self.undefined_rows is not None:
            exact = exact if self.undefined_elements is None else self.undefined_rows.apply(stage, exact)
            exact = self.undefined_rows.by_masking(stage, exact, self.solved[stage], returned)
        return exact if self.undefined_elements is None else self.undefined_elements.withdrawn(stage, exact, returned)

    def _with_uniform_rows(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Give the logits of rows whose weights are uniform by convention: all the same, which one does not matter."""
        undefined_rows = self.undefined_rows
        if undefined_rows is None or undefined_rows.convention != "uniform":
            return dict(values)

        def flat(stage: str, array: Array) -> Array:
            return np.where(undefined_rows.affected_by_empty(stage, array.shape) & (array == -np.inf), 0, array)

        return {stage: flat(stage, array) if stage in LOGITS else array for stage, array in values.items()}

    def introduced(self, stage: str, returned: Stages, rounding_model: str) -> tuple[Enclosure, Bound] | None:
        """Return a stage's exact value from an implementation's own stages before it, and the bound for that step.

        ``returned`` are stages of the rows that are judged. None where those are not finite, or not there.
        """
        if self.inner and stage in self.exact:  # what was returned has no stage from which this one follows
            own = (self.solved or self.exact)[stage]
            return self._with_undefined_rows(stage, own, returned), self.bounds(rounding_model)[stage]
        together = next((names for names in _EVALUATED_TOGETHER if stage in names), (stage,))
        stages = [name for name in together if name == stage or (name in self.exact and name in returned)]
        earlier = {name: self._without_undefined(name, array) for name, array in returned.items() if name not in stages}
        if self.operation in ADDS_QUERIES_UP:
            return None  # no gradient follows from another
        step = self._step_key(earlier, stages)
        exact = self._step(step, earlier, stages)
        bounds = None if exact is None else self._step_bounds(step, earlier, stages, exact, rounding_model)
        if exact is None or bounds is None:
            return None
        return self._with_undefined_rows(stage, exact[stage], earlier), bounds[stage]

    def _without_undefined(self, stage: str, returned: Array) -> Array:
        """Take out of a returned stage what is not finite by right, so that other elements can be followed from it."""
        for gaps in (self.undefined_rows, self.undefined_elements):
            returned = returned if gaps is None else gaps.without_undefined(stage, returned)
        return returned

    def _with_undefined_rows(self, stage: str, exact: Enclosure, earlier: Collection[str]) -> Enclosure:
        """Set what undefined rows give, and withdraw what is undefined."""
        exact = exact if self.undefined_rows is None else self.undefined_rows.apply_to_step(stage, exact, earlier)
        return exact if self.undefined_elements is None else self.undefined_elements.withdrawn(stage, exact)

    def why_open(self, stage: str, index: tuple[int, ...]) -> str:
        """Say why an element of a stage, whose own the index is, cannot be judged."""
        if stage not in self.exact:
            return self.outside or f"none is known for a stage of this name: {stage}"
        high, radius = self.exact[stage].high, self.exact[stage].radius[index]
        if self.undefined_elements is not None and self.undefined_elements.of(stage, high.shape)[index]:
            behind = self.undefined_elements.behind_a_mask(stage, high.shape)[index]
            return BEHIND_A_MASK if behind else self.undefined_elements.reason
        if np.isfinite(radius):
            dtype = self.dtype_of(stage)
            is_beyond = np.abs(high[index]) > FORMATS[dtype].largest
            return f"it is beyond the range of {dtype}" if is_beyond else "no finite bound is known for its error"
        rows = self.undefined_rows
        if rows is not None and rows.affected_elements(stage, high.shape, rows.empty | rows.nan_rows)[index]:
            return "what a query without a key, or one that holds NaN, gives here is a matter of convention"
        return "it is beyond the range of float64"

    def _step_key(self, earlier: Stages, stages: Sequence[str]) -> tuple[Any, ...]:
        """Return stages and every bit of those that they follow from: what an implementation shares with others."""
        needed = sorted(predecessors(self.computation, earlier, stages[0]))
        return (*stages, *((name, earlier[name].dtype.name, digest(earlier[name])) for name in needed))

    def _step(self, step: tuple[Any, ...], earlier: Stages, stages: Sequence[str]) -> Mapping[str, Enclosure] | None:
        """Return stages' exact values from those before them; what is known already is not evaluated again.

        Known is what follows from the inputs alone, and from stages of which another implementation has every bit.
        """
        solved = self.solved or self.exact
        if len(step) == len(stages) and solved.keys() >= set(stages):
            return solved
        if step not in self._known_steps:
            try:
                self._known_steps[step] = exact_from(self.computation, earlier, stages)
            except (OutsideDomain, PrecisionExhausted):
                self._known_steps[step] = None
        return self._known_steps[step]

    def _step_bounds(
        self,
        step: tuple[Any, ...],
        earlier: Stages,
        stages: Sequence[str],
        exact: Mapping[str, Enclosure],
        rounding_model: str,
    ) -> Mapping[str, Bound] | None:
        """Return the bounds of steps; those that were worked out last are kept, for what follows from the same."""
        key = (rounding_model, self.has_wide_statistics, *step, *sorted(earlier))
        if key not in self._last_step_bounds:
            rounding = self.rounding(rounding_model)
            values = {stage: exact[stage].high for stage in stages}
            found, known = self._from_inputs.get(rounding, ({}, {}))
            if len(step) == len(stages) and all(found.get(stage) is values[stage] for stage in stages):
                return known  # what follows from no stage that was returned has been bounded
            bounds = introduced_bounds(self.wide_computation, rounding, earlier, values)
            self._last_step_bounds.clear()
            self._last_step_bounds[key] = bounds and self._without_overflown(rounding, bounds)
        return self._last_step_bounds[key]


_OF_WEIGHTS = frozenset(GRADIENTS).difference(THROUGH_SCORES)
_EVALUATED_TOGETHER = (("raw_scores", "scores"), ("weights", "log_sum_exp"))
"""Stages that follow from the same product, or from the same exponentials."""


def digest(array: Array) -> bytes:
    """Return what stands for every bit of an array's numbers."""
    return blake2b(array.tobytes(), digest_size=16).digest()


def find_truth(
    problem: Problem,
    dtype: str,
    *,
    supports_statistics: bool,
    whole: bool = False,
    returned: Collection[str] | None = None,
    store: Store = NO_STORE,
) -> Truth:
    """Evaluate the oracle for one computation; on large shapes for some query rows, unless it has to be ``whole``.

    ``returned`` are the stages that anybody returned: on large shapes no others are evaluated, where that saves the
    score matrix, and none at all where nobody returned any, as in a dtype that none declares; by default all are.
    """
    base, plain = unsolved_truth(problem, dtype, supports_statistics=supports_statistics, whole=whole, store=store)
    try:
        base = _solved(base, returned)
    except (OutsideDomain, PrecisionExhausted) as error:
        return replace(base, outside=str(error), query_rows=None)
    return with_undefined_rows(base, plain)


def unsolved_truth(
    called: Problem,
    dtype: str,
    *,
    supports_statistics: bool,
    whole: bool = False,
    store: Store = NO_STORE,
) -> tuple[Truth, Problem]:
    """Return a truth without its exact stages, and the canonical form of its problem, NaN and all."""
    problem = called.without_layout()
    rows = None if whole else sampled_rows(problem)
    plain = problem.canonical(rows)
    if problem.options.get("empty_rows") == "uniform":
        plain = plain.with_options(empty_rows="uniform")
    given = without_nan(plain.inputs)
    undefined = find_undefined_elements(replace(plain, inputs=given))
    base = Truth(
        replace(plain, inputs=given if undefined is None else undefined.filled(given)),
        dtype,
        supports_statistics,
        {},
        query_rows=rows,
        queries=queries_of(problem.inputs),
        problem=problem,
        called=None if problem is called else called,
        undefined_elements=undefined,
        store=store,
    )
    return base, plain


def with_undefined_rows(base: Truth, plain: Problem) -> Truth:
    """Set what undefined rows give, and withdraw what is undefined."""
    assert base.problem is not None
    convention = str(base.problem.options.get("empty_rows") or DEFAULT_EMPTY_ROWS)
    undefined_rows, undefined = find_undefined_rows(plain, convention), base.undefined_elements
    exact = dict(base.exact)
    if undefined_rows:
        exact = {stage: undefined_rows.apply(stage, enclosure) for stage, enclosure in exact.items()}
    if undefined is not None:
        exact = {stage: undefined.withdrawn(stage, enclosure) for stage, enclosure in exact.items()}
    if not undefined_rows and undefined is None:
        return base
    return replace(base, exact=exact, solved=base.exact, undefined_rows=undefined_rows or None)


def _solved(base: Truth, returned: Collection[str] | None) -> Truth:
    """Evaluate the exact stages: all of them, or the results alone with keys in blocks; none where nobody asks."""
    if returned is not None and not returned:
        return base
    operation, options, inputs = base.operation, base.options, base.inputs
    scores = score_elements(operation, options, inputs)
    if every_row_counts(base.canonical, base.query_rows) and scores > MAX_WHOLE:
        raise OutsideDomain(
            operation, f"has {scores:,} scores; at most {MAX_WHOLE:,} are judged where every row counts"
        )
    asked = [stage for stage in computed_stages(operation, options, inputs) if stage in (returned or ())]
    blocked = bool(asked) and are_blocked(base.canonical, asked)
    exact, inner = base.store.remembered(
        lambda: key_of("exact", operation, options, inputs, asked if blocked else None),
        lambda: _evaluated(base, asked if blocked else ()),
        lambda found: enclosures_to_bytes(*found),
        enclosures_from_bytes,
    )
    return replace(base, exact=exact, inner=inner)


def _evaluated(base: Truth, blocked: Sequence[str]) -> tuple[Mapping[str, Enclosure], Stages]:
    """Evaluate stages with keys in blocks, if that can be done, else all of them."""
    if blocked and (found := exact_results(base.canonical, blocked)):
        return _rounded(found.exact), found.inner
    return _rounded(exact_stages(base.canonical)), {}


def _rounded(exact: Mapping[str, Enclosure]) -> dict[str, Enclosure]:
    """Return enclosures of a third of the size, whether they are kept or not: a store must not show in any verdict."""
    return {stage: enclosure.rounded() for stage, enclosure in exact.items()}


def truth_of_case(
    case: Case, dtype: str, inputs: Inputs, returned: Collection[str] | None = None, store: Store = NO_STORE
) -> Truth:
    """Evaluate the oracle for a case in a dtype: whole where numbers are expected, each of which is judged.

    ``returned`` are the stages that anybody returned; by default those that the case asks for.
    """
    whole = bool(case.expected)
    stages = case.judged_stages if returned is None else returned
    if stages is not None:
        stages = {*stages, *(expected.of for expected in case.expected)}
    return find_truth(
        problem_of(case, inputs),
        dtype,
        supports_statistics=case.supports_statistics,
        whole=whole,
        returned=stages,
        store=store,
    )


def is_measured(exact: Enclosure, bound: Bound, dtype: str) -> NDArray[np.bool_]:
    """Return where an error can be measured: the exact value is a number of the dtype, and its bound is finite."""
    return within_range(exact, dtype) & np.isfinite(bound.max_error)


def is_prescribed(exact: Enclosure) -> NDArray[np.bool_]:
    """Return where the exact answer is -inf or NaN itself: nothing is measured there, it has to be the same."""
    prescribed: NDArray[np.bool_] = ((exact.high == -np.inf) | np.isnan(exact.high)) & (exact.radius == 0)
    return prescribed


def is_open(exact: Enclosure, bound: Bound, dtype: str) -> NDArray[np.bool_]:
    """Return where nothing can be judged: neither measured nor prescribed."""
    return ~(is_measured(exact, bound, dtype) | is_prescribed(exact))


def within_range(exact: Enclosure, dtype: str) -> NDArray[np.bool_]:
    """Return where the exact value is a number that a dtype has: enclosed, and no larger than its largest."""
    return np.isfinite(exact.radius) & (np.abs(exact.high) <= FORMATS[dtype].largest)


def _where_finite(bound: Bound, exact: Array) -> Bound:
    """Return a bound of 0 where the exact value is not finite: such values are compared, not measured."""
    finite = np.isfinite(exact)
    return bound if finite.all() else bound.mapped(lambda part: np.where(finite, part, 0.0))


@dataclass(frozen=True)
class Conditioning:
    """The condition numbers of the elements of a stage that are measured.

    ``ill`` counts those whose bound exceeds the value, of so many ``elements``.
    """

    median: float
    largest: float
    ill: int
    elements: int
    unit_roundoff: float

    def of(self, bound: float, exact: float) -> float:
        """Return the condition number of one element."""
        return float(condition_numbers(np.array(exact), np.array(bound), self.unit_roundoff))


def condition_numbers(
    exact: NDArray[np.float64], bound: NDArray[np.float64], unit_roundoff: float
) -> NDArray[np.float64]:
    """Return B / (u |x|): 0 where no error is possible, infinity where that of a zero is."""
    with np.errstate(all="ignore"):
        found: NDArray[np.float64] = np.where(bound == 0, 0.0, bound / (unit_roundoff * np.abs(exact)))
    return found


def conditioning_of(truth: Truth, stage: str, array: NDArray[np.generic], rounding_model: str) -> Conditioning | None:
    """Return the condition numbers of a returned stage; None where nothing of it is measured."""
    bounds = truth.bounds(rounding_model)
    if stage not in truth.exact or stage not in bounds:
        return None
    exact, bound, dtype = truth.exact_for(stage, array), bounds[stage], truth.dtype_of(stage)
    return _of_measured(exact, bound, dtype)


def _of_measured(exact: Enclosure, bound: Bound, dtype: str) -> Conditioning | None:
    measured, unit_roundoff = is_measured(exact, bound, dtype), FORMATS[dtype].unit_roundoff
    if not measured.any():
        return None
    values, errors = exact.high[measured], bound.max_error[measured]
    numbers = condition_numbers(values, errors, unit_roundoff)
    ill = int((errors > np.abs(values)).sum())
    return Conditioning(float(np.median(numbers)), float(numbers.max()), ill, int(numbers.size), unit_roundoff)


def truth_of_reading(own: Truth, problem: Problem) -> Truth:
    """Return the exact answer of a case that is read as another problem, on the rows that are judged of the case."""
    whole, returned = own.query_rows is None, own.exact if own.inner else None
    truth = find_truth(
        problem,
        own.dtype,
        supports_statistics=own.supports_statistics,
        whole=whole,
        returned=returned,
        store=own.store,
    )
    return truth.with_wide_statistics() if own.has_wide_statistics else truth
