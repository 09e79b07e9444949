"""Faults of sizes: widths that have a path of their own, many heads, many batch entries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.mutants.mutant import KERNELS, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import DotScore, dot, repeat_heads
from attncheck.mutants.variant import Variant

WIDTHS = (32, 64, 80, 96, 128, 192, 256)


def _zero_at(width: int) -> Variant:
    def inputs(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        return query, key, np.zeros_like(value) if query.shape[-1] == width else value

    return Variant(inputs=inputs)


def _zeros_at(width: int) -> Mutant:
    defect = f"a kernel that returns zeros is called for width {width}: KernelBench#165's kind"
    return Mutant(f"output_zero_at_width_{width}", "sizes", defect, _zero_at(width), "context", KERNELS)


def _scored(change: Callable[[Array], Array]) -> Variant:
    """Score by queries and keys that are changed in the same way."""
    return Variant(score=DotScore(dot=lambda query, key: dot(change(query), change(key))))


def _key_scored(change: Callable[[Array], Array]) -> Variant:
    return Variant(score=DotScore(dot=lambda query, key: dot(query, change(key))))


def _averaged(change: Callable[[Array], Array]) -> Variant:
    """Change the output."""
    return Variant(average=lambda logits, weights, value: change(weights @ value))


def _padded_by_the_next_row(array: Array) -> Array:
    """Read whole lines of 16 numbers: what is behind the last feature is the next row's."""
    missing = -array.shape[-1] % 16
    return np.concatenate([array, np.roll(array, -1, axis=-2)[..., :missing]], axis=-1)


def _whole_chunks_of_64(array: Array) -> Array:
    width = array.shape[-1]
    return array[..., : width - width % 64] if width > 64 else array


def _halves_swapped(array: Array) -> Array:
    half = array.shape[-1] // 2
    return np.roll(array, half, axis=-1) if array.shape[-1] == 256 else array


def _scale_of_padded(query: Array, explicit: float | None) -> float:
    width = query.shape[-1]
    padded = 1 << (width - 1).bit_length() if width > 64 else width
    return float(padded**-0.5) if explicit is None else explicit


def _columns_repeated(output: Array) -> Array:
    """Write what is left behind whole blocks of 64 columns from the first block again."""
    rest = output.shape[-1] % 64
    if output.shape[-1] > 64 and rest:
        output[..., -rest:] = output[..., :rest]
    return output


def _beyond_columns(first: int) -> Callable[[Array], Array]:
    def zeroed(output: Array) -> Array:
        output[..., first:] = 0
        return output

    return zeroed


