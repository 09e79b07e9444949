"""Attention by the interfaces of transformers: eager functions of models, ``sdpa`` and ``flex_attention``.

A model asks ``masking_utils`` for a mask, made from a config, and a cache where there is a past. Then it calls the
function of its implementation with itself as the module, of which attributes are read. Eager functions are each model's
own: Llama's, Gemma 2's where there is a softcap, that of gpt-oss where there are sinks, and T5's where there is a bias
of positions.

A causal window counts a query's own key: "sliding_window=3" is drawn with a query's key and the two before. One of an
encoder does not: "absolute distance is within the (inclusive) sliding window size".
https://huggingface.co/docs/transformers/attention_interface, and the docstrings of ``transformers/masking_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager
from transformers.models.t5.modeling_t5 import eager_attention_forward as t5_eager

from attncheck.backends import torch_backend
from attncheck.backends.contract import CallOptions, Stages, Window, pass_as_options
from attncheck.backends.derived import with_gradients

_LAYER_TYPES = {"sliding": "sliding_attention", "chunked": "chunked_attention"}
_MAX_PATTERN_SIZE = 64  # keys of a mask in which chunks are looked for


@dataclass(frozen=True)
class MaskPattern:
    """One of the masks that masking_utils makes, with its size as transformers counts it."""

    name: str
    size: int | None = None
    blocks: Tensor | None = None
    """Of each batch entry and token, the block in which tokens attend both ways; -1 for none."""

    @property
    def is_causal(self) -> bool:
        """Return whether a model that has this mask is a decoder."""
        return self.name in ("causal", "sliding", "chunked")

    def make_config(self, implementation: str) -> Any:
        """Return the attributes of a model's config that masks and caches read."""
        config = PreTrainedConfig(
            num_hidden_layers=1,
            layer_types=[_LAYER_TYPES.get(self.name, "full_attention")],
            sliding_window=self.size if "sliding" in self.name else None,
            attention_chunk_size=self.size if self.name == "chunked" else None,
            is_causal=self.is_causal,
        )
        config._attn_implementation = implementation
        return config


BIDIRECTIONAL = MaskPattern("bidirectional")


def pattern_of_window(is_causal: bool, window: Window | None) -> MaskPattern:
    """Return the mask of causality and a window. Raises ``NotImplementedError`` for windows that transformers lacks."""
    left, right = window or (None, None)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return BIDIRECTIONAL
    if right == 0 and (left is None or left >= 0):
        return MaskPattern("causal") if left is None else MaskPattern("sliding", left + 1)
    if left is not None and left == right and left >= 0:
        return MaskPattern("bidirectional_sliding", left)
    raise NotImplementedError("windows of transformers are causal, or reach as far before as after")


def pattern_of_mask(mask: Tensor, past: int) -> MaskPattern | None:
    """Return the mask of transformers that equals a boolean mask (B, H, Lq, T); None if none does."""
    if mask.size(1) != 1 or mask.size(2) + past != mask.size(3) or not mask.numel():
        return None
    positions = torch.arange(past, mask.size(3), device=mask.device).unsqueeze(-1)
    keys = torch.arange(mask.size(3), device=mask.device)
    for pattern, allowed in _candidate_patterns(mask, positions, keys):
        if bool((mask == allowed).all()):
            return pattern
    return _find_block_pattern(mask, keys) if past == 0 else None


