"""What is kept for later runs: found again whole or not at all, and under digests that equal values alone share."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck import store as store_module
from attncheck.spec import Options
from attncheck.store import NO_STORE, VARIABLE, Key, Store, UnreadableEntry, digest_of, user_store
from attncheck.verdicts import Verdict

KEY = Key("exact", f"{4:016x}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def entry_of(store: Store, key: Key = KEY) -> Path:
    assert store.folder is not None
    [path] = [path for path in store.folder.rglob("*") if path.is_file() and key.digest[2:] in path.name]
    return path


def test_what_was_kept_is_found_again_under_its_own_key_alone(store: Store) -> None:
    assert store.folder is not None
    for data in (b"", b"\0\n", b"truth" * 50):
        store.put(KEY, data)
        assert Store(store.folder).get(KEY) == data
    other = Key("exact", "f" * 16)
    assert store.get(other) is store.get(Key("bounds", KEY.digest)) is None
    assert store.counts == {"kept": 3, "missing": 2}
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
    assert store.counts["damaged"] == 1


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
        assert store.remembered(lambda: KEY, lambda: b"truth", bytes, bytes) == store.get(KEY) == b"truth"
    store.counts.clear()
    store.put(KEY, b"?")
    assert store.remembered(lambda: KEY, lambda: 7, lambda number: str(number).encode(), decode) == 7
    assert store.counts == {"found": 0, "damaged": 1, "kept": 2}
    assert store.remembered(lambda: KEY, lambda: 8, lambda number: str(number).encode(), decode) == 7


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
    store = Store(tmp_path / "small", size=8000)  # what is too large is not kept, and no store makes no key
    store.put(KEY, bytes(1001))
    assert store.get(KEY) is None
    assert NO_STORE.remembered(pytest.fail, lambda: 7, lambda _: b"", lambda _: 0) == 7
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
    code = f"from attncheck.store import digest_of; from attncheck.spec import Options; print({value})"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
        assert found == f"{eval(value)}\n"


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
