"""What is kept for later runs: found again whole or not at all, under keys of all that a verdict follows from."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.attention.exact_array import Enclosure
from attncheck.backends import BACKENDS, numpy_backend
from attncheck.common import store as store_module
from attncheck.common.store import CACHE_VARIABLE, NO_STORE, Store, StoreKey, UnreadableEntry, digest_of, user_store
from attncheck.execution.implementations import Implementation
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on_backend
from attncheck.judging.judge import judge_case
from attncheck.judging.remembered import (
    JUDGING_CODE,
    enclosures_from_bytes,
    enclosures_to_bytes,
    make_store_key_of_rows,
    rows_from_bytes,
    rows_to_bytes,
)
from attncheck.judging.units import Judge, StoredUnit, UnitResult
from attncheck.reading.case import UNJUDGED_FIELDS, Case
from attncheck.reading.inputs import RoundedInputs, make_inputs, make_problem_of_case
from attncheck.reading.parsed_corpus import READING_CODE_MODULES
from attncheck.reading.selection import select_cases
from attncheck.results.format import Row
from attncheck.spec import Options
from attncheck.spec.verdicts import Verdict

KEY = StoreKey("exact", f"{4:016x}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def entry_of(store: Store, key: StoreKey = KEY) -> Path:
    assert store.folder is not None
    [path] = [path for path in store.folder.rglob("*") if path.is_file() and key.digest[2:] in path.name]
    return path


def test_what_was_kept_is_found_again_under_its_own_key_alone(store: Store) -> None:
    assert store.folder is not None
    for data in (b"", b"\0\n", b"truth" * 50):
        store.put(KEY, data)
        assert Store(store.folder).get(KEY) == data
    other = StoreKey("exact", "f" * 16)
    assert store.get(other) is store.get(StoreKey("bounds", KEY.digest)) is None
    assert store.event_counts == {"kept": 3, "missing": 2}
    store.put(other, b"another truth")
    entry_of(store).write_bytes(entry_of(store, other).read_bytes())
    assert store.get(KEY) is None, "an entry of another key is none"


@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_one_wrong_byte_is_none(place: int, change: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    store.put(KEY, b"the truth and nothing but the truth")
    path = entry_of(store)
    entry = bytearray(path.read_bytes())
    entry[place % len(entry)] ^= change
    path.write_bytes(entry)
    assert store.get(KEY) is None
    assert store.event_counts["damaged"] == 1


def test_an_entry_that_was_cut_off_or_cannot_be_read_is_replaced(store: Store) -> None:
    def decode(data: bytes) -> int:
        if data == b"?":
            raise UnreadableEntry
        return int(data)

    for left in (0, 1, 20, -1):
        store.put(KEY, b"truth")
        path = entry_of(store)
        path.write_bytes(path.read_bytes()[:left])
        assert store.get(KEY) is None
        assert store.get_or_compute(lambda: KEY, lambda: b"truth", bytes, bytes) == store.get(KEY) == b"truth"
    store.event_counts.clear()
    store.put(KEY, b"?")
    assert store.get_or_compute(lambda: KEY, lambda: 7, lambda number: str(number).encode(), decode) == 7
    assert store.event_counts == {"found": 0, "damaged": 1, "kept": 2}
    assert store.get_or_compute(lambda: KEY, lambda: 8, lambda number: str(number).encode(), decode) == 7


def test_where_nothing_can_be_written_nothing_is_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> Callable[..., None]:
        def failing(*_arguments: object, **_named: object) -> None:
            raise OSError(number, os.strerror(number))

        return failing

    monkeypatch.setattr(Path, "replace", fail(errno.ENOSPC))
    store.put(KEY, b"truth")
    assert store.folder is not None
    assert not [path for path in store.folder.rglob("*") if path.is_file()], "what was half written is removed"
    for number in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT):
        monkeypatch.setattr(store_module.tempfile, "mkstemp", fail(number))
        assert store.get_or_compute(lambda: KEY, lambda: b"truth", bytes, bytes) == b"truth"
        assert store.get(KEY) is None
    assert store.event_counts["not kept"] == 5


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path: Path) -> None:
    keys = [StoreKey("exact", f"{number:016x}") for number in range(8)]
    store = Store(tmp_path, max_bytes=32 * 4096)
    for number, key in enumerate(keys):
        store.put(key, bytes(4000))
        os.utime(entry_of(store, key), (number, number))
    assert store.get(keys[0]) is not None  # which makes it the newest
    Store(tmp_path, max_bytes=5 * 4096).trim()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 8, "nothing was added by that one"
    store.max_bytes = 5 * 4096
    store.trim()
    assert [number for number, key in enumerate(keys) if store.get(key)] == [0, 4, 5, 6, 7]
    store = Store(tmp_path / "small", max_bytes=8000)  # what is too large is not kept, and no store makes no key
    store.put(KEY, bytes(1001))
    assert store.get(KEY) is None
    assert NO_STORE.get_or_compute(pytest.fail, lambda: 7, lambda _: b"", lambda _: 0) == 7
    assert (NO_STORE.get(KEY), NO_STORE.summary) == (None, "not used")


def test_a_store_that_was_trimmed_a_moment_ago_is_not_listed_again(tmp_path: Path) -> None:
    store = Store(tmp_path, max_bytes=8 * 4096)
    store.put(KEY, b"truth")
    store.trim(min_interval=60.0)
    store.max_bytes = 0
    store.trim(min_interval=60.0)
    assert store.get(KEY) == b"truth"
    os.utime(tmp_path / ".trimmed", (0, 0))
    store.trim(min_interval=60.0)
    assert store.get(KEY) is None


def test_the_users_store_is_theirs_alone_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    store = user_store()
    assert store.folder is not None
    assert store.folder.stat().st_mode & 0o077 == 0 or os.name != "posix"
    if os.name == "posix":
        store.folder.chmod(0o777)
        assert user_store() is NO_STORE
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert user_store() is NO_STORE


# Digests: equal values have equal ones, in every process; others have others

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each, max_size=4))


@dataclass(frozen=True)
class One:
    value: object


@dataclass(frozen=True)
class Other:
    value: object


@given(first=VALUES, second=VALUES)
def test_other_values_have_other_digests(first: Any, second: Any) -> None:
    assert (digest_of(first) == digest_of(second)) == (repr_of(first) == repr_of(second))


def repr_of(value: Any) -> str:
    """Tell values apart as Python does, except for the order of a mapping, with every bit of a number."""
    if isinstance(value, dict):
        return f"mapping {sorted((name, repr_of(each)) for name, each in value.items())!r}"
    return repr([repr_of(each) for each in value]) if isinstance(value, list) else repr(value)


def test_what_looks_alike_has_another_digest() -> None:
    alike: tuple[tuple[Any, Any], ...] = (
        (1, 1.0),
        (0.0, -0.0),
        (1, True),
        ("1", 1),
        (b"a", "a"),
        ([1, [2]], [[1], 2]),
        (One(1), Other(1)),
        (np.zeros(2), np.zeros((2, 1))),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (np.array([0.0]), np.array([-0.0])),
        (np.array(["1", "2"], dtype=object), np.array(["12", ""], dtype=object)),
        (Verdict.NUMERIC, Verdict.AGREE),
        (Options(scale=1.0), Options(scale=2.0)),
        ({"a": None}, {}),
    )
    assert [each for each in alike if digest_of(each[0]) == digest_of(each[1])] == []
    array = np.arange(6.0).reshape(2, 3)  # how it lies in memory is no matter
    assert digest_of(array) == digest_of(np.asfortranarray(array)) == digest_of(np.repeat(array, 2, axis=0)[::2])


def test_another_process_finds_the_same_digest() -> None:
    value = "digest_of({'b': {1, 2, 3}, 'a': frozenset('xyz')}, Options(scale=0.5), [1.5, None])"
    code = f"from attncheck.common.store import digest_of; from attncheck.spec import Options; print({value})"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
        assert found == f"{eval(value)}\n"


def test_several_processes_share_a_store(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from attncheck.common.store import StoreKey, Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "for _ in range(20):\n"
        "    for number in range(20):\n"
        "        found = store.get(StoreKey('exact', f'{number:016x}'))\n"
        "        assert found in (None, bytes([number]) * 5000), found\n"
        "        store.put(StoreKey('exact', f'{number:016x}'), bytes([number]) * 5000)\n"
        "assert not store.event_counts['damaged'] and not store.event_counts['not kept'], store.event_counts\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]


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
    (
        "attncheck.judging.units, attncheck.judging.judge",
        JUDGING_CODE,
        {"execution", "execution.user_code", "results.tables", "wording"},
    ),
    ("attncheck.reading.loader", READING_CODE_MODULES, {"backends.entry", "backends.families"}),
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
        self.inputs: RoundedInputs = make_inputs(case, dtype)
        self.outcome: Outcome = evaluate_on_backend(numpy_backend, make_problem_of_case(case, self.inputs).as_call())
        self.collected = {"numpy.eager": replace(self.outcome, seconds=1.5)}

    def judged(self, store: Store) -> list[Any]:
        found = self.by(Judge((NUMPY,), keep_all_arrays=True, store=store))
        rows = [[str(value) for value in vars(row).values()] for row in found.rows]
        return [*rows, *((each.case, each.implementation, each.stage, each.array.tobytes()) for each in found.arrays)]

    def by(self, judge: Judge, found: StoredUnit | None = None) -> UnitResult:
        return judge.judge_unit(self.case, self.dtype, self.inputs, self.collected, found)

    def remembered(self, judge: Judge) -> StoredUnit | None:
        return judge.look_up_stored_unit(self.case, self.dtype, self.inputs, self.collected)


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
    assert store.event_counts["missing"] == store.event_counts["kept"] > len(units)
    assert store.event_counts["found"] > len(units)
    paths = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in paths:
        entry = bytearray(path.read_bytes())
        for _ in range(chance.randrange(1, 5)):
            entry[chance.randrange(len(entry))] ^= chance.randrange(1, 256)
        path.write_bytes(entry[: chance.randrange(1, len(entry) + 1)])
    store.event_counts.clear()
    assert [unit.judged(store) for unit in units] == expected
    assert store.event_counts["damaged"] == len(paths)


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
    key = make_store_key_of_rows(**asked)
    assert key == make_store_key_of_rows(**{**asked, "outcomes": {"one": replace(document.outcome, seconds=7.0)}})
    stage, array = next(iter(document.outcome.stages.items()))
    moved = {**document.outcome.stages, stage: np.nextafter(array, 2, dtype=array.dtype)}
    name, given = next(iter(document.inputs.arrays.items()))
    others = [
        {"dtype": "float16"},
        {"inputs": replace(document.inputs, arrays={**document.inputs.arrays, name: given.astype(np.float16)})},
        {"outcomes": {"other": document.outcome}},
        {"outcomes": {"one": replace(document.outcome, stages=moved)}},
        {"outcomes": {"one": replace(document.outcome, padded="by 3")}},
        {"outcomes": {"one": Failure("error", "no")}},
        {"judged_by": [{"one": "float32_accumulation"}]},
    ]
    assert len({key, *(make_store_key_of_rows(**{**asked, **other}) for other in others)}) == len(others) + 1


def test_of_a_case_counts_everything_but_where_it_stands_and_what_it_is_called(document: Unit) -> None:
    def key(case: Case) -> str:
        return make_store_key_of_rows(case, document.dtype, document.inputs, {"one": document.outcome}, []).digest

    same = set()
    for name in (each.name for each in fields(Case)):
        value = getattr(document.case, name)
        kinds: dict[type, Any] = {tuple: ("other",), dict: {}, frozenset: frozenset({"query"})}
        other = replace(document.case, **{name: kinds.get(type(value), "another")})
        if getattr(other, name) != value and key(other) == key(document.case):
            same.add(name)
    assert same == UNJUDGED_FIELDS


def test_judging_reads_nothing_of_a_case_that_no_key_has() -> None:
    read: set[str] = set()

    class Watched(Case):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    for case in select_cases(["documents/*", "masking/*"]).cases[::4]:
        watched = Watched(**{each.name: getattr(case, each.name) for each in fields(Case)})
        unit = Unit(case, case.dtypes[0])
        judge_case(watched, unit.dtype, unit.inputs, {"one": unit.outcome}, {"one": "native"})
    assert {"id", "operation", "expected"} <= read
    assert not read & UNJUDGED_FIELDS