def _candidate_patterns(mask: Tensor, positions: Tensor, keys: Tensor) -> Iterator[tuple[MaskPattern, Tensor]]:
    causal = keys <= positions
    yield MaskPattern("causal"), causal
    # The first query of a chunk attends only to its own key, as with a window of 1, which no model has.
    for size in range(2, min(len(keys), _MAX_PATTERN_SIZE)):
        yield MaskPattern("chunked", size), causal & (keys // size == positions // size)
    size = int(mask[0, 0, -1].sum())
    if size:
        yield MaskPattern("sliding", size), causal & (keys > positions - size)


def _find_block_pattern(mask: Tensor, keys: Tensor) -> MaskPattern | None:
    """Return causality with blocks of tokens that attend in both directions, such as those of an image."""
    blocks = torch.full((mask.size(0), len(keys)), -1, device=mask.device)
    for entry, rows in enumerate(mask[:, 0]):
        token = number = 0
        while token < len(keys):
            seen = rows[token].nonzero()
            last = int(seen[-1]) if len(seen) else token
            if last > token:
                blocks[entry, token : last + 1] = number
                number += 1
            token = max(last, token) + 1
    together = (blocks.unsqueeze(-1) == blocks.unsqueeze(-2)) & (blocks.unsqueeze(-1) >= 0)
    allowed = (keys <= keys.unsqueeze(-1)) | together
    return MaskPattern("causal", blocks=blocks) if bool((mask[:, 0] == allowed).all()) else None


@dataclass
class Layer:
    """The inputs of a layer of a model: a mask, and keys and values with those of its cache."""

    pattern: MaskPattern
    implementation: str
    query: Tensor
    key: Tensor
    value: Tensor
    past: tuple[Tensor, Tensor] | None = None
    padding: Tensor | None = None
    """True for used keys, (B, T)."""
    user_mask: Tensor | None = None
    """A mask that is none of transformers', (B, 1, Lq, T)."""
    position_ids: Tensor | None = None
    cache: DynamicCache | None = field(init=False, default=None)

    def make_mask(self) -> Any:
        """Make the mask, then append key and value to the cache, in the order of models."""
        config = self.pattern.make_config(self.implementation)
        if self.past is not None:
            if self.query.size(2) != self.key.size(2):
                raise NotImplementedError("a cache is given one new key for each query, and masks count on it")
            self.cache = DynamicCache(config=config)
            self.cache.update(*self.past, 0)
        mask = self._make_layer_mask(config)
        if self.cache is not None:
            self.key, self.value = self.cache.update(self.key, self.value, 0)
        return mask

    def _make_layer_mask(self, config: Any) -> Any:
        batch, _, queries, _ = self.query.shape
        embeds = self.query.new_empty((batch, queries, 1))
        words: dict[str, Any] = {"past_key_values": self.cache}
        padding, same_length = self.padding, queries == self.key.size(2)
        if self.user_mask is not None:
            past = 0 if self.past is None else self.past[0].size(2)
            words["and_mask_function"] = _mask_function(self.user_mask, past)
        if not self.pattern.is_causal:
            if not same_length and self.past is None:
                words["encoder_hidden_states"] = self.key.new_empty((batch, self.key.size(2), 1))
            sliding = self.pattern.name == "bidirectional_sliding"
            made = create_bidirectional_sliding_window_mask if sliding else create_bidirectional_mask
            return made(config, embeds, padding, position_ids=self.position_ids, **words)
        if not same_length and self.past is None:
            # Only the mask of used keys has the number of keys; the shortcut is_causal needs as many queries as keys.
            every = torch.ones((batch, self.key.size(2)), dtype=torch.bool, device=self.key.device)
            padding, words["allow_is_causal_skip"] = every if padding is None else padding, False
        made = {"causal": create_causal_mask, "sliding": create_sliding_window_causal_mask}.get(
            self.pattern.name, create_chunked_causal_mask
        )
        words |= {"position_ids": self.position_ids, "block_sequence_ids": self.pattern.blocks}
        return made(config, embeds, padding, **words)


def _mask_function(mask: Tensor, past: int) -> Any:
    """Return a mask (B, 1, Lq, T) as a function of indices; a query's index includes the past."""
    return lambda batch, _head, query, key: mask[batch, 0, query - past, key]


class _Module(torch.nn.Module):  # type: ignore[misc]
    """The attributes of the calling layer that attention functions read."""

    def __init__(self, query: Tensor, key: Tensor, is_causal: bool, sinks: Tensor | None) -> None:
        super().__init__()
        self.num_key_value_groups = query.size(1) // key.size(1) if key.size(1) else 1
        self.is_causal = is_causal
        self.training = False
        self.layer_idx = 0
        self.sinks: Any = sinks


@dataclass(frozen=True)
class Interface:
    """One implementation by its name in transformers. Shapes and meanings: ``contract.py``."""

    implementation: str

    prepare = staticmethod(torch_backend.prepare)
    from_numpy = staticmethod(torch_backend.from_numpy)
    to_numpy = staticmethod(torch_backend.to_numpy)
    gradients = staticmethod(torch_backend.gradients)

    def describe(self) -> dict[str, str]:
        """Return the versions and what may change the numbers."""
        of_torch = torch_backend.describe()
        return {**of_torch, "version": transformers.__version__, "torch": of_torch["version"]}

    @pass_as_options(
        *("mask", "bias", "sinks", "is_causal", "scale", "softcap", "window", "key_lengths", "past_key", "past_value")
    )
    def attention(self, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Stages:
        """Make the mask, and attend in one call."""
        mask, bias, past_key, past_value = options.mask, options.bias, options.past_key, options.past_value
        past = 0 if past_key is None else past_key.size(2)
        pattern = pattern_of_window(options.is_causal, options.window)
        shape = (query.size(0), query.size(1), query.size(2), past + key.size(2))
        if mask is not None:
            mask = mask.expand(shape[0], mask.size(1), *shape[2:])
            if pattern == BIDIRECTIONAL and (recognised := pattern_of_mask(mask, past)) is not None:
                pattern, mask = recognised, None
        layer = Layer(pattern, self.implementation, query, key, value)
        if past_key is not None and past_value is not None:
            layer.past = past_key, past_value
        if options.key_lengths is not None:
            layer.padding = torch.arange(shape[3], device=query.device) < options.key_lengths.unsqueeze(-1)
        if mask is not None and mask.size(1) == 1:
            layer.user_mask = mask
        layer_mask = layer.make_mask()
        if mask is not None and mask.size(1) != 1:
            layer_mask = self._combine_masks(mask, layer_mask, query.dtype)
        if bias is not None:
            bias = bias.expand(shape)[..., shape[3] - layer.key.size(2) :]
        return self._attend_in_layer(layer, layer_mask, shape[3], replace(options, bias=bias))

    @pass_as_options("sinks", "is_causal", "scale", "softcap", "window")
    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        options: CallOptions,
    ) -> Stages:
        """Attend in one call; position_ids, which restart in each sequence, separate the sequences."""
        if not torch.equal(cu_seqlens_q, cu_seqlens_k):
            raise NotImplementedError("position_ids are those of queries and keys alike")
        pattern = pattern_of_window(options.is_causal, options.window)
        if not pattern.is_causal:
            raise NotImplementedError("create_bidirectional_mask takes position_ids and does not read them")
        layer = Layer(pattern, self.implementation, query, key, value)
        lengths = cu_seqlens_q.diff()
        starts = torch.repeat_interleave(cu_seqlens_q[:-1], lengths)
        layer.position_ids = (torch.arange(query.size(2), device=query.device) - starts).unsqueeze(0)
        return self._attend_in_layer(layer, layer.make_mask(), key.size(2), options)

    def _attend_in_layer(self, layer: Layer, mask: Any, keys: int, options: CallOptions) -> Stages:
        query, sinks, scale = layer.query, options.sinks, options.scale
        module = _Module(query, layer.key, layer.pattern.is_causal, sinks)
        words = {"softcap": options.softcap, "s_aux": sinks, "position_bias": options.bias}
        asked = {name: value for name, value in words.items() if value is not None}
        scaling = query.size(-1) ** -0.5 if scale is None else scale
        call = self._attention_function(query, layer.key, frozenset(asked))
        output, weights = call(module, query, layer.key, layer.value, mask, scaling=scaling, dropout=0.0, **asked)
        stages = {"output": output.transpose(1, 2)}
        # A cache of a window forgets keys, and these have no column.
        has_weights = self.implementation == "eager" and weights.size(-1) == keys
        return {"weights": weights, **stages} if has_weights else stages

    def _attention_function(self, query: Tensor, key: Tensor, asked: frozenset[str]) -> Callable[..., Any]:
        """Return the function that a model with these options calls."""
        if self.implementation != "eager":
            self._require_supported(asked)
            interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[self.implementation]
            return interface
        if len(asked) > 1:
            raise NotImplementedError("of softcap, sinks and bias, the eager function of a model has one")
        if "position_bias" in asked and query.size(1) != key.size(1):
            raise NotImplementedError("T5's eager function, which has a bias, has no groups of heads")
        functions = {"softcap": gemma2_eager, "s_aux": gpt_oss_eager, "position_bias": t5_eager}
        function: Callable[..., Any] = next((functions[name] for name in asked), llama_eager)
        return function

    def _require_supported(self, asked: frozenset[str]) -> None:
        if "s_aux" in asked:
            raise NotImplementedError("sdpa takes s_aux and ignores it, and flex_attention refuses it on a CPU")
        if "softcap" in asked and self.implementation == "sdpa":
            raise NotImplementedError("sdpa attention does not support softcap")

    def _combine_masks(self, mask: Tensor, layer_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return a mask with different heads, combined with the layer's mask, in the function's form."""
        if self.implementation == "flex_attention":
            raise NotImplementedError("flex_attention reads the mask of the first head alone")
        if self.implementation == "sdpa":
            return mask if layer_mask is None else mask & layer_mask
        allowed = torch.zeros((), dtype=dtype, device=mask.device) if layer_mask is None else layer_mask
        return torch.where(mask, allowed, torch.finfo(dtype).min)


def _make_differentiable(implementation: str) -> SimpleNamespace:
    """Return an implementation that has a backward pass on a CPU, with gradients by autograd."""
    interface = Interface(implementation)
    return with_gradients(interface, attention=interface.attention, packed_attention=interface.packed_attention)


EAGER = _make_differentiable("eager")
SDPA = _make_differentiable("sdpa")
FLEX = Interface("flex_attention")
