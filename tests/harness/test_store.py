"""What is kept for later runs: found again whole or not at all, and under digests that equal values alone share."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck import store as store_module
from attncheck.spec import Options
from attncheck.store import NO_STORE, VARIABLE, Key, Store, UnreadableEntry, digest_of, digest_of_code, user_store
from attncheck.verdicts import Verdict

KEY = Key("exact", "0123456789abcdef")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def entry_of(store: Store, key: Key = KEY) -> Path:
    assert store.folder is not None
    [path] = [path for path in store.folder.rglob("*") if path.is_file() and key.digest[2:] in path.name]
    return path


@given(data=st.binary(max_size=200))
def test_what_was_kept_is_found_again(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("store")
    Store(folder).put(KEY, data)
    assert Store(folder).get(KEY) == data


def test_nothing_is_found_under_another_key(store: Store) -> None:
    store.put(KEY, b"truth")
    assert store.get(Key("exact", "0123456789abcdee")) is None
    assert store.get(Key("bounds", KEY.digest)) is None
    assert store.counts == {"kept": 1, "missing": 2}


@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_one_wrong_byte_is_none(place: int, change: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    store.put(KEY, b"the truth and nothing but the truth")
    path = entry_of(store)
    entry = bytearray(path.read_bytes())
    entry[place % len(entry)] ^= change
    path.write_bytes(entry)
    assert store.get(KEY) is None
    assert store.counts["damaged"] == 1


def test_an_entry_that_was_cut_off_is_none_and_is_replaced(store: Store) -> None:
    for left in (0, 1, 20, -1):
        store.put(KEY, b"truth")
        path = entry_of(store)
        path.write_bytes(path.read_bytes()[:left])
        assert store.get(KEY) is None
        assert store.remembered(lambda: KEY, lambda: b"truth", bytes, bytes) == store.get(KEY) == b"truth"


def test_an_entry_of_another_key_is_none(store: Store) -> None:
    other = Key("exact", "f" * 16)
    store.put(other, b"another truth")
    store.put(KEY, b"truth")
    entry_of(store).write_bytes(entry_of(store, other).read_bytes())
    assert store.get(KEY) is None


def test_an_entry_that_is_whole_but_cannot_be_read_is_replaced(store: Store) -> None:
    def decode(data: bytes) -> int:
        if data == b"?":
            raise UnreadableEntry
        return int(data)

    store.put(KEY, b"?")
    assert store.remembered(lambda: KEY, lambda: 7, lambda each: str(each).encode(), decode) == 7
    assert store.counts == {"found": 0, "damaged": 1, "kept": 2}
    assert store.remembered(lambda: KEY, lambda: 8, lambda each: str(each).encode(), decode) == 7


def test_where_nothing_can_be_written_nothing_is_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    store.put(KEY, b"truth")
    assert store.folder is not None
    assert not [path for path in store.folder.rglob("*") if path.is_file()], "what was half written is removed"
    for number in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT):

        def fail(*_arguments: object, number: int = number, **_named: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(store_module.tempfile, "mkstemp", fail)
        assert store.remembered(lambda: KEY, lambda: b"truth", bytes, bytes) == b"truth"
        assert store.get(KEY) is None
    assert store.counts["not kept"] == 5


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path: Path) -> None:
    keys = [Key("exact", f"{number:016x}") for number in range(8)]
    store = Store(tmp_path, size=32 * 4096)
    for number, key in enumerate(keys):
        store.put(key, bytes(4000))
        os.utime(entry_of(store, key), (number, number))
    assert store.get(keys[0]) is not None  # which makes it the newest
    Store(tmp_path, size=5 * 4096).trim()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 8, "nothing was added by that one"
    store.size = 5 * 4096
    store.trim()
    assert [number for number, key in enumerate(keys) if store.get(key)] == [0, 4, 5, 6, 7]


def test_what_is_quickly_made_again_goes_before_what_takes_long(tmp_path: Path) -> None:
    store = Store(tmp_path, size=32 * 4096)
    cheap, dear, small, rows = (Key("exact", f"{number:016x}") for number in range(4))
    store.put(rows, bytes(4000))
    store.put(dear, bytes(4000), seconds=1.0)
    store.put(small, bytes(400), seconds=0.0001)
    store.put(cheap, bytes(4000), seconds=0.0001)
    for left in ([rows, dear, small, cheap], [rows, dear, small], [rows, dear], [rows]):
        store.size = len(left) * 4096
        store.trim()
        assert [path.is_file() for path in map(store._path, (rows, dear, small, cheap))] == [
            key in left for key in (rows, dear, small, cheap)
        ]


def test_what_is_quickly_made_again_still_goes_after_what_was_used_days_ago(tmp_path: Path) -> None:
    store = Store(tmp_path, size=32 * 4096)
    store.put(KEY, bytes(4000))
    os.utime(entry_of(store), (time() - 200_000, time() - 200_000))
    store.put(Key("exact", "f" * 16), bytes(4000), seconds=0.0)
    assert store.get(Key("exact", "f" * 16)) is not None
    store.size = 4096
    store.trim()
    assert store.get(Key("exact", "f" * 16)) is not None
    assert store.get(KEY) is None


def test_what_is_too_large_for_the_store_is_not_kept_and_no_store_makes_no_key(tmp_path: Path) -> None:
    store = Store(tmp_path, size=8000)
    store.put(KEY, bytes(1001))
    assert store.get(KEY) is None

    def no_key() -> Key:
        raise AssertionError("asked for a key")

    assert NO_STORE.remembered(no_key, lambda: 7, lambda _: b"", lambda _: 0) == 7
    assert (NO_STORE.get(KEY), NO_STORE.summary) == (None, "not used")


def test_the_users_store_is_theirs_alone_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    store = user_store()
    assert store.folder is not None
    assert store.folder.stat().st_mode & 0o077 == 0 or os.name != "posix"
    if os.name == "posix":
        store.folder.chmod(0o777)
        assert user_store() is NO_STORE
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    assert user_store() is NO_STORE


def test_several_processes_share_a_store(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from attncheck.store import Key, Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "for _ in range(20):\n"
        "    for number in range(20):\n"
        "        found = store.get(Key('exact', f'{number:016x}'))\n"
        "        assert found in (None, bytes([number]) * 5000), found\n"
        "        store.put(Key('exact', f'{number:016x}'), bytes([number]) * 5000)\n"
        "assert not store.counts['damaged'] and not store.counts['not kept'], store.counts\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]


# Digests: equal values have equal ones, in every process; others have others

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each, max_size=4))


@dataclass(frozen=True)
class One:
    value: object


@dataclass(frozen=True)
class Other:
    value: object


@given(value=VALUES)
def test_a_digest_is_the_same_again_and_in_any_order(value: Any) -> None:
    def turned(each: Any) -> Any:
        if isinstance(each, dict):
            return {name: turned(each[name]) for name in reversed(list(each))}
        return [turned(one) for one in each] if isinstance(each, list) else each

    assert digest_of(value) == digest_of(turned(value))


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


def test_what_is_no_plain_data_is_refused() -> None:
    for value in (object(), lambda: None, 1j, {1, "a"}, {(1,): 2}, One):
        with pytest.raises(TypeError):
            digest_of(value)


def test_another_process_finds_the_same_digest() -> None:
    value = "digest_of({'b': {1, 2, 3}, 'a': frozenset('xyz')}, Options(scale=0.5), [1.5, None])"
    code = f"from attncheck.store import digest_of; from attncheck.spec import Options; print({value})"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {digest_of({"b": {1, 2, 3}, "a": frozenset("xyz")}, Options(scale=0.5), [1.5, None]) + "\n"}


def test_code_has_a_digest_of_its_own() -> None:
    whole = digest_of_code(("attncheck.spec",), ())
    assert whole == digest_of_code(("attncheck.spec",), ())
    assert whole != digest_of_code(("attncheck.spec.inputs",), ())
    assert whole != digest_of_code(("attncheck.spec",), ("numpy",))
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        digest_of_code(("attncheck.no_such",), ())
