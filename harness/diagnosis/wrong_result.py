"""One wrong result beside one reading of its case, which fits it, is refuted by it, or neither.

``docs/diagnoses.md`` says when a reading fits and when it is refuted, and of which errors an accuracy is told. Some
readings have a free number: the scale, or factor of a bias, with which a case comes nearest to what was returned.

Readings that simpler cases have named are tried on other failing cases without the oracle (``FailingCase``). In the
place of the exact answer of a reading stand its stages in float64, and what float64 may be off by beside them, so that
a reading that is handed on fits as it would there. No statistics are asked. What this cannot tell is for
``diagnose_case``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.caches import size_of_made
from attncheck.attention.errors import Bound, Real
from attncheck.attention.exact_array import Enclosure
from attncheck.attention.walk import approximate_stages
from attncheck.diagnosis.decision import ACCURACY
from attncheck.diagnosis.readings import (
    ACCURACIES,
    BIAS_FITTED,
    EXPONENTIALS,
    KEYS_FITTED,
    SCALE_FITTED,
    STAGE_FITTED,
    TRADES,
    TRADES_WITHIN_THE_WIDEST,
    undefined_row_conventions,
)
from attncheck.diagnosis.readings_of_scores import with_bias_times
from attncheck.diagnosis.replaced_steps import multiplied, replacement_by
from attncheck.diagnosis.residuals import Readings, best_number, relative_bound, shortest
from attncheck.judging.alternatives import (
    Alternative,
    Form,
    default_scale,
    has_default_scale,
    has_scale,
    scale_of,
    scales_in_words,
    with_allowed,
)
from attncheck.judging.exact_stages import Array, ExactStages, Stages
from attncheck.judging.judge_stages import agrees, failing_elements
from attncheck.judging.stage_bounds import StageBounds, StageReference
from attncheck.judging.truth import Truth, truth_of_reading, truth_of_stages
from attncheck.judging.undefined import find_undefined, judged_problem
from attncheck.reading.lowering import queries_and_keys
from attncheck.reading.problem import Problem
from attncheck.spec import OPERATIONS, PROJECTIONS, inputs_of, stage_position
from attncheck.spec.classes import WITH, rounding_model_named
from attncheck.spec.dtypes import rounded_once
from attncheck.spec.options import SIXTEEN_BITS
from attncheck.spec.rounding import FORMATS

_NEARLY = 16.0
"""How many times its bounds a reading may be missed by, on average, until that refutes it."""


@dataclass(frozen=True, eq=False)
class WrongResult:
    """What an implementation got wrong: the judged rows of its failing stages, and what they were judged by.

    ``right`` are the judged rows of the stages that do not fail.
    """

    truth: Truth
    stages: Stages
    rounding_model: str
    right: Stages = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """The problem as it was asked for."""
        return self.truth.judged.problem

    @cached_property
    def readings(self) -> Readings:
        """The other readings of the case: the same for all implementations that fail it."""
        found: Readings = self.truth.of_readings.setdefault("all", Readings(self.truth))
        return found

    def reference(self, stage: str) -> StageReference:
        """Return the exact answer of a stage with its bound."""
        return self.truth.reference(stage, self.rounding_model)

    @cached_property
    def possible(self) -> tuple[Alternative, ...]:
        """The readings that begin no later than the first stage that fails.

        One that begins later says nothing of this case: something else is wrong before.
        """
        first = min(map(stage_position, self.stages))
        return tuple(each for each in self.readings.alternatives if stage_position(each.stage) <= first)

    @cached_property
    def allowed(self) -> float:
        """What a mean difference over its size may be by rounding, about."""
        unit = FORMATS[self.truth.bounds.dtype].unit_roundoff
        return max(relative_bound(map(self.reference, self.judged)), unit)

    @cached_property
    def judged(self) -> frozenset[str]:
        """All stages that there is an exact answer for."""
        return frozenset((self.stages.keys() | self.right.keys()) & self.truth.exact.keys())


def is_only_in_empty_rows(wrong: WrongResult) -> bool:
    """Whether all that is proved to be wrong lies in rows without a key."""
    undefined_rows = wrong.truth.undefined.rows
    if undefined_rows is None or not undefined_rows.empty.any() or not wrong.stages.keys() <= wrong.truth.exact.keys():
        return False
    wrong_rows = False
    for stage, array in wrong.stages.items():
        reference = wrong.truth.reference(stage, wrong.rounding_model, array)
        failing = failing_elements(reference, array)
        if (failing & ~undefined_rows.affected_by_empty(stage, array.shape)).any():
            return False
        wrong_rows |= bool(failing.any())
        if not failing.any() and not agrees(reference, array):
            return False
    return wrong_rows


def would_show(wrong: WrongResult, convention: Alternative) -> bool:
    """Whether a reading that does not fit would change what was returned by more than rounding can.

    One that all but fits says nothing: who computes so may round once more than the class allows to what is right.
    """
    other = wrong.readings.truth_of(convention, wrong.rounding_model, wrong.stages)
    if other is None or _all_but_fits(wrong, convention, other):
        return False
    for stage in sorted(stages_behind(convention, wrong.judged)):
        named = convention.stage_aliases.get(stage, stage)
        if named not in other.exact or _differ(wrong.reference(stage), other.reference(named, wrong.rounding_model)):
            return True
    return False


def try_reading(wrong: WrongResult, convention: Alternative) -> Alternative | None:
    """Return a reading that holds, with what it says of rows that have no key only when it is read so."""
    other = wrong.readings.truth_of(convention, wrong.rounding_model, wrong.stages)
    if other is None:
        return None
    if does_fit(wrong, convention, other):
        return convention
    if convention.stage_aliases or convention.replacement or not is_only_in_empty_rows(replace(wrong, truth=other)):
        return None
    for of_rows in undefined_row_conventions(convention.problem):
        description = f"{convention.description}; {of_rows.description}"
        both = replace(convention, problem=of_rows.problem, description=description, option=of_rows.option, shared="")
        if does_fit(wrong, both, truth_of_reading(wrong.truth, both.problem)):
            return both
    return None


def does_fit(wrong: WrongResult, convention: Alternative, other: Truth) -> bool:
    """Whether the exact answer of a reading is what was returned, and is another than the case's own."""
    named = {stage: convention.stage_aliases.get(stage, stage) for stage in wrong.stages}
    if not set(named.values()) <= other.exact.keys():
        return False
    model = wrong.rounding_model
    if not all(agrees(other.reference(named[stage], model, array), array) for stage, array in wrong.stages.items()):
        return False
    # Before the stage that it replaces, a reading is the case itself, though its problem may be another one.
    right = stages_behind(convention, frozenset(wrong.right)) & other.exact.keys() - convention.stage_aliases.keys()
    if not _all_agree(other, {stage: wrong.right[stage] for stage in right}, model):
        return False
    return any(_differ(wrong.reference(stage), other.reference(named[stage], model)) for stage in named)


