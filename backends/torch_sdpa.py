"""torch.nn.functional.scaled_dot_product_attention: with the kernel that torch picks, and with each that a CPU has.

On a CPU torch picks a flash kernel where it can, and the math kernel where Dv is unlike D, the last axis is strided, an
axis is empty or the bias needs a gradient. Those calls the flash kernel by itself refuses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attncheck.backends import torch_backend
from attncheck.backends.contract import Stages, Window
from attncheck.backends.library_arrays import KerasArrays, TorchArrays
from attncheck.backends.torch_common import differentiate, may_attend

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


@dataclass(frozen=True)
class ScaledDotProduct:
    """The call, restricted to one kernel where ``kernel`` says so. Shapes and meanings: ``contract.py``."""

    kernel: SDPBackend | None = None

    prepare = staticmethod(torch_backend.prepare)
    describe = staticmethod(torch_backend.describe)
    from_numpy = staticmethod(torch_backend.from_numpy)
    to_numpy = staticmethod(torch_backend.to_numpy)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
    ) -> Stages:
        """Attend in one call, which returns the output alone."""
        past = 0
        if past_key is not None and past_value is not None:
            past = past_key.size(-2)
            key, value = torch.cat((past_key, key), dim=-2), torch.cat((past_value, value), dim=-2)
        scores = (*query.shape[:-1], key.size(-2))
        limits: dict[str, Any] = {"mask": mask, "window": window, "key_lengths": key_lengths}
        mask = may_attend(scores, **limits, past=past, device=query.device)
        with self._kernels():
            output = _call(query, key, value, _merge(mask, bias), is_causal=is_causal, scale=scale)
        return {"output": output}

    def attention_gradients(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_output: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
    ) -> Stages:
        """Differentiate the call by autograd."""
        inputs = {"query": query, "key": key, "value": value}
        options = {"mask": mask, "bias": bias, "is_causal": is_causal, "scale": scale, "window": window}
        options["key_lengths"] = key_lengths
        return differentiate(self.attention, inputs, grad_output, options)

    def _kernels(self) -> AbstractContextManager[None]:
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)


def _merge(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Make the one attn_mask that the call takes: boolean, True = may attend, or added to the scores."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, float("-inf"))


def _call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *, is_causal: bool, scale: float | None
) -> Tensor:
    grouped = query.size(1) != key.size(1)
    try:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    except RuntimeError as error:
        for message, reason in _REFUSALS.items():
            if message in str(error):
                raise NotImplementedError(reason) from error
        raise


DEFAULT = ScaledDotProduct()
FLASH = ScaledDotProduct(SDPBackend.FLASH_ATTENTION)
EFFICIENT = ScaledDotProduct(SDPBackend.EFFICIENT_ATTENTION)
CUDNN = ScaledDotProduct(SDPBackend.CUDNN_ATTENTION)
MATH = ScaledDotProduct(SDPBackend.MATH)
LIBRARY = TorchArrays(torch_backend)
KERAS = KerasArrays(LIBRARY, "torch")
"""What libraries that compute with torch are called on."""
