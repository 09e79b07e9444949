"""Arrays as they are stored: numbers come back, and what has another dtype is refused as damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attncheck.errors import ResultsError
from attncheck.reading.dtypes import numpy_dtype
from attncheck.results.parts import decode_array

KEY = ("file/one", "float64", "numpy.eager", "weights")


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16", "complex64", "int8", "uint32", "bool"])
def test_numbers_come_back(name: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(numpy_dtype(name))
    found = decode_array({"data": array.tobytes(), "array_dtype": name, "shape": [2, 3]}, KEY, Path("part"))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("name", ["V8", "M8[s]", "m8[s]", "S8", "U2", "O", "no such"])
def test_what_is_not_of_numbers_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ResultsError, match=r"^part: the array file/one float64 numpy\.eager weights cannot be read: "):
        decode_array({"data": bytes(16), "array_dtype": name, "shape": [2]}, KEY, Path("part"))