def _all_but_fits(wrong: WrongResult, convention: Alternative, other: Truth) -> bool:
    for stage, array in wrong.stages.items():
        name = convention.stage_aliases.get(stage, stage)
        if name not in other.exact or other.exact[name].shape != array.shape:
            return False
        exact, bound = other.exact[name], other.bounds.of(wrong.rounding_model)[name]
        error, judged = exact.error_of(array), np.isfinite(exact.high) & np.isfinite(exact.radius)
        with np.errstate(over="ignore"):
            if not error[judged].sum() <= _NEARLY * bound.max_error[judged].sum():
                return False
    return True


def _differ(one: StageReference, other: StageReference) -> bool:
    """Whether two exact answers are further apart than an implementation could be from both."""
    first, second = one.exact, other.exact
    if first.shape != second.shape:
        return True
    allowed = one.bound.max_error + other.bound.max_error
    judged = ~(one.open | other.open)
    finite = np.isfinite(first.high) & np.isfinite(second.high)
    with np.errstate(invalid="ignore", over="ignore"):
        separated = finite & (np.abs(first.high - second.high) - first.radius - second.radius > allowed)
        odd = ~finite & ~((first.high == second.high) | (np.isnan(first.high) & np.isnan(second.high)))
    return bool((judged & (separated | odd)).any())


def stages_behind(convention: Alternative, stages: frozenset[str]) -> frozenset[str]:
    """Return the stages at which a reading may show: not those before the one at which it departs."""
    return frozenset(stage for stage in stages if stage_position(stage) >= stage_position(convention.stage))


