"""Devices: the same module, with its tensors on an accelerator.

A ``Mode`` with a ``device`` is loaded as usual and wrapped here. What goes in is put on the device and stays there;
what comes out is fetched once it is judged. Before a call, torch's free memory there is filled with NaN: a kernel that
leaves some of its output unwritten then returns NaN, and not what a call before it left behind. XLA allots the memory
of JAX and writes all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncheck.backends.contract import Backend, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

HIDDEN_DEVICE_VARIABLES = {"CUDA_VISIBLE_DEVICES": "-1"}
"""The environment of a mode without a device: JAX and TensorFlow otherwise compute on one wherever they see it."""
VISIBLE_DEVICE_VARIABLES = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""The environment of a mode on a device, which it may share: JAX otherwise takes three quarters of its memory."""

_NAN_BYTE = 0xFF
"""Repeated, it is NaN in every floating-point format that there is here."""
_SMALL, _LARGE = (16, 1 << 20), (2, 1 << 26)
"""How many blocks are filled, of how many bytes: torch keeps those up to 1 MiB apart from larger ones."""


class NoDeviceError(RuntimeError):
    """The framework does not see the device, or has none."""


@dataclass(frozen=True)
class OnDevice:
    """A backend whose tensors lie on a device: all else is the backend's own."""

    backend: Any
    device: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def prepare(self, dtype: str, threads: int) -> None:
        """Prepare the framework. Raises ``NoDeviceError`` where it does not see the device."""
        self.backend.prepare(dtype, threads)
        self.require_device()

    def require_device(self) -> None:
        """Raise ``NoDeviceError`` where the framework does not see the device."""
        raise NotImplementedError

    def describe(self) -> dict[str, str]:
        """Return what the backend says, and what the device, its driver and its switches are."""
        return {**self.backend.describe(), "device": self.device}

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        """Copy to the device."""
        raise NotImplementedError


class _OnTorchDevice(OnDevice):
    def require_device(self) -> None:
        import torch

        try:
            torch.empty(0, device=self.device)
        except (AssertionError, RuntimeError) as error:  # of a build without it, or of a machine without one
            reason = str(error).partition("\n")[0]
            raise NoDeviceError(f"torch {torch.__version__} does not see {self.device}: {reason}") from error

    def describe(self) -> dict[str, str]:
        import torch

        if torch.device(self.device).type != "cuda":
            return super().describe()
        properties = torch.cuda.get_device_properties(self.device)
        return {
            **super().describe(),
            "device_name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "allow_tf32": str(torch.backends.cuda.matmul.allow_tf32),
            "reduced_precision_reduction": str(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        }

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        """Copy to the device, with the strides and whatever lies between the elements."""
        tensor = self.backend.from_numpy(array)
        if tensor.numel() == 0:
            return tensor.to(self.device)
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        moved = tensor.as_strided((reach,), (1,)).to(self.device)
        _fill_free_memory(self.device)
        return moved.as_strided(tensor.shape, tensor.stride())


def _fill_free_memory(device: str) -> None:
    """Leave NaN in the blocks that torch hands out next."""
    import torch

    blocks = [
        torch.full((size,), _NAN_BYTE, dtype=torch.uint8, device=device)
        for count, size in (_SMALL, _LARGE)
        for _ in range(count)
        if torch.device(device).type != "cpu"
    ]
    del blocks


class _OnJaxDevice(OnDevice):
    def _device(self) -> Any:
        import jax

        platform, _, number = self.device.partition(":")
        try:
            return jax.devices(platform)[int(number or 0)]
        except (RuntimeError, IndexError) as error:
            raise NoDeviceError(f"jax {jax.__version__} does not see {self.device}: {error}") from error

    def prepare(self, dtype: str, threads: int) -> None:
        import jax

        super().prepare(dtype, threads)
        jax.config.update("jax_default_device", self._device())  # where constants and calls without arrays go

    def require_device(self) -> None:
        self._device()

    def describe(self) -> dict[str, str]:
        device = self._device()
        return {
            **super().describe(),
            "device_name": str(device.device_kind),
            "runtime": " ".join(str(device.client.platform_version).split()),
        }

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        import jax

        return jax.device_put(array.copy(), self._device())


class _OnTensorFlowDevice(OnDevice):
    def _device_name(self) -> str:
        return self.device.upper().replace("CUDA", "GPU")

    def require_device(self) -> None:
        import tensorflow as tf

        kind, _, number = self._device_name().partition(":")
        if len(tf.config.list_physical_devices(kind)) <= int(number or 0):
            raise NoDeviceError(f"tensorflow {tf.__version__} does not see {self.device}")

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        import tensorflow as tf

        with tf.device(self._device_name()):
            return tf.identity(self.backend.from_numpy(array))


FRAMEWORKS_WITH_DEVICES = ("torch", "tensorflow", "jax")
"""The frameworks whose arrays may lie on a device."""
_BACKEND_CLASSES = {
    "torch": _OnTorchDevice,
    "triton": _OnTorchDevice,
    "jax": _OnJaxDevice,
    "tensorflow": _OnTensorFlowDevice,
}


def on_device(backend: Any, framework: str, device: str) -> Backend:
    """Return a backend with its tensors on a device, such as ``cuda`` or ``cuda:1``; itself where none is named."""
    if not device:
        return backend  # type: ignore[no-any-return]
    return _BACKEND_CLASSES[framework](backend, device)
