"""Properties of numbers: values scaled, scores shifted, and poison where no query may read.

Properties of memory and of history: where arrays lie, what was there before, and what was called before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.dtypes import largest_number, rounded_once
from attncheck.execution.sessions import Session, Step
from attncheck.properties.problem import (
    AnyVariant,
    Call,
    Pair,
    Problem,
    SessionVariant,
    UnfitError,
    Variant,
    require,
    require_operation,
    taken,
)
from attncheck.reading.lowering import poisoned

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


_LAYOUTS = ("strided", "padded", "unaligned", "transposed", "reversed")
_OF_MASKS = ("mask", "bias")
_REPEATED = 20
_THREADS = (2, 3)
_THOUSAND = 1000


def layout(problem: Problem) -> Sequence[AnyVariant]:
    """Lay query, key and value out otherwise, then the mask and the bias."""
    found = []
    for kind in _LAYOUTS:
        names = [name for name in problem.inputs if name not in _OF_MASKS and _can_lie(problem, name, kind)]
        if names:
            found.append(_laid_out(problem, names, kind, "inputs"))
    for kind in ("strided", "transposed", "reversed"):
        names = [name for name in _OF_MASKS if name in problem.inputs and _can_lie(problem, name, kind)]
        if names:
            found.append(_laid_out(problem, names, kind, " and ".join(names)))
    return found


def _can_lie(problem: Problem, name: str, kind: str) -> bool:
    spec, array = problem.specs[name], problem.inputs[name]
    if name not in _OF_MASKS and not spec.is_number:
        return False
    return array.ndim >= 2 and (kind != "transposed" or array.ndim == 4)


def _laid_out(problem: Problem, names: Sequence[str], kind: str, what: str) -> Variant:
    changed = Problem(problem.operation, problem.options, problem.inputs, problem.dtype, dict.fromkeys(names, kind))
    return Variant(f"{what} {kind}", (Call(f"{what} {kind} in memory", changed, problem),))


def repeated(problem: Problem) -> Sequence[AnyVariant]:
    """Make the same call again and again, with other work in between."""
    steps = tuple(Step(problem.task(), other_work=number > 0) for number in range(_REPEATED))
    pairs = tuple(Pair(f"call {number + 1} of {_REPEATED}", 0, number, problem) for number in range(1, _REPEATED))
    return (SessionVariant(f"{_REPEATED} calls", Session(steps), pairs),)


def fresh_process(problem: Problem) -> Sequence[AnyVariant]:
    """Make the call in a process that has done nothing else."""
    call = Call("in a fresh process", problem)
    return (Variant("in a fresh process", (call,), where="fresh process"),)


def threads(problem: Problem) -> Sequence[AnyVariant]:
    """Make the call in processes with more threads than one."""
    return tuple(
        Variant(f"{number} threads", (Call(f"with {number} threads", problem),), where="threads", threads=number)
        for number in _THREADS
    )


def output_buffer(problem: Problem) -> Sequence[AnyVariant]:
    """Fill the memory that the call may be given with NaN: by hand, and by the same call on NaN."""
    task = problem.task()
    poisonous = problem.replaced(
        {
            name: np.full_like(array, np.nan)
            for name, array in problem.inputs.items()
            if problem.specs[name].is_number and array.dtype.name != "float8_e5m2"
        }
    ).task()
    freed = Session((Step(task), Step(task, nan_memory=True)))
    called = Session((Step(task), Step(poisonous, returns=False), Step(task)))
    return (
        SessionVariant("memory full of NaN was freed", freed, (Pair("after NaN in memory", 0, 1, problem),)),
        SessionVariant("a call on NaN came before", called, (Pair("after a call on NaN", 0, 2, problem),)),
    )


def inputs_unchanged(problem: Problem) -> Sequence[AnyVariant]:
    """Look at the inputs behind a call."""
    return (SessionVariant("the inputs after the call", Session((Step(problem.task()),)), problem=problem),)


def outputs_independent(problem: Problem) -> Sequence[AnyVariant]:
    """Look at what a call returned after the next calls, and whether it is memory of an input."""
    other = problem.replaced(
        {
            name: (array.astype(np.float64) / 2).astype(array.dtype)
            for name, array in problem.inputs.items()
            if problem.specs[name].is_number
        }
    ).task()
    steps = (Step(problem.task(), stays=True), Step(other, returns=False, times=2))
    return (SessionVariant("the output after the next calls", Session(steps), problem=problem),)


def after_other_shapes(problem: Problem) -> Sequence[AnyVariant]:
    """Call other shapes between two equal calls, and hold those against calls in a process of their own."""
    others = list(_other_shapes(problem))
    if not others:
        raise UnfitError("no other shape can be made of the case")
    found = []
    for what, other in others:
        task, its = problem.task(), other.task()
        session = Session((Step(task), Step(its), Step(task), Step(its)))
        pairs = (
            Pair(f"again after {what}", 0, 2, problem),
            Pair(f"{what}, after the case's own shape", None, 1, other),
            Pair(f"{what}, after both shapes", None, 3, other),
        )
        found.append(SessionVariant(what, session, pairs))
    return found


def _other_shapes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Give the same operation with fewer queries, with half of the keys, and with the keys twice."""
    lengths = problem.lengths
    if {"cu_seqlens_q", "block_table"}.isdisjoint(problem.inputs):
        if lengths.get("Lq", 0) > 1:
            yield "half of the queries", problem.along({"Lq": taken(np.arange(lengths["Lq"] // 2))})
        cannot = {"key_lengths", "past_key", "rotary_cos", "query_offsets"} & problem.inputs.keys()
        if lengths.get("Lk", 0) > 1 and not cannot:
            half, twice = np.arange(lengths["Lk"] // 2), np.tile(np.arange(lengths["Lk"]), 2)
            if not problem.inputs.keys() & {"mask", "bias"}:
                yield "half of the keys", problem.along({"Lk": taken(half), "T": taken(half)})
            yield "the keys twice", problem.along({"Lk": taken(twice), "T": taken(twice)})
    if lengths.get("B", 0) > 1:
        yield "one batch entry", problem.along({"B": taken([0])})


def after_a_thousand_calls(problem: Problem) -> Sequence[AnyVariant]:
    """Call something smaller, and the same, a thousand times between two equal calls."""
    task = problem.task()
    other = next((made.task() for _, made in _other_shapes(problem)), task)
    half = _THOUSAND // 2
    steps = (
        Step(task),
        Step(other, returns=False, times=half),
        Step(task, returns=False, times=_THOUSAND - half),
        Step(task),
    )
    pair = Pair("after a thousand calls", 0, 3, problem)
    return (SessionVariant("a thousand calls in between", Session(steps), (pair,)),)
