"""The distance of a result from a reading of its case, in float64 NumPy, to choose what is worth an exact answer.

Beside it the scales that are tried in the place of the one that a case means: the common wrong ones, and the one with
which the result comes nearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.problem import Computation
from attncheck.attention.scores import scale_from
from attncheck.attention.walk import value_walk
from attncheck.backends import numpy_backend
from attncheck.execution.operations import run_operation
from attncheck.judging.undefined_rows import UndefinedRows, find_undefined_rows
from attncheck.reading.lowering import Problem
from attncheck.spec import BY_SCORE, DEFAULT_EMPTY_ROWS, FOLDED_INPUTS, computed_stages, score_kind

Real = NDArray[np.float64]

_OPERATIONS = frozenset({"attention", "attention_gradients", "multi_head_attention"})
_OF_ONE = "the root of the right one, as if one of query and key had it"
_OCTAVES, _PER_OCTAVE, _ITERATIONS = 6, 2, 12


def has_scale(problem: Problem) -> bool:
    """Whether the scores are a product of query and key times a number."""
    is_scored = problem.operation in ("scoring", *BY_SCORE)
    return problem.operation in _OPERATIONS or (
        is_scored and score_kind(problem.operation, problem.options) in ("dot", "scaled_dot", "cosine")
    )


def scale_of(problem: Problem) -> float:
    """Return the factor of the scores that a case means."""
    return scale_from(problem.options, score_kind(problem.operation, problem.options), lambda: widths_of(problem)["D"])


def other_scales(problem: Problem) -> Iterator[tuple[float, dict[str, str]]]:
    """Yield the scales that are often taken for the right one, the likeliest first, each once.

    Beside each all that it may be: by a name that is the same in every case, what it is in words.
    """
    own, widths = scale_of(problem), widths_of(problem)
    root = math.sqrt(widths["D"])
    given = problem.options.get("scale") is not None
    times = "the given one times 1/sqrt(D)" if given else "1/sqrt(D)"
    candidates = [
        (1 / root, "scale-default", "the default 1/sqrt(D)" if given else "1/sqrt(D)"),
        *([(own / root, "scale-times-default", times)] if f"{own * root:.12g}" != "1" else []),
        (1.0, "scale-one", ""),
        (own * own, "scale-twice", "twice the same factor"),
        *(
            [(math.sqrt(own), "scale-root", "the root of the right one, as if one of query and key had it")]
            if own > 0
            else []
        ),
        (1 / widths["D"], "scale-inverse-width", "1/D"),
        (root, "scale-root-of-width", "sqrt(D)"),
        *(
            (1 / math.sqrt(width), f"scale-inverse-root-of-{name.replace(' ', '')}", f"1/sqrt({name})")
            for name, width in widths.items()
            if name != "D"
        ),
        (2 * own, "scale-doubled", "twice as large"),
        (own / 2, "scale-halved", "half as large"),
        (-own, "scale-negated", "the negative"),
        (own / math.log(2), "scale-times-log2e", "log2(e) times as large"),
        (own * math.log(2), "scale-times-ln2", "ln(2) times as large"),
    ]
    found: dict[str, tuple[float, dict[str, str]]] = {}
    for scale, name, words in candidates:
        same = f"{scale:.12g}"  # 1/8 and the square of 1/sqrt(8) are one scale
        if same != f"{own:.12g}":
            found.setdefault(same, (scale, {}))[1][name] = words
    yield from found.values()


def widths_of(problem: Problem) -> dict[str, int]:
    """Return the widths that a scale may be made of: D of a head, Dv of values, H D of all heads, E of the inputs.

    Of latent vectors, C is their own width, and Dn that of a query's part that is not rotated.
    """
    inputs = problem.inputs
    if problem.operation == "multi_head_attention":
        heads = int(problem.options["heads"])
        shared = int(problem.options.get("kv_heads") or heads)
        return {
            "D": inputs["query_weight"].shape[-1] // heads,
            "Dv": inputs["value_weight"].shape[-1] // shared,
            "H D": inputs["query_weight"].shape[-1],
            "E": inputs["query"].shape[-1],
        }
    query = inputs["query"]
    widths = {"D": query.shape[-1]}
    if "key_projection" in inputs:
        widths |= {"C + Dr": inputs["key"].shape[-1], "Dn": inputs["key_projection"].shape[-1]}
        widths |= {"C": inputs["value"].shape[-1], "Dv": inputs["value_projection"].shape[-1]}
    elif "value" in inputs:
        widths["Dv"] = inputs["value"].shape[-1]
    heads = query.shape[-3] if query.ndim > 2 else 1
    return widths | {"H D": heads * query.shape[-1]}


def fit_scale(residual: Callable[[float], Real], own: float) -> float | None:
    """Return the scale at which a residual is smallest, by least squares; None where there is no such place.

    A coarse search over some octaves on both sides of ``own``, of either sign, then Gauss and Newton's iteration, which
    stays between the neighbours of the coarse best.
    """
    grid = grid_around(own)
    far = np.array([np.abs(residual(scale)).sum() for scale in grid])
    if not np.isfinite(far).any():
        return None
    best = int(np.nanargmin(far))
    if best in (0, len(grid) - 1):
        return None
    low, scale, high = grid[best - 1 : best + 2]
    for _ in range(_ITERATIONS):
        step = 1e-5 * (high - low)
        slope = (residual(scale + step) - residual(scale - step)) / (2 * step)
        steepness = float(slope @ slope)
        if not steepness > 0:
            return None
        before, scale = scale, min(max(scale - float(slope @ residual(scale)) / steepness, low), high)
        if scale == before:
            break
    return scale if low < scale < high else None


def grid_around(own: float) -> list[float]:
    """Return the scales of the coarse search, in their order."""
    octaves = 2.0 ** (np.arange(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1) / _PER_OCTAVE) * (abs(own) or 1.0)
    return [*(-octaves[::-1]).tolist(), 0.0, *octaves.tolist()]


def shortest(scale: float, relative: float, own: float) -> float:
    """Return the number of fewest digits this close to a scale: a constant in code is seldom longer."""
    if abs(scale) <= relative * abs(own):
        return 0.0
    for digits in range(2, 10):
        short = float(f"{scale:.{digits}g}")
        if abs(short - scale) <= relative * abs(scale):
            return short
    return scale


def scales_in_words(*scales: float) -> list[str]:
    """Write scales with four digits, or with more where they would look the same."""
    short = [f"{scale:.4g}" for scale in scales]
    return short if len(set(short)) == len(set(scales)) else [f"{scale:.9g}" for scale in scales]


Array = NDArray[Any]
Stages = Mapping[str, Array]

_MAX_KEPT = 1 << 13
"""Elements that failing stages may have for what is tried beside them to be kept: half a hundred times as much."""


@dataclass(frozen=True, eq=False)
class Approximation:
    """The stages of a reading in float64, empty where NumPy cannot do it, and its rows without a key."""

    stages: Stages
    undefined_rows: UndefinedRows


def approximate(problem: Problem) -> Approximation:
    """Evaluate a reading in float64."""
    plain = problem.canonical()
    undefined_rows = find_undefined_rows(plain, DEFAULT_EMPTY_ROWS)
    return Approximation(approximate_stages(plain), undefined_rows)


def residual(approximation: Approximation, returned: Stages, stage_aliases: Mapping[str, str] | None = None) -> float:
    """Return how far stages are from a reading: of their mean differences, each over its size, the largest.

    ``stage_aliases`` names the stages to compare with where they have other names. Rows without a key do not count.
    """
    undefined_rows, far = approximation.undefined_rows, 0.0
    for stage, array in returned.items():
        other = approximation.stages.get((stage_aliases or {}).get(stage, stage))
        if other is None or other.shape != array.shape:
            return np.inf
        judged = ~undefined_rows.affected_by_empty(stage, array.shape)
        far = max(far, _mean_difference(array.astype(np.float64)[judged], other[judged]))
    return far


def best_number(
    with_number: Callable[[float], Problem],
    returned: Stages,
    own: float,
    known: dict[float, Stages],
) -> float | None:
    """Return the number with which a problem comes nearest to what was returned; None where none is nearest.

    ``with_number`` gives a problem in canonical form; of a small one, ``known`` keeps what it comes to with the numbers
    that are tried whatever was returned.
    """
    stages = {stage: array.astype(np.float64) for stage, array in returned.items()}
    grid, is_small = frozenset(grid_around(own)), sum(array.size for array in stages.values()) <= _MAX_KEPT

    def stages_with(number: float) -> Stages:
        if number in known:
            return known[number]
        found = approximate_stages(with_number(number))
        if is_small and number in grid:
            known[number] = found
        return found

    def differences(number: float) -> NDArray[np.float64]:
        other = stages_with(number)
        flat = np.concatenate([(array - other.get(stage, np.nan)).ravel() for stage, array in stages.items()])
        return np.where(np.isfinite(flat), flat, 0.0)

    with np.errstate(all="ignore"):
        return fit_scale(differences, own)


def _mean_difference(array: Array, other: Array) -> float:
    if not array.size:
        return 0.0
    finite = np.isfinite(array) & np.isfinite(other)
    odd = ~finite & ~((array == other) | (np.isnan(array) & np.isnan(other)))
    with np.errstate(over="ignore"):
        difference = np.abs(array[finite] - other[finite]).sum()
        size = np.abs(other[finite]).sum() + np.finfo(np.float64).tiny
        # Sums of the lowest numbers of float64 overflow.
        relative = difference / size if np.isfinite(size) else np.inf
        return float(relative + odd.mean())


def approximate_stages(plain: Problem) -> dict[str, Array]:
    """Return the stages of a problem in canonical form, from the NumPy backend; nothing where it cannot do it.

    A backend takes no inputs that this form alone has; these problems are walked in float64.
    """
    inputs = {name: array if array.dtype == bool else array.astype(np.float64) for name, array in plain.inputs.items()}
    options = {name: value for name, value in plain.options.items() if value is not None}
    try:
        with np.errstate(all="ignore"):
            if not inputs.keys().isdisjoint(FOLDED_INPUTS):
                return _walked(Computation.of(Problem(plain.operation, options, inputs)))
            return dict(run_operation(numpy_backend, plain.operation, inputs, options))
    except NotImplementedError:
        return {}


def _walked(problem: Computation) -> dict[str, Array]:
    walk, stages = value_walk(problem), computed_stages(problem.operation, problem.options, problem.inputs)
    return {stage: problem.without_added(stage, walk.node(stage)) for stage in stages}
