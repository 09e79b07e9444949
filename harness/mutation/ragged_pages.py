"""Faults of attention as serving engines call it: several sequences in one call, over the pages of one cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import Stages
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array, change_call_arguments
from attncheck.mutation.mutant import StepReplacements, register_control, register_equivalent, register_fault

_TILE = 16
"""Queries, or keys, that a kernel takes at a time."""
_SPLIT_KEYS = 8
"""Keys of a sequence that one part of a split computation takes; small, as the keys of cases are few."""

_register_ragged_fault = partial(register_fault, "ragged pages", stage="log_sum_exp")
_change_ragged_call = partial(change_call_arguments, "ragged_paged_attention")
SequenceCall = Callable[[Array, Array, Array, Array, Array, dict[str, Any]], Stages]


def _for_each_sequence(call: SequenceCall) -> StepReplacements:
    """Replace the call for one sequence: of its queries, the pages, its row of the table, its length and options."""
    return {
        "ragged_paged_attention.paged_attention": lambda query, keys, values, table, used, **options: call(
            query, keys, values, table, used, options
        )
    }


def _change_sequence(
    change: Callable[[Array, Array, Array, dict[str, Any]], tuple[Array, Array, dict[str, Any]]],
) -> StepReplacements:
    """Change the row of the table, the length, and the options of each sequence: ``change(query, row, used, ...)``."""

    def changed_call(
        query: Array, keys: Array, values: Array, table: Array, used: Array, options: dict[str, Any]
    ) -> Stages:
        table, used, options = change(query, table, used, options)
        if options.get("bias") is not None:  # the tree mask, of as many keys as are used without the fault
            missing = max(int(used[0]) - options["bias"].shape[-1], 0)
            options["bias"] = np.pad(options["bias"], ((0, 0), (0, 0), (0, 0), (0, missing)))[..., : used[0]]
        return backend.paged_attention(query, keys, values, table, used, **options)

    return _for_each_sequence(changed_call)


def _drop_option(option: str, does_decode: bool) -> Callable[..., tuple[Array, Array, dict[str, Any]]]:
    """Return a change that drops an option for sequences of one query, or for those of several."""

    def change(query: Array, table: Array, used: Array, options: dict[str, Any]) -> tuple[Array, Array, dict[str, Any]]:
        is_concerned = (query.shape[2] == 1) is does_decode
        return table, used, {name: value for name, value in options.items() if name != option or not is_concerned}

    return change


def _attend_to_new_keys(
    query: Array, keys: Array, values: Array, table: Array, used: Array, options: dict[str, Any]
) -> Stages:
    """Attend to as many keys as queries, the last ones: those before them are left out."""
    (row,), (length,), queries = table, used, query.shape[2]
    edges = options.pop("is_causal", False), options.pop("window", None)
    first = max(int(length) - queries, 0) if queries > 1 else 0
    key, value = (backend._join_pages(cache, row)[:, :, first:length] for cache in (keys, values))
    mask = backend._allowed_from_the_end(queries, key.shape[2], *edges)
    bias = None if options.get("bias") is None else options["bias"][..., first:]
    return backend.attention(query, key, value, mask=mask, **{**options, "bias": bias})


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
for _option in ("is_causal", "window", "softcap", "sinks", "scale"):
    if _option != "is_causal":  # one query stands at the last key
        _register_ragged_fault(_change_sequence, f"decoding_without_{_option}",
            f"{_option} is dropped for sequences that decode, which have code of their own: sglang#30050's kind",
            _drop_option(_option, does_decode=True))
    _register_ragged_fault(_change_sequence, f"prefill_without_{_option}",
        f"{_option} is dropped for sequences of several queries, which have code of their own: sglang#30050's kind",
        _drop_option(_option, does_decode=False), diagnosis="causality-ignored" if _option == "is_causal" else ())
_register_ragged_fault(_change_sequence, "decoding_by_the_code_of_prefill",
    "a query alone is taken for a prompt, of which it sees the first key: vllm-ascend#3270",
    lambda query, table, used, options: (table, np.minimum(used, 1) if query.shape[2] == 1 else used, options))
_register_ragged_fault(_for_each_sequence, "chunks_without_what_is_cached",
    "a chunk of a prompt attends to its own keys alone: the cached ones need another call", _attend_to_new_keys)
_register_ragged_fault(_change_sequence, "lengths_before_the_new_keys",
    "context_lens, without the keys of the call, are taken for seq_lens",
    lambda query, table, used, options: (table, np.maximum(used - query.shape[2], 0), options))
_register_ragged_fault(_change_sequence, "new_keys_counted_twice",
    "seq_lens are taken for context_lens, to which the keys of the call are added",
    lambda query, table, used, options: (table, used + query.shape[2], options))
_register_ragged_fault(_change_sequence, "sinks_in_every_split",
    "the sink is added once for each part of the keys: flash-decoding's parts all begin with it",
    lambda query, table, used, options: (table, used, options if options.get("sinks") is None
        else options | {"sinks": options["sinks"] + np.log(np.maximum(-(-used[0] // _SPLIT_KEYS), 1)).astype(
            options["sinks"].dtype)}), diagnosis="sinks-twice")
_register_ragged_fault(_change_ragged_call, "limits_of_decoding_for_all",
    "cu_seqlens_q holds the limits of sequences that decode, one query each: ROCm/ATOM#2037",
    lambda call: {"cu_seqlens_q": np.minimum(np.append(np.arange(len(call["key_lengths"])), call["query"].shape[2]),
        call["query"].shape[2])})
_register_ragged_fault(_change_ragged_call, "tiles_of_queries_belong_to_their_first_sequence",
    "a tile of queries reads the keys of one sequence: a search for the sequence of each tile, not of each query",
    lambda call: {"cu_seqlens_q": np.minimum(-(-call["cu_seqlens_q"] // _TILE) * _TILE, call["query"].shape[2])})
_register_ragged_fault(_change_ragged_call, "limits_cut_to_tiles",
    "sequences begin where a tile of queries does",
    lambda call: {"cu_seqlens_q": np.append(call["cu_seqlens_q"][:-1] // _TILE * _TILE, call["query"].shape[2])})
_register_ragged_fault(_change_ragged_call, "keys_up_to_those_of_the_first_sequence",
    "max_seqlen_k is taken from the first sequence",
    lambda call: {"key_lengths": np.minimum(call["key_lengths"], call["key_lengths"][:1])},
    diagnosis="key-lengths-of-first-batch-entry")
for _name, _defect, _change in (
    ("tree_mask_read_from_the_last_bit",
        "bits of a packed mask are read from the other end of each byte: flashinfer packs little-endian",
        lambda mask: np.unpackbits(np.packbits(mask, axis=1, bitorder="big"), axis=1, bitorder="little")[
            :, : mask.shape[1]].astype(np.bool_)),
    ("tree_mask_of_the_first_tile_of_queries",
        "rows of the mask beyond a tile of queries are those of the first tile",
        lambda mask: mask[np.arange(len(mask)) % 4]),
    ("tree_mask_with_all_that_came_before", "the mask is taken for causality: siblings see one another",
        lambda mask: np.logical_or.accumulate(mask[:, ::-1], axis=1)[:, ::-1]),
    ("tree_mask_without_the_query_itself", "a draft token does not see its own key",
        lambda mask: mask & ~(np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)),
):
    _register_ragged_fault(_change_ragged_call, _name, _defect, partial(lambda change, call: {}
        if call.get("tree_mask") is None else {"tree_mask": change(call["tree_mask"])}, _change),
        diagnosis="tree-mask-bits-in-reverse" if _name.endswith("_bit") else ())
_register_ragged_fault(_change_sequence, "decoding_without_tree_mask",
    "a sequence of one query has no tree: its mask is dropped", _drop_option("bias", does_decode=True))
# fmt: on
for _fault in forms.faults_from_readings(
    (
        *("ragged pages", "query-limits-one-too-late", "a query at a limit belongs to the sequence before it"),
        *("query_limits_one_too_late", forms.is_operation("ragged_paged_attention")),
    ),
    (
        *("ragged pages", "query-limits-one-too-early", "the last query of a sequence belongs to the next one"),
        *("query_limits_one_too_early", forms.is_operation("ragged_paged_attention")),
    ),
    stage="log_sum_exp",
):
    register_fault(**_fault)


@_register_ragged_fault(
    _change_ragged_call, defect="sequences without a query are skipped in the limits alone: flash-attention#2562's kind"
)
def tables_without_empty_sequences(call: Mapping[str, Any]) -> Mapping[str, Any]:
    limits = call["cu_seqlens_q"]
    kept = limits[np.append(True, np.diff(limits) > 0)]
    return {"cu_seqlens_q": np.append(kept, np.full(len(limits) - len(kept), limits[-1]))}


@_register_ragged_fault(_change_ragged_call, defect="a stale row of the table: vllm#47042's kind")
def last_page_of_the_sequence_before(call: Mapping[str, Any]) -> Mapping[str, Any]:
    table, page = call["block_table"].copy(), call["key_pages"].shape[1]
    for sequence, used in enumerate(call["key_lengths"]):
        if sequence and used:
            last = (int(used) - 1) // page
            table[sequence, last] = call["block_table"][sequence - 1, last]
    return {"block_table": np.clip(table, 0, len(call["key_pages"]) - 1)}


@_register_ragged_fault(_change_ragged_call, defect="the page that the newest key begins is not in the table yet")
def page_begun_by_the_last_key_is_page_zero(call: Mapping[str, Any]) -> Mapping[str, Any]:
    table, page = call["block_table"].copy(), call["key_pages"].shape[1]
    for sequence, used in enumerate(call["key_lengths"]):
        if used % page == 1 % page and used:
            table[sequence, (int(used) - 1) // page] = 0
    return {"block_table": table}


@_register_ragged_fault("ragged_paged_attention")
def results_of_decoding_first(**call: Any) -> Stages:
    """the batch is ordered, sequences that decode first, and its results are not put back"""
    stages, limits = backend.ragged_paged_attention(**call), call["cu_seqlens_q"]
    counts = np.diff(limits)
    order = np.argsort(np.repeat(counts > 1, counts), kind="stable")
    return {name: stage.take(order, 2) for name, stage in stages.items()}


@register_equivalent(
    "ragged_paged_attention",
    defect="the longest sequence is computed first, and results are put back",
    proof="what a sequence gives depends on no other sequence",
)
def longest_sequence_first(
    query: Array, key_pages: Array, value_pages: Array, cu_seqlens_q: Array, block_table: Array, key_lengths: Array,
    **options: Any,
) -> Stages:  # fmt: skip
    counts, order = np.diff(cu_seqlens_q), np.argsort(-key_lengths, kind="stable")
    rows = [np.arange(cu_seqlens_q[place], cu_seqlens_q[place + 1]) for place in order]
    ordered = np.concatenate(rows).astype(np.intp)
    limits = np.append(0, np.cumsum(counts[order]))
    query, key_pages, value_pages = backend._numbers_of_codes(query, key_pages, value_pages, options, in_pages=True)
    if options.get("tree_mask") is not None:
        options["tree_mask"] = options["tree_mask"][ordered]
    stages = backend.ragged_paged_attention(
        query[:, :, ordered], key_pages, value_pages, limits, block_table[order], key_lengths[order], **options
    )
    return {name: stage.take(np.argsort(ordered), 2) for name, stage in stages.items()}


@register_control(
    "ragged_paged_attention.paged_attention", why="every query of a sequence is computed by itself, as in decoding"
)
def one_query_at_a_time(
    query: Array, key_pages: Array, value_pages: Array, table: Array, used: Array, **options: Any
) -> Stages:
    queries, is_causal, bias = query.shape[2], options.pop("is_causal", False), options.pop("bias", None)
    left, right = options.pop("window", None) or (None, None)
    right = 0 if is_causal and (right is None or right > 0) else right
    parts = []
    for place in range(queries):
        behind = queries - 1 - place  # the last query stands at the last key
        key, value = (backend._join_pages(cache, table[0])[:, :, : used[0]] for cache in (key_pages, value_pages))
        distance = np.arange(used[0]) - (used[0] - 1 - behind)
        mask = np.ones(used[0], np.bool_)
        mask &= True if left is None else distance >= -left
        mask &= True if right is None else distance <= right
        rows, of_row = query[:, :, place : place + 1], None if bias is None else bias[:, :, place : place + 1]
        parts.append(backend.attention(rows, key, value, mask=mask[None, None, None], bias=of_row, **options))
    if not parts:
        return backend.paged_attention(query, key_pages, value_pages, table, used, **options)
    return {
        "log_sum_exp": np.concatenate([part["log_sum_exp"] for part in parts], -1),
        "output": np.concatenate([part["output"] for part in parts], -2),
    }
