"""Faults of sizes, and of float32 attention whose products round their factors, as tensor cores do.

Widths have a path of their own, there are many heads or batch entries; tiles of 16, 64 and 128 have edges and tails,
and are skipped by causality and windows. A factor is rounded to nearest (oneDNN, TPUs, cuBLAS) or cut off, as a unit
does that reads the leading bits of what it is handed (triton#4574). Tensor cores cut partial sums off, too: Fasi,
Higham, Mikaitis and Pranesh 2021. Beside them are weights made as e^(s - L) from a log_sum_exp that was stored before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _dot, _repeat_heads, _row_maximum, _row_sum, softmax
from attncheck.mutation import forms, kernel
from attncheck.mutation.kernel import Array, Store
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, KERNELS, WIDE, Call, Steps, Variant, control, mutant

Three = tuple[Array, Array, Array]
WIDTHS = (32, 64, 80, 96, 128, 192, 256)

_sized = partial(mutant, "sizes", dtypes=KERNELS, at="raw_scores")


def _zero_at(width: int) -> Steps:
    """Return zeros for one width."""

    def changed(query: Array, key: Array, value: Array) -> Three:
        return query, key, np.zeros_like(value) if query.shape[-1] == width else value

    return forms.inputs_changed(changed)


for _width in WIDTHS:
    _sized(_zero_at, f"output_zero_at_width_{_width}",
        f"a kernel that returns zeros is called for width {_width}: KernelBench#165's kind", _width,
        at="context", diagnosis="gradients-of-query-and-key-zero")  # fmt: skip


def _scored(change: Callable[[Array], Array]) -> Steps:
    """Score by queries and keys that are changed in the same way."""
    return {"dot_scores._dot": lambda query, key: _dot(change(query), change(key))}


@_sized(
    forms.outputs_read_as,
    at="context",
    defect="structure: the last block of columns is stored with the first one's data",
)
def columns_behind_whole_blocks_of_64_repeated(output: Array) -> Array:
    """Write what is left behind whole blocks of 64 columns from the first block again."""
    rest = output.shape[-1] % 64
    if output.shape[-1] > 64 and rest:
        output[..., -rest:] = output[..., :rest]
    return output


@_sized(
    forms.inputs_changed,
    at="context",
    defect="a kernel for D = Dv is handed D = 192 and Dv = 128: pytorch#176767's kind",
)
def value_columns_lost_where_widths_of_blocks_differ(query: Array, key: Array, value: Array) -> Three:
    """Where both widths are whole blocks and differ, stop at the smaller one."""
    width, value_width = query.shape[-1], value.shape[-1]
    if width == value_width or width % 64 or value_width % 64:
        return query, key, value
    smaller = min(width, value_width)
    return query, key, np.where(np.arange(value_width) < smaller - 32, value, 0)


def _in_groups_of(size: int, index: Callable[[Array, int, int], Array]) -> Steps:
    """Use another head of keys and values, ``index(head, kv_heads, group)``, in groups of this size alone."""

    def repeat(key: Array, value: Array, heads: int) -> tuple[Array, Array]:
        kv_heads, group = key.shape[1], heads // key.shape[1]
        if group != size or kv_heads == 1:
            return _repeat_heads(key, value, heads)
        chosen = index(np.arange(heads), kv_heads, group)
        return key[:, chosen], value[:, chosen]

    return {"_repeat_heads": repeat}


_tiled = partial(mutant, "tiles", dtypes=KERNELS, at="masked")
_TWO, _THREE = (64, 128), (16, 64, 128)


def _at_each(
    tiles: tuple[int, ...], name: str, defect: str, form: Callable[[int], Steps], *, at: str, diagnosis: Any = ()
) -> None:
    """Register a fault at each size of tiles."""
    for tile in tiles:
        _tiled(form, name.format(tile), defect, tile, at=at, diagnosis=diagnosis)


def _kept(keeps: Callable[[Array, int], Array]) -> Steps:
    """Look only at the keys for which ``keeps(key, keys)``."""

    def change(logits: Array) -> Array:
        keys = logits.shape[-1]
        return np.where(keeps(np.arange(keys), keys), logits, -np.inf)

    return forms.logits_read_as(change)


_at_each(_TWO, "keys_behind_tiles_of_{}_dropped", "only whole tiles of keys are read: FlagGems#898",
    lambda tile: _kept(lambda key, keys: (key < keys - keys % tile) | (keys < tile)),
    at="weights", diagnosis="last-key-dropped")  # fmt: skip
_at_each(_THREE, "last_key_of_a_full_tile_of_{}_dropped", "structure: j < n - 1 where the last tile needs no mask",
    lambda tile: _kept(lambda key, keys: (key < keys - 1) | (keys % tile != 0)),
    at="weights", diagnosis="last-key-dropped")  # fmt: skip


def _padding_counted(tile: int) -> Steps:
    """Let the keys with which the last tile is filled up take part, with scores and values of 0."""

    def normalise(logits: Array) -> Stages:
        keys = logits.shape[-1]
        missing = -keys % tile if keys > tile else 0
        padding = np.zeros((*logits.shape[:-1], missing), logits.dtype)
        stages = softmax(np.concatenate([logits, padding], axis=-1))
        return stages | {"weights": stages["weights"][..., :keys]}

    return forms.normalised(normalise)


_at_each(_THREE, "padding_of_the_last_tile_of_{}_counted",
    "keys that fill up the last tile are not masked: tt-metal#41215, SageAttention#376",
    _padding_counted, at="weights")  # fmt: skip


def _overlapping(tile: int) -> Steps:
    """Move the last tile back until it is full: its first keys are read a second time."""

    def change(logits: Array) -> Array:
        keys = logits.shape[-1]
        key, rest = np.arange(keys), keys % tile
        twice = (key >= keys - tile) & (key < keys - rest) & (rest > 0) & (keys > tile)
        return np.asarray(logits + np.where(twice, math.log(2), 0).astype(logits.dtype))

    return forms.logits_read_as(change)


_at_each(_TWO, "last_tile_of_{}_read_twice", "structure: the last tile is moved back until it is full",
    _overlapping, at="weights")  # fmt: skip


def _rows(output: Array) -> Array:
    """Return the number of each query, (Lq, 1)."""
    return np.arange(output.shape[-2])[:, np.newaxis]


_at_each(_TWO, "last_tile_of_{}_queries_zero", "the last tile of queries is not written: fla#892's kind",
    lambda tile: forms.outputs_read_as(lambda output: np.where(
        _rows(output) < max(len(_rows(output)) // tile, 1) * tile, output, 0)), at="context")  # fmt: skip
_at_each(_THREE, "last_row_of_each_tile_of_{}_repeated", "structure: a store at the edge of a tile is off by one row",
    lambda tile: forms.outputs_read_as(lambda output: np.where(_rows(output) % tile == tile - 1,
        np.roll(output, 1, axis=-2), output)), at="context")  # fmt: skip


def _causal(change: Callable[[Array, Array, Array], Array]) -> Steps:
    """Change what causality allows, by the positions of query and key."""
    return forms.causal_pattern(
        lambda queries, keys: change(
            forms.causal_keys(queries, keys), np.arange(queries)[:, np.newaxis], np.arange(keys)
        )
    )


_at_each(_THREE, "causal_loop_ends_before_the_diagonal_tile_of_{}",
    "structure: the loop over tiles of keys ends one early",
    lambda tile: _causal(lambda allowed, query, key: allowed & ~((query // tile == key // tile) & (query >= tile))),
    at="masked")  # fmt: skip
_at_each(_TWO, "causal_diagonal_tile_of_{}_open",
    "the diagonal tile is taken for a full one beyond the first: gcnasm#21's kind",
    lambda tile: _causal(lambda allowed, query, key: allowed | ((query // tile == key // tile) & (query >= tile))),
    at="masked")  # fmt: skip


@_tiled(forms.window_pattern, at="masked", defect="structure: the first tile of a window is rounded up instead of down")
def first_partial_tile_of_a_window_skipped(scores: Array, masks: forms.Masks) -> Array:
    """Begin at the first tile of 16 keys that lies wholly inside of the window of a tile's first query."""
    within, left = forms.keys_within(scores, masks["window"]), masks["window"][0]
    if left is None:
        return within
    queries, keys = scores.shape[-2:]
    begin = np.maximum(np.arange(queries) // 16 * 16 - left, 0)
    return np.asarray(within & (np.arange(keys) >= (np.ceil(begin / 16) * 16)[:, np.newaxis]))


@_tiled(
    forms.window_pattern,
    at="masked",
    defect="structure: the right side of a window does not lengthen the loop over tiles of 64",
)
def window_ends_with_the_tile_of_its_query(scores: Array, masks: forms.Masks) -> Array:
    """End at the tile of 64 keys in which a tile of queries begins, whatever the right side is."""
    within, right = forms.keys_within(scores, masks["window"]), masks["window"][1]
    if right is None:
        return within
    queries, keys = scores.shape[-2:]
    end = (np.arange(queries) // 64 + 1) * 64
    return np.asarray(within & (np.arange(keys) < end[:, np.newaxis]))


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# Read whole lines of 16 numbers: what is behind the last feature is the next row's.
_sized(_scored, "width_padded_with_the_next_row",
    "a line of 16 numbers is read where the width is no multiple: SageAttention#376's kind",
    lambda array: np.concatenate([array, np.roll(array, -1, axis=-2)[..., : -array.shape[-1] % 16]], axis=-1))
_sized(_scored, "features_behind_whole_chunks_of_64_dropped",
    "80 and 96 are computed as 64: a loop over chunks of the width without its tail",
    lambda array: array[..., : array.shape[-1] - array.shape[-1] % 64] if array.shape[-1] > 64 else array)
_sized(forms.outputs_read_as, "value_columns_beyond_128_zero",
    "structure: one block of 128 columns is written, pytorch#176767's kind",
    lambda output: np.where(np.arange(output.shape[-1]) < 128, output, 0), at="context")
_sized("_repeat_heads", "keys_of_heads_beyond_32_wrap",
    "structure: five bits for the head, head h reads keys of h % 32",
    lambda key, value, heads: tuple(each[:, np.arange(heads) % 32] for each in _repeat_heads(key, value, heads)))
_sized(forms.inputs_changed, "keys_of_batch_entries_beyond_16_wrap",
    "structure: the batch stride is right for 16 entries, then it starts again",
    lambda query, key, value: (query, *(each[np.arange(len(query)) % 16] for each in (key, value))))
_sized(forms.outputs_read_as, "last_entry_of_a_large_odd_batch_zero",
    "structure: two batch entries for each block, the last without a partner is not written",
    lambda output: np.concatenate([output[:-1], np.zeros_like(output[-1:])]) if len(output) > 8 and len(output) % 2
        else output,
    at="context")
_tiled(forms.outputs_read_as, "first_row_behind_a_tile_of_128_reads_the_first_query",
    "structure: the offset of the next tile is added after its first row",
    lambda output: np.where((_rows(output) > 0) & (_rows(output) % 128 == 0), output[..., :1, :], output), at="context")
_tiled("attention._weighted_sum", "queries_beyond_the_number_of_keys_zero",
    "the grid is sized by keys: pytorch#139462's kind",
    lambda weights, value: np.where(_rows(weights) < value.shape[-2], weights @ value, 0), at="context")
_sized(_scored, "features_beyond_128_dropped", "the loop over chunks of the width runs once: pytorch#139462's kind",
    lambda array: array[..., :128])
_sized("dot_scores._dot", "halves_of_the_keys_width_256_swapped",
    "structure: two tiles of 128 columns are loaded in the wrong order",
    lambda query, key: _dot(query, np.roll(key, key.shape[-1] // 2, axis=-1) if key.shape[-1] == 256 else key))
_sized("_scale_of", "scale_of_the_padded_width",
    "structure: 80, 96 and 192 are padded to a power of two, which then gives the scale",
    lambda query, scale: float((1 << (query.shape[-1] - 1).bit_length() if query.shape[-1] > 64
        else query.shape[-1]) ** (-0.5)) if scale is None else scale,
    at="scores", diagnosis="scale-fitted")
# Number batch entries and heads together, modulo 64.
_sized(forms.inputs_changed, "queries_beyond_64_batch_heads_wrap",
    "structure: the number of batch entry and head is taken modulo 64",
    lambda query, key, value: (query.reshape(-1,
        *query.shape[2:])[np.arange(query.shape[0] * query.shape[1]) % 64].reshape(query.shape), key, value))
_sized(partial(_in_groups_of, 8), "groups_of_eight_taken_for_four",
    "head h // 4 where groups have eight: HipKittens#22's kind",
    lambda head, kv_heads, group: np.asarray(head // 4 % kv_heads))
_sized(partial(_in_groups_of, 8), "groups_of_eight_tiled",
    "h % Hkv on the path for eight heads alone: onnx#7274's kind",
    lambda head, kv_heads, group: np.asarray(head % kv_heads))
_sized(partial(_in_groups_of, 4), "groups_of_four_shifted",
    "the last head of each group of four belongs to the next one: FreeToken#177's kind",
    lambda head, kv_heads, group: np.asarray((head + 1) // group % kv_heads))
_tiled(_causal, "causal_loop_by_one_tile_of_64_for_128_queries",
    "structure: tiles of 128 queries and 64 keys, of which the second on the diagonal is skipped",
    lambda allowed, query, key: np.asarray(allowed & (key < query // 128 * 128 + 64)))
# Mask from the top left, but end the loop over tiles of 16 keys as if the last query stood at the last key.
_tiled(forms.causal_pattern, "causal_loop_bounded_from_the_other_corner",
    "masked from the top left, bounded from the bottom right: cutlass#2336's kind",
    lambda queries, keys: np.asarray(forms.causal_keys(queries, keys) & (np.arange(keys) < np.ceil(((np.arange(queries)[
        :,
        np.newaxis] // 16 + 1) * 16 + keys - queries) / 16) * 16)))
# fmt: on


_SINGLE = ("float32",)
_SINGLE_BITS = 24
_ELEMENTS_AT_A_TIME = 1 << 15
"""Numbers that are added up at a time: a quarter of a megabyte stays near the processor."""


def rounded_product(store: Store, product: forms.Product = np.matmul) -> forms.Product:
    """Multiply matrices of rounded elements."""
    return lambda left, right: np.asarray(product(store(left), store(right)))


def in_two_parts(store: Store, product: forms.Product = np.matmul) -> forms.Product:
    """Multiply matrices of elements that are sums of two rounded numbers, without the product of both lesser parts."""

    def run(left: Array, right: Array) -> Array:
        high_left, high_right = store(left), store(right)
        low_left, low_right = (store(_rest(x, high)) for x, high in ((left, high_left), (right, high_right)))
        lesser = product(low_left, high_right) + product(high_left, low_right)
        return np.asarray(lesser + product(high_left, high_right))

    return run


def _rest(array: Array, part: Array) -> Array:
    return np.where(np.isfinite(array), array - part, 0).astype(array.dtype)


def block_product(terms: int) -> forms.Product:
    """Multiply float32 matrices as a tensor core does: so many exact products and a running sum at a time.

    They are aligned to the largest of them, cut off below its 24th bit and added; the sum is cut off to 24 bits.
    """

    def run(left: Array, right: Array) -> Array:
        rows = max(1, _ELEMENTS_AT_A_TIME // max(1, right.size // max(1, right.shape[-2]) * (terms + 1)))
        if rows < left.shape[-2]:
            starts = range(0, left.shape[-2], rows)
            return np.concatenate([run(left[..., start : start + rows, :], right) for start in starts], axis=-2)
        shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
        total, wide = np.zeros(shape), (left.astype(np.float64), right.astype(np.float64))
        for start in range(0, left.shape[-1], terms):
            columns = range(start, min(start + terms, left.shape[-1]))
            parts = np.empty((1 + len(columns), *shape))
            parts[0] = total
            for number, column in enumerate(columns, 1):
                np.multiply(wide[0][..., :, column, None], wide[1][..., None, column, :], out=parts[number])
            total = _cut_sum(parts)
        return np.asarray(total.astype(left.dtype))

    return run


def _cut_sum(parts: Array) -> Array:
    """Add up along the first axis; what is handed over is written over."""
    last_bit = np.ldexp(1.0, np.frexp(np.abs(parts).max(axis=0))[1] - _SINGLE_BITS)
    np.divide(parts, last_bit, out=parts)
    np.trunc(parts, out=parts)
    np.multiply(parts, last_bit, out=parts)
    return kernel.to_bits(np.asarray(parts.sum(axis=0)), _SINGLE_BITS, truncate=True)


def steps_by(product: forms.Product) -> Steps:
    """Use another product of matrices wherever there is one."""

    def additive_scores(
        query: Array, key: Array, query_weight: Array, key_weight: Array, score_vector: Array, *, score_bias: Any = None
    ) -> Stages:
        hidden = product(query, query_weight)[..., :, np.newaxis, :] + product(key, key_weight)[..., np.newaxis, :, :]
        shifted = np.tanh(hidden if score_bias is None else hidden + score_bias)
        return {"scores": product(shifted, score_vector[:, np.newaxis])[..., 0]}

    return {**forms.products_by(product), "additive_scores": additive_scores}


def variant_by(product: forms.Product) -> Variant:
    """Return attention by another product of matrices."""
    return Variant(steps_by(product))


def _fused_by(product: forms.Product, block: int) -> Steps:
    """Also take the softmax in blocks of keys; go back from log_sum_exp and the output, by products again."""

    def backward(call: Call) -> Steps:
        # Sum g o over the columns, as an einsum that becomes a product of matrices.
        rows = product(call.grad_output[..., np.newaxis, :], call.stages["output"][..., :, np.newaxis])
        return {
            "attention": forms.stages_remembered(call, forms.weights_again(call.logits, call.log_sum_exp)),
            "_row_sum": lambda terms: np.asarray(rows[..., 0]),
        }

    return {**steps_by(product), **forms.Online(block, product=product).steps, **forms.in_gradients(backward)}


_TF32, _BFLOAT16 = kernel.tf32, kernel.bfloat16
_CUT_TF32, _CUT_BFLOAT16 = kernel.truncated_tf32, kernel.truncated_bfloat16
_BY_FOUR, _BY_EIGHT = block_product(4), block_product(8)

# fmt: off
for _name, _why, _steps, _rounding_model in (
    ("tf32_products", "factors rounded to TF32, sums in float32", steps_by(rounded_product(_TF32)), "tf32_products"),
    ("tf32_products_cut_off", "a unit that reads ten bits of the fraction, and cuts sums of four products off",
        steps_by(rounded_product(_CUT_TF32, _BY_FOUR)), "tf32_products"),
    ("tf32_products_in_blocks_of_keys",
        "a fused kernel with factors cut off to TF32, sums of eight products cut off",
        _fused_by(rounded_product(_CUT_TF32, _BY_EIGHT), 64), "tf32_products"),
    ("bfloat16_products", "factors rounded to bfloat16, sums in float32",
        steps_by(rounded_product(_BFLOAT16)), "bf16_products"),
    ("bfloat16_products_cut_off", "factors cut off to bfloat16, sums of eight products cut off",
        steps_by(rounded_product(_CUT_BFLOAT16, _BY_EIGHT)), "bf16_products"),
    ("bfloat16_products_in_blocks_of_keys", "a fused kernel with factors rounded to bfloat16",
        _fused_by(rounded_product(_BFLOAT16), 16), "bf16_products"),
    ("bfloat16_products_in_three_passes",
        "each factor is the sum of two of bfloat16; the product of both lesser parts is left out",
        steps_by(in_two_parts(_BFLOAT16)), "bf16x3_products"),
    ("bfloat16_products_in_three_passes_cut_off", "the same with factors and sums cut off",
        _fused_by(in_two_parts(_CUT_BFLOAT16, _BY_FOUR), 16), "bf16x3_products"),
):
    control(None, _name, _why, _steps, dtypes=_SINGLE, classes={"float32": _rounding_model},
        hidden=forms.NEVER_HELD if "attention" in _steps else frozenset())  # the softmax runs over blocks
# fmt: on


def _stored(store: Store) -> forms.Product:
    return lambda left, right: kernel.sequential_matmul(left, right, store=store)


def _weights_alone(product: forms.Product) -> Steps:
    """Average the values by another product, and take all others in TF32."""
    return {**steps_by(rounded_product(_TF32)), "attention._weighted_sum": product}


def _backward_alone(product: forms.Product) -> Steps:
    """Go back by another product, and forward in TF32."""
    back = forms.products_by(product)
    names = ("_dot", "_weighted_sum", "_sum_over_queries")
    return {**steps_by(rounded_product(_TF32)), **{f"attention_gradients.{name}": back[name] for name in names}}


# Rows, laid out by hand: a product that is coarser than the class that it claims, and what it does instead.
# fmt: off
for _claimed, _name, _defect, _form, _product in (
    ("tf32_products", "bfloat16_products_for_tf32", "one pass of bfloat16 where TF32 is asked for",
        steps_by, rounded_product(_BFLOAT16)),
    ("tf32_products", "bfloat16_weights_for_tf32", "P V alone is taken in bfloat16",
        _weights_alone, rounded_product(_BFLOAT16)),
    ("tf32_products", "tf32_backward_sums_in_bfloat16", "running sums are kept in bfloat16 in the backward pass alone",
        _backward_alone, rounded_product(_TF32, _stored(_BFLOAT16))),
    ("tf32_products", "tf32_sums_in_bfloat16", "running sums are kept in bfloat16",
        steps_by, rounded_product(_TF32, _stored(_BFLOAT16))),
    ("tf32_products", "float16_products_for_tf32",
        "TF32's bits with float16's range: above 65504 is infinity, small numbers lose bits",
        steps_by, rounded_product(kernel.float16)),
    ("bf16_products", "bfloat16_sums_in_bfloat16", "running sums are kept in bfloat16, as its factors are",
        steps_by, rounded_product(_BFLOAT16, _stored(_BFLOAT16))),
    ("bf16_products", "float16_products_for_bfloat16", "more bits than bfloat16 has, and less range",
        steps_by, rounded_product(kernel.float16)),
    ("bf16x3_products", "one_pass_of_bfloat16_for_three", "the lesser parts are forgotten",
        steps_by, rounded_product(_BFLOAT16)),
    ("bf16x3_products", "two_passes_of_bfloat16_for_three", "the lesser part of one factor is forgotten",
        steps_by, lambda left, right: in_two_parts(_BFLOAT16)(_BFLOAT16(left), right)),
    ("bf16x3_products", "tf32_products_for_three_of_bfloat16", "one pass of TF32 for three of bfloat16",
        steps_by, rounded_product(_TF32)),
):
    mutant("products", _form, _name, _defect, _product, at="query", dtypes=_SINGLE, diagnosis=ACCURACY_OF_16_BITS,
        classes={"float32": _claimed})
# fmt: on


_FROM_LOG_SUM_EXP = {"float64": "native_lse", "float32": "native_lse", "float16": "eager_lse"}


def _from_log_sum_exp(store: Store) -> Steps:
    """Take log_sum_exp first and store it, then make the weights of it."""

    def normalise(logits: Array) -> Stages:
        log_sum_exp = store(softmax(logits)["log_sum_exp"])
        return {"weights": forms.weights_again(logits, log_sum_exp[..., np.newaxis]), "log_sum_exp": log_sum_exp}

    return forms.normalised(normalise)


def _of_tiles(keys: int) -> Steps:
    """Take log_sum_exp in one pass over tiles of keys, merging two at a time, and the output in a second pass."""

    def normalise(logits: Array) -> Stages:
        log_sum_exp = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
        for start in range(0, logits.shape[-1], keys):
            tile = softmax(logits[..., start : start + keys])
            log_sum_exp = np.logaddexp(log_sum_exp, tile["log_sum_exp"][..., np.newaxis])
        return {"weights": forms.weights_again(logits, log_sum_exp), "log_sum_exp": log_sum_exp[..., 0]}

    def average(weights: Array, value: Array) -> Array:
        output = np.zeros((*weights.shape[:-1], value.shape[-1]), weights.dtype)
        for start in range(0, weights.shape[-1], keys):
            output = output + weights[..., start : start + keys] @ value[..., start : start + keys, :]
        return output

    return {**forms.normalised(normalise), "attention._weighted_sum": average}


@control(forms.normalised, why="p = exp(log p): log-softmax, then an exponential", classes=_FROM_LOG_SUM_EXP)
def log_softmax_first(logits: Array) -> Stages:
    """Take the logarithms of the weights first."""
    maximum = _row_maximum(logits)
    shifted = logits - np.where(np.isinf(maximum), 0, maximum)
    total = np.where(np.isneginf(maximum), 1, _row_sum(np.exp(shifted)))
    return softmax(logits) | {"weights": np.exp(shifted - np.log(total))}


for _format, _defect, _store in (
    ("bfloat16", "L is rounded to 16 bits on its way to p = exp(s - L)", kernel.bfloat16),
    ("float16", "L is kept in float16 between two passes", kernel.float16),
):
    mutant("denominator", _from_log_sum_exp, f"log_sum_exp_stored_in_{_format}", _defect, _store, at="weights",
        dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS, classes=_FROM_LOG_SUM_EXP)  # fmt: skip


# Rows, laid out by hand: the variant and why it is right, and below what it does instead.
# fmt: off
control(_from_log_sum_exp, "weights_from_log_sum_exp", "L is stored, then p = exp(s - L): nothing is divided",
    kernel.exactly, classes=_FROM_LOG_SUM_EXP)
# the output is added up in the arrays' own format
control(_of_tiles, "weights_from_log_sum_exp_in_tiles_of_16",
    "L in one pass over the keys, merged tile by tile, p = exp(s - L) in a second pass",
    16, dtypes=WIDE, classes=_FROM_LOG_SUM_EXP)
# fmt: on