_FORMATS = (("float32", "native"), ("bfloat16", "eager_pre"))
"""The dtype and rounding model whose roundings an accuracy has; the best one first."""

_MIN_Z = 2.0**-8
"""In units of the noise that a format makes: errors far smaller are not that format's."""
_MIN_ERRORS = 16
_MAX_OF_ONE_SIGN = 0.95
_MAX_EXPLAINED = 0.5


def _all_agree(truth: Truth, failing: Stages, rounding_model: str) -> bool:
    return all(agrees(truth.reference(stage, rounding_model, array), array) for stage, array in failing.items())


def judge_accuracy(wrong: WrongResult, *, is_known: bool = False) -> tuple[Alternative | None, set[str]]:
    """Return the accuracy that what fails has, if any can be told, and the names of those that it has not.

    A few errors tell none. Of an implementation of which other cases told it, they are that one's.
    """
    truth, failing, refuted = wrong.truth, wrong.stages, set[str]()
    for dtype, of_format in _FORMATS:
        name = ACCURACIES[dtype].name
        if not _is_lower(dtype, truth.bounds.dtype):
            refuted.add(name)
            continue
        bounds = _bounds_of(truth, dtype, of_format)
        lower = replace(truth, bounds=truth.bounds.with_known(wrong.rounding_model, bounds))
        if not _all_agree(lower, failing, wrong.rounding_model):
            refuted.add(name)
            continue
        first = min(failing, key=stage_position)
        is_noise = _is_noise(truth.exact[first], bounds[first].sigma, failing[first])
        if is_noise or (is_noise is None and is_known):
            return ACCURACIES[dtype].alternative(Form(wrong.problem), is_fitted=True), refuted
        return None, refuted if is_noise is None else refuted | {accuracy.name for accuracy in ACCURACIES.values()}
    return None, refuted


def judge_trades(wrong: WrongResult) -> tuple[list[Alternative], set[str]]:
    """Return what a kernel of 16 bits may have traded for speed, of others its exponentials; and what it has not.

    What fails holds the class with that part, and its errors are noise: of both signs, and in proportion to nothing.
    """
    truth, failing, found, refuted = wrong.truth, wrong.stages, list[Alternative](), set[str]()
    trades = EXPONENTIALS.get(truth.bounds.dtype, TRADES)
    if trades is not TRADES and any(wrong.problem.options.get(reading.of) for reading in TRADES.values()):
        return [], set()  # a hyperbolic tangent may be what errs
    first, widest = min(failing, key=stage_position), [*trades][-1]
    holds_widest = False
    for parts, reading in [*trades.items()][::-1]:
        model = f"{wrong.rounding_model}{WITH}{parts}"
        is_asked = _may_trade(truth.bounds, model) and (not reading.of or reading.of in wrong.problem.options)
        # FP8 operands err by more than weights, exponentials and tanh do that are less exact, and are tried before.
        is_narrower = parts in TRADES_WITHIN_THE_WIDEST and not holds_widest
        if not is_asked or is_narrower or not _all_agree(truth, failing, model):
            refuted.add(reading.name)
            continue
        holds_widest |= parts == widest
        if _is_noise(truth.exact[first], truth.bounds.of(model)[first].sigma, failing[first], as_stored=False):
            found.append(reading.alternative(Form(wrong.problem), is_fitted=True))
    return found[::-1], refuted


def _may_trade(bounds: StageBounds, rounding_model: str) -> bool:
    """Tell if there is such a class, and the operation has a way forward."""
    if "output" not in bounds.stages.values or rounding_model.count(WITH) > 1:
        return False
    try:
        return bool(rounding_model_named(rounding_model, bounds.dtype))
    except ValueError:  # the class permits more already
        return False


def _bounds_of(truth: Truth, dtype: str, of_format: str) -> dict[str, Bound]:
    """Return the bounds of a lower precision; the same for whoever fails."""
    found: dict[str, Bound] | None = truth.of_readings.get(of_format)
    if found is None:
        own, unit = replace(truth.bounds, dtype=dtype).of(of_format), FORMATS[dtype].unit_roundoff
        found = truth.of_readings[of_format] = _with_rounded_operands(truth.stages, own, unit)
    return found


