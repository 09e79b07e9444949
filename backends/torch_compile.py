"""torch.compile of the eager functions and of a call as models write it, and flex_attention, eager and compiled.

TorchInductor makes C++ loops in the place of one kernel after the other.
Shapes are symbolic, so that a new length is no new compilation; axes of length 0 and 1, dtypes, strides and what is
given or not are. A graph that breaks, or too many compilations, raises: eager code would otherwise run unnoticed.

``fused`` is attention that returns only its output, written as models write it. TorchInductor replaces what reads as
attention (``torch/_inductor/fx_passes/fuse_attention.py``) by a call of scaled_dot_product_attention, where nothing but
the output is returned. So the softmax is torch's own there, which makes a query without a key NaN, and what may not be
attended is minus infinity in a mask that is added. Keys that lie in memory as (B, L, H, D), which is what a projection
leaves, are permuted to (B, H, D, L) at once, as many models do it.

``torch.nn.attention.flex_attention`` writes the scores out where it is eager, and is one kernel where it is compiled.
Who may attend to whom is a function of places, mask_mod, and so is what becomes of a score, score_mod. On a CPU it has
no backward pass. https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
"""

from __future__ import annotations

import math
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

from attncheck.backends import torch_backend
from attncheck.backends.contract import CallOptions, Stages, Window, pass_as_options
from attncheck.backends.derived import compile_backend, make_gradients, output_only, with_functions
from attncheck.backends.library_arrays import FrameworkArrays

_MAX_COMPILATIONS = 1 << 16


def prepare(dtype: str, threads: int) -> None:
    """Limit the threads of this process, of its compiler too, and let it compile as often as it has to."""
    torch_backend.prepare(dtype, threads)
    torch._inductor.config.compile_threads = threads
    torch._dynamo.config.recompile_limit = _MAX_COMPILATIONS
    torch._dynamo.config.accumulated_recompile_limit = _MAX_COMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {**torch_backend.describe(), "compiler": "inductor"}


def _compile_operation(function: Callable[..., Stages]) -> Callable[..., Stages]:
    made: Callable[..., Stages] = torch.compile(function, fullgraph=True, dynamic=True)
    return made


