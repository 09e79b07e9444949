"""Properties of order: which entry of a batch, which head and which key comes first must not matter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.properties.problem import Change, Problem, UnfitError, per_head, require, taken
from attncheck.properties.variants import AnyVariant, Call, Combine, Variant
from attncheck.reading.shapes import optional_gradients

Array = NDArray[Any]
_SEED = 20


def stages_along(problem: Problem, letter: str) -> tuple[str, ...]:
    """Return the results that have an axis of a letter: of what was summed over it, nothing can be compared."""
    optional = optional_gradients(problem.operation)
    return tuple(
        stage
        for stage in problem.results
        if letter in problem.axes_of_stage(stage)
        and (stage not in optional or problem.axis_of(optional[stage], letter) is not None)
    )


def batch_invariant(problem: Problem) -> Sequence[AnyVariant]:
    """Compute each batch entry alone, and all of them in another order."""
    entries = problem.lengths.get("B", 1)
    if entries < 2:
        raise UnfitError("the case has a batch of one")
    stages = stages_along(problem, "B")
    if not stages:
        raise UnfitError("no result has an axis of the batch")
    alone = tuple(Call(f"batch entry {entry} alone", problem.along({"B": taken([entry])})) for entry in range(entries))
    order = np.roll(np.arange(entries), 1)
    rolled = Call("the entries in another order", problem.along({"B": taken(order)}))
    return (
        Variant("each batch entry alone", alone, partial(_joined, problem, "B"), stages=stages),
        Variant("another place in the batch", (rolled,), _back(problem, {"B": order}), stages=stages),
    )


def _joined(problem: Problem, letter: str, stage: str, results: Sequence[Array]) -> Array:
    return np.concatenate(results, axis=problem.axes_of_stage(stage).index(letter) - len(problem.axes_of_stage(stage)))


def joined_along(problem: Problem, letter: str) -> Combine:
    """Return what lays results one after the other along an axis."""
    return partial(_joined, problem, letter)


def _back(problem: Problem, orders: dict[str, NDArray[np.intp]]) -> Combine:
    """Return what brings a result back into the first call's order."""

    def combine(stage: str, results: Sequence[Array]) -> Array:
        (array,) = results
        for letter, order in orders.items():
            axis = problem.axis_of_stage(stage, letter, array.shape)
            if axis is not None:
                array = array.take(np.argsort(order), axis=axis)
        return array

    return combine


def heads_permuted(problem: Problem) -> Sequence[AnyVariant]:
    """Compute the heads in another order; heads of queries stay with those of the keys that they share."""
    if not per_head(problem):
        raise UnfitError(f"{problem.operation} has no axis of heads")
    if problem.options.get("norm_over") == "full":
        raise UnfitError("the case takes a norm over all heads")
    heads = problem.lengths["H"]
    groups = problem.lengths.get("Hkv", heads)
    if heads < 2:
        raise UnfitError("the case has one head")
    several = heads // groups
    of_keys = np.roll(np.arange(groups), 1)
    of_queries = np.array([group * several + each for group in of_keys for each in reversed(range(several))])
    orders = {"H": of_queries, "Hkv": of_keys}
    changes: dict[str, Change] = {letter: taken(order) for letter, order in orders.items()}
    call = Call("the heads in another order", problem.along(changes))
    return (Variant("the heads in another order", (call,), _back(problem, orders)),)


def keys_permuted(problem: Problem) -> Sequence[AnyVariant]:
    """Compute with keys in another order, and with them all that is theirs."""
    require(
        problem,
        lacks=("is_causal", "window", "key_lengths", "rotary_cos", "query_offsets", "past_key", "cu_seqlens_k"),
    )
    keys = problem.lengths.get("Lk", 0)
    if keys < 2 or not any("Lk" in spec.axes for spec in problem.specs.values()):
        raise UnfitError("the case has no keys to put in another order")
    orders = {
        "the keys in reverse": np.arange(keys)[::-1],
        "the keys shuffled": np.random.default_rng(_SEED).permutation(keys),
    }
    return tuple(
        Variant(
            what,
            (Call(what, problem.along({"Lk": taken(order), "T": taken(order)})),),
            _back(problem, {"Lk": order, "T": order}),
        )
        for what, order in orders.items()
    )
