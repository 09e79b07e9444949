"""Shared code of torch's modes: all masks as one boolean tensor, and gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import Stages, Window


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


def may_attend(
    scores: tuple[int, ...],
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    past: int = 0,
    query_offsets: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """Combine everything that forbids a key, for scores (B, H, Lq, T).

    Returns a boolean tensor that broadcasts to them, True = may attend, or None where nothing is forbidden. A window
    counts from position ``past`` + i of query i; causality is aligned top left. Both count from
    ``query_offsets`` (B,) where there are any.
    """
    queries, keys = (torch.arange(length, device=device) for length in scores[-2:])
    queries = queries.unsqueeze(-1)
    if query_offsets is not None:
        queries, past = queries + query_offsets.view(-1, 1, 1, 1), 0
    conditions = [] if mask is None else [mask]
    if is_causal:
        conditions.append(keys <= queries)
    before, after = window or (None, None)
    if before is not None:
        conditions.append(keys >= queries + past - before)
    if after is not None:
        conditions.append(keys <= queries + past + after)
    if key_lengths is not None:
        conditions.append(keys < key_lengths.view(-1, 1, 1, 1))
    allowed = None
    for condition in conditions:
        allowed = condition if allowed is None else allowed & condition
    return allowed


def seen_from_the_end(
    lengths: tuple[int, int | Tensor],
    is_causal: bool,
    window: Window | None,
    keys: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return who may attend to whom, where the last query stands at the last key that is used: (.., Lq, Lk).

    ``lengths`` are the number of queries and that of keys, one for all or (B, 1, 1, 1); ``keys`` is how many there are
    with those that are not used.
    """
    queries, used = lengths
    position = torch.arange(queries, device=device).unsqueeze(-1) + used - queries
    behind = torch.arange(used if keys is None else keys, device=device) - position
    allowed = behind <= 0 if is_causal else torch.ones_like(behind, dtype=torch.bool)
    left, right = window or (None, None)
    if left is not None:
        allowed = allowed & (behind >= -left)
    if right is not None:
        allowed = allowed & (behind <= right)
    return allowed


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
