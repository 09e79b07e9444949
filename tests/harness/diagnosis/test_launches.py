"""Readings of wrong launches against kernels that do so, and where readings are told to hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import reported_kernels
from numpy.random import RandomState

from attncheck.diagnosis.conditions import find_condition, is_reading_refuted
from attncheck.diagnosis.readings import apply_readings_named
from attncheck.diagnosis.residuals import approximate
from attncheck.reading.problem import Problem


def problem(options: dict[str, Any] | None = None, **shape: Any) -> Problem:
    sizes = {"B": 2, "H": 4, "Hkv": 2, "Lq": 5, "Lk": 9, "D": 8, "Dv": 8} | shape
    random = RandomState(7)
    inputs = {
        "query": random.randn(*(sizes[axis] for axis in ("B", "H", "Lq", "D"))),
        "key": random.randn(*(sizes[axis] for axis in ("B", "Hkv", "Lk", "D"))),
        "value": random.randn(*(sizes[axis] for axis in ("B", "Hkv", "Lk", "Dv"))),
    }
    inputs |= {name: array for name, array in shape.items() if isinstance(array, np.ndarray)}
    return Problem("attention", options or {}, inputs)


TABLES = {f"rotary_{part}": RandomState(number).randn(64, 4) for number, part in enumerate(("cos", "sin"))}
OFFSETS = {"query_offsets": np.array([60, 55])}
SHOWN = [
    ("RowsAreDividedByTheGroup", "causal-rows-over-group", problem({"is_causal": True}, Lq=9)),
    ("CausalityByGroupsOfFour", "causal-by-tiles-of-4", problem({"is_causal": True}, Lq=20, Lk=30)),
    ("UnwrittenSplitsAreMerged", "hidden-parts-of-16-merged", problem({"window": (4, 0)}, Lq=1, Lk=64, **OFFSETS)),
    ("FirstHeadIsRotated", "rotary-of-first-head-alone", problem(Lq=1, **TABLES, **OFFSETS)),
    ("FirstEntryIsRotated", "rotary-writes-first-batch-entry", problem(Lq=1, **TABLES, **OFFSETS)),
    ("HeadsArePositions", "rotary-heads-as-positions", problem(Lq=1, **TABLES, **OFFSETS)),
    ("WideHeadsAreTruncated", "columns-unwritten", problem(Dv=72)),
    ("ValueTilesOverwriteTheFirst", "columns-over-the-first", problem(Dv=72)),
    ("WidthOfSixtyFour", "features-unread", problem(D=80)),
    ("FurtherEntriesAreZero", "batch-entries-unwritten", problem()),
    ("WindowOnBothSides", "window-left-for-both", problem({"window": (2, 0)}, Lq=9)),
    ("LongestLengthForAll", "key-lengths-of-longest", problem(key_lengths=np.array([3, 6]))),
]


def test_a_reading_of_each_kind_gives_what_a_kernel_gives_that_does_so() -> None:
    wrong = []
    for kernel, name, case in SHOWN:
        called = case.as_call()
        given = {**called.inputs, **{key: value for key, value in called.options.items() if value is not None}}
        output = getattr(reported_kernels, kernel).attention(**given)["output"]
        far = [
            np.abs(approximate(form.problem).stages["output"] - output).max()
            for form in apply_readings_named(name, case)
        ]
        if not far or min(far) > 1e-12:
            wrong.append((kernel, name, far))
    assert not wrong


def test_the_condition_of_a_reading_is_what_only_the_cases_that_it_explains_have() -> None:
    bias = {"bias": np.zeros((1, 1, 1, 1))}
    explained = [problem({"is_causal": True}, Lq=length, **bias) for length in (3, 4, 5)]
    passing = [problem({"is_causal": True}, Lq=length) for length in (3, 4, 5)]
    assert all(is_reading_refuted("causality-ignored", case) for case in passing)
    assert is_reading_refuted("causality-ignored", problem()) is None
    found = find_condition(explained, passing)
    assert found is not None
    assert found.insert_into("causality is ignored; so") == (
        "causality is ignored, but only where bias is given, and not in 3 other cases that would show it; so"
    )


def test_a_condition_is_silent_where_another_fact_tells_as_much_or_few_cases_pass() -> None:
    bias = {"bias": np.zeros((1, 1, 1, 1))}
    explained = [problem({"is_causal": True}, Lq=1, **bias) for _ in range(3)]
    passing = [problem({"is_causal": True}, Lq=length) for length in (3, 4, 5)]
    found = find_condition(explained, passing)
    assert found is not None
    assert found.description == ""
    assert find_condition(explained, passing[:2]) is None
