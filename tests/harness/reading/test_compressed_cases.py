"""Cases packed away: the same cases in the same order, in a small part of the memory."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
import weakref
from dataclasses import replace

import pytest

from attncheck.plan import Plan
from attncheck.reading.compressed_cases import TOGETHER, PackedCases
from attncheck.reading.selection import select_cases

CASES = list(select_cases(["attention", "masking*", "probes"]).cases)


def test_what_is_packed_comes_back_in_order() -> None:
    packed = PackedCases(CASES)
    assert len(CASES) > TOGETHER > 1
    assert list(map(repr, packed)) == list(map(repr, CASES))
    assert len(packed) == len(CASES)
    assert packed[-1].id == CASES[-1].id
    assert [case.id for case in packed[1:4]] == [case.id for case in CASES[1:4]]
    with pytest.raises(IndexError):
        packed[len(CASES)]


def test_cases_can_be_put_in_another_order() -> None:
    packed = PackedCases(CASES)
    packed.arrange(sorted(range(len(CASES)), key=lambda place: CASES[place].name))
    assert [case.name for case in packed] == sorted(case.name for case in CASES)


def test_a_campaign_of_many_cases_takes_little_memory() -> None:
    def many() -> PackedCases:
        return PackedCases(replace(pickle.loads(pickle.dumps(CASES[0])), id=f"made/{number}") for number in range(5000))

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        packed = many()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert packed[4999].id == "made/4999"
    assert taken / 5000 < 400  # bytes; a case alone takes thousands


def test_what_nobody_holds_is_freed_at_once() -> None:
    packed = PackedCases(CASES)
    plan = Plan.of(packed, ())
    plan.task(next(iter(plan)))
    held = weakref.ref(packed), weakref.ref(plan)
    gc.disable()
    try:
        del packed, plan
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()
