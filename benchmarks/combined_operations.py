"""Faults of memory, of what is kept between calls, and of other operations, where an option meets a size or a shape.

Written from public reports, named with their threads, and from how kernels are built (structure), not from the cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from combinations import (
    BATCH,
    DECODING,
    GROUPS,
    ONE_QUERY,
    SEVERAL,
    WINDOW_LEFT,
    Array,
    Call,
    Fault,
    Stages,
    When,
    Wrong,
    alone,
    as_if_packed,
    at_least,
    beyond,
    gathered,
    given,
    hidden,
    lost,
    not_packed,
    of_entry_0,
    read,
    strides_of,
    with_offsets_of,
)

VIEWS: Mapping[str, Fault] = {
    "queries cut out of a fused projection are read as if they lay row by row: vllm#41142's kind": Fault(
        not_packed("query") & at_least(width=64), read("query", as_if_packed)
    ),
    "keys are read with the strides of values: FlagAttention#46": Fault(
        When(lambda call: call.key.shape == call.value.shape and strides_of(call.key) != strides_of(call.value)),
        lambda call: call.again(key=gathered(call.key, strides_of(call.value))),
    ),
    "a mask that is a view is read as if it lay row by row: candle#3703's kind": Fault(
        not_packed("mask"), read("mask", as_if_packed)
    ),
    "a bias that is a view is read as if it lay row by row: TransformerEngine#1195's kind": Fault(
        not_packed("bias"), read("bias", as_if_packed)
    ),
    "strides lose their sign: structure": Fault(
        When(lambda call: min(strides_of(call.key)) < 0),
        read("key", lambda call, key: gathered(key, [abs(stride) for stride in strides_of(key)])),
    ),
    "the offset of a head is one stride divided by another: attorch#14": Fault(
        When(lambda call: 0 < strides_of(call.query)[1] < strides_of(call.query)[2] and call.query_heads > 1) & BATCH,
        read("query", lambda call, query: np.broadcast_to(query[:, :1], query.shape)),
    ),
    "a stride of 0 over entries or heads is taken for that of a copy where one key is left over: pytorch#191937": Fault(
        When(lambda call: 0 in strides_of(call.key)[:2] and call.keys % 32 == 1), read("key", as_if_packed)
    ),
    "offsets into keys have 16 bits: SageAttention#386's kind": Fault(
        beyond("key", 16), read("key", with_offsets_of(16))
    ),
    "offsets into keys that are a view have 16 bits: SageAttention#386's kind": Fault(
        beyond("key", 16) & not_packed("key"), read("key", with_offsets_of(16))
    ),
    "offsets into a bias have 16 bits: structure": Fault(beyond("bias", 16), read("bias", with_offsets_of(16))),
    "offsets into a mask have 16 bits: structure": Fault(beyond("mask", 16), read("mask", with_offsets_of(16))),
    "offsets into the output's gradient have 16 bits: NATTEN#347's kind": Fault(
        beyond("grad_output", 16), read("grad_output", with_offsets_of(16)), "attention_gradients"
    ),
    "the output's gradient is read with the strides of a copy: dkernel#1's kind": Fault(
        not_packed("grad_output"), read("grad_output", as_if_packed), "attention_gradients"
    ),
    "the value's gradient is wrong for cuts of one projection: flash-attention#2541": Fault(
        not_packed("query") & at_least(width=64),
        alone("grad_value", read("query", as_if_packed)),
        "attention_gradients",
    ),
    "vectors are loaded from the boundary of 64 bytes before: structure": Fault(
        When(lambda call: call.query.ctypes.data % 64 > 0 and call.query.ctypes.data % 16 > 0) & at_least(width=16),
        read("query", lambda call, query: np.roll(query, 1, -1)),
    ),
}
PAGES: Mapping[str, Fault] = {
    name: replace(fault, operation="paged_attention")
    for name, fault in {
        "a page number has 16 bits: ATOM#702": Fault(
            When(lambda call: call.block_table.max() >= 1 << 16),
            read("block_table", lambda call, table: table % (1 << 16)),
        ),
        "a page number has 8 bits: ATOM#702's kind": Fault(
            When(lambda call: call.block_table.max() >= 1 << 8),
            read("block_table", lambda call, table: table % (1 << 8)),
        ),
        "the stride of pages is that of a page: vllm#47493": Fault(
            not_packed("key_pages"), read("key_pages", as_if_packed)
        ),
        "the stride of pages of values is that of a page: kvcached#399": Fault(
            not_packed("value_pages"), read("value_pages", as_if_packed)
        ),
        "pages are read by offsets of 16 bits: vllm-xpu-kernels#445's kind": Fault(
            beyond("key_pages", 16), read("key_pages", with_offsets_of(16))
        ),
        "several queries of an entry stand at the end of the longest one: rocm-libraries#10999": Fault(
            given("is_causal") & SEVERAL & BATCH & at_least(keys=64),
            lambda call: _page_by_page(call, lambda length: int(call.key_lengths.max()) - length),
        ),
        "sinks are dropped where several queries meet pages beyond a tile: vllm#52148": Fault(
            given("sinks") & SEVERAL & at_least(keys=65), lost("sinks")
        ),
        "the window of pages is cut to whole pages: structure": Fault(
            WINDOW_LEFT & at_least(keys=65),
            read(
                "window",
                lambda call, window: (window[0] // call.key_pages.shape[1] * call.key_pages.shape[1], window[1]),
            ),
        ),
        "a softcap is unknown where groups meet pages beyond a tile: sgl-kernel-xpu#491": Fault(
            given("softcap") & GROUPS & at_least(keys=65), lost("softcap")
        ),
        "one query in groups reads pages of the first entry beyond 1,024 keys: mlx#4431's kind": Fault(
            GROUPS & BATCH & DECODING, read("block_table", lambda call, table: np.broadcast_to(table[:1], table.shape))
        ),
    }.items()
}


def _page_by_page(call: Call, more: Callable[[int], int]) -> Stages:
    """Attend entry by entry, whose queries stand so many keys later than they do."""
    parts = []
    for number, length in enumerate(map(int, call.key_lengths)):
        own = {name: getattr(call, name)[number : number + 1] for name in ("query", "block_table", "key_lengths")}
        parts.append(call.again(**own, is_causal=None if more(length) > 0 else True)["output"])
    return {"output": np.concatenate(parts)}


SEQUENCES: Mapping[str, Fault] = {
    name: replace(fault, operation="packed_attention")
    for name, fault in {
        "the diagonal is that of the longest sequences: rocm-libraries#10999": Fault(
            given("is_causal") & BATCH & at_least(queries=33) & When(lambda call: len({*_differences(call)}) > 1),
            lambda call: _sequence_by_sequence(call, _aligned_as_the_longest),
        ),
        "the second boundary alone is heeded: HunyuanVideo#310": Fault(
            at_least(batch=3, queries=33), lambda call: _with_boundaries(call, [0, 1, call.batch])
        ),
        "a window is dropped for queries of their own sequence: tvm#18630": Fault(
            given("window") & BATCH & at_least(queries=33), lost("window")
        ),
        "a window is dropped in groups behind boundaries: sglang#30050's kind": Fault(
            given("window") & BATCH & GROUPS, lost("window")
        ),
        "sinks of a head are those of a sequence: openvino#32731's kind": Fault(
            given("sinks") & BATCH & at_least(keys=65), read("sinks", lambda call, sinks: np.roll(sinks, 1))
        ),
        "offsets into all tokens have 16 bits: state-spaces/mamba#1015's kind": Fault(
            beyond("key", 16), read("key", with_offsets_of(16))
        ),
        "lengths that are used count for the first sequence alone: structure": Fault(
            given("key_lengths") & BATCH & at_least(keys=65),
            read(
                "key_lengths",
                lambda call, lengths: np.where(np.arange(len(lengths)) > 0, np.diff(call.cu_seqlens_k), lengths),
            ),
        ),
        "gradients of packed sequences are dense behind a window: MSLK#263's kind": Fault(
            given("window") & at_least(queries=33), alone("grad_key", lost("window"))
        ),
    }.items()
}
SEQUENCES = {
    name: replace(fault, operation="packed_attention_gradients") if name.startswith("gradients") else fault
    for name, fault in SEQUENCES.items()
}


def _differences(call: Call) -> list[int]:
    return [
        int(keys - queries)
        for queries, keys in zip(np.diff(call.cu_seqlens_q), np.diff(call.cu_seqlens_k), strict=True)
    ]


def _with_boundaries(call: Call, kept: Sequence[int]) -> Stages:
    changed = {name: getattr(call, name)[list(kept)] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return call.again(**changed, key_lengths=None)


def _sequence_by_sequence(call: Call, change: Callable[[Call, int], Mapping[str, Any]]) -> Stages:
    """Attend within each sequence by a call of its own that is changed."""
    parts = []
    for number in range(call.batch):
        queries, keys = (slice(*map(int, each[number : number + 2])) for each in (call.cu_seqlens_q, call.cu_seqlens_k))
        own: dict[str, Any] = {
            "query": call.query[:, :, queries],
            "key": call.key[:, :, keys],
            "value": call.value[:, :, keys],
        }
        own |= {
            "cu_seqlens_q": np.array([0, own["query"].shape[2]]),
            "cu_seqlens_k": np.array([0, own["key"].shape[2]]),
        }
        own |= {} if call.key_lengths is None else {"key_lengths": call.key_lengths[number : number + 1]}
        parts.append(call.again(**own, **change(call, number))["output"])
    return {"output": np.concatenate(parts, axis=-2)}


def _aligned_as_the_longest(call: Call, number: int) -> Mapping[str, Any]:
    """Move the diagonal from the end of a sequence to where it is for the longest queries and the longest keys."""
    baked = int(np.diff(call.cu_seqlens_k).max() - np.diff(call.cu_seqlens_q).max())
    return {"is_causal": None, "window": ((call.window or (None, None))[0], baked - _differences(call)[number])}


CODES: Mapping[str, Fault] = {
    name: replace(fault, operation="quantized_attention")
    for name, fault in {
        "scales of keys are those of the first tile of 64: flashinfer#5272's kind": Fault(
            at_least(keys=65), read("key_scale", lambda call, scale: _of_tile(scale, 64))
        ),
        "scales of values are those of the first tile of 32: flashinfer#5272's kind": Fault(
            at_least(keys=33), read("value_scale", lambda call, scale: _of_tile(scale, 32))
        ),
        "scales have no batch term beyond a tile of keys: rocm-libraries#10474": Fault(
            BATCH & at_least(keys=65), of_entry_0("key_scale", "value_scale")
        ),
        "scales are read by query head in groups: sgl-kernel-xpu#252's kind": Fault(
            GROUPS & at_least(key_heads=2, keys=65), read("value_scale", lambda call, array: np.roll(array, 1, 1))
        ),
        "the first scale of each tile of 16 counts for all of it beyond one tile: vllm#50084's kind": Fault(
            at_least(keys=17), read("key_scale", lambda call, scale: _first_of_tiles(scale, 16))
        ),
        "codes are read without their sinks: kekzl/imp#1345": Fault(given("sinks") & at_least(keys=65), lost("sinks")),
        "codes behind 128 keys are never summed: Camelid#714": Fault(
            at_least(keys=129), hidden(lambda call: call.column < 128)
        ),
        "a window is unknown to codes in groups: sglang#30050's kind": Fault(
            given("window") & GROUPS & at_least(keys=65), lost("window")
        ),
    }.items()
}


def _of_tile(scale: Array, tile: int) -> Array:
    """Take the scales of the first tile of keys for those of all, where each key has its own."""
    return scale if scale.shape[-1] == 1 else np.take(scale, np.arange(scale.shape[-1]) % tile, axis=-1)


def _first_of_tiles(scale: Array, tile: int) -> Array:
    return scale if scale.shape[-1] == 1 else np.take(scale, np.arange(scale.shape[-1]) // tile * tile, axis=-1)


def _kept(*names: str, shapes: bool = True) -> Wrong:
    """Keep inputs and options of the first call with these shapes and kinds of options."""

    def wrong(call: Call) -> Stages:
        own = call.problem
        key = (
            names,
            own.operation,
            frozenset(own.options),
            tuple((name, each.shape) for name, each in own.inputs.items() if shapes or name not in names),
        )
        kept = call.memory.setdefault(key, {name: getattr(call, name) for name in names})
        return call.again(**kept)

    return wrong


STATE: Mapping[str, Fault] = {
    "a program is kept without its scale: b12x#52": Fault(given("scale"), _kept("scale")),
    "a program is kept without the edges of its window: TileOps#392's closures": Fault(
        given("window"), _kept("window")
    ),
    "a program is kept without its softcap: structure": Fault(given("softcap"), _kept("softcap")),
    "a program is kept with the mask that it was made with: SageAttention#392's kind": Fault(
        given("mask"), _kept("mask")
    ),
    "a program is kept without the batch axis of its mask: structure": Fault(
        given("mask"), lambda call: _strided_as_before(call, "mask")
    ),
    "a program is kept without the batch axis of its bias: structure": Fault(
        given("bias"), lambda call: _strided_as_before(call, "bias")
    ),
    "a captured graph keeps its lengths: SageAttention#392's kind": Fault(given("key_lengths"), _kept("key_lengths")),
    "a captured graph keeps its offsets: structure": Fault(given("query_offsets"), _kept("query_offsets")),
    "sinks are laid out once for each number of heads: structure": Fault(given("sinks"), _kept("sinks")),
    "a program is kept without causality: structure": Fault(
        When(lambda call: call.queries > 1), lambda call: _as_causal_as_before(call)
    ),
}


def _strided_as_before(call: Call, name: str) -> Stages:
    """Keep whether entries have a mask or bias of their own, by all shapes but that axis."""
    array = getattr(call, name)
    key = name, call.query.shape, call.key.shape, array.shape[1:], frozenset(call.problem.options)
    if call.memory.setdefault(key, len(array)) == len(array) or array.ndim < 4:
        return call.again()
    return call.again(**{name: np.broadcast_to(array[:1], array.shape)} if len(array) > 1 else {})


def _as_causal_as_before(call: Call) -> Stages:
    shapes = tuple((name, each.shape) for name, each in call.problem.inputs.items())
    others = frozenset(call.problem.options) - {"is_causal"}
    return call.again(is_causal=call.memory.setdefault((shapes, others), call.is_causal))


OTHERS: Mapping[str, Fault] = {
    "the rotated part is left out for one query beyond a tile of latent vectors: vllm#27491's kind": Fault(
        given("query_rotary") & ONE_QUERY & at_least(keys=65), lost("query_rotary", "key_rotary"), "latent_attention"
    ),
    "latent vectors behind a tile of 64 are those of the first entry: aiter#4076's kind": Fault(
        BATCH & at_least(keys=65),
        read("latent", lambda call, latent: np.where(call.column[:, None] < 64, latent, latent[:1])),
        "latent_attention",
    ),
    "a window is unknown to latent attention beyond a tile: structure": Fault(
        given("window") & at_least(keys=65), lost("window"), "latent_attention"
    ),
    "indices of the first group are read for all beyond a tile of keys: FlagGems#2184's kind": Fault(
        GROUPS & at_least(keys=65),
        read("key_indices", lambda call, indices: np.broadcast_to(indices[:, :1], indices.shape)),
        "sparse_attention",
    ),
    "an index of -1 reads the first key for one query to more than a tile: structure": Fault(
        ONE_QUERY & at_least(keys=65),
        read("key_indices", lambda call, indices: np.where(indices < 0, 0, indices)),
        "sparse_attention",
    ),
    "a window is unknown to chosen keys beyond a tile: structure": Fault(
        given("window") & at_least(keys=65), lost("window"), "sparse_attention"
    ),
    "parts behind the eighth are not merged: flash-attention's kBlockM of splits": Fault(
        When(lambda call: call.outputs.shape[0] > 8),
        lambda call: call.again(outputs=call.outputs[:8], log_sum_exps=call.log_sum_exps[:8]),
        "merge_states",
    ),
    "the number of splits is kept as more than one: recsys-examples#379": Fault(
        When(lambda call: call.outputs.shape[0] > 2),
        lambda call: call.again(outputs=call.outputs[:2], log_sum_exps=call.log_sum_exps[:2]),
        "merge_states",
    ),
    "weights of the norm of keys are read by query head over all heads: vllm-metal#659's kind": Fault(
        given("key_norm_weight") & GROUPS & at_least(width=64), lost("key_norm_weight"), "normalized_attention"
    ),
    "normalised keys are those of the first entry beyond a tile of groups: structure": Fault(
        GROUPS & BATCH & at_least(keys=65), of_entry_0("key"), "normalized_attention"
    ),
    "a projection of shared heads in a batch is cut at whole tiles of 64 keys: structure": Fault(
        GROUPS & BATCH & at_least(keys=65),
        hidden(lambda call: call.column < call.keys // 64 * 64),
        "multi_head_attention",
    ),
    "biases of projections are lost beside a cache of more than a tile: structure": Fault(
        given("query_bias") & at_least(past=32), lost("query_bias"), "multi_head_attention"
    ),
}
FAULTS_OF_OPERATIONS: Mapping[str, Fault] = {**VIEWS, **PAGES, **SEQUENCES, **CODES, **STATE, **OTHERS}
