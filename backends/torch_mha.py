"""torch.nn.MultiheadAttention in eval mode, three ways through it: each has code of its own.

Without weights it calls scaled_dot_product_attention; with weights it is written out in Python, with a query that is
scaled before the product; and self-attention without gradients takes a fast path in C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_

import torch
from torch import Tensor, nn

from attncheck.backends import torch_backend
from attncheck.backends.composed import causal_and_window_conditions
from attncheck.backends.contract import CallOptions, Stages, pass_as_options


@dataclass(frozen=True)
class MultiheadModule:
    """The module, with weights or on the fast path where that is said. Shapes and meanings: ``contract.py``."""

    need_weights: bool = False
    fast: bool = False

    prepare = staticmethod(torch_backend.prepare)
    describe = staticmethod(torch_backend.describe)
    from_numpy = staticmethod(torch_backend.from_numpy)
    to_numpy = staticmethod(torch_backend.to_numpy)

    @pass_as_options("mask", "bias", "is_causal", "window", "key_lengths")
    def multi_head_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        heads: int,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        output_weight: Tensor | None = None,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        options: CallOptions,
    ) -> Stages:
        """Project, attend in every head, merge the heads and project once more, in one call."""
        weights = {"query": query_weight, "key": key_weight, "value": value_weight, "output": output_weight}
        biases = {"query": query_bias, "key": key_bias, "value": value_bias, "output": output_bias}
        layer = _build_module(heads, _module_weights(weights), biases)
        if self.fast:
            key = value = _shared_self_attention_input(layer, query, key, value, options.bias)
        masks = _mask_arguments((query.size(0), heads, query.size(1), key.size(1)), options)
        with torch.no_grad():
            output, attention_weights = layer(
                query, key, value, need_weights=self.need_weights, average_attn_weights=False, **masks
            )
        return {"weights": attention_weights, "output": output} if self.need_weights else {"output": output}


def _module_weights(weights: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the weights if the module can hold them: it has one width, E, except for keys and values."""
    whole = {name: weight for name, weight in weights.items() if weight is not None}
    if "output" not in whole:
        raise NotImplementedError("nn.MultiheadAttention always has an output projection")
    width = whole["query"].size(0)
    if {*whole["query"].shape, whole["key"].size(1), whole["value"].size(1), *whole["output"].shape} != {width}:
        raise NotImplementedError("nn.MultiheadAttention needs H D, H Dv and the output's width equal to the query's")
    return whole


def _build_module(
    heads: int, weights: Mapping[str, Tensor], biases: Mapping[str, Tensor | None]
) -> nn.MultiheadAttention:
    """Build the module and load the projections, which it stores as (out, in), with all biases or none."""
    width, key_width, value_width = (weights[name].size(0) for name in ("query", "key", "value"))
    has_bias = any(bias is not None for bias in biases.values())
    layer = nn.MultiheadAttention(
        width, heads, bias=has_bias, kdim=key_width, vdim=value_width, batch_first=True, dtype=weights["query"].dtype
    )
    state = {"out_proj.weight": weights["output"].mT}
    if width == key_width == value_width:
        state["in_proj_weight"] = torch.cat([weights[name].mT for name in ("query", "key", "value")])
    else:
        state |= {f"{name[0]}_proj_weight": weights[name].mT for name in ("query", "key", "value")}
    if has_bias:
        whole = {name: weights[name].new_zeros(width) if bias is None else bias for name, bias in biases.items()}
        state["in_proj_bias"] = torch.cat([whole[name] for name in ("query", "key", "value")])
        state["out_proj.bias"] = whole["output"]
    layer.load_state_dict(state)
    return layer.eval()


def _shared_self_attention_input(
    layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the one tensor that is query, key and value; without it, the module silently leaves the fast path.

    The conditions are those of ``nn.MultiheadAttention.forward``.
    """
    if not (torch.equal(query, key) and torch.equal(key, value)):
        raise NotImplementedError("the fast path needs one tensor as query, key and value")
    if layer.in_proj_bias is None:
        raise NotImplementedError("the fast path needs biases")
    if layer.num_heads % 2:
        raise NotImplementedError("the fast path needs an even number of heads")
    if bias is not None:
        raise NotImplementedError("the fast path takes boolean masks alone")
    return query


def _mask_arguments(scores: tuple[int, int, int, int], options: CallOptions) -> dict[str, Tensor | bool | None]:
    """Return attn_mask, key_padding_mask and the hint is_causal.

    The masks are boolean, and True drops a key; with a bias, both are added to the scores.
    """
    mask, bias, is_causal, window = options.mask, options.bias, options.is_causal, options.window
    queries, keys = (torch.arange(length) for length in scores[-2:])
    rules = [
        *([] if mask is None else [mask]),
        *causal_and_window_conditions(keys - queries[:, None], is_causal, window),
    ]
    attn_mask = ~reduce(and_, rules) if rules else None
    lengths = options.key_lengths
    padding = None if lengths is None else torch.arange(scores[-1]) >= lengths.unsqueeze(-1)
    if bias is not None:  # both masks should be of one type
        attn_mask = bias if attn_mask is None else torch.where(attn_mask, float("-inf"), bias)
        padding = None if padding is None else bias.new_zeros(()).masked_fill(padding, float("-inf"))
    only_causal = is_causal and mask is None and bias is None and window is None
    if attn_mask is not None and all(length == 1 for length in attn_mask.shape[:-2]):
        attn_mask = attn_mask.reshape(attn_mask.shape[-2:]).expand(scores[-2:])  # (Lq, Lk)
    elif attn_mask is not None:
        attn_mask = attn_mask.expand(scores).reshape(scores[0] * scores[1], *scores[-2:])  # (B*H, Lq, Lk)
    return {"attn_mask": attn_mask, "key_padding_mask": padding, "is_causal": only_causal}


WITHOUT_WEIGHTS = MultiheadModule()
WITH_WEIGHTS = MultiheadModule(need_weights=True)
FAST = MultiheadModule(fast=True)
