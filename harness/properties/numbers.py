"""Properties of numbers: values scaled, scores shifted, and poison where no query may read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.properties.problem import Problem, UnfitError, require, require_operation
from attncheck.properties.variants import AnyVariant, Call, Variant
from attncheck.reading.dtypes import largest_number, rounded_once
from attncheck.reading.lowered import poisoned

Array = NDArray[Any]
_EXPONENTS = (3, -3)
_VALUES = ("value", "past_value", "value_pages")
_SCALED = ("attention", "packed_attention", "paged_attention", "normalized_attention")
_BY_SCORE = ("general_attention", "additive_attention", "cosine_attention")
_POISONED = ("attention", "packed_attention", "normalized_attention", *_BY_SCORE)
_LARGE = 1e30
_SHIFTS = {"by up to 2": (0.25, 17), "by 64": (64.0, 1)}
"""A step between rows, and after how many rows it begins anew."""


def values_scaled(problem: Problem) -> Sequence[AnyVariant]:
    """Multiply all values by a power of two, which rounds nothing."""
    require_operation(problem, *_SCALED, *_BY_SCORE)
    names = [name for name in _VALUES if name in problem.inputs]
    found = []
    for exponent in _EXPONENTS:
        factor = 2.0**exponent
        scaled = {name: _times(problem.inputs[name], factor) for name in names}
        if not all(np.array_equal(_times(each, 1 / factor), problem.inputs[name]) for name, each in scaled.items()):
            continue  # a value would be beyond the range of the dtype, or tiny
        what = f"values times 2^{exponent}"
        found.append(Variant(what, (Call(what, problem.replaced(scaled)),), factor=1 / factor))
    if not found:
        raise UnfitError(f"no power of two leaves all values in the range of {problem.dtype}")
    return found


def _times(array: Array, factor: float) -> Array:
    with np.errstate(over="ignore"):
        return (array.astype(np.float64) * factor).astype(array.dtype)


def scores_shifted(problem: Problem) -> Sequence[AnyVariant]:
    """Add a number of its own to all scores of each row, through the bias."""
    if "bias" not in problem.specs or problem.results != ("output",):
        raise UnfitError(f"{problem.operation} takes no bias, or gives more than an output")
    require(problem, lacks=("sinks", "mask_fill"))
    queries, keys = problem.lengths["Lq"], problem.lengths["T"]
    bias = problem.inputs.get("bias", np.zeros((1, 1, queries, keys), problem.inputs["query"].dtype))
    found = []
    for what, (step, period) in _SHIFTS.items():
        rows = step * (np.arange(queries) % period - period // 2 if period > 1 else np.ones(queries))
        exact = bias.astype(np.float64) + rows[:, np.newaxis]
        shifted = rounded_once(exact, problem.dtype)
        if not np.array_equal(shifted.astype(np.float64), exact):
            raise UnfitError(f"the bias with a number added is no number of {problem.dtype}")
        call = Call(f"scores shifted {what}", problem.replaced({"bias": shifted}))
        found.append(Variant(f"scores shifted {what}", (call,)))
    return found


def poison_large(problem: Problem) -> Sequence[AnyVariant]:
    """Set huge numbers where no query may read."""
    return _poison(problem, "large")


def poison_nan(problem: Problem) -> Sequence[AnyVariant]:
    """Set NaN where no query may read."""
    return _poison(problem, "nan")


def _poison(problem: Problem, kind: str) -> Sequence[AnyVariant]:
    if problem.operation == "paged_attention":
        found = [_of_pages(problem, kind)]
    else:
        require_operation(problem, *_POISONED)
        value = np.nan if kind == "nan" else min(_LARGE, largest_number(problem.dtype))
        found = list(_of_keys(problem, value, "NaN" if kind == "nan" else "a huge number"))
    if not found:
        raise UnfitError("every query may attend to every key")
    return found


def _of_pages(problem: Problem, kind: str) -> Variant:
    inputs = poisoned({"poison": kind}, problem.inputs, problem.dtype)
    call = Call("with unused slots of pages poisoned", problem.replaced({**inputs}), problem)
    return Variant("unused slots of pages", (call,), nan_may_spread=kind == "nan")


def _of_keys(problem: Problem, value: float, word: str) -> Iterator[Variant]:
    """Poison keys that nobody may attend to, then one half of the keys, and look at rows that see none of that."""
    allowed = problem.allowed()
    dead: NDArray[np.bool_] = np.logical_not(allowed.any(axis=(1, 2)))  # (B, T)
    half, positions = allowed.shape[-1] // 2, np.arange(allowed.shape[-1])
    for where, places in (
        ("that nobody may attend to", dead),
        (f"from {half} on", np.broadcast_to(positions >= half, dead.shape)),
        (f"before {half}", np.broadcast_to(positions < half, dead.shape)),
    ):
        if places.any() and _rows_without(allowed, places).any():
            for names, what in (
                (("key", "past_key"), "in keys"),
                (("value", "past_value"), "in values of keys"),
            ):
                yield _with(problem, names, places, allowed, value, f"{word} {what} {where}")


def _rows_without(allowed: NDArray[np.bool_], places: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the query rows (B, H, Lq) that may attend to some key, and to none of these."""
    sees = (allowed & places[:, np.newaxis, np.newaxis]).any(axis=-1)
    rows: NDArray[np.bool_] = np.logical_and(~sees, allowed.any(axis=-1))
    return rows


def _with(
    problem: Problem,
    names: Sequence[str],
    places: NDArray[np.bool_],
    allowed: NDArray[np.bool_],
    value: float,
    what: str,
) -> Variant:
    past = problem.lengths.get("P", 0)
    inputs: dict[str, Array | None] = {}
    for name in names:
        if name in problem.inputs:
            own = places[:, :past] if name.startswith("past") else places[:, past:]
            array = problem.inputs[name].copy()
            array[np.broadcast_to(own[:, np.newaxis, :, np.newaxis], array.shape)] = value
            inputs[name] = array
    rows = _rows_without(allowed, places)[..., np.newaxis]
    call = Call(f"with {what}", problem.replaced(inputs), problem)
    return Variant(what, (call,), compared={"output": rows}, nan_may_spread=bool(np.isnan(value)))
