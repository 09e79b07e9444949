"""Where tensors lie: what is put on a device, what is filled with NaN, and what is said where there is none.

No accelerator is needed: ``cpu:0`` is a device by name, and torch's ``meta`` one that holds no numbers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attncheck.backends import BACKENDS, EVERYTHING, BackendEntry, Mode
from attncheck.backends.devices import HIDDEN, VISIBLE, NoDeviceError, on_device

needs_torch = [pytest.mark.torch, pytest.mark.skipif(not BACKENDS["torch"].is_installed, reason="no torch")]
needs_jax = [pytest.mark.jax, pytest.mark.skipif(not BACKENDS["jax"].is_installed, reason="no jax")]
needs_tensorflow = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(not BACKENDS["tensorflow"].is_installed, reason="no tensorflow"),
]
FRAMEWORKS = [
    pytest.param("torch", marks=needs_torch),
    pytest.param("jax", marks=needs_jax),
    pytest.param("tensorflow", marks=needs_tensorflow),
]
VIEWS = {
    "dense": np.arange(24.0).reshape(2, 3, 4),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "every second": np.arange(48.0).reshape(4, 12)[:, ::2],
    "broadcast": np.broadcast_to(np.arange(3.0), (4, 3)),
    "empty": np.zeros((2, 0, 3)),
    "one number": np.array(7.0),
}


def test_without_a_device_a_backend_is_itself() -> None:
    backend: Any = SimpleNamespace()
    assert on_device(backend, "torch", "") is backend


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_put_on_a_device_is_the_same_numbers(framework: str) -> None:
    backend = on_device(BACKENDS[framework].load(), framework, "cpu:0")
    for view in VIEWS.values():
        array = view.astype(np.float32)
        np.testing.assert_array_equal(backend.to_numpy(backend.from_numpy(array)), array)


@pytest.mark.torch
@pytest.mark.skipif(not BACKENDS["torch"].is_installed, reason="no torch")
def test_strides_are_kept_on_torchs_device() -> None:
    for array in VIEWS.values():
        own = BACKENDS["torch"].load().from_numpy(array)
        moved = on_device(BACKENDS["torch"].load(), "torch", "meta").from_numpy(array)
        assert moved.device.type == "meta"
        assert tuple(moved.shape) == array.shape
        assert not array.size or moved.stride() == own.stride()


@pytest.mark.torch
@pytest.mark.skipif(not BACKENDS["torch"].is_installed, reason="no torch")
@pytest.mark.parametrize(
    "call",
    [
        {"is_causal": True, "window": (2, 1)},
        {"key_lengths": np.array([2, 4])},
        {"is_causal": True, "query_offsets": np.array([1, 0])},
    ],
    ids=["window", "lengths", "offsets"],
)
def test_torchs_eager_code_makes_all_that_it_needs_where_its_tensors_lie(call: dict[str, Any]) -> None:
    # meta refuses to compute with what lies elsewhere.
    backend = on_device(BACKENDS["torch"].load(), "torch", "meta")
    put = {name: backend.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in call.items()}
    query, key = backend.from_numpy(np.ones((2, 2, 3, 4))), backend.from_numpy(np.ones((2, 2, 5, 4)))
    output = backend.attention(query, key, key, **put)["output"]
    assert output.device.type == "meta"
    assert tuple(output.shape) == (2, 2, 3, 4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_device_that_is_not_there_is_said_before_anything_runs(framework: str) -> None:
    backend: Any = on_device(BACKENDS[framework].load(), framework, "cuda:99")
    with pytest.raises(NoDeviceError, match=rf"^{framework} \S+ does not see cuda:99"):
        backend.require()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_description_names_the_device(framework: str) -> None:
    backend = on_device(BACKENDS[framework].load(), framework, "cpu:0")
    assert backend.describe()["device"] == "cpu:0"
    assert backend.describe()["version"] == BACKENDS[framework].load().describe()["version"]


def test_a_mode_without_a_device_sees_none_and_one_with_a_device_leaves_room_there() -> None:
    entry = BACKENDS["jax"]
    assert entry.environment_of("jit") == {**entry.environment, **HIDDEN}
    assert entry.environment_of("jit@cuda") == {**entry.environment, **VISIBLE}


def test_a_mode_on_a_device_is_the_mode_without_it_and_is_named_so() -> None:
    for entry in EVERYTHING.values():
        for mode in entry.device_modes:
            name, _, device = mode.name.partition("@")
            assert mode.device == device
            assert entry.mode_named(mode.name) is mode
            assert mode.name not in entry.all_modes
            assert mode.classes
            if name in entry.all_modes:
                own: Mode = entry.all_modes[name]
                assert (own.module, own.attribute) == (mode.module, mode.attribute)


def test_an_interpreter_is_set_for_the_mode_that_runs_in_it_alone() -> None:
    triton: BackendEntry = EVERYTHING["triton"]
    assert triton.environment_of("fused")["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in triton.environment_of("fused@cuda")
