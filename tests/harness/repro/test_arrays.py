"""Arrays in scripts are read back bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.repro.expected import written
from attncheck.repro.parts import unpack

RANDOM = np.random.default_rng(3)
PAYLOAD = np.array([0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    "array",
    [
        RANDOM.normal(size=(2, 3, 4)),
        RANDOM.normal(size=(2, 3, 4)).astype(np.float32) * np.float32(1e-39),
        RANDOM.normal(size=(30, 40)).astype(np.float16),
        RANDOM.normal(size=(2, 5)).astype(ml_dtypes.bfloat16),
        RANDOM.normal(size=(40, 50)).astype(ml_dtypes.bfloat16),
        np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e308, 5e-324]),
        PAYLOAD,
        np.array([[True, False], [False, False]]),
        np.arange(5),
        np.zeros((2, 0, 3), np.float32),
        np.float64(0.1).reshape(()),
        RANDOM.normal(size=(4, 6)).T,
        np.frombuffer(RANDOM.bytes(64 * 4), np.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("margin", [0, 8])
def test_an_array_is_read_back_bit_for_bit(array: NDArray[Any], margin: int) -> None:
    text = written(array, margin)
    names = {"np": np, "ml_dtypes": ml_dtypes, "inf": np.inf, "nan": np.nan, "unpack": unpack}
    read = eval(text, names)
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert read.tobytes() == array.tobytes()
    assert max(map(len, text.splitlines())) <= 100


def test_a_small_array_is_written_as_people_write_it() -> None:
    assert written(np.array([[0.1, -2]], np.float32)) == "np.array([[ 0.1, -2. ]], np.float32)"
    assert written(np.array([True])) == "np.array([ True], bool)"


def test_a_large_array_takes_lines_and_less_room_where_it_repeats_itself() -> None:
    text = written(np.tile(RANDOM.normal(size=10), 1000))
    assert text.startswith('unpack("float64", (10000,), """\n')
    assert len(text) < 1000
