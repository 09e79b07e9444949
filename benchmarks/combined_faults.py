"""Faults of attention and its gradients where an option meets a size or a shape, by what they are of.

Written from public reports, named with their threads, and from how kernels are built (structure), not from the cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from combinations import (
    BATCH,
    DECODING,
    FEW,
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
    at_least,
    exactly,
    given,
    hidden,
    lost,
    of_entry_0,
    partly,
    read,
    written,
)

_WINDOW_RIGHT = When(lambda call: call.window is not None and bool(call.window[1]))


def _behind(size: int) -> When:
    """Hold for several queries behind a cache, or at offsets, of at least so many keys."""
    return SEVERAL & When(lambda call: call.positions.min() >= size)


def _axis_of(name: str, axis: int) -> Callable[[Call], int]:
    """Return the length of an axis of a mask or a bias, counted from the end; 1 where it has none."""
    return lambda call: getattr(call, name).shape[axis] if getattr(call, name).ndim >= -axis else 1


def _spread(name: str, axis: int) -> When:
    """Hold where one slice of a mask or bias stands for all along an axis."""
    return given(name) & When(lambda call: _axis_of(name, axis)(call) == 1)


def _of_each(name: str, axis: int) -> When:
    """Hold where a mask or bias has a slice of its own for each of several along an axis."""
    return given(name) & When(lambda call: _axis_of(name, axis)(call) > 1)


def _entries(array: Array, numbers: Array) -> Array:
    return np.asarray(array[numbers % len(array)])


def _allowed_left(call: Call, start: Array) -> Array:
    """Let queries see no key in front of a start."""
    return np.asarray(call.column >= start)


def _causal(call: Call, last: Array) -> Array:
    """Let queries see no key behind the last one."""
    return np.asarray(call.column <= last)


def _left(call: Call) -> int:
    return int(call.window[0])


def _by_key_head(call: Call) -> Array:
    return np.arange(call.query_heads) // call.group


def _with_empty_keys(call: Call, count: int) -> Stages:
    """Let so many keys of score and value 0 take part."""
    sinks = np.full(call.query_heads, -np.inf) if call.sinks is None else call.sinks.astype(np.float64)
    return call.again(sinks=np.logaddexp(sinks, math.log(count)).astype(call.query.dtype))


def _lost_rows(rows: Callable[[Call], Array]) -> Wrong:
    """Write no row that is marked."""
    return written(lambda call, output: np.where(rows(call), np.zeros((), output.dtype), output))


def _group_row(call: Call) -> Array:
    """Return the row of each query where the heads of a group lie one below the other, (H, Lq, 1)."""
    return np.asarray(call.head % call.group * call.queries + call.row)


SINKS: Mapping[str, Fault] = {
    "sinks are lost at width 64 before several queries: openvino#36039": Fault(
        given("sinks") & exactly(width=64) & SEVERAL, lost("sinks")
    ),
    "sinks are lost at width 128 before several queries: vllm#52148": Fault(
        given("sinks") & exactly(width=128) & SEVERAL, lost("sinks")
    ),
    "sinks are lost where a chunk of queries meets more than 256 keys: kekzl/imp#992": Fault(
        given("sinks") & SEVERAL & at_least(keys=257), lost("sinks")
    ),
    "sinks are lost in the sum of splits of one query: kekzl/imp#1346": Fault(given("sinks") & DECODING, lost("sinks")),
    "every one of four splits counts the sink: rocm-libraries#12229's kind": Fault(
        given("sinks") & ONE_QUERY & at_least(keys=512), read("sinks", lambda call, sinks: sinks + math.log(4))
    ),
    "the sink counts twice where the first 64 keys are all hidden: rocm-libraries#12229": Fault(
        given("sinks") & at_least(keys=128),
        partly(
            lambda call: (call.right["weights"][..., :64] == 0).all(-1, keepdims=True),
            read("sinks", lambda call, sinks: sinks + math.log(2)),
        ),
    ),
    "the sink is seeded with the scale of the scores beyond a tile of 64 keys: rocm-libraries#12229": Fault(
        given("sinks") & at_least(keys=65, queries=2),
        read("sinks", lambda call, sinks: sinks * (call.width**-0.5 if call.scale is None else call.scale)),
    ),
    "the sink passes through the softcap beyond a tile of 64 keys: rocm-libraries#12229": Fault(
        given("sinks", "softcap") & at_least(keys=65),
        read("sinks", lambda call, sinks: call.softcap * np.tanh(sinks / call.softcap)),
    ),
    "the sink is read by work group, that is by key head and batch entry: openvino#32731": Fault(
        given("sinks") & GROUPS & BATCH & at_least(width=64),
        read("sinks", lambda call, sinks: sinks[_by_key_head(call)]),
    ),
    "sinks are dropped with a window in a batch beyond a tile of 64 keys: sglang#30050": Fault(
        given("sinks", "window") & BATCH & at_least(keys=65), lost("sinks")
    ),
    "sinks are lost where the value's width is another one and wide: cudnn-frontend#421's forward": Fault(
        given("sinks") & at_least(width=64) & When(lambda call: call.width != call.value_width), lost("sinks")
    ),
    "sinks are lost behind a cache of more than 64 keys: kekzl/imp#992's chunks": Fault(
        given("sinks") & _behind(64), lost("sinks")
    ),
    "the gradient of sinks is that of the first batch entry in groups: rocm-libraries#10519": Fault(
        given("sinks") & BATCH & GROUPS & at_least(width=64),
        alone("grad_sinks", of_entry_0("query", "key", "value", "grad_output")),
        "attention_gradients",
    ),
    "gradients forget sinks beyond a tile of 64 keys: nki-samples#106's kind": Fault(
        given("sinks") & at_least(keys=65), alone("grad_key", lost("sinks")), "attention_gradients"
    ),
}
SHARED_HEADS: Mapping[str, Fault] = {
    "one query of several entries in groups reads the first entry's cache beyond 1,024 keys: mlx#4431": Fault(
        GROUPS & BATCH & DECODING, of_entry_0("key", "value", "past_key", "past_value")
    ),
    "a few queries of several entries in groups do so beyond 1,024 keys: mlx#4431": Fault(
        GROUPS & BATCH & FEW & at_least(keys=1024), of_entry_0("key", "value", "past_key", "past_value")
    ),
    "one query in groups takes heads modulo beyond 1,024 keys: pytorch#174861's kind": Fault(
        GROUPS & at_least(key_heads=2) & DECODING,
        read("query", lambda call, query: query[:, np.arange(query.shape[1]).reshape(call.group, -1).T.reshape(-1)]),
    ),
    "a few queries in groups are laid out in tiles of eight: flashinfer#4059": Fault(
        GROUPS & BATCH & FEW & When(lambda call: call.queries % 8 != 0),
        read("query", lambda call, query: _at_rows(query, 8)),
    ),
    "queries of an entry begin one token behind the entry before: flashinfer#3800": Fault(
        BATCH & FEW & at_least(keys=64), read("query", lambda call, query: _at_rows(query, 1))
    ),
    "a block of 16 rows is all that is written of a group: comfy-kitchen#111": Fault(
        GROUPS & FEW & at_least(keys=64) & When(lambda call: call.queries * call.group > 16),
        _lost_rows(lambda call: _group_row(call) >= 16),
    ),
    "rows of a group count as positions behind each other: structure": Fault(
        GROUPS & given("is_causal") & FEW & at_least(keys=64),
        hidden(lambda call: _causal(call, call.positions.min() + _group_row(call) // call.group)),
    ),
    "keys of one shared head have no batch stride at width 64 and more: TransformerEngine#1195's kind": Fault(
        exactly(key_heads=1) & GROUPS & BATCH & at_least(width=64), of_entry_0("key")
    ),
    "values of another width are read by h % Hkv: structure": Fault(
        GROUPS & at_least(key_heads=2, width=64) & When(lambda call: call.width != call.value_width),
        read("value", lambda call, array: np.roll(array, 1, 1)),
    ),
    "the last head of a group of four loses the last split beyond 1,024 keys: structure": Fault(
        at_least(group=4) & DECODING,
        partly(
            lambda call: call.head % call.group == call.group - 1,
            hidden(lambda call: call.column < call.keys // 256 * 256),
        ),
    ),
    "shared heads of a batch are one off at width 128 and several queries: HipKittens#22's kind": Fault(
        at_least(key_heads=2) & GROUPS & BATCH & SEVERAL & exactly(width=128),
        lambda call: call.again(key=np.roll(call.key, 1, 1)),
    ),
    "gradients of shared heads are summed over every Hkv-th head beyond a tile: NSA-triton#27": Fault(
        at_least(key_heads=2, keys=65) & GROUPS & When(lambda call: call.group != call.key_heads),
        lambda call: _summed_by_other_heads(call),
        "attention_gradients",
    ),
    "gradients of shared heads in a batch lose the softcap beyond a tile: TransformerEngine#3391's kind": Fault(
        given("softcap") & GROUPS & BATCH & at_least(keys=65),
        alone("grad_query", lost("softcap")),
        "attention_gradients",
    ),
}


def _at_rows(query: Array, tile: int) -> Array:
    """Read the queries of entry b from row b * tile (or as many) of all rows."""
    batch, _, queries, _ = query.shape
    rows = query.swapaxes(1, 2).reshape(batch * queries, *query.shape[1::2])
    stride = tile if tile == 1 else -(-queries // tile) * tile
    return rows[(np.arange(batch)[:, np.newaxis] * stride + np.arange(queries)) % len(rows)].swapaxes(1, 2)


def _summed_by_other_heads(call: Call) -> Stages:
    spread = {name: np.repeat(getattr(call, name), call.group, axis=1) for name in ("key", "value")}
    stages = dict(call.again(**spread))
    for name in ("grad_key", "grad_value"):
        batch, _, *rest = stages[name].shape
        stages[name] = stages[name].astype(np.float32).reshape(batch, call.group, call.key_heads, *rest).sum(1)
    return call.results(stages)


BIASES: Mapping[str, Fault] = {
    "a bias of all heads is strided as if each head had its own: onnxruntime#28963": Fault(
        _of_each("bias", -4) & _spread("bias", -3) & GROUPS,
        read("bias", lambda call, bias: _entries(bias, np.arange(len(bias)) * call.query_heads)),
    ),
    "a bias of all entries moves on with the batch in groups: onnxruntime#28963's kind": Fault(
        _spread("bias", -4) & _of_each("bias", -3) & GROUPS & BATCH,
        read("bias", lambda call, bias: _moved_with_the_batch(call, bias)),
    ),
    "a bias of each head is read by key head where queries become the group: flash-sparse-attention#190": Fault(
        _of_each("bias", -3) & GROUPS & ONE_QUERY & at_least(keys=64),
        read("bias", lambda call, bias: np.take(bias, _by_key_head(call), axis=-3)),
    ),
    "a bias of one row reaches the first row of each tile of 16: openvino#30758's kind": Fault(
        _spread("bias", -2) & at_least(queries=17), partly(lambda call: call.row % 16 > 0, lost("bias"))
    ),
    "a bias is spread to nothing for one query of several heads: keras-hub#2861": Fault(
        _of_each("bias", -3) & ONE_QUERY & at_least(keys=64), lost("bias")
    ),
    "a bias ends with the first tile of 128 keys in groups: structure": Fault(
        given("bias") & GROUPS & at_least(keys=129),
        read("bias", lambda call, bias: np.where(np.arange(bias.shape[-1]) < 128, bias, 0).astype(bias.dtype)),
    ),
    "rows of a bias are read behind a cache of more than 32 keys: structure": Fault(
        _of_each("bias", -2) & _behind(32), read("bias", lambda call, bias: np.roll(bias, 1, -2))
    ),
    "a bias is counted from the first tile of a window: structure": Fault(
        given("bias") & WINDOW_LEFT & at_least(keys=65), lambda call: _from_the_windows_tile(call)
    ),
    "a bias is left out for entries shorter than the longest: onnxruntime-genai#1639's kind": Fault(
        given("bias", "key_lengths") & BATCH & at_least(keys=64),
        partly(lambda call: (call.key_lengths < call.key_lengths.max())[:, None, None, None], lost("bias")),
    ),
    "a bias is left out where there are sinks beyond a tile: structure": Fault(
        given("bias", "sinks") & at_least(keys=65), lost("bias")
    ),
    "the gradient of a bias that entries share is that of the first one, in groups: jax#30593's kind": Fault(
        _spread("bias", -4) & BATCH & GROUPS,
        alone("grad_bias", read("grad_output", lambda call, grad: grad * (call.entry == 0).astype(grad.dtype))),
        "attention_gradients",
    ),
    "the backward pass adds no bias beyond a tile in groups: MSLK#263's kind": Fault(
        given("bias") & GROUPS & at_least(keys=65), alone("grad_query", lost("bias")), "attention_gradients"
    ),
}


def _moved_with_the_batch(call: Call, array: Array) -> Array:
    heads = (np.arange(call.query_heads) + np.arange(call.batch)[:, np.newaxis]) % array.shape[-3]
    return np.asarray(array.reshape(array.shape[-3:])[heads])


def _from_the_windows_tile(call: Call) -> Stages:
    start = np.maximum(call.positions - _left(call), 0) // 32 * 32
    columns = np.maximum(call.column - start, 0)
    bias = call.full("bias")
    return call.again(bias=np.take_along_axis(bias, np.broadcast_to(columns, bias.shape), axis=-1))


WINDOWS: Mapping[str, Fault] = {
    "a chunk behind a cache sees as far back as its first query: executorch#21857": Fault(
        WINDOW_LEFT & _behind(32),
        lambda call: call.again(window=(_left(call) + call.queries - 1, call.window[1])),
    ),
    "a block of drafts has the window of its last query: flashinfer#4137": Fault(
        WINDOW_LEFT & _behind(64) & FEW,
        hidden(lambda call: _allowed_left(call, call.positions.max(-2, keepdims=True) - _left(call))),
    ),
    "the first tile of a window is rounded up behind a cache of 64: structure": Fault(
        WINDOW_LEFT & _behind(64),
        hidden(lambda call: _allowed_left(call, -(-np.maximum(call.positions - _left(call), 0) // 32) * 32)),
    ),
    "entries of unequal length are cut by one bound of the window: ik_llama.cpp#2171": Fault(
        WINDOW_LEFT & given("query_offsets") & BATCH & at_least(keys=64),
        hidden(lambda call: _allowed_left(call, call.positions.max(0, keepdims=True) - _left(call))),
    ),
    "entries of unequal length have the window of the shortest: ik_llama.cpp#2171's kind": Fault(
        WINDOW_LEFT & given("query_offsets") & BATCH & at_least(keys=64),
        read("query_offsets", lambda call, offsets: np.full_like(offsets, offsets.min())),
    ),
    "a window is counted from the padded end where entries have lengths: structure": Fault(
        WINDOW_LEFT & given("key_lengths") & BATCH & at_least(keys=65),
        partly(
            lambda call: (call.key_lengths < call.keys)[:, None, None, None],
            hidden(lambda call: _allowed_left(call, call.positions + 1 - _left(call))),
        ),
    ),
    "a window (L, 0) without causality sees the future beyond a tile: jax#39576": Fault(
        When(lambda call: call.window is not None and call.window[1] == 0) & at_least(keys=65, queries=2),
        read("window", lambda call, window: (window[0], None)),
    ),
    "a window ends with the tile of 64 of its queries in groups: TileOps#1616": Fault(
        _WINDOW_RIGHT & GROUPS & at_least(keys=65),
        hidden(lambda call: call.column < (call.positions // 64 + 1) * 64),
    ),
    "a mask switches the window off beyond a tile: vllm#47332": Fault(
        given("window", "mask") & at_least(keys=65), lost("window")
    ),
    "the split path of one query knows no window beside sinks: sglang#30050's kind": Fault(
        given("window", "sinks") & DECODING, lost("window")
    ),
    "the split path of one query in groups knows no window: vllm-xpu-kernels#168's kind": Fault(
        given("window") & GROUPS & DECODING, lost("window")
    ),
    "the mask of a ring of as many keys as the window is not turned for several queries: litgpt#2182": Fault(
        WINDOW_LEFT & _behind(32), hidden(lambda call: _allowed_left(call, call.positions.min() + call.row))
    ),
    "the window counts from the first query of a tile of 64 in a batch of groups: structure": Fault(
        WINDOW_LEFT & GROUPS & BATCH & at_least(queries=65),
        hidden(lambda call: _allowed_left(call, call.positions - _left(call) + call.positions % 64 // 63)),
    ),
    "a softcap is forgotten in tiles that a window cuts: vllm-metal#666's kind": Fault(
        given("softcap", "window") & at_least(keys=129), lost("softcap")
    ),
    "the backward pass of a window is dense beyond a tile: MSLK#263": Fault(
        given("window") & at_least(keys=65), alone("grad_key", lost("window")), "attention_gradients"
    ),
    "the backward pass bounds a window by tiles of 32 queries in groups: aiter#3742's kind": Fault(
        WINDOW_LEFT & GROUPS & at_least(keys=33),
        alone(
            "grad_value",
            hidden(lambda call: call.row // 32 <= (call.column // 32 * 32 + _left(call)) // 32),
        ),
        "attention_gradients",
    ),
}
CACHES: Mapping[str, Fault] = {
    "a chunk behind a cache of 128 sees none of the prompt: hyprstream#1521": Fault(
        given("is_causal") & _behind(128), hidden(lambda call: _causal(call, call.row))
    ),
    "rows of a chunk see later tokens of a tile of 32: tt-metal#48899": Fault(
        given("is_causal") & _behind(32),
        hidden(lambda call: _causal(call, call.positions // 32 * 32 + 31), "is_causal"),
    ),
    "the offset of a chunk is cut to whole tiles of 64: structure": Fault(
        given("is_causal") & _behind(64),
        hidden(lambda call: _causal(call, (call.positions - call.row) // 64 * 64 + call.row)),
    ),
    "the first entry's offset counts for all beyond a tile: tt-xla#5817": Fault(
        given("query_offsets") & BATCH & _behind(64),
        read("query_offsets", lambda call, offsets: np.full_like(offsets, offsets[0])),
    ),
    "an offset has seven bits: structure": Fault(
        given("query_offsets") & at_least(keys=129), read("query_offsets", lambda call, offsets: offsets % 128)
    ),
    "the tile of the diagonal is not masked behind a cache in groups: gcnasm#21's kind": Fault(
        given("is_causal") & GROUPS & _behind(64), lost("is_causal")
    ),
    "what is behind whole tiles of 128 of a cache is skipped for several queries: structure": Fault(
        SEVERAL & When(lambda call: call.past > 128 and call.past % 128 > 0),
        hidden(lambda call: (call.column < call.past // 128 * 128) | (call.column >= call.past)),
    ),
    "lengths are ignored behind a cache of more than a tile: jax#23349's kind": Fault(
        given("key_lengths") & SEVERAL & at_least(past=64), lost("key_lengths")
    ),
    "a cache with a softcap in a batch is read by its first entry: structure": Fault(
        given("softcap") & BATCH & at_least(past=64), of_entry_0("past_key")
    ),
    "padded keys of score 0 count beside a softcap: llama.cpp#29034": Fault(
        given("softcap") & SEVERAL & When(lambda call: call.keys > 64 and call.keys % 64 > 0),
        lambda call: _with_empty_keys(call, -call.keys % 64),
    ),
    "a softcap is unknown to splits of one query in groups: sgl-kernel-xpu#491's kind": Fault(
        given("softcap") & GROUPS & DECODING, lost("softcap")
    ),
    "the last partial split is lost in a batch of one query: structure": Fault(
        BATCH & DECODING & When(lambda call: call.keys % 256 > 0),
        hidden(lambda call: call.column < call.keys // 256 * 256),
    ),
    "statistics of splits are those of the first entry: structure": Fault(
        BATCH & DECODING & GROUPS, lambda call: _merged_by_the_first_entry(call)
    ),
    "tables of rotation start at 0 behind a cache of more than a tile: mlx-lm#1805's kind": Fault(
        given("rotary_cos") & _behind(32),
        lambda call: call.again(rotary_cos=np.roll(call.rotary_cos, -1, 0), rotary_sin=np.roll(call.rotary_sin, -1, 0)),
    ),
}


def _merged_by_the_first_entry(call: Call) -> Stages:
    """Average what each entry has of two halves by the first entry's shares."""
    half = call.keys // 2
    halves = [call.column < half, call.column >= half]
    shares = [call.right["weights"][:1, ..., part].sum(-1, keepdims=True) for part in halves]
    parts = [call.hiding(part)["output"] for part in halves]
    output = sum((mean * share for mean, share in zip(parts, shares, strict=True)), np.zeros((), np.float32))
    return call.results({"output": np.asarray(output)})