def _with_rounded_operands(stages: ExactStages, bounds: Mapping[str, Bound], unit: float) -> dict[str, Bound]:
    """Allow raw scores the rounding of query and key, which every later stage is allowed with the scale."""
    inputs = stages.canonical.inputs
    if OPERATIONS[stages.canonical.operation].has_projections:
        return {name: _with_rounded_projection(stages, name, bound, unit) for name, bound in bounds.items()}
    if "raw_scores" not in bounds or not {"query", "key"} <= inputs.keys() - stages.values.keys():
        return dict(bounds)
    query, key = inputs["query"].astype(np.float64), inputs["key"].astype(np.float64)
    if "key_projection" in inputs:
        key = size_of_made(key, inputs["key_projection"].astype(np.float64))
    group = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    size = np.abs(query) @ np.swapaxes(np.repeat(np.abs(key), group, -3) if group > 1 else np.abs(key), -1, -2)
    own, moved = bounds["raw_scores"], (2 * unit + unit * unit) * size
    return {**bounds, "raw_scores": Bound(own.max_error + moved, own.sigma + moved)}


def _with_rounded_projection(stages: ExactStages, name: str, bound: Bound, unit: float) -> Bound:
    """Allow a projection the rounding of what is projected, and of its weights."""
    inputs = stages.canonical.inputs
    if name not in PROJECTIONS or f"{name}_weight" not in inputs:
        return bound
    given, weight = (np.abs(inputs[each].astype(np.float64)) for each in (name, f"{name}_weight"))
    size = given @ weight  # (B, L, H D), of which the stage has (B, H, L, D)
    heads, _, width = stages.high[name].shape[-3:]
    moved = (2 * unit + unit * unit) * size.reshape(*size.shape[:-1], heads, width).swapaxes(-2, -3)
    return Bound(bound.max_error + moved, bound.sigma + moved)


def _is_noise(exact: Enclosure, scale: Real, array: Array, *, as_stored: bool = True) -> bool | None:
    """Say whether the errors of a stage look like roundings of a format; None where there are too few, or too small.

    ``as_stored``, numbers that are all of a format of 16 bits are.
    """
    stored = array.astype(np.float64)
    known = np.isfinite(exact.high) & np.isfinite(exact.radius) & np.isfinite(stored)
    value, error = exact.high[known], stored[known] - exact.high[known] - exact.low[known]
    wrong = error != 0
    with np.errstate(all="ignore"):
        z = np.abs(error) / scale[known]
        if wrong.sum() < _MIN_ERRORS or not np.max(z[np.isfinite(z)], initial=0.0) >= _MIN_Z:
            return None
        if as_stored and _is_stored_in_16_bits(stored):  # however it was rounded: bits that are cut off have one sign
            return True
        size = np.where(np.isfinite(z), z, 0.0)
        shares = float((error[wrong] > 0).mean()), float(size[error > 0].sum() / size.sum())
        explained = _cosine(error, value) ** 2
    has_signs = all(1 - _MAX_OF_ONE_SIGN <= share <= _MAX_OF_ONE_SIGN for share in shares)
    return has_signs and not explained > _MAX_EXPLAINED


def _is_stored_in_16_bits(stored: Real) -> bool:
    """Return whether every number is one of a format of 16 bits."""
    return any(np.array_equal(rounded_once(stored, dtype), stored) for dtype in ("bfloat16", "float16"))


def _cosine(one: Real, other: Real) -> float:
    """Return the cosine of the angle between two vectors, 0 where one has no direction; squares may not underflow."""
    one, other = (each / np.abs(each).max(initial=0.0) for each in (one, other))
    cosine = float(one @ other / np.sqrt((one @ one) * (other @ other)))
    return cosine if np.isfinite(cosine) else 0.0


def _is_lower(of: str, dtype: str) -> bool:
    return FORMATS[of].precision < FORMATS[dtype].precision and dtype not in SIXTEEN_BITS


MIN_FITTED = 8
"""Numbers that a fitted one must explain: some scale explains every single one."""


