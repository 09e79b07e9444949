"""What is kept for later runs: found again whole or not at all, whoever else writes there, and never in the way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from time import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck import store as store_module
from attncheck.store import NO_STORE, VARIABLE, Key, Store, UnreadableEntry, user_store

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
def test_an_entry_with_one_wrong_byte_is_none(
    place: int, change: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    store.put(KEY, b"the truth and nothing but the truth")
    path = entry_of(store)
    entry = bytearray(path.read_bytes())
    entry[place % len(entry)] ^= change
    path.write_bytes(entry)
    assert store.get(KEY) is None
    assert store.counts["damaged"] == 1


@pytest.mark.parametrize("left", [0, 1, 20, -1])
def test_an_entry_that_was_cut_off_is_none_and_is_replaced(store: Store, left: int) -> None:
    store.put(KEY, b"truth")
    path = entry_of(store)
    path.write_bytes(path.read_bytes()[:left])
    found = store.remembered(lambda: KEY, lambda: b"truth", lambda each: each, lambda each: each)
    assert found == b"truth"
    assert store.get(KEY) == b"truth"


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


def test_a_folder_in_the_place_of_an_entry_is_in_nobodys_way(store: Store) -> None:
    store.put(KEY, b"truth")
    path = entry_of(store)
    path.unlink()
    path.mkdir()
    assert store.remembered(lambda: KEY, lambda: b"truth", lambda each: each, lambda each: each) == b"truth"
    assert store.counts["not kept"] == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_where_nothing_can_be_written_nothing_is_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_arguments: object, **_named: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store_module.tempfile, "mkstemp", fail)
    assert store.remembered(lambda: KEY, lambda: b"truth", lambda each: each, lambda each: each) == b"truth"
    assert store.get(KEY) is None
    assert store.counts["not kept"] == 1


def test_what_was_half_written_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "replace", fail)
    store.put(KEY, b"truth")
    assert store.folder is not None
    assert not [path for path in store.folder.rglob("*") if path.is_file()]


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


def test_what_is_too_large_for_the_store_is_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, size=8000)
    store.put(KEY, bytes(1001))
    assert store.get(KEY) is None


def test_no_store_makes_no_key_and_keeps_nothing() -> None:
    def no_key() -> Key:
        raise AssertionError("asked for a key")

    assert NO_STORE.remembered(no_key, lambda: 7, lambda _: b"", lambda _: 0) == 7
    assert NO_STORE.get(KEY) is None
    assert NO_STORE.summary == "not used"


def test_the_users_store_is_theirs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    store = user_store()
    assert store.folder is not None
    assert store.folder.stat().st_mode & 0o077 == 0 or os.name != "posix"
    if os.name == "posix":
        store.folder.chmod(0o777)
        assert user_store() is NO_STORE


def test_a_users_store_that_cannot_be_made_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