MASKS: Mapping[str, Fault] = {
    "a mask of one entry is read beyond its end for one query: tt-metal#39910": Fault(
        _spread("mask", -4) & BATCH & ONE_QUERY & at_least(keys=64), partly(lambda call: call.entry > 0, lost("mask"))
    ),
    "a mask of one head is read beyond its end for one query: tt-metal#39910's kind": Fault(
        _spread("mask", -3) & at_least(query_heads=2, keys=64) & ONE_QUERY,
        partly(lambda call: call.head > 0, lost("mask")),
    ),
    "a mask of one row is loaded as a tile of 16 rows: openvino#30758": Fault(
        _spread("mask", -2) & at_least(queries=17), partly(lambda call: call.row % 16 > 0, lost("mask"))
    ),
    "a mask of one row of each entry is the first entry's for many queries: structure": Fault(
        _spread("mask", -2) & _of_each("mask", -4) & at_least(queries=17), of_entry_0("mask")
    ),
    "a mask of each head is read by key head where queries become the group: flash-sparse-attention#190": Fault(
        _of_each("mask", -3) & GROUPS & ONE_QUERY & at_least(keys=64),
        read("mask", lambda call, mask: np.take(mask, _by_key_head(call), axis=-3)),
    ),
    "a mask of heads moves on with the batch for one query: structure": Fault(
        _spread("mask", -4) & _of_each("mask", -3) & BATCH & ONE_QUERY,
        read("mask", lambda call, mask: _moved_with_the_batch(call, mask)),
    ),
    "a second tile of 64 queries reads the mask of the first in groups: structure": Fault(
        _of_each("mask", -2) & GROUPS & at_least(queries=65),
        read("mask", lambda call, mask: np.take(mask, np.arange(mask.shape[-2]) % 64, axis=-2)),
    ),
    "a mask of heads ends with the first tile of 128 keys: structure": Fault(
        _of_each("mask", -3) & at_least(keys=129),
        read("mask", lambda call, mask: mask | (np.arange(mask.shape[-1]) >= 128)),
    ),
    "the mask is laid over new keys alone behind a cache of more than a tile: transformers#30437's kind": Fault(
        given("mask") & SEVERAL & at_least(past=64), read("mask", lambda call, mask: mask | (call.column < call.past))
    ),
    "bits of a mask behind whole words of 32 are lost for several queries: structure": Fault(
        given("mask") & SEVERAL & When(lambda call: call.keys > 64 and call.keys % 32 > 0),
        read("mask", lambda call, mask: mask | (np.arange(mask.shape[-1]) >= mask.shape[-1] // 32 * 32)),
    ),
    "a mask takes the place of lengths in groups beyond a tile: jax#23349's kind": Fault(
        given("mask", "key_lengths") & GROUPS & at_least(keys=65), lost("key_lengths")
    ),
    "a mask of entries is read a tile of columns too wide: onnxruntime-genai#1639": Fault(
        _of_each("mask", -4) & _spread("mask", -2) & at_least(keys=65),
        read("mask", lambda call, mask: _with_row_stride(mask, -(-mask.shape[-1] // 64) * 64)),
    ),
    "gradients know no mask of heads beyond a tile: pytorch#141126's kind": Fault(
        _of_each("mask", -3) & at_least(keys=65), alone("grad_value", lost("mask")), "attention_gradients"
    ),
    "gradients know no causality of groups beyond a tile of 64 queries: flash-attention#2623's kind": Fault(
        given("is_causal") & GROUPS & at_least(queries=65), alone("grad_key", lost("is_causal")), "attention_gradients"
    ),
}


def _with_row_stride(mask: Array, stride: int) -> Array:
    """Read the rows of entries of a mask as if they were so far apart."""
    offsets = np.arange(len(mask))[:, np.newaxis] * stride + np.arange(mask[0].size)
    return np.asarray(np.ascontiguousarray(mask).reshape(-1)[offsets % mask.size].reshape(mask.shape))


FAULTS_OF_ATTENTION: Mapping[str, Fault] = {**SINKS, **SHARED_HEADS, **BIASES, **WINDOWS, **CACHES, **MASKS}
