"""Equal values have equal digests, in every process; others have others."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.digests import digest_of, digest_of_code
from attncheck.spec import Options
from attncheck.verdicts import Verdict

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


@pytest.mark.parametrize(
    ("first", "second"),
    [
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
    ],
)
def test_what_looks_alike_has_another_digest(first: Any, second: Any) -> None:
    assert digest_of(first) != digest_of(second)


def test_how_an_array_lies_in_memory_is_no_matter() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert digest_of(array) == digest_of(np.asfortranarray(array)) == digest_of(np.repeat(array, 2, axis=0)[::2])


@pytest.mark.parametrize("value", [object(), lambda: None, 1j, {1, "a"}, {(1,): 2}, One])
def test_what_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        digest_of(value)


def test_another_process_finds_the_same_digest() -> None:
    value = "digest_of({'b': {1, 2, 3}, 'a': frozenset('xyz')}, Options(scale=0.5), [1.5, None])"
    code = f"from attncheck.digests import digest_of; from attncheck.spec import Options; print({value})"
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
