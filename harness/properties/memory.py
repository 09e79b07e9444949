"""Properties of memory and of history: where arrays lie, what was there before, and what was called before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from attncheck.execution.sessions import Session, Step
from attncheck.properties.problem import Problem, UnfitError, taken
from attncheck.properties.variants import AnyVariant, Call, Pair, SessionVariant, Variant

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
