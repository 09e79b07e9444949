"""``torch.nn.attention.flex_attention``: eager, which writes the scores out, and compiled to one kernel.

Who may attend to whom is a function of places, mask_mod, and so is what becomes of a score, score_mod. On a CPU it has
no backward pass. https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

from attncheck.backends import torch_backend, torch_compile
from attncheck.backends.contract import Stages, Window

_LEAST_WIDTH_ON_A_GPU = 16
"""Of queries, keys and values; the kernel of torch/_inductor/kernel/flex raises for less."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Flex:
    """The call, eager or compiled. Shapes and meanings: ``contract.py``."""

    call: Callable[..., Any]
    prepare: Callable[[str, int], None]
    describe: Callable[[], dict[str, str]]
    has_log_sum_exp: bool = True

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
        softcap: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        query_offsets: Tensor | None = None,
    ) -> Stages:
        """Attend in one call; everything that forbids a key is a mask_mod."""
        past = 0
        if past_key is not None and past_value is not None:
            past = past_key.size(-2)
            key, value = torch.cat((past_key, key), dim=-2), torch.cat((past_value, value), dim=-2)
        scores = (*query.shape[:-1], key.size(-2))
        mods = [] if mask is None else [_given(mask.expand(scores))]
        if is_causal:
            mods.append(_causal if query_offsets is None else _sliding((None, 0), query_offsets))
        if window is not None:
            offsets = (
                torch.full((query.size(0),), past, device=query.device) if query_offsets is None else query_offsets
            )
            mods.append(_sliding(window, offsets))
        if key_lengths is not None:
            mods.append(_padded(key_lengths))
        score_mod = _score_mod(softcap, None if bias is None else bias.expand(scores))
        return self._attend(query, key, value, mods, score_mod=score_mod, scale=scale)

    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
    ) -> Stages:
        """Attend in one call, in which a mask_mod keeps documents apart."""
        documents = (_document_of(cu_seqlens_q), _document_of(cu_seqlens_k))
        offsets = cu_seqlens_k[1:] - cu_seqlens_q[1:]  # from a query's index to that of the key at which it stands
        mods = [_same_document(*documents)]
        if is_causal:
            mods.append(_sliding_in_document((None, 0), documents[0], offsets))
        if window is not None:
            mods.append(_sliding_in_document(window, documents[0], offsets))
        return self._attend(query, key, value, mods, score_mod=_score_mod(softcap, None), scale=scale)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mods: list[MaskMod], **options: Any) -> Stages:
        if self is COMPILED and query.is_cuda and min(query.size(-1), value.size(-1)) < _LEAST_WIDTH_ON_A_GPU:
            raise NotImplementedError(
                f"compiled for a GPU, flex_attention takes widths of {_LEAST_WIDTH_ON_A_GPU} and more"
            )
        block_mask: BlockMask | None = None
        if mods:
            batch, heads, queries, _ = query.shape
            block_mask = create_block_mask(and_masks(*mods), batch, heads, queries, key.size(2), device=query.device)
        grouped = query.size(1) != key.size(1)
        options |= {"block_mask": block_mask, "enable_gqa": grouped}
        if not self.has_log_sum_exp:
            return {"output": self.call(query, key, value, **options)}
        output, also = self.call(query, key, value, return_aux=AuxRequest(lse=True), **options)
        return {"log_sum_exp": also.lse, "output": output}


def _causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _given(mask: Tensor) -> MaskMod:
    return lambda batch, head, query, key: mask[batch, head, query, key]


def _sliding(window: Window, offsets: Tensor) -> MaskMod:
    """Count a window from ``offsets`` (B,) + the query's index."""
    return _between(window, lambda batch, query: query + offsets[batch])


def _sliding_in_document(window: Window, documents: Tensor, offsets: Tensor) -> MaskMod:
    return _between(window, lambda _, query: query + offsets[documents[query]])


def _between(window: Window, position_of: Callable[[Tensor, Tensor], Tensor]) -> MaskMod:
    left, right = window

    def sliding(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = position_of(batch, query)
        allowed = key >= 0
        if left is not None:
            allowed = allowed & (key >= position - left)
        if right is not None:
            allowed = allowed & (key <= position + right)
        return allowed

    return sliding


def _padded(key_lengths: Tensor) -> MaskMod:
    return lambda batch, _head, _query, key: key < key_lengths[batch]


def _same_document(queries: Tensor, keys: Tensor) -> MaskMod:
    return lambda _batch, _head, query, key: queries[query] == keys[key]


def _document_of(cu_seqlens: Tensor) -> Tensor:
    """Return which sequence each place belongs to."""
    sequences = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return torch.repeat_interleave(sequences, cu_seqlens.diff())


def _score_mod(softcap: float | None, bias: Tensor | None) -> ScoreMod | None:
    if softcap is None and bias is None:
        return None

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias[batch, head, query, key]

    return changed


EAGER = Flex(flex_attention, torch_backend.prepare, torch_backend.describe)
# Compiled for a CPU it says that "return_lse is not supported yet". With symbolic shapes, which a second shape brings
# where dynamic is not False, numbers depend on the calls before (docs/findings.md).
COMPILED = Flex(
    torch.compile(flex_attention, fullgraph=True, dynamic=False),
    torch_compile.prepare,
    torch_compile.describe,
    has_log_sum_exp=False,
)
