"""What a framework gives for parts of the keys, merged exactly, is the whole within bounds (split keys, rings).

With L_n off by at most D and o_n by at most E_n, merged exactly, and p_n the exact shares of the parts,

    |L' - L| <= D        |o' - o| <= e^(2D) sum_n p_n E_n + (e^(2D) - 1) sum_n p_n |o_n - o|

The exact numbers and the bounds of each part are the oracle's; nothing here is computed by the framework but its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.judging.truth import Truth, find_truth

Array = NDArray[Any]
Run = Callable[..., dict[str, Array]]
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 5, 24, 8
SPLITS = {"halves": (12,), "one key first": (1,), "three": (7, 16), "one at a time": tuple(range(1, KEYS))}
LEVELS = {"near zero": 0.0, "below exp's range in float32": -100.0, "below exp's range in float64": -900.0}


class Setting(Protocol):
    """A backend that is prepared for a dtype."""

    dtype: np.dtype[Any]


@pytest.fixture(params=sorted(LEVELS))
def inputs(request: pytest.FixtureRequest, setting: Setting) -> dict[str, Array]:
    """Draw a call whose scores are all moved by a bias; the last query may attend to none of the first keys."""
    rng = np.random.default_rng(len(request.param))
    shapes = {"query": (QUERIES, WIDTH), "key": (KEYS, WIDTH), "value": (KEYS, WIDTH)}
    drawn = {name: rng.standard_normal((BATCH, HEADS, *shape)) for name, shape in shapes.items()}
    bias = LEVELS[request.param] + rng.standard_normal((QUERIES, KEYS))
    drawn["mask"] = rng.random((BATCH, 1, QUERIES, KEYS)) < 0.8
    drawn["mask"][:, :, :, -1], drawn["mask"][:, :, -1, :13] = True, False
    stored = {name: array if array.dtype == bool else array.astype(setting.dtype) for name, array in drawn.items()}
    return {**stored, "bias": bias.astype(setting.dtype)}


def part_of(inputs: dict[str, Array], keys: slice) -> dict[str, Array]:
    rows = {name: inputs[name][:, :, keys] for name in ("key", "value")}
    columns = {name: inputs[name][..., keys] for name in ("mask", "bias")}
    return {**inputs, **rows, **columns}


def truth_of(operation: str, inputs: dict[str, Array], dtype: str) -> Truth:
    return find_truth(operation, {}, inputs, dtype, supports_statistics=False)


def exact(truth: Truth, stage: str) -> Array:
    return np.asarray(truth.exact[stage].high)


def bound(truth: Truth, stage: str) -> Array:
    return np.asarray(truth.bounds("native")[stage].max_error)


def apart(one: Truth, other: Truth, stage: str) -> Array:
    """Return how far two exact stages are from each other, beyond float64's own rounding."""
    a, b = one.exact[stage], other.exact[stage]
    return np.asarray(np.abs((a.high - b.high) + (a.low - b.low)))


def excess(inputs: dict[str, Array], found: list[dict[str, Array]], parts: list[Truth], dtype: str) -> dict[str, float]:
    """Return by how many times what is allowed the merged parts are off at most, stage by stage."""
    outputs, lses = (np.stack([each[stage] for each in found]) for stage in ("output", "log_sum_exp"))
    whole = truth_of("attention", inputs, dtype)
    merged = truth_of("merge_states", {"outputs": outputs, "log_sum_exps": lses}, dtype)
    logarithms = np.stack([exact(part, "log_sum_exp") for part in parts])
    known = np.isfinite(logarithms)
    off = np.where(known, np.stack([bound(part, "log_sum_exp") for part in parts]), 0.0).max(axis=0)
    shares = np.exp(logarithms - exact(whole, "log_sum_exp"))[..., np.newaxis]
    own = np.where(known[..., np.newaxis], np.stack([bound(part, "output") for part in parts]), 0.0)
    distance = np.stack([apart(part, whole, "output") for part in parts])
    grown = np.expm1(2 * off)[..., np.newaxis]
    allowed = (1 + grown) * (shares * own).sum(axis=0) + grown * (shares * distance).sum(axis=0)
    return {
        "log_sum_exp": float((apart(merged, whole, "log_sum_exp") / off).max()),
        "output": float((apart(merged, whole, "output") / allowed).max()),
    }


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_parts_merged_exactly_are_the_whole_within_the_bounds_of_the_parts(
    run: Run, setting: Setting, inputs: dict[str, Array], split: tuple[int, ...]
) -> None:
    dtype = setting.dtype.name
    parts = [part_of(inputs, slice(*ends)) for ends in pairwise((0, *split, KEYS))]
    truths = [truth_of("attention", part, dtype) for part in parts]
    found = [run("attention", *(part[each] for each in ("query", "key", "value")), **_rest(part)) for part in parts]
    assert all(0 < each <= 1 for each in excess(inputs, found, truths, dtype).values())
    in_base_two = [{**each, "log_sum_exp": each["log_sum_exp"] * setting.dtype.type(np.log2(np.e))} for each in found]
    assert min(excess(inputs, in_base_two, truths, dtype).values()) > 100


def _rest(part: dict[str, Array]) -> dict[str, Array]:
    return {name: part[name] for name in ("mask", "bias")}