def fitted_numbers(wrong: WrongResult) -> Iterator[Alternative]:
    """Yield the case with the number that fits best, and before it with the nearest number of few digits."""
    truth, problem, failing = wrong.truth, wrong.problem, wrong.stages
    if sum(array.size for array in failing.values()) < MIN_FITTED:
        return
    first = min(map(stage_position, failing))
    unit, plain = FORMATS[truth.bounds.dtype].unit_roundoff, problem.canonical(truth.judged.query_rows)
    if has_scale(problem) and first >= stage_position("scores"):
        own = scale_of(problem)
        known = truth.of_readings.setdefault("scaled", {})
        fitted = best_number(lambda scale: _scaled(plain, scale), failing, own, known)
        if fitted is not None and own and _root_in_words(root := as_root(fitted / own, _WORTH_A_ROOT)):
            yield with_scale_times(problem, root)
        for scale in _shortened(fitted, unit, own):
            yield with_scale_times(problem, scale / own if own else math.nan, scale)
    if "bias" in problem.inputs and first >= stage_position("biased"):
        known = truth.of_readings.setdefault("bias scaled", {})
        fitted = best_number(lambda factor: with_bias_times(plain, factor), failing, 1.0, known)
        for factor in _shortened(fitted, unit, 1.0):
            yield bias_fitted(problem, factor)
    name = min(failing, key=stage_position)
    if first >= stage_position("weights") and not OPERATIONS[truth.judged.canonical.operation].has_gradients:
        fitted = _times_as_large(failing[name].astype(np.float64), truth.exact[name].high)
        for factor in _shortened(fitted, unit, 1.0):
            yield multiplied_by(wrong, factor)
    if (run := _keys_left_out(wrong)) is not None:
        yield without_keys(problem, *run)


def _times_as_large(array: Real, exact: Real) -> float | None:
    """Return the factor by which a stage comes nearest to the right one; None where there is none."""
    known = np.isfinite(array) & np.isfinite(exact)
    size = np.abs(exact[known]).max(initial=0.0)
    if not size:
        return None
    with np.errstate(all="ignore"):
        right = exact[known] / size  # whose squares neither overflow nor underflow
        found = float((array[known] / size) @ right / (right @ right))
    return found if math.isfinite(found) and found else None  # zeros are no multiple of anything


def multiplied_by(wrong: WrongResult, factor: float) -> Alternative:
    """Return the case with all that fails times a number that was fitted."""
    replacement = replacement_by(multiplied(tuple(wrong.stages), factor))
    form = Form(wrong.problem, {"factor": scales_in_words(factor, 1.0)[0]}, replacement=replacement)
    return STAGE_FITTED.alternative(form, is_fitted=True, factor=factor)


def without_keys(problem: Problem, start: int, end: int) -> Alternative:
    """Return the case with a run of keys that nobody sees."""
    keys = queries_and_keys(problem.inputs)[1]
    number = np.arange(keys)
    which = f"{start:,} to {end - 1:,} of {keys:,}" if end - start > 1 else f"{start:,} of {keys:,}"
    behind = KEYS_FITTED.says.format(which=f"{start:,} and all behind") if end == keys else ""
    form = Form(with_allowed(problem, (number < start) | (number >= end)), {"which": which}, shared=behind)
    return KEYS_FITTED.alternative(form, is_fitted=True)


_RUNS_TRIED = 64


