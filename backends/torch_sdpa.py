"""torch.nn.functional.scaled_dot_product_attention: with the kernel that torch picks, and with each of its kernels.

On a CPU torch picks a flash kernel where it can, and the math kernel where Dv is unlike D, the last axis is strided, an
axis is empty or the bias needs a gradient. Those calls the flash kernel by itself refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attncheck.backends import torch_backend
from attncheck.backends.library_arrays import KerasArrays, TorchArrays

_REFUSALS = {
    "attn_mask should not be set when is_causal": (
        "the math kernel of scaled_dot_product_attention takes attn_mask or is_causal, not both"
    ),
    "No available kernel": (
        "the flash kernel of scaled_dot_product_attention needs values as wide as the keys, "
        "a last axis without strides, and no gradient of a bias"
    ),
}
"""What the error says that a kernel answers with, and what the kernel does not do."""


def _restricted_to(kernel: SDPBackend | None) -> Callable[..., Tensor]:
    """Return the function, restricted to one kernel where one is named."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        try:
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                return functional.scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
        except RuntimeError as error:
            for message, reason in _REFUSALS.items():
                if message in str(error):
                    raise NotImplementedError(reason) from error
            raise

    return scaled_dot_product_attention


picked = _restricted_to(None)
flash, efficient, cudnn, math = map(
    _restricted_to,
    (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH),
)
LIBRARY = TorchArrays(torch_backend)
KERAS = KerasArrays(LIBRARY, "torch")
"""What libraries that compute with torch are called on."""
