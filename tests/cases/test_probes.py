"""The probes have the properties that they are named for: without them they would pass and probe nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.reading.selection import select_cases

Stages = dict[str, NDArray[Any]]
Compute = Callable[[Case, str], tuple[Inputs, Stages]]
Property = Callable[[Inputs, Stages], bool]

PROBES = select_cases(["probes"]).cases
BLOCK = 16


def tagged(tag: str, *operations: str) -> list[Case]:
    return [case for case in PROBES if tag in case.tags and case.operation in (operations or (case.operation,))]


def logits_of(inputs: Inputs, stages: Stages) -> NDArray[Any]:
    """Return what the softmax gets."""
    given = next((stages[name] for name in ("masked", "biased", "scores") if name in stages), None)
    return inputs.arrays["scores"] if given is None else given


def is_poisoned(inputs: Inputs, stages: Stages) -> bool:
    """Whether some row's forbidden values are so large that a weight of a tenth would show."""
    values = np.abs(inputs.arrays["value"]).max(axis=-1)[..., None, :]
    forbidden = np.where(np.isneginf(logits_of(inputs, stages)), values, 0).max(axis=-1)
    return bool((forbidden > 10 * np.abs(stages["output"]).max(axis=-1)).any())


def is_poisoned_for_a_finite_fill(inputs: Inputs, stages: Stages) -> bool:
    """Whether a fill of -1e4, put in a masked score's place or added to it, would outweigh a kept one."""
    logits = logits_of(inputs, stages)
    before = stages.get("biased", stages["scores"])
    kept = np.where(np.isneginf(logits), -np.inf, before).max(axis=-1)
    masked = np.where(np.isneginf(logits), before, -np.inf).max(axis=-1)
    return bool(((kept < -1e4) | (masked - 1e4 > kept) | (masked < -1e38)).any())


def maximum_changes_between_blocks(inputs: Inputs, stages: Stages) -> bool:
    row = logits_of(inputs, stages).reshape(-1, stages["weights"].shape[-1])[-1]
    blocks = [row[start : start + BLOCK].max() for start in range(0, len(row), BLOCK)]
    changes = [later != earlier for earlier, later in pairwise(np.maximum.accumulate(blocks))]
    # Falling logits are the counterpart: nothing may be rescaled after the first block.
    return len(blocks) > 4 and (sum(changes) >= 3 or not any(changes))


def has_integers(inputs: Inputs, stages: Stages) -> bool:
    return all((inputs.arrays[name] % 1 == 0).all() for name in ("query", "key"))


def cancels(inputs: Inputs, stages: Stages) -> bool:
    query, key = inputs.arrays["query"], inputs.arrays["key"].swapaxes(-1, -2)
    return bool((np.abs(query) @ np.abs(key) > 20 * np.abs(query @ key)).any())


def has_coinciding_axes(inputs: Inputs, stages: Stages) -> bool:
    shapes = [
        inputs.arrays[name].shape for name in ("query", "key", "value", "weight", "scores") if name in inputs.arrays
    ]
    return any(first == second > 1 for shape in shapes for first, second in pairwise(shape)) or any(
        first[-2] == second[-2] for first, second in pairwise(shapes)
    )


def allows_one_key(inputs: Inputs, stages: Stages) -> bool:
    return bool((np.isfinite(logits_of(inputs, stages)).sum(axis=-1) == 1).any())


PROPERTIES: list[tuple[str, tuple[str, ...], Property]] = [
    ("poisoned-mask", ("attention",), is_poisoned),
    ("finite-fill", ("attention",), is_poisoned_for_a_finite_fill),
    ("low-logits", (), lambda given, made: bool((logits_of(given, made).max(axis=-1) < -5e4).any())),
    ("running-maximum", (), maximum_changes_between_blocks),
    ("ragged-tail", ("attention",), lambda given, made: given.arrays["key"].shape[-2] % BLOCK > 0),
    ("first-block", (), lambda given, made: bool((made["weights"][..., :BLOCK] == 0).all(axis=-1).any())),
    ("flat-row", (), lambda given, made: made["weights"].shape[-1] >= 4100 and made["weights"].max() < 1.01 / 4100),
    ("no-averaging", (), lambda given, made: made["weights"].shape[-1] <= 3),
    ("peaked", (), lambda given, made: bool(made["weights"].max() > 0.999)),
    (
        "weights-visible",
        (),
        lambda given, made: np.array_equal(given.arrays["value"][0, 0], np.eye(len(made["output"][0, 0].T))),
    ),
    ("exact-scores", (), has_integers),
    ("cancellation", (), cancels),
    ("one-key", (), allows_one_key),
    ("empty-row", (), lambda given, made: bool(np.isneginf(made["log_sum_exp"]).any())),
    ("broadcast-coincidence", ("attention", "softmax", "scoring"), has_coinciding_axes),
    ("underflow", (), lambda given, made: bool((made["weights"] < 1e-38).any())),
    ("head-split", (), lambda given, made: min(made["context"].shape[1:3]) > 1),
]


@pytest.mark.parametrize(("tag", "operations", "holds"), PROPERTIES, ids=[tag for tag, *_ in PROPERTIES])
def test_a_probe_is_what_its_tag_says(tag: str, operations: tuple[str, ...], holds: Property, compute: Compute) -> None:
    assert tagged(tag, *operations)
    assert [case.id for case in tagged(tag, *operations) if not holds(*compute(case, "float32"))] == []


def test_a_probe_says_what_it_is_for_and_is_small() -> None:
    for case in PROBES:
        shapes = [*case.input_shapes.values(), *case.stage_shapes.values()]
        assert case.tags, case.id
        assert max(map(math.prod, shapes)) <= 13_000, case.id


def test_a_width_whose_default_scale_is_a_binary_number_has_a_reason() -> None:
    for case in PROBES:
        if "query" in case.input_shapes and case.options.get("score") != "dot":
            width = case.input_shapes["query"][-1] // int(case.options.get("heads", 1))
            reasons = {"exact-scores", "broadcast-coincidence"} & set(case.tags)
            assert width not in (4, 16, 64, 256) or reasons, case.id


def test_about_half_of_the_probes_are_generic() -> None:
    supports_statistics = sum(case.supports_statistics for case in PROBES)
    assert len(PROBES) / 3 < supports_statistics < 2 * len(PROBES) / 3
