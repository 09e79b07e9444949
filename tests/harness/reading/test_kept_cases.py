"""Cases that are stored or packed away come back as they were, and nothing but cases."""

from __future__ import annotations

import gc
import os
import pickle
import tracemalloc
import weakref
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attncheck.plan import Plan
from attncheck.reading.case import Case
from attncheck.reading.kept_cases import TOGETHER, PackedCases, cases_from_bytes, cases_to_bytes, load_kept_case_file
from attncheck.reading.selection import select_cases
from attncheck.store import Store, UnreadableEntry, digest_of

FILE = """
title: One case of my own
source: {kind: derivation, title: By hand}
operation: softmax
cases:
- name: a row
  inputs: {scores: {values: [[0, 1]]}}
"""


FILES = ("documents", "attention", "masks_of_models", "packed", "quantized", "pairs")


def test_bundled_cases_come_back_as_they_were(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = select_cases(FILES, store=store)
    assert store.counts.keys() == {"missing", "kept"}
    second = select_cases(FILES, store=store)
    assert store.counts["found"] == store.counts["kept"]
    assert list(map(digest_of, second.cases)) == list(map(digest_of, first.cases))
    assert second.tags == first.tags


def read(folder: Path, store: Store) -> list[Case]:
    return list(select_cases(["mine.yaml"], base=folder, store=store).cases)


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "mine.yaml"
    path.write_text(FILE)
    assert read(tmp_path, store)[0].name == "a row"
    before = path.stat()
    path.write_text(FILE.replace("a row", "b row"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(tmp_path, store)[0].name == "b row"
    assert store.counts["found"] == 1, "the bundled tags"


def test_a_file_whose_expected_numbers_lie_in_another_is_read_every_time(tmp_path: Path) -> None:
    path, store = tmp_path / "some.yaml", Store(tmp_path / "store")
    path.write_text(
        "title: A file\nsource: {kind: derivation, title: Made for the tests}\noperation: softmax\ncases:\n"
        "  - name: A case\n    inputs: {scores: {values: [0, 0]}}\n"
        "    expect: [{stage: weights, printed: {file: some.npy}}]\n",
        encoding="utf-8",
    )
    for number in (0.5, 0.25):
        np.save(tmp_path / "some.npy", np.full(2, number))
        [case] = load_kept_case_file(path, path.name, "some", (), store)
        numbers = case.expected[0].numbers
        assert numbers is not None
        assert (numbers.value == number).all()


def test_a_tag_that_is_defined_no_more_is_a_fault_again(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "mine.yaml"
    path.write_text(FILE + "  tags: [mine]\n")
    (tmp_path / "tags.yaml").write_text("tags: {mine: {probes: Something., defect: None yet.}}\n")
    assert read(tmp_path, store)[0].tags == ("mine",)
    (tmp_path / "tags.yaml").unlink()
    selection = select_cases(["mine.yaml"], base=tmp_path, store=store)
    assert ["undefined tag 'mine'" in fault.message for fault in selection.faults] == [True]


def test_what_is_wrong_with_a_file_is_said_every_time(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "mine.yaml"
    path.write_text(FILE.replace("softmax", "softmin"))
    found = [select_cases(["mine.yaml"], base=tmp_path, store=store).faults for _ in range(2)]
    assert found[0] == found[1] != ()


class _Foreign:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps([_Foreign()]),
        pickle.dumps([eval]),
        pickle.dumps([1]),
        pickle.dumps(None),
        cases_to_bytes([])[:5],
        b"",
    ],
)
def test_what_is_no_list_of_cases_is_no_entry(content: bytes) -> None:
    for data in (content, zlib.compress(content)):
        with pytest.raises(UnreadableEntry):
            cases_from_bytes(data)


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
    assert list(map(repr, pickle.loads(pickle.dumps(packed)))) == list(map(repr, packed))


def test_a_campaign_of_many_cases_takes_little_memory() -> None:
    def many() -> PackedCases:
        return PackedCases(replace(pickle.loads(pickle.dumps(CASES[0])), id=f"made/{number}") for number in range(2500))

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        packed = many()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert packed[2499].id == "made/2499"
    assert taken / 2500 < 400  # bytes; a case alone takes thousands


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
