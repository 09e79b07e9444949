"""Gradients by autograd, for every module here that has an ``attention``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import Stages


def differentiate(
    attention: Callable[..., Stages],
    inputs: Mapping[str, Tensor | None],
    grad_output: Tensor,
    options: Mapping[str, Any],
) -> Stages:
    """Differentiate sum(grad_output * output) of ``attention`` by its ``inputs``; a bias is one of them where given."""
    # detach() makes a leaf that shares memory and strides with the tensor that it is made from.
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items() if tensor is not None}
    with torch.enable_grad():
        output = attention(**leaves, **options)["output"]
    # Where an axis is empty, a kernel may not look at its bias at all: that gradient is zero, and here it is made so.
    gradients = torch.autograd.grad(output, tuple(leaves.values()), grad_output, materialize_grads=True)
    return {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
