"""Shared code of torch's modes: all masks as one boolean tensor, and gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import Stages


def differentiate(
    attention: Callable[..., Stages],
    inputs: Mapping[str, Tensor],
    grad_output: Tensor,
    options: Mapping[str, Any],
) -> Stages:
    """Differentiate sum(grad_output * output) of ``attention`` by its ``inputs``, and by a bias and sinks if given."""
    given = {**inputs, **{name: options.get(name) for name in ("bias", "sinks")}}
    # detach() makes a leaf that shares memory and strides with the tensor that it is made from.
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items() if tensor is not None}
    with torch.enable_grad():
        output = attention(**{**options, **leaves})["output"]
    # Where an axis is empty, a kernel may not look at its bias at all: that gradient is zero, and here it is made so.
    gradients = torch.autograd.grad(output, tuple(leaves.values()), grad_output, materialize_grads=True)
    return {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def sequences_of(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: tuple[Tensor, Tensor], key_lengths: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the queries of each sequence, and those of its keys and values that are used."""
    limits_of_queries, limits_of_keys = (each[1:-1].tolist() for each in cu_seqlens)
    queries = query.tensor_split(limits_of_queries, dim=2)
    keys, values = (each.tensor_split(limits_of_keys, dim=2) for each in (key, value))
    used = [each.size(2) for each in keys] if key_lengths is None else key_lengths.tolist()
    for own_query, own_key, own_value, length in zip(queries, keys, values, used, strict=True):
        yield own_query, own_key[:, :, :length], own_value[:, :, :length]
