"""Masks as models of transformers make them: by ``masking_utils``, from a config, and a cache where there is a past.

A causal window counts a query's own key: "sliding_window=3" is drawn with a query's key and the two before. One of an
encoder does not: "absolute distance is within the (inclusive) sliding window size".
https://huggingface.co/docs/transformers/attention_interface, and the docstrings of ``transformers/masking_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from attncheck.backends.contract import Window

_LAYERS = {"sliding": "sliding_attention", "chunked": "chunked_attention"}
_LONGEST = 64  # keys of a mask in which chunks are looked for


@dataclass(frozen=True)
class Pattern:
    """One of the masks that masking_utils makes, with its size as transformers counts it."""

    name: str
    size: int | None = None
    blocks: Tensor | None = None
    """Of each batch entry and token, the block in which tokens attend both ways; -1 for none."""

    @property
    def is_causal(self) -> bool:
        """Whether a model that has this mask is a decoder."""
        return self.name in ("causal", "sliding", "chunked")

    def config(self, implementation: str) -> Any:
        """Return the part of a model's config that masks and caches read."""
        config = PreTrainedConfig(
            num_hidden_layers=1,
            layer_types=[_LAYERS.get(self.name, "full_attention")],
            sliding_window=self.size if "sliding" in self.name else None,
            attention_chunk_size=self.size if self.name == "chunked" else None,
            is_causal=self.is_causal,
        )
        config._attn_implementation = implementation
        return config


BIDIRECTIONAL = Pattern("bidirectional")


def pattern_of(is_causal: bool, window: Window | None) -> Pattern:
    """Return the mask of causality and a window. Raises ``NotImplementedError`` for windows that transformers lacks."""
    left, right = window or (None, None)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return BIDIRECTIONAL
    if right == 0 and (left is None or left >= 0):
        return Pattern("causal") if left is None else Pattern("sliding", left + 1)
    if left is not None and left == right and left >= 0:
        return Pattern("bidirectional_sliding", left)
    raise NotImplementedError("windows of transformers are causal, or reach as far before as after")


def pattern_in(mask: Tensor, past: int) -> Pattern | None:
    """Return which mask of transformers a boolean mask (B, H, Lq, T) is; None if it is none of them."""
    if mask.size(1) != 1 or mask.size(2) + past != mask.size(3) or not mask.numel():
        return None
    positions = torch.arange(past, mask.size(3), device=mask.device).unsqueeze(-1)
    keys = torch.arange(mask.size(3), device=mask.device)
    for pattern, allowed in _candidates(mask, positions, keys):
        if bool((mask == allowed).all()):
            return pattern
    return _with_blocks(mask, keys) if past == 0 else None


def _candidates(mask: Tensor, positions: Tensor, keys: Tensor) -> Iterator[tuple[Pattern, Tensor]]:
    causal = keys <= positions
    yield Pattern("causal"), causal
    # A query that stands where a chunk begins sees its own key alone, as with a window of 1, which no model has.
    for size in range(2, min(len(keys), _LONGEST)):
        yield Pattern("chunked", size), causal & (keys // size == positions // size)
    size = int(mask[0, 0, -1].sum())
    if size:
        yield Pattern("sliding", size), causal & (keys > positions - size)


def _with_blocks(mask: Tensor, keys: Tensor) -> Pattern | None:
    """Return causality with blocks of tokens that attend both ways, such as an image's."""
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
    return Pattern("causal", blocks=blocks) if bool((mask[:, 0] == allowed).all()) else None


@dataclass
class Layer:
    """What a layer of a model is given: a mask, and keys and values with those of its cache."""

    pattern: Pattern
    implementation: str
    query: Tensor
    key: Tensor
    value: Tensor
    past: tuple[Tensor, Tensor] | None = None
    padding: Tensor | None = None
    """True where a key is used, (B, T)."""
    own: Tensor | None = None
    """A mask of the user's own, (B, 1, Lq, T)."""
    position_ids: Tensor | None = None
    cache: DynamicCache | None = field(init=False, default=None)

    def made(self) -> Any:
        """Make the mask, then append key and value to the cache; in that order, as models do."""
        config = self.pattern.config(self.implementation)
        if self.past is not None:
            if self.query.size(2) != self.key.size(2):
                raise NotImplementedError("a cache is given one new key for each query, and masks count on it")
            self.cache = DynamicCache(config=config)
            self.cache.update(*self.past, 0)
        mask = self._mask(config)
        if self.cache is not None:
            self.key, self.value = self.cache.update(self.key, self.value, 0)
        return mask

    def _mask(self, config: Any) -> Any:
        batch, _, queries, _ = self.query.shape
        embeds = self.query.new_empty((batch, queries, 1))
        words: dict[str, Any] = {"past_key_values": self.cache}
        padding, same_length = self.padding, queries == self.key.size(2)
        if self.own is not None:
            words["and_mask_function"] = _own(self.own, 0 if self.past is None else self.past[0].size(2))
        if not self.pattern.is_causal:
            if not same_length and self.past is None:
                words["encoder_hidden_states"] = self.key.new_empty((batch, self.key.size(2), 1))
            sliding = self.pattern.name == "bidirectional_sliding"
            made = create_bidirectional_sliding_window_mask if sliding else create_bidirectional_mask
            return made(config, embeds, padding, position_ids=self.position_ids, **words)
        if not same_length and self.past is None:
            # How many keys there are, only the mask of used keys tells; the shortcut is_causal is for as many queries.
            every = torch.ones((batch, self.key.size(2)), dtype=torch.bool, device=self.key.device)
            padding, words["allow_is_causal_skip"] = every if padding is None else padding, False
        made = {"causal": create_causal_mask, "sliding": create_sliding_window_causal_mask}.get(
            self.pattern.name, create_chunked_causal_mask
        )
        words |= {"position_ids": self.position_ids, "block_sequence_ids": self.pattern.blocks}
        return made(config, embeds, padding, **words)


def _own(mask: Tensor, past: int) -> Any:
    """Return a mask (B, 1, Lq, T) as a function of places: a query's index counts the past."""
    return lambda batch, _head, query, key: mask[batch, 0, query - past, key]
