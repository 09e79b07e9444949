"""Pad calls to a function's shape requirements, and strip the padding from its results.

Widths get columns of zeros, lengths get queries of zeros and keys that are masked. ``requirements.py`` refuses padding
that is not exact; docs/numerics.md, section 4.8, derives both.

A kernel with few options does not support most cases of the corpus. Its parameters show that before any numbers are
drawn, which keeps reruns fast. If the parameters do not decide it, the call does, with the same message
(``operations.run_operation``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import UnsupportedError
from attncheck.common.errors import UsageError
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.operations import (
    KeptElements,
    function_and_keywords,
    missing_conventions,
    require_parameters,
    strip_padding,
)
from attncheck.execution.requirements import InexactError, Requirements, attends_to_added_keys, require_exact_padding
from attncheck.execution.signatures import INPUTS_BY_FUNCTION
from attncheck.execution.worker import Failure, Outcome, unsupported_failure
from attncheck.reading.case import Case
from attncheck.reading.inputs import ArrayWithRadius, convert_inputs, make_problem_of_case
from attncheck.reading.lowering import unpacked_shapes
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import find_axis_lengths, find_stage_axes, input_of_optional_gradients, stage_shapes
from attncheck.spec import (
    DEFAULT_SCORE,
    GRADIENTS,
    LOGITS,
    OPERATIONS,
    PROJECTIONS,
    STAGE_SPECS,
    Shape,
    is_option_set,
    score_kind,
)

Array = NDArray[Any]
AxisLengths = Mapping[str, int]
"""Axis letter -> length."""

_WIDTHS = ("D", "Dv", "Dk")
_MAX_PADDED_SCORES, _MAX_SCORE_GROWTH = 1 << 26, 8
"""Of a padded call: 256 MiB in float32, unless the case itself has an eighth of them."""
_ZERO_PADDED_AXES: Mapping[str, frozenset[str]] = {
    name: frozenset(spec.axes) & {*_WIDTHS, "Lk", "T"}
    for name, spec in STAGE_SPECS.items()
    if name not in (*PROJECTIONS, *LOGITS) and not (name in GRADIENTS and "T" in spec.axes)
}
"""By stage, the axes along which padding is zero: columns of zeros, and masked keys."""


@dataclass(frozen=True, eq=False)
class PaddedCall:
    """A padded call.

    Attributes:
        problem: The call that is made instead.
        kept: By stage, the elements that remain when the padding is stripped.
        description: The padding in words.
    """

    problem: Problem
    kept_elements: Mapping[str, KeptElements]
    description: str

    def strip_padding(self, outcome: Outcome) -> Outcome:
        """Strip the padding from the stages of an outcome."""
        if isinstance(outcome, Failure):
            return replace(outcome, padded=self.description)
        cuts = {
            stage: strip_padding(array, self.kept_elements[stage])
            for stage, array in outcome.stages.items()
            if stage in self.kept_elements
        }
        stages = {stage: cuts[stage][0] if stage in cuts else array for stage, array in outcome.stages.items()}
        faults = {stage: fault for stage, (_, fault) in cuts.items() if fault}
        return replace(outcome, stages=stages, padded=self.description, faults={**outcome.faults, **faults})


def pad_call(implementation: Implementation, problem: Problem) -> PaddedCall | Failure | None:
    """Pad a call to the shapes that the function requires.

    Packed sequences become one mask first if the implementation has no function for them.

    Returns:
        The padded call; None if it meets the requirements already; a ``Failure`` if no padding is exact.
    """
    if OPERATIONS[problem.operation].may_run_as_lowered and not implementation.has_function(
        function_and_keywords(problem.operation, problem.options)[0]
    ):
        return _pad_call_with_mask(implementation, problem)
    name, _ = function_and_keywords(problem.operation, problem.options)
    declared, accepted = implementation.shape_requirements(name)
    if not declared or "query" not in problem.inputs:  # scores that are given have neither a width nor a scale
        return None
    requirements = Requirements.from_declaration(declared)
    specs = problem.input_specs
    blocks = {name for name in problem.inputs if specs[name].is_per_block}
    input_shapes = {name: array.shape for name, array in problem.inputs.items() if name not in blocks}
    shapes = unpacked_shapes(problem.options, input_shapes)
    lengths = find_axis_lengths(specs, shapes, problem.options.get("heads"), problem.options.get("kv_heads"))
    # The position of a sequence's first query, the largest of a batch.
    start = int(problem.inputs.get("query_offsets", np.zeros(1)).max(initial=lengths.get("P", 0)))
    try:
        longer = _padded_lengths(requirements, lengths, start)
        if longer and (blocks or shapes != input_shapes):
            kept = "codes that share bytes or scales of blocks keep their widths and lengths"
            raise InexactError(f"cannot be padded: {kept}")
        for convention in implementation.declared_readings:
            if _AXIS_DEPENDENT_CONVENTIONS.get(convention, frozenset()) & longer.keys():
                message = f"cannot be padded: it declares {convention}, by which a padded call is read otherwise"
                raise InexactError(message)
        _require_affordable(lengths, longer)
        return _pad_to_lengths(problem, lengths, longer, accepted) if longer else None
    except InexactError as error:
        return Failure("unsupported", str(error), error.lacks)


def _pad_call_with_mask(implementation: Implementation, problem: Problem) -> PaddedCall | Failure:
    """Turn the sequences of a problem into a mask, and pad the call of the other function."""
    if names := [name for name in _SEQUENCE_CONVENTIONS if name in implementation.declared_readings]:
        return Failure("unsupported", f"takes no sequences, and a mask in their place says no {names[0]}")
    folded = problem.without_layout()
    description = f"a block mask ({len(problem.inputs['cu_seqlens_k']) - 1} sequences)"
    padding = pad_call(implementation, folded)
    if padding is None:
        return PaddedCall(folded, {}, description)
    if isinstance(padding, Failure):
        return replace(padding, padded=description)
    return replace(padding, description=f"{description}, {padding.description}")


def pad_call_or_raise(implementation: Implementation, problem: Problem) -> PaddedCall:
    """Return the call that is made for a problem, padded or as it is. Raises ``UsageError`` if none is."""
    padding = pad_call(implementation, problem)
    if isinstance(padding, Failure):
        raise UsageError(f"{implementation.name} is not called: {padding.message}")
    return padding or PaddedCall(problem, {}, "")


def _padded_lengths(requirements: Requirements, lengths: AxisLengths, start: int) -> dict[str, int]:
    """Return the new lengths of axes that have to grow, by letter. Raises ``InexactError`` if no length works."""
    widths = {letter: lengths[letter] for letter in _WIDTHS if letter in lengths}
    if requirements.value_width and "Dv" in widths:
        widths |= dict.fromkeys(("D", "Dv"), max(widths["D"], widths["Dv"]))
    wanted = {letter: requirements.smallest_accepted_width(width) for letter, width in widths.items()}
    for letter, width in wanted.items():
        if width is None:
            raise InexactError(f"requires {requirements.width_limits_text}; {letter} is {widths[letter]}")
    queries, keys = requirements.smallest_accepted_lengths(lengths["Lq"], lengths["T"])
    if lengths.keys() & {"S1", "W", "C", "K"}:
        if (queries, keys) != (lengths["Lq"], lengths["T"]):
            kept = "sequences that are packed, paged, latent or sparse keep their lengths"
            raise InexactError(f"requires lengths such as {queries} queries and {keys} keys; {kept}")
        return {letter: width for letter, width in wanted.items() if width not in (None, lengths[letter])}
    longer = {letter: width for letter, width in wanted.items() if width is not None}
    longer |= {"Lq": queries, "Lk": keys - lengths.get("P", 0), "T": keys}
    if "Lr" in lengths:  # what is added has a position, too
        longer["Lr"] = max(lengths["Lr"], keys, queries + start)
    return {letter: length for letter, length in longer.items() if length != lengths[letter]}


_AXIS_DEPENDENT_CONVENTIONS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("corner", "mask", "key_lengths", "softcap"), frozenset({"Lq", "T"})),
    "scale": frozenset({"D"}),
}
"""Conventions whose meaning changes when these axes are padded, such as a mask in which True forbids."""
_SEQUENCE_CONVENTIONS = ("corner", "key_lengths")


def _require_affordable(lengths: AxisLengths, longer: AxisLengths) -> None:
    """Raise ``InexactError`` if padding makes many more scores than the case has, and too many for a kernel."""
    padded = {**lengths, **longer}
    before, after = (sizes["B"] * sizes.get("H", 1) * sizes["Lq"] * sizes["T"] for sizes in (lengths, padded))
    if after > _MAX_PADDED_SCORES and after > _MAX_SCORE_GROWTH * before:
        padding = _describe_padding(lengths, longer)
        raise InexactError(
            f"would be padded from {before:,} scores to {after:,}, too many to ask: {padding}",
            ("padding of few queries to many keys",),
        )


def _pad_to_lengths(
    problem: Problem, lengths: AxisLengths, longer: AxisLengths, accepted: frozenset[str]
) -> PaddedCall:
    require_exact_padding(problem, longer)
    specs = problem.input_specs
    inputs = {
        name: _pad_array(array, specs[name].axes, lengths, longer, name, is_broadcast=specs[name].is_broadcastable)
        for name, array in problem.inputs.items()
    }
    options = {**problem.options, **_scale_of_unpadded_width(problem, lengths, longer, accepted)}
    asked = _mask_added_keys(replace(problem, options=options, inputs=inputs), lengths, longer, accepted)
    require_exact_padding(problem, longer, asked)
    padded = {**lengths, **longer}
    axes, shapes = find_stage_axes(problem.operation, lengths), stage_shapes(problem.operation, padded)
    for stage, name in input_of_optional_gradients(problem.operation).items():
        if name in inputs:
            axes[stage], shapes[stage] = specs[name].axes, inputs[name].shape
    kept = {stage: _kept_elements(stage, axes[stage], shape, lengths, longer) for stage, shape in shapes.items()}
    kept = {stage: elements for stage, elements in kept.items() if elements.positions}
    return PaddedCall(asked, kept, _describe_padding(lengths, longer))


def _scale_of_unpadded_width(
    problem: Problem, lengths: AxisLengths, longer: AxisLengths, accepted: frozenset[str]
) -> dict[str, float]:
    """Return the scale that has to be given because the function would take it from the padded width."""
    is_from_width = score_kind(problem.operation, problem.options) == DEFAULT_SCORE
    if "D" not in longer or is_option_set("scale", problem.options, problem.inputs) or not is_from_width:
        return {}
    if "scale" not in accepted:
        raise InexactError("takes no scale, which has to be given where the width is padded", ("scale",))
    return {"scale": 1 / math.sqrt(lengths["D"])}


def _mask_added_keys(problem: Problem, lengths: AxisLengths, longer: AxisLengths, accepted: frozenset[str]) -> Problem:
    """Mask the keys that were added, if any query of the case may attend to them."""
    if (
        "T" not in longer
        or OPERATIONS[problem.operation].has_score_option
        or not attends_to_added_keys(problem, lengths)
    ):
        return problem
    is_key = (np.arange(longer["T"]) < lengths["T"]).reshape(1, 1, 1, -1)
    if "mask" in problem.inputs:
        return replace(problem, inputs={**problem.inputs, "mask": problem.inputs["mask"] & is_key})
    if "key_lengths" in accepted:
        counts = np.full(lengths["B"], lengths["T"], dtype=np.int64)
        return replace(problem, inputs={**problem.inputs, "key_lengths": counts})
    if "mask" in accepted:
        return replace(problem, inputs={**problem.inputs, "mask": is_key})
    lacking = "takes neither mask nor key_lengths, one of which it needs where keys are padded"
    raise InexactError(lacking, ("mask or key_lengths",))


def _pad_array(
    array: Array, axes: Sequence[str], lengths: AxisLengths, longer: AxisLengths, name: str, *, is_broadcast: bool
) -> Array:
    """Add zeros to every axis that has to be longer; a mask gets keys that are masked and queries that are not."""
    for axis, letter in enumerate(axes):
        heads, _, base = letter.rpartition("*")
        if base not in longer or (is_broadcast and array.shape[axis] == 1):
            continue
        shape = (lengths[heads], lengths[base]) if heads else (lengths[base],)
        split = array.reshape(*array.shape[:axis], *shape, *array.shape[axis + 1 :])
        last = axis + len(shape) - 1
        missing = (*split.shape[:last], longer[base] - lengths[base], *split.shape[last + 1 :])
        fill = np.full(missing, name == "mask" and base == "Lq", dtype=array.dtype)
        grown = np.concatenate([split, fill], axis=last)
        array = grown.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :]) if heads else grown
    return array


def _kept_elements(
    stage: str, axes: Sequence[str], shape: Shape, lengths: AxisLengths, longer: AxisLengths
) -> KeptElements:
    """Return the positions of a stage's longer axes that existed before padding."""
    kept: dict[int, Sequence[int]] = {}
    zeros: list[int] = []
    for axis, letter in enumerate(axes):
        heads, _, base = letter.rpartition("*")
        if base in longer and not (base in ("Lq", "T") and shape[axis] == 1 != longer[base]):  # broadcast: a bias's
            starts = range(0, lengths[heads] * longer[base], longer[base]) if heads else range(1)
            positions = range(lengths[base])
            kept[axis] = positions if len(starts) == 1 else [start + place for start in starts for place in positions]
            zeros += [axis] if base in _ZERO_PADDED_AXES.get(stage, ()) else []
    return KeptElements(shape, kept, tuple(zeros))


