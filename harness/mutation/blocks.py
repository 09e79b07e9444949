"""Faults of blocks: what is left over, what is counted twice, and what the next block forgets."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attncheck.backends.numpy_backend import _dot, _row_maximum, _row_sum
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import (
    logits_read_as,
    maximum_read_as,
    outputs_read_as,
    scores_read_as,
    values_read_as,
)
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, mutant
from attncheck.mutation.online import NEVER_HELD, Online
from attncheck.mutation.variant import Steps


def _without_keys(first_dropped: Callable[[int], int]) -> Steps:
    """Never look at the keys from this one on."""

    def visible(logits: Array) -> Array:
        keys = logits.shape[-1]
        return np.where(np.arange(keys) < first_dropped(keys), logits, -np.inf)

    return logits_read_as(visible)


@mutant("blocks", _without_keys, at="weights", defect="a vectorised loop without its tail: SageAttention#376's kind")
def last_key_dropped_unless_multiple_of_4(keys: int) -> int:
    return keys if keys % 4 == 0 or keys == 1 else keys - 1


@mutant("blocks", _without_keys, at="weights", defect="a tile of 16 without its tail")
def last_key_dropped_unless_multiple_of_16(keys: int) -> int:
    return keys if keys % 16 == 0 or keys == 1 else keys - 1


@mutant("blocks", _without_keys, at="weights", defect="only whole tiles of 32 keys: FlagGems#898")
def tail_dropped_after_blocks_of_32(keys: int) -> int:
    return keys - keys % 32 if keys > 32 else keys


@mutant("blocks", _without_keys, at="weights", defect="the loop over blocks runs once: pytorch#139462's kind")
def only_the_first_16_keys(keys: int) -> int:
    return 16


@mutant("blocks", "_softmax_with_sinks._row_sum", at="weights", defect="the last tile overlaps the one before it")
def tail_counted_twice_in_the_sum(exponentials: Array) -> Array:
    keys = exponentials.shape[-1]
    tail = exponentials[..., keys - keys % 16 :] if keys > 16 else exponentials[..., :0]
    return np.asarray(_row_sum(exponentials) + _row_sum(tail))


@mutant("blocks", maximum_read_as, at="weights", defect="the maximum is not updated: overflow in later blocks")
def maximum_of_the_first_16_keys(logits: Array) -> Array:
    return _row_maximum(logits[..., :16])


def _online(online: Online) -> Steps:
    return online.steps


mutant(
    "blocks",
    _online,
    at="log_sum_exp",
    defect="tile maximum and running maximum mixed: gcnasm#21",
    hidden=NEVER_HELD,
    name="sum_not_rescaled_in_the_second_block",
)(Online(16, rescales_sum=lambda block: block != 1))
mutant(
    "blocks",
    _online,
    at="context",
    defect="one rescale of the accumulator missed: gcnasm#21",
    hidden=NEVER_HELD,
    name="output_not_rescaled_in_the_second_block",
)(Online(16, rescales_output=lambda block: block != 1))
mutant(
    "blocks",
    _online,
    at="context",
    defect="no rescale of the accumulator at all",
    hidden=NEVER_HELD,
    name="output_never_rescaled",
)(Online(16, rescales_output=lambda block: False))
mutant(
    "blocks",
    _online,
    at="context",
    defect="the accumulator lives in the output's type: torch's backward",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
    hidden=NEVER_HELD,
    name="output_kept_in_bfloat16_between_blocks",
)(Online(16, store=arithmetic.bfloat16))


@mutant("blocks", scores_read_as, at="scores", defect="qk_scale *= log2e inside the loop over keys: FlagGems#424")
def scale_compounds_over_blocks(scores: Array) -> Array:
    block = np.arange(scores.shape[-1]) // 16
    return np.asarray(scores * (math.log2(math.e) ** block).astype(scores.dtype))


@mutant("blocks", "dot_scores._dot", at="raw_scores", defect="features in chunks of 8 without their tail")
def width_beyond_a_multiple_of_8_dropped(query: Array, key: Array) -> Array:
    width = query.shape[-1]
    whole = width - width % 8 if width > 8 else width
    return _dot(query[..., :whole], key[..., :whole])


@mutant("blocks", outputs_read_as, at="context", defect="the last tile of queries is not written: fla#892")
def query_rows_beyond_a_multiple_of_16_zero(output: Array) -> Array:
    queries = output.shape[-2]
    if queries > 16:
        output[..., queries - queries % 16 :, :] = 0
    return output


@mutant("blocks", values_read_as, at="context", defect="reads the row before: pytorch#191937")
def last_value_stale_where_lk_mod_32_is_1(value: Array) -> Array:
    keys = value.shape[-2]
    if keys > 1 and keys % 32 == 1:
        return np.concatenate([value[..., :-1, :], value[..., -2:-1, :]], axis=-2)
    return value