def _gradients(forward: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return the gradients of a compiled operation, with a compiled backward pass.

    Autograd differentiates all results of a compiled function, unused ones with a gradient of zero. Through the
    logarithm of an empty row's sum, that is 0 * NaN. So only the output is returned, as in training.
    """
    return make_gradients(_compile_operation(output_only(forward)), torch_backend.gradients)


def _plain_pattern(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.softmax(query @ key.transpose(-2, -1) * scale, dim=-1) @ value


def _permuted_pattern(query: Tensor, stored_key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.softmax(query @ stored_key.permute(0, 2, 3, 1) * scale, dim=-1) @ value


def _masked_pattern(query: Tensor, key: Tensor, value: Tensor, inverse_scale: float, attn_mask: Tensor) -> Tensor:
    return torch.softmax(query @ key.transpose(-2, -1) / inverse_scale + attn_mask, dim=-1) @ value


# The compiler does not recognise attention if shapes are symbolic.
_compiled_plain, _compiled_permuted, _compiled_masked = (
    torch.compile(form, fullgraph=True, dynamic=False) for form in (_plain_pattern, _permuted_pattern, _masked_pattern)
)


def fused(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attend in one compiled program, after repeating the keys and values of grouped heads."""
    group = query.size(1) // key.size(1)
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    if attn_mask is not None:
        if scale == 0:
            raise NotImplementedError("code that divides by the inverse of the scale has no scale of zero")
        return _compiled_masked(query, key, value, 1 / scale, attn_mask)
    if not key.is_contiguous() and key.transpose(1, 2).is_contiguous():
        return _compiled_permuted(query, key.transpose(1, 2), value, scale)
    return _compiled_plain(query, key, value, scale)


_UNCOMPILED_FUNCTIONS = (
    *("packed_attention", "packed_attention_gradients", "paged_attention", "ragged_paged_attention"),
    "quantized_attention",
)
_COMPILED_GRADIENTS = {
    "attention_gradients": _gradients(torch_backend.attention),
    "gated_attention_gradients": _gradients(torch_backend.gated_attention),
}
COMPILED = compile_backend(
    torch_backend,
    _compile_operation,
    *_COMPILED_GRADIENTS,
    *_UNCOMPILED_FUNCTIONS,
    prepare=prepare,
    describe=describe,
    **_COMPILED_GRADIENTS,
)
OUTPUT = FrameworkArrays(
    with_functions(torch_backend, {}, prepare=prepare, describe=describe, gradients=torch_backend.gradients)
)
"""The arrays of ``fused``."""


_MIN_WIDTH_ON_GPU = 16
"""The least width of queries, keys and values; the kernel of torch/_inductor/kernel/flex raises for less."""

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

    @pass_as_options(
        *("mask", "bias", "is_causal", "scale", "softcap", "window", "key_lengths"),
        *("past_key", "past_value", "query_offsets"),
    )
    def attention(self, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Stages:
        """Attend in one call; every rule that forbids keys is a mask_mod."""
        offsets, (key, value, past) = options.query_offsets, options.with_past(key, value, torch.cat)
        scores = (*query.shape[:-1], key.size(-2))
        mods = [] if options.mask is None else [_explicit_mask_mod(options.mask.expand(scores))]
        if options.is_causal:
            mods.append(_causal_mask_mod if offsets is None else _window_mask_mod((None, 0), offsets))
        if options.window is not None:
            behind_past = torch.full((query.size(0),), past, device=query.device) if offsets is None else offsets
            mods.append(_window_mask_mod(options.window, behind_past))
        if options.key_lengths is not None:
            mods.append(_length_mask_mod(options.key_lengths))
        score_mod = _make_score_mod(options.softcap, None if options.bias is None else options.bias.expand(scores))
        return self._attend(query, key, value, mods, score_mod=score_mod, scale=options.scale)

    @pass_as_options("is_causal", "scale", "softcap", "window")
    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        options: CallOptions,
    ) -> Stages:
        """Attend in one call, in which a mask_mod separates documents."""
        documents = (_document_ids(cu_seqlens_q), _document_ids(cu_seqlens_k))
        offsets = cu_seqlens_k[1:] - cu_seqlens_q[1:]  # from a query's index to the index of the key at its position
        mods = [_same_document_mask_mod(*documents)]
        if options.is_causal:
            mods.append(_window_in_document_mask_mod((None, 0), documents[0], offsets))
        if options.window is not None:
            mods.append(_window_in_document_mask_mod(options.window, documents[0], offsets))
        score_mod = _make_score_mod(options.softcap, None)
        return self._attend(query, key, value, mods, score_mod=score_mod, scale=options.scale)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mods: list[MaskMod], **options: Any) -> Stages:
        if self is FLEX_COMPILED and query.is_cuda and min(query.size(-1), value.size(-1)) < _MIN_WIDTH_ON_GPU:
            raise NotImplementedError(
                f"compiled for a GPU, flex_attention takes widths of {_MIN_WIDTH_ON_GPU} and more"
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


def _causal_mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _explicit_mask_mod(mask: Tensor) -> MaskMod:
    return lambda batch, head, query, key: mask[batch, head, query, key]


def _window_mask_mod(window: Window, offsets: Tensor) -> MaskMod:
    """Return the mask_mod of a window around ``offsets`` (B,) + the query's index."""
    return _make_window_mask_mod(window, lambda batch, query: query + offsets[batch])


def _window_in_document_mask_mod(window: Window, documents: Tensor, offsets: Tensor) -> MaskMod:
    return _make_window_mask_mod(window, lambda _, query: query + offsets[documents[query]])


def _make_window_mask_mod(window: Window, position_of: Callable[[Tensor, Tensor], Tensor]) -> MaskMod:
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


def _length_mask_mod(key_lengths: Tensor) -> MaskMod:
    return lambda batch, _head, _query, key: key < key_lengths[batch]


def _same_document_mask_mod(queries: Tensor, keys: Tensor) -> MaskMod:
    return lambda _batch, _head, query, key: queries[query] == keys[key]


def _document_ids(cu_seqlens: Tensor) -> Tensor:
    """Return the sequence number of each position."""
    sequences = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return torch.repeat_interleave(sequences, cu_seqlens.diff())


def _make_score_mod(softcap: float | None, bias: Tensor | None) -> ScoreMod | None:
    if softcap is None and bias is None:
        return None

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias[batch, head, query, key]

    return changed


FLEX = Flex(flex_attention, torch_backend.prepare, torch_backend.describe)
# Compiled for a CPU it says that "return_lse is not supported yet". With symbolic shapes, which a second shape brings
# where dynamic is not False, numbers depend on the calls before (docs/findings.md).
FLEX_COMPILED = Flex(
    torch.compile(flex_attention, fullgraph=True, dynamic=False),
    prepare,
    describe,
    has_log_sum_exp=False,
)