def _describe_padding(lengths: AxisLengths, longer: AxisLengths) -> str:
    """Return the padding in words: what is added, and to which axes.

    Example:
        >>> _describe_padding({"D": 5, "Lq": 3, "T": 4}, {"D": 8, "T": 64})
        'zero columns (D 5 to 8), masked keys (T 4 to 64)'
    """
    kinds = (("zero columns", _WIDTHS), ("queries", ("Lq",)), ("masked keys", ("T",)))
    grown = {letter: f"{letter} {lengths[letter]} to {longer[letter]}" for letter in longer}
    return ", ".join(
        f"{what} ({', '.join(grown[letter] for letter in letters if letter in longer)})"
        for what, letters in kinds
        if any(letter in longer for letter in letters)
    )


def unsupported_before_call(implementation: Implementation, case: Case, dtype: str) -> Failure | None:
    """Return the outcome of a case that an implementation has no function or no parameter for; None if it may have."""
    return unsupported_reason(implementation, case, lambda: _call_without_numbers(case, dtype))


def unsupported_reason(
    implementation: Implementation, problem: Case | Problem, call: Callable[[], Problem]
) -> Failure | None:
    """Return the same of a problem whose ``call`` is known without its numbers."""
    entry = implementation.entry
    if not isinstance(entry, UserImplementation) or OPERATIONS[problem.operation].may_run_as_lowered:
        return None
    name, keywords = function_and_keywords(problem.operation, problem.options)
    parameters = entry.parameters.get(name)
    if parameters is None:
        return unsupported_failure(UnsupportedError.of_function(name)) if entry.parameters else None
    positional = INPUTS_BY_FUNCTION[name]
    if entry.requirements.get(name) or not parameters.missing_names(
        {*problem.inputs, *keywords}.difference(positional)
    ):
        return None
    called = call()
    _, keywords = function_and_keywords(problem.operation, called.options)
    unasked = missing_conventions(parameters, called.options)
    asked = [key for key in (*called.inputs, *keywords) if key not in (*positional, *unasked)]
    try:
        require_parameters(parameters, asked)
    except UnsupportedError as error:
        return unsupported_failure(error)
    return None


def _call_without_numbers(case: Case, dtype: str) -> Problem:
    """Return the call of a case with all inputs zero."""
    zeros = {name: np.zeros(shape) for name, shape in case.input_shapes.items()}
    inputs = convert_inputs(case, {name: ArrayWithRadius(array, array) for name, array in zeros.items()}, dtype)
    return make_problem_of_case(case, inputs).as_call()