def _keys_left_out(wrong: WrongResult) -> tuple[int, int] | None:
    """Return the run of keys without which the weighted mean of the others comes nearest to what was returned.

    Without keys a to b, a row has the mean of what is left where the weights of these keys times their values' distance
    from that mean add up to its distance from the right one. So a run is the difference of two places in running sums,
    of one column of the values and all rows at a time.
    """
    weights, array, problem = wrong.readings.own.stages.get("weights"), wrong.stages.get("output"), wrong.problem
    value = problem.canonical(wrong.truth.judged.query_rows).inputs.get("value")
    can_be_left_out = "mask" in inputs_of(problem.operation, problem.options.get("score"))
    if weights is None or array is None or value is None or "masked" in wrong.stages or not can_be_left_out:
        return None
    is_mean = value.ndim == weights.ndim and (*weights.shape[:-1], value.shape[-1]) == array.shape
    if not is_mean or not all(np.isfinite(each).all() for each in (weights, value, array)):
        return None
    value = value.astype(np.float64)
    column = np.random.RandomState(0).standard_normal(value.shape[-1])
    with np.errstate(all="ignore"):
        values = np.repeat(value @ column, weights.shape[-3] // value.shape[-3], axis=-2)[..., np.newaxis, :]
        mean = (array.astype(np.float64) @ column)[..., np.newaxis]
        wanted = ((weights * values).sum(axis=-1, keepdims=True) - mean).ravel()
        sums = np.cumsum(weights * (values - mean), axis=-1).reshape(len(wanted), -1)
    return _run_of(np.pad(sums, ((0, 0), (1, 0))), wanted) if np.isfinite(sums).all() else None


def _run_of(sums: Real, wanted: Real) -> tuple[int, int] | None:
    """Return the places between which running sums grow by what is wanted in every row, as far as any do."""
    mixed = np.random.RandomState(1).standard_normal(len(wanted))
    along, aim, last = mixed @ sums, float(mixed @ wanted), sums.shape[-1] - 1
    order = np.argsort(along)
    above = np.searchsorted(along[order], along + aim)
    starts = np.tile(np.arange(last + 1), 2)
    ends = order[np.clip(np.concatenate([above - 1, above]), 0, last)]
    is_run = (ends > starts) & (ends - starts < last)  # without any key there is no mean
    misses = np.where(is_run, np.abs(along[ends] - along[starts] - aim), np.inf)

    def miss(run: tuple[int, int]) -> float:
        return float(np.abs(sums[:, run[1]] - sums[:, run[0]] - wanted).max(initial=0.0))

    nearest = [place for place in np.argsort(misses)[:_RUNS_TRIED] if is_run[place]]
    if not nearest:
        return None
    start, end = min(((int(starts[place]), int(ends[place])) for place in nearest), key=miss)
    # Keys that nobody sees may be left out as well: up to the last one is said more simply.
    return (start, last) if start and miss((start, last)) <= 4 * miss((start, end)) else (start, end)


def bias_fitted(problem: Problem, factor: float) -> Alternative:
    """Return the case with its bias times a number that was fitted."""
    form = Form(with_bias_times(problem, factor), {"factor": scales_in_words(factor, 1.0)[0]})
    return BIAS_FITTED.alternative(form, is_fitted=True, factor=factor)


def with_scale_times(problem: Problem, factor: float, scale: float | None = None) -> Alternative:
    """Return the case with its scale times a number that was fitted; ``scale`` is the product, where it is known."""
    own = scale_of(problem)
    scale = own * factor if scale is None else scale
    taken, meant = scales_in_words(scale, own)
    shared = default_scale(_root_in_words(factor)) if has_default_scale(problem) and _root_in_words(factor) else ""
    form = Form(_scaled(problem, scale), {"taken": taken, "meant": meant}, shared=shared)
    return SCALE_FITTED.alternative(form, is_fitted=True, factor=factor)


def _root_in_words(factor: float) -> str:
    """Return the default scale times the root of a small whole number, or over it; empty where it is no such root."""
    for number in range(2, _MAX_ROOT + 1):
        if math.isclose(factor, 1 / math.sqrt(number), rel_tol=_NEARLY_A_ROOT):
            return f"1/sqrt({number}D)"
        if math.isclose(factor, math.sqrt(number), rel_tol=_NEARLY_A_ROOT):
            return f"sqrt({number}/D)"
    return ""


def _scaled(problem: Problem, scale: float) -> Problem:
    return problem.with_options(scale=scale)


def _shortened(fitted: float | None, unit: float, own: float) -> list[float]:
    return [] if fitted is None else list(dict.fromkeys((shortest(fitted, 4 * unit, own), fitted)))


_MAX_ROOT = 16
"""A fitted factor that is, except for roundings, the root of a whole number up to this, or one over it, is that."""
_NEARLY_A_ROOT = 2.0**-18
_WORTH_A_ROOT = 2.0**-10
"""So near a root, a fitted factor may be that: where it is not, that does not fit."""


@dataclass(frozen=True)
class FailingCase:
    """A problem in a dtype as an implementation fails it: the stages that fail, and those that are ``right``."""

    problem: Problem
    dtype: str
    failing: Stages
    right: Stages
    rounding_model: str

    def explained_by(self, names: Mapping[str, float | None]) -> list[Alternative]:
        """Return those of some readings that explain the case; a name has a factor where a number was fitted."""
        if not self.failing.keys() <= self._wrong.truth.exact.keys():
            return []
        found = {each.name: each for each in reversed(list(filter(self._fits, self._possible(names))))}
        for fitted in fitted_numbers(self._wrong) if names.keys() - found.keys() else ():
            if fitted.name in names and fitted.name not in found and self._fits(fitted):
                found[fitted.name] = fitted
        return list(found.values())

    def _possible(self, names: Mapping[str, float | None]) -> Iterator[Alternative]:
        problem, readings = self._wrong.problem, self._wrong.readings
        for each in readings.alternatives:
            if each.name in names and (each.replacement is not None or not readings.is_open(each)):
                yield each
        yield from (each for each in undefined_row_conventions(problem) if each.name in names)
        scale, bias = names.get(SCALE_FITTED.name), names.get(BIAS_FITTED.name)
        if scale is not None and has_scale(problem):
            yield with_scale_times(problem, as_root(scale))
        if bias is not None and "bias" in problem.inputs:
            yield bias_fitted(problem, bias)
        if (factor := names.get(STAGE_FITTED.name)) is not None:
            yield multiplied_by(self._wrong, factor)
        if any(name.startswith(ACCURACY) for name in names):
            accuracy, _ = judge_accuracy(self._wrong, is_known=True)
            yield from () if accuracy is None or accuracy.name not in names else (accuracy,)
            yield from judge_trades(self._wrong)[0]

    def _fits(self, reading: Alternative) -> bool:
        if reading.name.startswith(ACCURACY):
            return True
        if reading.replacement is None:
            other: Truth | None = self._approximate(reading.problem)
        else:
            other = reading.replacement(self._wrong.truth, self.rounding_model, self.failing)
        if other is None:
            return False
        arrays = {reading.stage_aliases.get(stage, stage): array for stage, array in self.failing.items()}
        have_shapes = all(stage in other.exact and other.exact[stage].shape == of.shape for stage, of in arrays.items())
        return have_shapes and does_fit(self._wrong, reading, other)

    @cached_property
    def _wrong(self) -> WrongResult:
        return WrongResult(self._approximate(self.problem), self.failing, self.rounding_model, self.right)

    def _approximate(self, problem: Problem) -> Truth:
        """Return a truth whose exact answer is the one in float64; none where numbers of the problem are not finite."""
        judged = judged_problem(replace(problem, dtype=self.dtype, supports_statistics=False), whole=True)
        rough = approximate_stages(judged.canonical)
        if self.failing.keys() - rough.keys():
            return truth_of_stages(judged, ExactStages(judged.canonical))
        values = {stage: _enclosed(array.astype(np.float64)) for stage, array in rough.items()}
        uniform_rows = find_undefined(judged).uniform_rows
        bounds = StageBounds(ExactStages(judged.canonical, values), self.dtype, uniform_rows).of(self.rounding_model)
        share = 2 * FORMATS["float64"].unit_roundoff / FORMATS[self.dtype].unit_roundoff
        exact = {stage: _with_radius(found, bounds[stage].max_error, share) for stage, found in values.items()}
        stages = ExactStages(judged.canonical, exact)
        truth = truth_of_stages(judged, stages)
        truth = replace(truth, bounds=truth.bounds.with_known(self.rounding_model, bounds))
        return truth.for_returned({**self.failing, **self.right})


def as_root(factor: float, nearly: float = _NEARLY_A_ROOT) -> float:
    """Return the root of a small whole number, or one over it, for a number that is nearly that."""
    roots = [math.sqrt(number) for number in range(2, _MAX_ROOT + 1)]
    return next(
        (math.copysign(each, factor) for root in roots for each in (root, 1 / root)
         if abs(abs(factor) / each - 1) < nearly),
        factor,
    )  # fmt: skip


def _enclosed(array: NDArray[np.float64]) -> Enclosure:
    """Take for exact what float64 gives: minus infinity is prescribed, and NaN or infinity says nothing."""
    unknown = np.isnan(array) | (array == np.inf)
    return Enclosure(array, np.zeros(array.shape), np.where(unknown, np.inf, 0.0))


def _with_radius(found: Enclosure, max_error: Real, share: float) -> Enclosure:
    """Give finite values a share of their largest error as radius: float64 may be off by so much."""
    known = (found.radius == 0) & np.isfinite(found.high) & np.isfinite(max_error)
    return replace(found, radius=np.where(known, share * max_error, found.radius))
