"""What torch's own tensors ask for: strides that are kept, memory that is shared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS

TORCH = BACKENDS["torch"]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not TORCH.is_installed, reason="torch is not installed"),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_])
@pytest.mark.parametrize(
    "view",
    [
        lambda array: array,
        lambda array: array[..., ::2],
        lambda array: array.transpose(0, 2, 1),
        lambda array: np.broadcast_to(array[:, :1], array.shape),
    ],
    ids=["whole", "every other", "transposed", "broadcast"],
)
def test_a_tensor_has_the_strides_and_the_memory_of_its_array(dtype: Any, view: Callable[[NDArray[Any]], Any]) -> None:
    array = view(np.arange(24).reshape(2, 3, 4).astype(dtype))
    tensor = TORCH.load().from_numpy(array)
    assert tensor.data_ptr() == array.__array_interface__["data"][0]
    assert tuple(stride * array.itemsize for stride in tensor.stride()) == array.strides


def test_a_view_backwards_is_copied_for_torch_has_no_negative_strides() -> None:
    array = np.arange(12.0).reshape(3, 4)[::-1]
    np.testing.assert_array_equal(TORCH.load().from_numpy(array).numpy(), array)


def test_a_read_only_array_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TORCH.load().from_numpy(np.broadcast_to(np.float32(1), (3, 4)))


def test_a_vector_too_short_for_functional_normalize_has_a_direction_all_the_same() -> None:
    backend = TORCH.load()
    tiny, one = np.array([[[[3e-13, 4e-13]]]]), np.array([[[[1.0, 0.0]]]])
    scores = backend.cosine_scores(backend.from_numpy(tiny), backend.from_numpy(one))["scores"]
    # 3 of 5, each of four operations rounded once.
    np.testing.assert_allclose(backend.to_numpy(scores), [[[[0.6]]]], rtol=4 * 2.0**-53)