def _unequal_by_64(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Where both widths are whole blocks and differ, stop at the smaller one."""
    width, value_width = query.shape[-1], value.shape[-1]
    if width == value_width or width % 64 or value_width % 64:
        return query, key, value
    smaller = min(width, value_width)
    return query, key, np.where(np.arange(value_width) < smaller - 32, value, 0)


def _key_head(index: Callable[[Array, int, int], Array]) -> Variant:
    """Let heads read keys and values of others; ``index(head, heads, group)`` says whose."""

    def repeat(inputs: Array, heads: int) -> Array:
        repeated = repeat_heads(inputs, heads)
        return repeated[:, index(np.arange(heads), heads, heads // inputs.shape[1])]

    return Variant(repeat_key=repeat, repeat_value=repeat)


def _key_of_group(group_size: int, index: Callable[[Array, int, int], Array]) -> Variant:
    """Use another head of keys and values, ``index(head, kv_heads, group)``, in groups of this size alone."""

    def repeat(inputs: Array, heads: int) -> Array:
        kv_heads, group = inputs.shape[1], heads // inputs.shape[1]
        if group != group_size or kv_heads == 1:
            return repeat_heads(inputs, heads)
        return inputs[:, index(np.arange(heads), kv_heads, group)]

    return Variant(repeat_key=repeat, repeat_value=repeat)


def _programs_wrap(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Number batch entries and heads together, modulo 64."""
    batch, heads = query.shape[:2]
    number = np.arange(batch * heads) % 64
    return query.reshape(-1, *query.shape[2:])[number].reshape(query.shape), key, value


def _batch_wraps(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    entry = np.arange(query.shape[0]) % 16
    return query, key[entry], value[entry]


def _last_of_an_odd_batch(output: Array) -> Array:
    if output.shape[0] > 8 and output.shape[0] % 2:
        output[-1] = 0
    return output


def _sized(name: str, defect: str, backend: Variant, first_wrong_stage: str, *diagnosis: str) -> Mutant:
    return Mutant(name, "sizes", defect, backend, first_wrong_stage, KERNELS, diagnosis)


MUTANTS = (
    *(_zeros_at(width) for width in WIDTHS),
    _sized(
        "width_padded_with_the_next_row",
        "a line of 16 numbers is read where the width is no multiple: SageAttention#376's kind",
        _scored(_padded_by_the_next_row),
        "raw_scores",
    ),
    _sized(
        "features_behind_whole_chunks_of_64_dropped",
        "80 and 96 are computed as 64: a loop over chunks of the width without its tail",
        _scored(_whole_chunks_of_64),
        "raw_scores",
    ),
    _sized(
        "features_beyond_128_dropped",
        "the loop over chunks of the width runs once: pytorch#139462's kind",
        _scored(lambda array: array[..., :128]),
        "raw_scores",
    ),
    _sized(
        "halves_of_the_keys_width_256_swapped",
        "structure: two tiles of 128 columns are loaded in the wrong order",
        _key_scored(_halves_swapped),
        "raw_scores",
    ),
    _sized(
        "scale_of_the_padded_width",
        "structure: 80, 96 and 192 are padded to a power of two, which then gives the scale",
        Variant(scale_of=_scale_of_padded),
        "scores",
        "scale-fitted",
    ),
    _sized(
        "columns_behind_whole_blocks_of_64_repeated",
        "structure: the last block of columns is stored with the first one's data",
        _averaged(_columns_repeated),
        "context",
    ),
    _sized(
        "value_columns_beyond_128_zero",
        "structure: one block of 128 columns is written, pytorch#176767's kind",
        _averaged(_beyond_columns(128)),
        "context",
    ),
    _sized(
        "value_columns_lost_where_widths_of_blocks_differ",
        "a kernel for D = Dv is handed D = 192 and Dv = 128: pytorch#176767's kind",
        Variant(inputs=_unequal_by_64),
        "context",
    ),
    _sized(
        "keys_of_heads_beyond_32_wrap",
        "structure: five bits for the head, head h reads keys of h % 32",
        _key_head(lambda head, heads, group: head % 32),
        "raw_scores",
    ),
    _sized(
        "queries_beyond_64_batch_heads_wrap",
        "structure: the number of batch entry and head is taken modulo 64",
        Variant(inputs=_programs_wrap),
        "raw_scores",
    ),
    _sized(
        "groups_of_eight_taken_for_four",
        "head h // 4 where groups have eight: HipKittens#22's kind",
        _key_of_group(8, lambda head, kv_heads, group: head // 4 % kv_heads),
        "raw_scores",
    ),
    _sized(
        "groups_of_eight_tiled",
        "h % Hkv on the path for eight heads alone: onnx#7274's kind",
        _key_of_group(8, lambda head, kv_heads, group: head % kv_heads),
        "raw_scores",
    ),
    _sized(
        "groups_of_four_shifted",
        "the last head of each group of four belongs to the next one: FreeToken#177's kind",
        _key_of_group(4, lambda head, kv_heads, group: (head + 1) // group % kv_heads),
        "raw_scores",
    ),
    _sized(
        "keys_of_batch_entries_beyond_16_wrap",
        "structure: the batch stride is right for 16 entries, then it starts again",
        Variant(inputs=_batch_wraps),
        "raw_scores",
    ),
    _sized(
        "last_entry_of_a_large_odd_batch_zero",
        "structure: two batch entries for each block, the last without a partner is not written",
        _averaged(_last_of_an_odd_batch),
        "context",
    ),
)
