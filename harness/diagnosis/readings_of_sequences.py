"""Readings of calls to sequences, pages and chosen keys, before the call is lowered to attention.

Where sequences begin, how many keys they use, which page holds a key, and which keys an index names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attncheck.diagnosis.readings_of_entries import describe_position_rule
from attncheck.judging.alternatives import (
    Change,
    Reading,
    ReadingForm,
    change_input,
    change_inputs,
    convention_reading,
    leave_out_input,
    reordering_readings,
    set_options,
    when_applicable,
)
from attncheck.reading.lowering import count_key_blocks, name_keys_once, pop_position_mask, query_positions
from attncheck.reading.problem import Problem
from attncheck.spec import OPTIONS

# Sequences and pages.


def _change_key_lengths(change: Callable[[Any, Any], Any]) -> Change:
    """Change key lengths, and clip them to the number of keys that each sequence has in memory."""

    def changed(problem: Problem) -> Problem:
        if "block_table" in problem.inputs:
            table = problem.inputs["block_table"]
            most = np.full(len(table), table.shape[1] * _page_size(problem))
        else:
            most = np.diff(problem.inputs["cu_seqlens_k"])
        return problem.with_inputs(key_lengths=np.clip(change(problem.inputs["key_lengths"], problem), 0, most))

    return changed


def _shift_inner_limits(steps: int, limits: Any) -> Any:
    """Move the limits between sequences; None if there are none, or if they pass one another."""
    moved = np.clip(limits + steps, 0, limits[-1])
    moved[[0, -1]] = limits[[0, -1]]
    return None if len(limits) < 3 or (np.diff(moved) < 0).any() else moved


def _shift_key_limits(steps: int) -> Change:
    def change(queries: Any, keys: Any) -> tuple[Any, Any] | None:
        moved = _shift_inner_limits(steps, keys)
        return None if moved is None else (queries, moved)

    return _change_sequence_limits(change)


def _change_sequence_limits(change: Callable[[Any, Any], tuple[Any, Any] | None]) -> Change:
    """Change the sequence limits of queries and keys."""

    def changed(called: Problem) -> Problem | None:
        limits = change(called.inputs["cu_seqlens_q"], called.inputs["cu_seqlens_k"])
        if limits is None:
            return None
        return called.without_input("key_lengths").with_inputs(cu_seqlens_q=limits[0], cu_seqlens_k=limits[1])

    return changed


def _use_query_limits(queries: Any, keys: Any) -> tuple[Any, Any] | None:
    limits = np.minimum(queries, keys[-1])
    return (queries, limits) if limits[-1] == keys[-1] and not np.array_equal(limits, keys) else None


def _page_size(called: Problem) -> int:
    return int(called.inputs["key_pages"].shape[1])


def _set_pages_in_order(called: Problem) -> Problem:
    table = called.inputs["block_table"]
    in_order = np.arange(table.size, dtype=table.dtype).reshape(table.shape) % len(called.inputs["key_pages"])
    return called.with_inputs(block_table=in_order)


def _reverse_pages(called: Problem) -> Problem:
    table, page = called.inputs["block_table"].copy(), called.inputs["key_pages"].shape[1]
    for row, used in zip(table, called.inputs["key_lengths"], strict=True):
        count = -(-int(used) // page)
        row[:count] = row[:count][::-1]
    return called.with_inputs(block_table=table)


_PAGE_INPUTS = ("key_pages", "value_pages")


def _align_sequences_top_left(called: Problem) -> ReadingForm | None:
    subject = describe_position_rule(called)
    return ReadingForm(called.with_options(alignment="top_left"), {"subject": subject[0]}) if subject else None


def _has_sequences(called: Problem) -> bool:
    return not called.inputs.keys().isdisjoint({"cu_seqlens_k", "block_table"})


SEQUENCE_READINGS = tuple(
    replace(reading, change=when_applicable(_has_sequences, reading.change), changes_called_operation=True)
    for reading in (
        convention_reading("aligned-top-left",
                   "{subject} is aligned top-left in each sequence; the case means its last query and key",
                   _align_sequences_top_left),
        convention_reading("key-lengths-one-too-long",
                   "a key length is taken for the last key's index; the case means the number of keys",
                   _change_key_lengths(lambda lengths, called: lengths + 1), "key_lengths"),
        convention_reading("key-lengths-one-too-short",
                           "a key length is taken for one less; the case means the number of keys",
                   _change_key_lengths(lambda lengths, called: lengths - 1), "key_lengths"),
        Reading("key-lengths-of-first-batch-entry", "the key length of the first sequence is taken for all",
                _change_key_lengths(lambda lengths, called: lengths[:1]), "key_lengths"),
        Reading("key-lengths-ignored", "the key lengths are ignored",
                when_applicable(lambda called: "block_table" not in called.inputs, leave_out_input("key_lengths")),
                "key_lengths"),
        *(
            Reading(f"{spec.plain_name.removeprefix('the ')}-ignored", f"{spec.plain_name} is ignored",
                    set_options(**{name: False if spec.type is bool else None}), name)
            for name, spec in OPTIONS.items() if spec.plain_name and spec.requested_stage == "masked"
        ),
        Reading("sequences-ignored", "the limits of sequences are ignored: every query sees the keys of all",
                _change_sequence_limits(
                    lambda queries, keys: (queries[[0, -1]], keys[[0, -1]]) if len(keys) > 2 else None
                ),
                "cu_seqlens_k"),
        Reading("limits-one-too-late", "sequences of keys end one too late: the next sequence's first key is seen",
                _shift_key_limits(1), "cu_seqlens_k"),
        Reading("limits-one-too-early", "sequences of keys end one too early", _shift_key_limits(-1), "cu_seqlens_k"),
        *(
            Reading(f"query-limits-one-too-{word}", f"sequences of queries end one too {word}",
                    when_applicable(lambda called: "cu_seqlens_k" not in called.inputs,
                                    change_input("cu_seqlens_q", partial(_shift_inner_limits, steps))), "cu_seqlens_q")
            for word, steps in (("late", 1), ("early", -1))
        ),
        Reading("tree-mask-ignored", "the tree mask is ignored", leave_out_input("tree_mask"), "tree_mask"),
        Reading("tree-mask-inverted", "True in the tree mask forbids", change_input("tree_mask", np.logical_not),
                "tree_mask"),
        Reading("tree-mask-bits-in-reverse", "the bits of each byte of the packed tree mask are read in reverse",
                change_input("tree_mask", lambda mask: np.unpackbits(
                    np.packbits(mask, 1, "big"), 1, mask.shape[1], "little").astype(np.bool_)), "tree_mask"),
        Reading("limits-of-queries", "the limits of queries are taken for keys",
                _change_sequence_limits(_use_query_limits), "cu_seqlens_k"),
        *reordering_readings("block-table", "the block table", ["block_table"], {"batch entry": -2}, "masked",
                "of-first"),
        Reading("block-table-ignored", "the block table is ignored: pages are read in their order", _set_pages_in_order,
                "block_table"),
        Reading("block-table-transposed", "the block table is read with the strides of its transpose",
                change_input("block_table", lambda table: table.T.reshape(table.shape)), "block_table"),
        Reading("slots-in-reverse", "the slots of each page are read in reverse",
                change_inputs(_PAGE_INPUTS, lambda pages: pages[:, ::-1]), "block_table"),
        Reading("pages-with-heads-first", "heads and slots of a page are confused",
                change_inputs(_PAGE_INPUTS, lambda pages: (
                    pages.reshape(len(pages), pages.shape[2], pages.shape[1], -1).swapaxes(1, 2)
                )),
                "block_table"),
        *(
            Reading(f"key-lengths-{how}-to-pages", f"key lengths are rounded {how} to whole pages",
                    _change_key_lengths(change), "block_table")
            for how, change in (("up", lambda lengths, called: -(-lengths // _page_size(called)) * _page_size(called)),
                                ("down", lambda lengths, called: lengths // _page_size(called) * _page_size(called)))
        ),
        Reading("pages-in-reverse", "the pages of each sequence are read in reverse", _reverse_pages, "block_table"),
    )
)  # fmt: skip


# Indices of keys.


def _change_indices(change: Callable[[Any, int], Any]) -> Callable[[Problem], Problem]:
    """Change the indices, given how many keys or blocks there are; what is none of these, or named again, is -1."""

    def changed(called: Problem) -> Problem:
        blocks = count_key_blocks(called.options, called.inputs["key"].shape[-2])
        return called.with_inputs(key_indices=name_keys_once(change(called.inputs["key_indices"], blocks), blocks))

    return changed


def _set_block_lengths(length: Callable[[int], int]) -> Change:
    """Change how many keys of each block are seen, from its first on: the indices become those of keys."""

    def changed(called: Problem) -> Problem:
        indices, size = called.inputs["key_indices"][..., np.newaxis], called.options["block_size"]
        positions = np.where(indices < 0, -1, indices * size + np.arange(length(size)))
        keys = positions.reshape(*indices.shape[:-2], -1)
        return _change_indices(lambda indices, blocks: indices)(
            called.with_options(block_size=None).with_inputs(key_indices=keys)
        )

    return changed


def _repeat_key_of_minus_one(place: int) -> Change:
    """Count the first key, or the last one, once more for each index of -1, as ``key[indices]`` and a clamp do.

    Rules of positions and lengths are applied to the indices, -1 among them, because copies stand behind all keys.
    Where -1 stands once, and its key nowhere else, this may be the same as another reading.
    """

    def changed(called: Problem) -> Problem | None:
        options, inputs = dict(called.options), dict(called.inputs)
        indices, keys = inputs["key_indices"], inputs["key"].shape[-2]
        if not keys or options.get("block_size"):
            return None
        rows = query_positions(options, inputs, np.arange(inputs["query"].shape[-2]))
        is_seen = pop_position_mask(options, rows, indices)
        if (lengths := inputs.pop("key_lengths", None)) is not None:
            is_seen = is_seen & (indices < lengths.reshape(-1, 1, 1, 1))
        inputs.pop("query_offsets", None)
        for name in ("key", "value"):
            copy = inputs[name].take([place % keys], axis=-2)
            inputs[name] = np.concatenate([inputs[name], copy.repeat(indices.shape[-1], axis=-2)], axis=-2)
        copies = keys + np.arange(indices.shape[-1])
        inputs["key_indices"] = np.where(is_seen, np.where(indices < 0, copies, indices), -1)
        return replace(called, options=options, inputs=inputs)

    return changed


INDEX_READINGS = tuple(
    replace(reading, changes_called_operation=True)
    for reading in (
        *(
            Reading(name, says, _change_indices(change), "key_indices")
            for name, says, change in (
                ("indices-none-as-last", "an index of -1, which names nothing, is read as the last one",
                 lambda indices, blocks: np.where(indices < 0, blocks - 1, indices)),
                ("indices-none-as-first", "an index of -1, which names nothing, is read as 0",
                 lambda indices, blocks: np.maximum(indices, 0)),
                ("indices-none-hides-first", "index 0 is lost where an index of -1 stands beside it",
                 lambda indices, blocks: np.where(indices == 0, indices.min(axis=-1, keepdims=True), indices)),
                ("indices-none-as-end", "indices behind one of -1 are lost",
                 lambda indices, blocks: np.minimum.accumulate(np.where(indices < 0, -1, blocks), axis=-1)
                 .clip(max=indices)),
                ("indices-one-too-high", "indices are one too high", lambda indices, blocks: indices + (indices >= 0)),
                ("indices-one-too-low", "indices are one too low", lambda indices, blocks: indices - 1),
                ("indices-without-last", "the last index of each query is left out",
                 lambda indices, blocks: np.where(np.arange(indices.shape[-1]) < indices.shape[-1] - 1, indices, -1)),
                ("indices-without-first", "the first index of each query is left out",
                 lambda indices, blocks: np.where(np.arange(indices.shape[-1]) > 0, indices, -1)),
                ("indices-as-places", "the place of an index is taken for the index",
                 lambda indices, blocks: np.where(indices < 0, -1, np.arange(indices.shape[-1]))),
                ("indices-as-run", "each query attends to the keys that follow its first index",
                 lambda indices, blocks: np.where(indices[..., :1] < 0, -1,
                                                  indices[..., :1] + np.arange(indices.shape[-1]))),
                ("indices-ignored", "the indices are ignored: every query attends to all keys",
                 lambda indices, blocks: np.arange(blocks).reshape(1, 1, 1, -1)),
            )
        ),
        Reading("indices-minus-one-repeats-last",
                "each index of -1, which means no key, is taken as the last key, so that key is counted again",
                _repeat_key_of_minus_one(-1), "key_indices"),
        Reading("indices-minus-one-repeats-first",
                "each index of -1, which means no key, is taken as key 0, so that key is counted again",
                _repeat_key_of_minus_one(0), "key_indices"),
        *reordering_readings("key-indices", "the choice of keys", ["key_indices"],
                             {"batch entry": -4, "head": -3, "query": -2}, "masked"),
        Reading("block-size-ignored", "the block size is ignored: an index is read as that of a key",
                set_options(block_size=None), "block_size"),
        Reading("block-size-of-64", "blocks have 64 keys, whatever is said", lambda called: _change_indices(
                    lambda indices, blocks: indices)(called.with_options(block_size=64)), "block_size"),
        *(
            Reading(f"block-{name}", says, _set_block_lengths(length), "block_size")
            for name, says, length in (
                ("of-first-key", "of each block, the first key alone is seen", lambda size: 1),
                ("one-key-too-short", "of each block, the last key is not seen", lambda size: size - 1),
                ("one-key-too-long", "with each block, the first key of the next one is seen", lambda size: size + 1),
            )
        ),
        Reading("block-cut-left-out", "the last block is left out where it is cut off",
                lambda called: called.with_inputs(key_indices=np.where(
                    called.inputs["key_indices"] < called.inputs["key"].shape[-2] // called.options["block_size"],
                    called.inputs["key_indices"], -1,
                )), "block_size"),
    )
)  # fmt: skip
