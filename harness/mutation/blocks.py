"""Faults of loops over keys and queries, of sizes, and of two options that are right alone and wrong together.

A block leaves something over or forgets it, or parts of the keys are merged wrongly. Tiles of 16, 64 and 128 have edges
and tails, and are skipped by causality and windows. Widths have a path of their own, and there are many heads or batch
entries. Decoding, one query against many keys, and extending, several queries behind a past, have their own loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import Stages
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array, Rounding, leave_unrounded, pad_last_axis, round_to_bfloat16, sum_in_order
from attncheck.mutation.mutant import FAST_PATH_DTYPES, ROUNDING_FIELDS, StepReplacements, register_fault
from attncheck.reading.lowering import count_queries_and_keys
from attncheck.reading.problem import Problem

_register_block_fault = partial(register_fault, "blocks", stage="weights")
_register_decoding_fault = partial(register_fault, "decoding", dtypes=FAST_PATH_DTYPES, stage="masked")
_register_size_fault = partial(register_fault, "sizes", dtypes=FAST_PATH_DTYPES, stage="raw_scores")
_register_tile_fault = partial(register_fault, "tiles", dtypes=FAST_PATH_DTYPES, stage="masked")
_register_pair_fault = partial(register_fault, "pairs", dtypes=FAST_PATH_DTYPES, stage="biased")
PartWeights = Callable[[Array, Array], Array]
"""How much each part counts, by its maximum and its log_sum_exp, the parts along the last axis."""
CutKeys = Callable[[Array], list[slice]]
"""The parts that the keys of logits are cut into."""


def part_weights(maxima: Array, log_sum_exps: Array) -> Array:
    """Return how much parts count by a softmax of their log_sum_exps."""
    weights: Array = backend.softmax(log_sum_exps)["weights"]
    return weights


def attend_in_parts(
    cut: CutKeys, merge: PartWeights = part_weights, *, store: Rounding = leave_unrounded
) -> StepReplacements:
    """Attend to parts of the keys, each with a separate softmax, and merge their averages by ``merge``."""

    def average_parts(logits: Array, weights: Array, value: Array) -> Array:
        chosen = cut(logits)
        if not chosen:
            return np.asarray(weights @ value)
        parts = [backend.softmax(logits[..., span]) for span in chosen]
        maxima = np.concatenate([backend._row_maximum(logits[..., span]) for span in chosen], axis=-1)
        shares = merge(maxima, np.stack([part["log_sum_exp"] for part in parts], axis=-1))
        means = [store(part["weights"]) @ value[..., span, :] for part, span in zip(parts, chosen, strict=True)]
        merged = sum_in_order((mean * shares[..., number : number + 1] for number, mean in enumerate(means)), value)
        return merged.astype(logits.dtype)

    return forms.replace_average(average_parts)


def cut_keys_evenly(parts: int, min_keys: int = 0) -> CutKeys:
    """Cut keys into so many nonempty parts, if there are enough keys."""

    def cut_keys(logits: Array) -> list[slice]:
        keys = logits.shape[-1]
        edges = [keys * part // parts for part in range(parts + 1)]
        return [slice(*edge) for edge in pairwise(edges) if edge[0] < edge[1]] if keys >= min_keys else []

    return cut_keys


def _attend_only_to(keeps: Callable[[Array, int], Array]) -> StepReplacements:
    """Attend only to the keys for which ``keeps(key, keys)`` is true."""
    return forms.change_logits(
        lambda logits: np.where(keeps(np.arange(logits.shape[-1]), logits.shape[-1]), logits, -np.inf)
    )


def _is_decoding(problem: Problem) -> bool:
    """Return whether there is one query and many keys."""
    queries, keys = count_queries_and_keys(problem.inputs)
    return queries == 1 < keys


def _part_weights_with_nan(maxima: Array, log_sum_exps: Array) -> Array:
    """Multiply 0 with minus infinity where a part has no key, but some other one has."""
    is_lost = np.isneginf(log_sum_exps) & ~np.isneginf(backend._row_maximum(log_sum_exps))
    return np.where(is_lost, np.nan, part_weights(maxima, log_sum_exps))


def _change_score_operands(change: Callable[[Array], Array]) -> StepReplacements:
    """Score by queries and keys that are changed in the same way."""
    return {"dot_scores._dot": lambda query, key: backend._dot(change(query), change(key))}


def _replace_group_heads(group_size: int, head_index: Callable[[Array, int, int], Array]) -> StepReplacements:
    """Use another head of keys and values, ``head_index(head, kv_heads, group)``, only in groups of this size."""

    def repeat_heads(key: Array, value: Array, heads: int) -> tuple[Array, Array]:
        kv_heads, group = key.shape[1], heads // key.shape[1]
        if group != group_size or kv_heads == 1:
            return backend._repeat_heads(key, value, heads)
        chosen = head_index(np.arange(heads), kv_heads, group)
        return key[:, chosen], value[:, chosen]

    return {"_repeat_heads": repeat_heads}


def _register_faults_at_sizes(
    sizes: tuple[int, ...],
    name: str,
    defect: str,
    form: Callable[[int], StepReplacements],
    register: Any = _register_tile_fault,
    diagnosis: tuple[str, ...] = (),
    **fields: Any,
) -> None:
    """Register a fault at each size, of tiles or of the width."""
    for size in sizes:
        names = tuple(pattern.format(size) for pattern in diagnosis)
        register(form, name.format(size), defect.format(size), size, diagnosis=names, **fields)


def _count_padding_keys(tile: int) -> StepReplacements:
    """Count the keys that pad the last tile, with scores and values of 0."""

    def softmax_with_padding(logits: Array) -> Stages:
        keys = logits.shape[-1]
        stages = backend.softmax(pad_last_axis(logits, tile) if keys > tile else logits)
        return stages | {"weights": stages["weights"][..., :keys]}

    return forms.replace_softmax(softmax_with_padding)


def _overlap_last_tile(tile: int) -> StepReplacements:
    """Move the last tile back until it is full: its first keys are read a second time."""

    def logits_with_doubled_keys(logits: Array) -> Array:
        keys = logits.shape[-1]
        key, rest = np.arange(keys), keys % tile
        twice = (key >= keys - tile) & (key < keys - rest) & (rest > 0) & (keys > tile)
        return np.asarray(logits + np.where(twice, math.log(2), 0).astype(logits.dtype))

    return forms.change_logits(logits_with_doubled_keys)


def _query_indices(output: Array) -> Array:
    """Return the number of each query, (Lq, 1)."""
    return np.arange(output.shape[-2])[:, np.newaxis]


def _column_indices(output: Array) -> Array:
    """Return the number of each feature, (Dv,)."""
    return np.arange(output.shape[-1])


def _change_output_by_row(change: Callable[[Array, Array], Array]) -> StepReplacements:
    """Change the average of the values by the number of each query: ``change(row, output)``."""
    return forms.change_outputs(lambda output: change(_query_indices(output), output))


def _change_causal_mask(change: Callable[[Array, Array, Array], Array]) -> StepReplacements:
    """Change the mask of causality by the positions of query and key."""
    return forms.replace_causality(
        lambda queries, keys: change(
            forms.causal_mask(queries, keys), np.arange(queries)[:, np.newaxis], np.arange(keys)
        )
    )


def _limit_window_in_tiles(side: int, is_read: Callable[[Array, Array, int], Array]) -> StepReplacements:
    """Skip keys of a window with this side in a loop over tiles: ``is_read(query, key, edge)``."""

    def window_mask(scores: Array, masks: forms.MaskArguments) -> Array:
        within, edge = forms.window_mask(scores, masks["window"]), masks["window"][side]
        return (
            within
            if edge is None
            else np.asarray(within & is_read(_query_indices(scores), _column_indices(scores), edge))
        )

    return forms.replace_window(window_mask)


_register_split_fault = partial(
    _register_decoding_fault,
    partial(attend_in_parts, cut_keys_evenly(4, min_keys=32)),
    stage="context",
    hidden_stages=forms.UNSTORED_STAGES,
)
_TWO_TILE_SIZES, _THREE_TILE_SIZES = (64, 128), (16, 64, 128)
"""Tile sizes of kernels for which a fault is registered; each costs runs of the catalogue."""


def _has_shared_heads(problem: Problem) -> bool:
    """Return whether query heads share heads of keys and values."""
    inputs = problem.inputs
    return inputs.keys() >= {"query", "key"} and inputs["query"].shape[-3] != inputs["key"].shape[-3]


_READINGS_WITHOUT_OPTION = {
    "causal": ("causality-ignored",),
    "mask": ("mask-ignored", "query-mask-ignored", "causality-ignored"),  # of pages, causality is a mask
    **{name: (f"{name.replace('_', '-')}-ignored",) for name in ("window", "key_lengths", "bias", "softcap")},
}
_FEATURE_CONDITIONS = {name: forms.has_any_of(name) for name in ("softcap", "window", "key_lengths", "bias")}


_FEATURE_CONDITIONS |= {"past": forms.has_any_of("past_key"), "groups": _has_shared_heads}


def _dot_scores_scaled_twice(
    query: Array, key: Array, *, scale: float | None = None, softcap: float | None = None
) -> Stages:
    stages = backend.dot_scores(query, key, scale=scale)
    if softcap is None:
        return stages
    return stages | {"capped": backend._cap(stages["scores"] * backend._scale_of(query, scale), softcap)}


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_register_faults_at_sizes((4, 16), "last_key_dropped_unless_multiple_of_{}",
    "a loop over {} keys at a time without its tail: SageAttention#376's kind",
    lambda tile: _attend_only_to(lambda key, keys: (key < keys - 1) | (keys % tile == 0) | (keys == 1)),
        _register_block_fault,
    diagnosis=("last-key-dropped",))
_register_block_fault("dot_scores._dot", "width_beyond_a_multiple_of_8_dropped",
    "features in chunks of 8 without their tail",
    lambda query, key: backend._dot(*(array[..., : max(query.shape[-1] // 8 * 8, min(query.shape[-1], 8))]
        for array in (query, key))), stage="raw_scores")
_register_block_fault(_attend_only_to, "only_the_first_16_keys",
    "the loop over blocks runs once: pytorch#139462's kind",
    lambda key, keys: key < 16)
_register_block_fault("_softmax_with_sinks._row_sum", "tail_counted_twice_in_the_sum",
    "the last tile overlaps the one before it",
    lambda terms: np.asarray(backend._row_sum(terms) + (backend._row_sum(terms[..., terms.shape[-1] // 16 * 16 :])
        if terms.shape[-1] > 16 else 0)))
_register_block_fault(forms.replace_row_maximum, "maximum_of_the_first_16_keys",
    "the maximum is not updated: overflow in later blocks", lambda logits: backend._row_maximum(logits[..., :16]))
_register_block_fault(None, "sum_not_rescaled_in_the_second_block", "tile maximum and running maximum mixed: gcnasm#21",
    forms.OnlineSoftmax(16, rescales_sum=lambda block: block != 1).steps, stage="log_sum_exp",
    hidden_stages=forms.UNSTORED_STAGES)
_register_block_fault(None, "output_not_rescaled_in_the_second_block",
    "one rescale of the accumulator missed: gcnasm#21",
    forms.OnlineSoftmax(16, rescales_output=lambda block: block != 1).steps, stage="context",
        hidden_stages=forms.UNSTORED_STAGES)
_register_block_fault(None, "output_never_rescaled", "no rescale of the accumulator at all",
    forms.OnlineSoftmax(16, rescales_output=lambda block: False).steps, stage="context",
        hidden_stages=forms.UNSTORED_STAGES)
_register_block_fault(None, "output_kept_in_bfloat16_between_blocks",
    "the accumulator lives in the output's type: torch's backward", forms.OnlineSoftmax(16,
        store=round_to_bfloat16).steps,
    stage="context", **ROUNDING_FIELDS, hidden_stages=forms.UNSTORED_STAGES)
_register_block_fault(forms.change_scores, "scale_compounds_over_blocks",
    "qk_scale *= log2e inside the loop over keys: FlagGems#424",
    lambda scores: np.asarray(scores * (math.log2(math.e) ** (_column_indices(scores) // 16)).astype(scores.dtype)),
    stage="scores")
_register_block_fault(forms.change_values, "last_value_stale_where_lk_mod_32_is_1",
    "reads the row before: pytorch#191937",
    lambda value: value[..., [*range(keys - 1), keys - 2], :] if (keys := value.shape[-2]) > 1 and keys % 32 == 1
        else value, stage="context")
_register_decoding_fault(forms.change_query_key_value, "first_batch_entry_for_all_in_decoding",
    "structure: the batch stride of the cache is left out where there is one query",
    lambda query, *cache: (query, *(cache if query.shape[-2] > 1
        else (np.broadcast_to(array[:1], array.shape) for array in cache))), stage="raw_scores")
# Stack the heads of a group as rows of one query, in the order of the other axis.
_register_decoding_fault(forms.change_query_key_value, "heads_of_groups_stacked_across_in_decoding",
    "the heads of a group become rows of one tile, in the wrong order: pytorch#174861's kind",
    lambda query, key, value: (query, key, value) if query.shape[-2] > 1 or query.shape[1] == key.shape[1]
        else (query[:, np.arange(query.shape[1]).reshape(-1, key.shape[1]).T.reshape(-1)], key, value),
    stage="raw_scores", diagnosis="heads-tiled")
_register_decoding_fault(forms.change_logits, "keys_beyond_128_lost_in_decoding",
    "structure: the number of splits is that of the first tile",
    lambda logits: np.where((_column_indices(logits) < 128) | (logits.shape[-2] > 1), logits, -np.inf), stage="weights")
_register_decoding_fault(forms.replace_attention_steps, "bias_does_not_reach_the_past_of_several_queries",
    "extending adds the bias to the new keys alone: transformers#30437's kind",
    lambda call: forms.replace_bias_addition(lambda scores, bias, masks: np.where(_column_indices(
        scores) < call.past_length, scores,
        scores + bias)) if call.past_length and call.query.shape[-2] > 1 else {}, stage="biased")
_register_split_fault("splits_merged_by_their_maxima", "parts count by their maximum alone: sglang#40903's kind",
    lambda maxima, statistics: part_weights(maxima, maxima))
_register_split_fault("splits_merged_by_their_sums",
    "parts count by sums that belong to different maxima: gcnasm#21's kind",
    lambda maxima, statistics: (sums := np.exp(statistics - maxima)) / sums.sum(-1, keepdims=True))
_register_split_fault("splits_averaged", "structure: the merge forgets how much each part weighs",
    lambda maxima, statistics: np.full_like(statistics, 1 / statistics.shape[-1]))
_register_split_fault("splits_merged_in_the_wrong_base",
    "log_sum_exp in base 2 is merged as one in base e: flashinfer#2113, sglang#35045",
    lambda maxima, statistics: part_weights(maxima, statistics / np.log(2).astype(statistics.dtype)))
_register_split_fault("last_split_lost", "structure: one split fewer is merged than there are",
    lambda maxima, statistics: part_weights(maxima, np.where(_column_indices(statistics) < 3, statistics, -np.inf)))
_register_split_fault("empty_split_gives_nan", "a part of which every key is masked: flashinfer#4051, #1178",
              _part_weights_with_nan)
_register_decoding_fault(partial(attend_in_parts, lambda logits: cut_keys_evenly(7, 32)(logits) if logits.shape[-2] == 1
    else []),
    "splits_of_one_query_merged_by_their_maxima", "the same in decoding alone: vllm#28840's kind",
    lambda maxima, statistics: part_weights(maxima, maxima), stage="context", hidden_stages=forms.UNSTORED_STAGES)
_register_faults_at_sizes((32, 64, 80, 96, 128, 192, 256), "output_zero_at_width_{}",
    "a kernel that returns zeros is called for width {}: KernelBench#165's kind",
    lambda width: forms.change_query_key_value(lambda query, key, value: (query, key,
        np.zeros_like(value) if query.shape[-1] == width else value)),
    _register_size_fault, stage="context", diagnosis=("gradients-of-query-and-key-zero",))
_register_size_fault(forms.change_outputs, "columns_behind_whole_blocks_of_64_repeated",
    "structure: the last block of columns is stored with the first one's data",
    lambda output: np.where(_column_indices(output) < output.shape[-1] // 64 * 64, output,
        np.roll(output, output.shape[-1] // 64 * 64, axis=-1)), stage="context")
_register_size_fault(forms.change_query_key_value, "value_columns_lost_where_widths_of_blocks_differ",
    "a kernel for D = Dv is handed D = 192 and Dv = 128: pytorch#176767's kind",
    lambda query, key, value: (query, key, value if query.shape[-1] == value.shape[-1] or query.shape[-1] % 64
        or value.shape[-1] % 64 else np.where(_column_indices(value) < min(query.shape[-1], value.shape[
            -1]) - 32, value, 0)),
    stage="context", diagnosis="columns-unwritten")
# Read whole lines of 16 numbers: what is behind the last feature is the next row's.
_register_size_fault(_change_score_operands, "width_padded_with_the_next_row",
    "a line of 16 numbers is read where the width is no multiple: SageAttention#376's kind",
    lambda array: np.concatenate([array, np.roll(array, -1, axis=-2)[..., : -array.shape[-1] % 16]], axis=-1))
_register_size_fault(_change_score_operands, "features_behind_whole_chunks_of_64_dropped",
    "80 and 96 are computed as 64: a loop over chunks of the width without its tail",
    lambda array: array[..., : max(array.shape[-1] // 64 * 64, min(array.shape[-1], 64))])
_register_size_fault(forms.change_outputs, "value_columns_beyond_128_zero",
    "structure: one block of 128 columns is written, pytorch#176767's kind",
    lambda output: np.where(_column_indices(output) < 128, output, 0), stage="context", diagnosis="columns-unwritten")
_register_size_fault("_repeat_heads", "keys_of_heads_beyond_32_wrap",
    "structure: five bits for the head, head h reads keys of h % 32",
    lambda key, value, heads: tuple(array[:, np.arange(heads) % 32]
        for array in backend._repeat_heads(key, value, heads)))
_register_size_fault(forms.change_query_key_value, "keys_of_batch_entries_beyond_16_wrap",
    "structure: the batch stride is right for 16 entries, then it starts again",
    lambda query, *cache: (query, *(array[np.arange(len(query)) % 16] for array in cache)))
_register_size_fault(forms.change_outputs, "last_entry_of_a_large_odd_batch_zero",
    "structure: two batch entries for each block, the last without a partner is not written",
    lambda output: np.concatenate([output[:-1], output[-1:] * (len(output) < 9 or len(output) % 2 == 0)]),
        stage="context")
_register_size_fault(_change_score_operands, "features_beyond_128_dropped",
              "the loop over chunks of the width runs once: pytorch#139462's kind",
    lambda array: array[..., :128])
_register_size_fault("dot_scores._dot", "halves_of_the_keys_width_256_swapped",
    "structure: two tiles of 128 columns are loaded in the wrong order",
    lambda query, key: backend._dot(query, np.roll(key, 128, axis=-1) if key.shape[-1] == 256 else key))
_register_size_fault("_scale_of", "scale_of_the_padded_width",
    "structure: 80, 96 and 192 are padded to a power of two, which then gives the scale",
    lambda query, scale: backend._scale_of(query, scale) if scale is not None or query.shape[-1] <= 64
        else float((1 << (query.shape[-1] - 1).bit_length()) ** -0.5), stage="scores", diagnosis="scale-fitted")
# Number batch entries and heads together, modulo 64.
_register_size_fault(forms.change_query_key_value, "queries_beyond_64_batch_heads_wrap",
    "structure: the number of batch entry and head is taken modulo 64",
    lambda query, *cache: (query.reshape(-1, *query.shape[2:])[
        np.arange(query.shape[0] * query.shape[1]) % 64].reshape(query.shape), *cache))
_register_size_fault(partial(_replace_group_heads, 8), "groups_of_eight_taken_for_four",
    "head h // 4 where groups have eight: HipKittens#22's kind",
    lambda head, kv_heads, group: np.asarray(head // 4 % kv_heads))
_register_size_fault(partial(_replace_group_heads, 8), "groups_of_eight_tiled",
    "h % Hkv on the path for eight heads alone: onnx#7274's kind",
    lambda head, kv_heads, group: np.asarray(head % kv_heads))
_register_size_fault(partial(_replace_group_heads, 4), "groups_of_four_shifted",
    "the last head of each group of four belongs to the next one: FreeToken#177's kind",
    lambda head, kv_heads, group: np.asarray((head + 1) // group % kv_heads))
_register_faults_at_sizes((32, *_TWO_TILE_SIZES), "keys_behind_tiles_of_{}_dropped",
                   "only whole tiles of {} keys are read: FlagGems#898",
    lambda tile: _attend_only_to(lambda key, keys: (key < keys - keys % tile) | (keys < tile)),
    stage="weights", diagnosis=("last-key-dropped", "last-part-lost", "keys-fitted"))
_register_faults_at_sizes(_THREE_TILE_SIZES, "last_key_of_a_full_tile_of_{}_dropped",
                   "structure: j < n - 1 where the last tile needs no mask",
    lambda tile: _attend_only_to(lambda key, keys: (key < keys - 1) | (keys % tile != 0)),
    stage="weights", diagnosis=("last-key-dropped", "last-part-lost"))
_register_faults_at_sizes(_THREE_TILE_SIZES, "padding_of_the_last_tile_of_{}_counted",
    "keys that fill up the last tile are not masked: tt-metal#41215, SageAttention#376", _count_padding_keys,
        stage="weights",
    diagnosis=("zero-score-keys-to-tiles-of-{}",))
_register_faults_at_sizes(_TWO_TILE_SIZES, "last_tile_of_{}_read_twice",
    "structure: the last tile is moved back until it is full",
    _overlap_last_tile, stage="weights")
_register_faults_at_sizes(_THREE_TILE_SIZES, "last_tile_of_{}_queries_zero",
    "the last tile of queries is not written: fla#892",
    lambda tile: _change_output_by_row(lambda row, output: np.where(row < max(len(row) // tile, 1) * tile, output, 0)),
    stage="context", diagnosis=("rows-unwritten",))
_register_faults_at_sizes(_THREE_TILE_SIZES, "last_row_of_each_tile_of_{}_repeated",
                   "structure: a store at the edge of a tile is off by one row",
    lambda tile: _change_output_by_row(lambda row, output: np.where(row % tile == tile - 1, np.roll(
        output, 1, -2), output)),
    stage="context")
_register_faults_at_sizes(_THREE_TILE_SIZES, "causal_loop_ends_before_the_diagonal_tile_of_{}",
    "structure: the loop over tiles of keys ends one early",
    lambda tile: _change_causal_mask(lambda allowed, query,
                                   key: allowed & ~((query // tile == key // tile) & (query >= tile))))
_register_faults_at_sizes(_TWO_TILE_SIZES, "causal_diagonal_tile_of_{}_open",
    "the diagonal tile is taken for a full one beyond the first: gcnasm#21's kind",
    lambda tile: _change_causal_mask(lambda allowed, query,
                                   key: allowed | ((query // tile == key // tile) & (query >= tile))))
_register_tile_fault(partial(_limit_window_in_tiles, 0), "first_partial_tile_of_a_window_skipped",
    "structure: the first tile of a window is rounded up instead of down",
    lambda query, key, left: key >= np.ceil(np.maximum(query // 16 * 16 - left, 0) / 16) * 16)
_register_tile_fault(partial(_limit_window_in_tiles, 1), "window_ends_with_the_tile_of_its_query",
    "structure: the right side of a window does not lengthen the loop over tiles of 64",
    lambda query, key, right: key < (query // 64 + 1) * 64)
_register_tile_fault(_change_output_by_row, "first_row_behind_a_tile_of_128_reads_the_first_query",
    "structure: the offset of the next tile is added after its first row",
    lambda row, output: np.where((row > 0) & (row % 128 == 0), output[..., :1, :], output), stage="context")
_register_tile_fault("attention._weighted_sum", "queries_beyond_the_number_of_keys_zero",
    "the grid is sized by keys: pytorch#139462's kind",
    lambda weights, value: np.where(_query_indices(weights) < value.shape[-2], weights @ value, 0), stage="context")
_register_tile_fault(_change_causal_mask, "causal_loop_by_one_tile_of_64_for_128_queries",
    "structure: tiles of 128 queries and 64 keys, of which the second on the diagonal is skipped",
    lambda allowed, query, key: np.asarray(allowed & (key < query // 128 * 128 + 64)))
# Mask from the top left, but end the loop over tiles of 16 keys as if the last query stood at the last key.
_register_tile_fault(_change_causal_mask, "causal_loop_bounded_from_the_other_corner",
    "masked from the top left, bounded from the bottom right: cutlass#2336's kind",
    lambda allowed, query, key: np.asarray(allowed & (key < np.ceil(
        ((query // 16 + 1) * 16 + allowed.shape[1] - len(allowed)) / 16) * 16)))
for _option, _other, _defect in (
    ("causal", "a_softcap", "the path with a cap forgets causality: onnxruntime#28379's kind"),
    ("causal", "groups", "a kernel for groups knows no causality: pytorch#193893's kind"),
    ("causal", "key_lengths", "lengths end causality: onnxruntime#14363's kind"),
    ("window", "groups", "a kernel for groups knows no window: sglang#30050's kind"),
    ("window", "a_bias", "a bias takes a path without windows: jax#32300's kind"),
    ("window", "a_softcap", "a cap takes a path without windows: sglang#30050's kind"),
    ("mask", "groups", "a kernel for groups reads no mask: pytorch#193893's kind"),
    ("mask", "a_softcap", "the mask is lost behind the cap: onnxruntime#28379's kind"),
    ("mask", "a_window", "the window takes the mask's place: transformers#39408's kind"),
    ("key_lengths", "a_softcap", "lengths are lost behind the cap: onnxruntime#28379"),
    ("key_lengths", "groups", "a kernel for groups reads no lengths: jax#23349's kind"),
    ("key_lengths", "a_bias", "a bias takes a path without lengths: jax#23349's kind"),
    ("key_lengths", "a_window", "the window ends behind the padding: jax#23349's kind"),
    ("bias", "groups", "a kernel for groups adds no bias: pytorch#193893's kind"),
    ("bias", "a_window", "a window takes a path without a bias: jax#32300's kind"),
    ("bias", "key_lengths", "lengths take the place of the bias: jax#23349's kind"),
    ("bias", "a_softcap", "a cap takes a path without a bias: vllm#7425's kind"),
    ("bias", "a_past", "a cache takes a path without a bias: transformers#30437's kind"),
    ("softcap", "groups", "a kernel for groups knows no cap: sgl-kernel-xpu#491's kind"),
    ("softcap", "a_window", "a window takes a path without a cap: vllm-metal#666's kind"),
    ("softcap", "key_lengths", "lengths take a path without a cap: onnxruntime#28379's kind"),
    ("softcap", "a_past", "decoding from a cache knows no cap: vllm#7425's kind"),
):
    _where, _diagnosis = _FEATURE_CONDITIONS[_other.removeprefix("a_")], _READINGS_WITHOUT_OPTION[_option]
    _reading = "pairs", _diagnosis[0], _defect, f"{_option}_dropped_with_{_other}", _where
    register_fault(**next(forms.faults_from_readings(_reading, dtypes=FAST_PATH_DTYPES, diagnosis=_diagnosis)))
_register_pair_fault("dot_scores", "scale_applied_twice_with_a_softcap",
    "structure: the scale is part of the cap's argument, and applied once more",
    _dot_scores_scaled_twice, stage="capped", diagnosis="softcap-of-twice-scaled-scores")
for _fault in forms.faults_from_readings(
    ("pairs", "aligned-with-key-lengths", "the window counts from each entry's last key: flash-attention#1778's kind",
        "window_at_the_last_key_of_each_length", forms.has_any_of("window")),
    ("pairs", "aligned-with-key-lengths", "causality counts from each entry's last key: flash-attention#1778's kind",
        "causal_at_the_last_key_of_each_length", forms.has_any_of("is_causal")),
    dtypes=FAST_PATH_DTYPES, diagnosis=("aligned-bottom-right", "aligned-with-key-lengths"),
):
    register_fault(**_fault)
# Read the mask of head h, which all batch entries share, one head further in each of them.
_register_pair_fault(forms.change_mask, "mask_per_head_read_with_a_batch_stride",
    "a shared mask moves on with the batch: graph-transformer-pytorch#2's kind",
    lambda mask, scores: mask if mask.shape[:2] != (1, scores.shape[1]) else np.asarray(mask[0][
        (np.arange(scores.shape[1]) + np.arange(scores.shape[0])[:, np.newaxis]) % scores.shape[1]]), stage="masked")
for _fault in forms.faults_from_readings(
    ("pairs", "bias-by-key-heads", "structure: one pointer for all that belongs to a head of keys"),
    ("pairs", "bias-scaled", "the scale is applied to the sum on the causal path: TransformerEngine#236's kind",
        "bias_scaled_when_causal", forms.has_any_of("is_causal")),
    ("pairs", "bias-one-key-late", "structure: the offset of a window's first key is added to the bias, too",
        "bias_one_key_late_in_a_window", forms.has_any_of("window")),
    ("decoding", "key-lengths-ignored", "positions behind the current one are read: tt-metal#41215",
        "key_lengths_ignored_in_decoding", _is_decoding),
    ("decoding", "bias-ignored", "a path for one query that knows no bias: onnxruntime#29020's kind",
        "bias_ignored_in_decoding", _is_decoding),
    ("decoding", "mask-beside-past", "extending reads all of the cache: transformers#30437's kind",
        "mask_does_not_reach_the_past_of_several_queries",
        lambda problem: count_queries_and_keys(problem.inputs)[0] > 1),
    ("decoding", "mask-ignored", "a path for one query that knows no mask: onnxruntime#29020's kind",
        "mask_ignored_in_decoding", _is_decoding),
    dtypes=FAST_PATH_DTYPES,
):
    register_fault(**_fault)
# fmt: on
