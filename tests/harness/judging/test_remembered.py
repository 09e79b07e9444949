"""What judging keeps in a store: the same as without one, under keys that hold all that it follows from."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck.attention.exact_array import Enclosure
from attncheck.backends import BACKENDS, numpy_backend
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on
from attncheck.judging.judge import judge
from attncheck.judging.remembered import (
    JUDGING_CODE,
    enclosures_from_bytes,
    enclosures_to_bytes,
    key_of_rows,
    rows_from_bytes,
    rows_to_bytes,
)
from attncheck.judging.units import Judge, Remembered, UnitResult
from attncheck.reading.case import NOT_JUDGED, READING_CODE, Case
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.results.format import Row
from attncheck.store import NO_STORE, Store
from attncheck.verdicts import Verdict

PATTERNS = ["documents/*", "masking/*", "softmax/*", "sinks/*", "gradients/*"]
ODD = np.array([[0.0, -0.0, np.inf], [-np.inf, np.nan, 5e-324]])


def test_rows_and_enclosures_come_back_bit_by_bit_and_in_order() -> None:
    row = Row("a/b", "attention", "float32", "one", "stage", "output", Verdict.NUMERIC)
    rows = (row, replace(row, value=float("inf"), ratio=-0.0, elements=3, xfail=True, message="é\n", lacks=""))
    assert repr(rows_from_bytes(rows_to_bytes(rows))) == repr(rows)
    exact = {"weights": Enclosure(ODD, ODD.copy(), abs(ODD)), "output": Enclosure(*np.zeros((3, 0, 2)))}
    found, inner = enclosures_from_bytes(enclosures_to_bytes(exact, {"scores": ODD[:1]}))
    assert list(found) == list(exact)
    for stage, each in exact.items():
        for part in fields(Enclosure):
            one, other = getattr(each, part.name), getattr(found[stage], part.name)
            assert (one.tobytes(), one.shape) == (other.tobytes(), other.shape)
    assert inner["scores"].tobytes() == ODD[:1].tobytes()
    found["weights"].high[0, 0] = 1  # as what was worked out can be written into
    np.testing.assert_array_equal(found["weights"].low, ODD)


COUNTED = [
    ("attncheck.judging.units, attncheck.judging.judge", JUDGING_CODE, {"execution", "execution.user_code", "wording"}),
    ("attncheck.reading.loader", READING_CODE, {"backends.entry", "backends.families"}),
]


@pytest.mark.parametrize(("modules", "code", "others"), COUNTED)
def test_the_digest_of_the_code_counts_everything_that_follows_from_it(
    modules: str, code: tuple[str, ...], others: set[str]
) -> None:
    script = f"import sys, json, {modules}\nprint(json.dumps([n for n in sys.modules if n[:9] == 'attncheck']))"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    # Which frameworks there are, where tensors and a user's code lie, what a worker is told, where results lie and how
    # messages are worded decide no verdict; how libraries are called decides no case.
    tables = {"attncheck.backends", *(f"attncheck.backends.{name}" for name in ("devices", "libraries", "torch_modes"))}
    idle = {"attncheck", "attncheck.results", *tables, *(f"attncheck.{name}" for name in others)}
    counted = [each for each in json.loads(output) if each not in idle]
    assert counted
    assert [each for each in counted if not f"{each}.".startswith(tuple(f"{part}." for part in code))] == []


NUMPY = Implementation(BACKENDS["numpy"])


class Unit:
    """A case in a dtype, and what the NumPy backend returned for it."""

    def __init__(self, case: Case, dtype: str) -> None:
        self.case, self.dtype = case, dtype
        self.inputs: Inputs = convert_inputs(case, make_exact_inputs(case), dtype)
        self.outcome: Outcome = evaluate_on(numpy_backend, task_of(case, self.inputs))
        self.collected = {"numpy.eager": replace(self.outcome, seconds=1.5)}

    def judged(self, store: Store) -> list[Any]:
        return as_written(self.by(Judge((NUMPY,), keep_all_arrays=True, store=store)))

    def by(self, judge: Judge, found: Remembered | None = None) -> UnitResult:
        return judge.judge(self.case, self.dtype, self.inputs, self.collected, found)

    def remembered(self, judge: Judge) -> Remembered | None:
        return judge.remembered(self.case, self.dtype, self.inputs, self.collected)


def as_written(found: UnitResult | None) -> list[Any]:
    rows = [[str(value) for value in vars(row).values()] for row in found.rows]
    return [*rows, *((each.case, each.implementation, each.stage, each.array.tobytes()) for each in found.arrays)]


@pytest.fixture(scope="module")
def units() -> list[Unit]:
    chosen = list(select_cases(PATTERNS).cases)
    return [
        Unit(case, next(each for each in case.dtypes if each in ("float32", "float64")))
        for case in chosen[:: max(1, len(chosen) // 18)]
    ]


@pytest.fixture(scope="module")
def document(units: list[Unit]) -> Unit:
    return next(unit for unit in units if unit.case.expected)


def test_with_a_store_everything_is_as_without_and_damaged_entries_change_nothing(
    units: list[Unit], tmp_path: Path
) -> None:
    store, chance = Store(tmp_path), random.Random(0)
    expected = [unit.judged(NO_STORE) for unit in units]
    for _ in range(2):
        assert [unit.judged(store) for unit in units] == expected
    assert store.counts["missing"] == store.counts["kept"] > len(units)
    assert store.counts["found"] > len(units)
    paths = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in paths:
        entry = bytearray(path.read_bytes())
        for _ in range(chance.randrange(1, 5)):
            entry[chance.randrange(len(entry))] ^= chance.randrange(1, 256)
        path.write_bytes(entry[: chance.randrange(1, len(entry) + 1)])
    store.counts.clear()
    assert [unit.judged(store) for unit in units] == expected
    assert store.counts["damaged"] == len(paths)


# Keys.


def test_a_key_has_all_that_a_verdict_follows_from(document: Unit) -> None:
    assert isinstance(document.outcome, Computed)
    asked: dict[str, Any] = {
        "case": document.case,
        "dtype": document.dtype,
        "inputs": document.inputs,
        "outcomes": {"one": document.outcome},
        "judged_by": [{"one": "native"}],
    }
    key = key_of_rows(**asked)
    assert key == key_of_rows(**{**asked, "outcomes": {"one": replace(document.outcome, seconds=7.0)}})
    stage, array = next(iter(document.outcome.stages.items()))
    moved = {**document.outcome.stages, stage: np.nextafter(array, 2, dtype=array.dtype)}
    name, given = next(iter(document.inputs.arrays.items()))
    others = [
        {"dtype": "float16"},
        {"inputs": Inputs({**document.inputs.arrays, name: given.astype(np.float16)}, document.inputs.radius)},
        {"outcomes": {"other": document.outcome}},
        {"outcomes": {"one": replace(document.outcome, stages=moved)}},
        {"outcomes": {"one": replace(document.outcome, padded="by 3")}},
        {"outcomes": {"one": Failure("error", "no")}},
        {"judged_by": [{"one": "float32_accumulation"}]},
    ]
    assert len({key, *(key_of_rows(**{**asked, **other}) for other in others)}) == len(others) + 1


def test_of_a_case_counts_everything_but_where_it_stands_and_what_it_is_called(document: Unit) -> None:
    def key(case: Case) -> str:
        return key_of_rows(case, document.dtype, document.inputs, {"one": document.outcome}, []).digest

    same = set()
    for name in (each.name for each in fields(Case)):
        value = getattr(document.case, name)
        kinds: dict[type, Any] = {tuple: ("other",), dict: {}, frozenset: frozenset({"query"})}
        other = replace(document.case, **{name: kinds.get(type(value), "another")})
        if getattr(other, name) != value and key(other) == key(document.case):
            same.add(name)
    assert same == NOT_JUDGED


def test_judging_reads_nothing_of_a_case_that_no_key_has() -> None:
    read: set[str] = set()

    class Watched(Case):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    for case in select_cases(["documents/*", "masking/*"]).cases[::4]:
        watched = Watched(**{each.name: getattr(case, each.name) for each in fields(Case)})
        unit = Unit(case, case.dtypes[0])
        judge(watched, unit.dtype, unit.inputs, {"one": unit.outcome}, {"one": "native"})
    assert {"id", "operation", "expected"} <= read
    assert not read & NOT_JUDGED
