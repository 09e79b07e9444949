"""The three forms of a problem: the call, the canonical form, and the form without a layout.

The call is what an implementation gets. Restrictions that its signature cannot express, such as a mask of queries, are
folded into the mask. The canonical form is what the oracle evaluates: one mask says which keys a query attends to, the
past is part of the keys, a rotary embedding has a row for each query and key, and no other option is left that changes
these. With projections, the past stays separate, because it is the cache of earlier projections. Merged parts are
scores, one for each part, and separate values for each query.

The form without a layout replaces operations that differ from attention only in how keys and values are stored: packed,
in pages, or in 8 bits. Packed sequences get one mask for all of them. A key that no query may use becomes a masked key
of zeros. The pages of a cache are read into one array of keys for each batch entry, and unused slots become masked keys
of zeros. These steps round nothing, so exact answers and bounds are those of ``attention`` and ``attention_gradients``.

Codes of keys and values are widened, which is exact, and their scales become factors with a separate step
(``attention/caches.py``). Weights of norms of queries and keys get a row for each head, of ones if there are none
(``attention/normalization.py``). Latent vectors are keys and values of one head, from which a step makes those of every
head (``attention/caches.py``).

Indices of keys become a mask, which rounds nothing, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import CODE_FORMATS
from attncheck.reading.shapes import ShapeFault, format_shape
from attncheck.spec import (
    CONVENTIONS,
    DEFAULT_FORMAT,
    FOLDED_INPUTS,
    FORMATS_KNOWN_BY_DTYPE,
    HEADS,
    OPERATIONS,
    OPTIONS,
    QUERY_KEY_VALUE,
    SCALE_PREFIX,
    InputSpec,
    Shape,
)
from attncheck.spec.dtypes import has_nan, largest_number, numpy_dtype, round_to

Array = NDArray[Any]
Rows = NDArray[np.intp]
Inputs = Mapping[str, Array]
Options = Mapping[str, Any]
Factor = Any
"""A number, or one for each head, (H, 1, 1)."""
_OptionsAndInputs = tuple[dict[str, Any], dict[str, Array]]

_OPTIONS_ONLY_IN_FILES = frozenset(name for name, spec in OPTIONS.items() if spec.only_in_files and name != "score")
_INPUT_SPECS: Mapping[str, InputSpec] = {
    **FOLDED_INPUTS,
    **{
        name: spec
        for operation in OPERATIONS.values()
        if not (operation.has_projections or operation.is_lowered)
        for name, spec in operation.inputs.items()
    },
}
_MASK_INPUTS = frozenset(name for name, spec in _INPUT_SPECS.items() if spec.folds_into_input == "mask")
_ROTARY_TABLES = frozenset({"rotary_cos", "rotary_sin"})
_INPUTS_PER_PAGE_SLOT = tuple(
    name for name, spec in OPERATIONS["paged_attention"].inputs.items() if spec.axes[:2] == ("Np", "Lp")
)
_CODE_ENDINGS = ("_scale", "_block_scale", "_zero")
_INPUTS_OF_KEYS = {f"{name}{ending}" for name in ("key", "value") for ending in ("", *_CODE_ENDINGS)}
_PAST_INPUTS = tuple(
    (name, str(spec.folds_into_input))
    for name, spec in _INPUT_SPECS.items()
    if spec.folds_into_input in ("key", "value")
)
"""Inputs that come before another one, and the name of that."""


def call_options_and_inputs(operation: str, options: Options, inputs: Inputs) -> _OptionsAndInputs:
    """Return the options and inputs of the call that an implementation gets."""
    spec = OPERATIONS[operation]
    if spec.is_lowered and "query_mask" not in spec.inputs:  # its signature says all that a case can
        return pack_codes(_options_of_functions(options), dict(inputs))
    if spec.merges_parts:
        return _without_default_lse_base(options), dict(inputs)
    offset, past = query_offset(options, inputs), _count_past_keys(inputs)
    is_told = "query_offsets" in inputs  # so that the function knows where queries stand
    folded = {
        name
        for name, differs in (("is_causal", offset != 0 or past != 0), ("window", offset != past))
        if differs and not is_told
    } | {"query_mask"}
    return _fold_rules_into_mask(operation, options, inputs, folded)  # a convention, empty_rows, is part of the call


def canonical_options_and_inputs(
    operation: str, options: Options, inputs: Inputs, rows: Rows | None
) -> _OptionsAndInputs:
    """Return the options and inputs of the canonical form, of some query rows or of all."""
    spec = OPERATIONS[operation]
    if spec.merges_parts:
        is_canonical = "log_sum_exps" not in inputs
        meant = {name: value for name, value in _without_default_lse_base(options).items() if name not in CONVENTIONS}
        return meant, dict(inputs) if is_canonical else _convert_parts_to_keys(inputs, rows)
    folded = {"window", *_MASK_INPUTS}
    if rows is not None or query_offset(options, inputs) or not folded.isdisjoint({*options, *inputs}):
        folded.add("is_causal")
    kept_options, kept = _fold_rules_into_mask(operation, options, inputs, folded, rows)
    for name in CONVENTIONS:  # what a row without a key gives is not computed from anything
        kept_options.pop(name, None)
    for past, name in _PAST_INPUTS:
        if past in kept and spec.has_projections:
            kept[f"cached_{name}"] = kept.pop(past)  # the new ones are not projected yet
        elif past in kept:
            kept[name] = np.concatenate([kept.pop(past), kept[name]], axis=-2)
    kept = {name: array for name, array in kept.items() if name not in _ROTARY_TABLES}
    return kept_options, kept | select_rotary_table_rows(inputs, rows)


def options_and_inputs_without_layout(operation: str, options: Options, inputs: Inputs) -> _OptionsAndInputs:
    """Return the options and inputs of the operation that another one lowers to."""
    laid_out = dict(options), dict(inputs)
    lay_out = _REMOVE_LAYOUT.get(operation.removesuffix("_gradients"))
    return lay_out(*laid_out) if lay_out else laid_out


def _options_of_functions(options: Options) -> dict[str, Any]:
    """Leave out options of files only, and false options, which a function without that keyword can do."""
    return {name: value for name, value in options.items() if name not in _OPTIONS_ONLY_IN_FILES and value is not False}


def _without_default_lse_base(options: Options) -> dict[str, Any]:
    """Leave out the default base of log_sum_exps, which a function without that keyword can do."""
    return {name: value for name, value in options.items() if (name, value) != ("lse_base", "e")}


def _convert_parts_to_keys(inputs: Inputs, rows: Rows | None) -> dict[str, Array]:
    """Return parts as keys: log_sum_exps as scores, outputs as values.

    The values of an empty part are 0: its outputs do not count, not even NaN.
    """
    kept = {name: array if rows is None else _select_query_rows(name, array, rows) for name, array in inputs.items()}
    log_sum_exps, outputs = kept["log_sum_exps"], kept["outputs"]
    empty = (log_sum_exps == -np.inf)[..., np.newaxis]
    values = np.where(empty, np.zeros((), outputs.dtype), outputs)
    lowered = {"scores": np.moveaxis(log_sum_exps, 0, -1), "row_values": np.moveaxis(values, 0, -2)}
    return {name: np.ascontiguousarray(array) for name, array in lowered.items()}


def select_rotary_table_rows(
    inputs: Inputs, rows: Rows | None = None, of_past: tuple[float, float] = (1, 0)
) -> dict[str, Array]:
    """Return the rows of the rotary tables for each query and each key, counted from the first past key.

    Past keys are rotated already: they get ``of_past``, the cosine and sine of no rotation. Empty without tables.
    """
    if inputs.keys().isdisjoint(_ROTARY_TABLES):
        return {}
    (queries, keys), past = count_queries_and_keys(inputs), _count_past_keys(inputs)
    positions = query_positions({}, inputs, np.arange(queries) if rows is None else rows)[..., 0]
    tables: dict[str, Array] = {}
    for name, table, alone in zip(("cos", "sin"), (inputs["rotary_cos"], inputs["rotary_sin"]), of_past, strict=True):
        tables[f"query_{name}"] = table[positions]
        before = np.full((past, table.shape[-1]), alone, table.dtype)
        tables[f"key_{name}"] = np.concatenate([before, table[past:keys]])
    return tables


def query_offset(options: Options, inputs: Inputs) -> int:
    """Return the position of the first query among all keys, which causality and windows count from.

    Example:
        >>> inputs = {"query": np.ones((1, 1, 2, 4)), "key": np.ones((1, 1, 5, 4))}
        >>> query_offset({"alignment": "bottom_right"}, inputs), query_offset({}, inputs)
        (3, 0)
    """
    match options.get("alignment"):
        case "top_left":
            return 0
        case "bottom_right":
            queries, keys = count_queries_and_keys(inputs)
            return keys - queries
    return _count_past_keys(inputs)


def query_positions(options: Options, inputs: Inputs, rows: Rows) -> Array:
    """Return the positions of query rows among all keys: (Lq, 1), or (B, 1, Lq, 1) with an offset per batch entry."""
    offsets = inputs.get("query_offsets")
    if offsets is None:
        return np.asarray(rows[:, np.newaxis] + query_offset(options, inputs))
    return np.asarray(rows[:, np.newaxis] + offsets.astype(np.intp).reshape(-1, 1, 1, 1))


def _fold_rules_into_mask(
    operation: str, options: Options, inputs: Inputs, names: set[str], rows: Rows | None = None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Turn the options and inputs in ``names`` and the mask into one mask; with ``rows``, only of these query rows."""
    kept_options = _options_of_functions(options)
    if not OPERATIONS[operation].has_projections:
        kept_options = {name: value for name, value in kept_options.items() if name not in HEADS}
    if kept_options.get("mask_fill") is not None:
        # Rounded to the dtype of its neighbours; beyond the dtype's range it is -inf, as without a fill.
        dtype = inputs["query" if "query" in inputs else "scores"].dtype.name
        with np.errstate(over="ignore"):
            fill = float(round_to(np.array(float(kept_options.pop("mask_fill"))), dtype))
        kept_options |= {} if fill == -np.inf else {"mask_fill": fill}
    kept_inputs = {
        name: array if rows is None else _select_query_rows(name, array, rows) for name, array in inputs.items()
    }
    allowed: list[Array] = []
    if names:
        queries = np.arange(count_queries_and_keys(inputs)[0]) if rows is None else rows
        positions, keys = query_positions(options, inputs, queries), np.arange(count_queries_and_keys(inputs)[1])
    if "is_causal" in names and kept_options.pop("is_causal", False):
        allowed.append(keys <= positions)
    if "window" in names and (window := kept_options.pop("window", None)) is not None:
        allowed += make_window_conditions(window, positions, keys)
    if "query_offsets" in names:
        kept_inputs.pop("query_offsets", None)
    if "key_lengths" in names and (lengths := kept_inputs.pop("key_lengths", None)) is not None:
        allowed.append(keys < lengths.reshape(-1, 1, 1, 1))
    if "query_mask" in names and (is_query := kept_inputs.pop("query_mask", None)) is not None:
        allowed.append(is_query[:, np.newaxis, :, np.newaxis])
    if allowed:
        mask: Array = reduce(np.logical_and, [*allowed, *([kept_inputs["mask"]] if "mask" in inputs else [])])
        kept_inputs["mask"] = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return kept_options, kept_inputs


def _select_query_rows(name: str, array: Array, rows: Rows) -> Array:
    """Keep these query rows of an input that has any; one row of a mask or bias stands for all."""
    spec = _INPUT_SPECS.get(name)
    if spec is None or "Lq" not in spec.axes:
        return array
    axis = spec.axes.index("Lq") - len(spec.axes)
    one_for_all = spec.is_broadcastable and (array.ndim < -axis or array.shape[axis] == 1)
    return array if one_for_all else array.take(rows, axis)


def make_window_conditions(window: tuple[int | None, int | None], positions: Array, keys: Array) -> list[Array]:
    """Return the conditions of a window on keys, for queries at these positions."""
    left, right = window
    before = [] if left is None else [keys >= positions - left]
    return before if right is None else [*before, keys <= positions + right]


def _count_past_keys(inputs: Inputs) -> int:
    past = inputs.get("past_key", inputs.get("cached_key"))
    return 0 if past is None else int(past.shape[-2])


def count_queries_and_keys(inputs: Inputs) -> tuple[int, int]:
    """Return how many queries and how many keys there are, the past among them."""
    if "query" not in inputs:
        queries, keys = inputs["scores"].shape[-2:]
        return int(queries), int(keys)
    return int(inputs["query"].shape[-2]), int(inputs["key"].shape[-2]) + _count_past_keys(inputs)


_LARGE_POISON = 1e30


def poison_unused_keys(options: Options, inputs: Inputs, dtype: str) -> dict[str, Array]:
    """Return the inputs with all keys and values that no query may use replaced, as the option ``poison`` says."""
    if not options.get("poison"):
        return dict(inputs)
    is_nan = options["poison"] == "nan"
    poisoned_inputs = dict(inputs)
    if "block_table" in inputs:
        # The slots of pages that have no key which any batch entry uses, (Np, Lp).
        unused: Array = np.ones(inputs["key_pages"].shape[:2], np.bool_)
        page, is_page = unused.shape[1], True
        for pages, used in zip(
            inputs["block_table"].astype(np.int64), inputs["key_lengths"].astype(np.int64), strict=True
        ):
            positions = np.arange(used)
            unused[pages[positions // page], positions % page] = False
        names = [name for name in _INPUTS_PER_PAGE_SLOT if name in inputs and inputs[name].shape[:2] == unused.shape]
    else:
        unused, is_page, names = ~_PackedPositions.from_inputs(inputs).is_used, False, ["key", "value"]
    for name in names:
        poisoned_inputs[name] = inputs[name].copy()
        stored = inputs[name].dtype.name if is_page else dtype
        value = np.nan if is_nan and has_nan(stored) else min(_LARGE_POISON, largest_number(stored))
        if is_page:
            poisoned_inputs[name][unused] = round_to(np.array(value), stored)
        else:
            poisoned_inputs[name][..., unused, :] = value
    return poisoned_inputs


def check_layout_inputs(operation: str, options: Options, shapes: Mapping[str, Shape], counts: Inputs) -> None:
    """Check the ``counts`` of packed sequences, paged caches and chosen keys, and the widths of norms.

    Raises ``ShapeFault`` for the first that does not fit.
    """
    if OPERATIONS[operation].lowers_to is None:
        return
    if "block_table" in counts:
        pages, page = shapes["key_pages"][:2]
        table = counts["block_table"].reshape(shapes["block_table"])
        for entry, used in enumerate(counts["key_lengths"]):
            named = table[entry, : -(-int(used) // page)]
            if missing := [number for number in named.tolist() if not 0 <= number < pages]:
                problem = f"entry {entry} uses page {missing[0]:g}, which is not there: there are {pages}, from 0 on"
                raise ShapeFault("block_table", problem)
    check_code_shapes(options, shapes)
    for name in ("query", "key"):
        weight = f"{name}_norm_weight"
        if weight in shapes:
            is_full = options.get("norm_over") == "full"
            wanted, got = shapes[name][-1] * (shapes[name][-3] if is_full else 1), shapes[weight][-1]
            if got != wanted:
                what = f"the {wanted} elements of {'all heads' if is_full else 'a head'}"
                raise ShapeFault(weight, f"expected a weight for each of {what}, got {got}")
    _check_key_indices(options, shapes, counts)
    if "cu_seqlens_q" not in counts:
        return
    if shapes["query"][0] != 1:
        one_batch = "a batch of 1, whose sequences lie one after the other"
        raise ShapeFault("query", f"expected {one_batch}, got {shapes['query'][0]}")
    limits = {"cu_seqlens_q": "query", "cu_seqlens_k": "key"}
    for name in (name for name in limits if name in counts):
        _check_cumulative_lengths(name, counts[name], shapes[limits[name]][-2], limits[name])
    lengths = np.diff(counts.get("cu_seqlens_k", ()))
    for number, (used, length) in enumerate(zip(counts.get("key_lengths", ()), lengths, strict=False)):
        if used > length:
            raise ShapeFault("key_lengths", f"sequence {number} has {length} keys, of which {used} cannot be used")


def _check_key_indices(options: Options, shapes: Mapping[str, Shape], counts: Inputs) -> None:
    """Check that indices name keys that there are, or blocks of these, and that no query names one twice."""
    if "key_indices" not in counts:
        return
    keys, shape, block = shapes["key"][-2], shapes["key_indices"], options.get("block_size") or 1
    indices, blocks = counts["key_indices"].reshape(shape), count_key_blocks(options, keys)
    there = f"there are {keys} keys" if block == 1 else f"{keys} keys are {blocks} blocks of {block}"
    ordered = np.sort(indices, axis=-1)
    for is_wrong, values, wanted in (
        (indices >= blocks, indices, f"expected -1 to {blocks - 1}, got {{:g}}; {there}, and -1 names none"),
        (
            (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0),
            ordered[..., 1:],
            "got {:g} twice; name it once, and put -1 where nothing is named",
        ),
    ):
        for place in np.argwhere(is_wrong)[:1]:
            where = "batch entry {}, key head {}, query {}".format(*place[:-1])
            raise ShapeFault("key_indices", f"{where}: {wanted.format(values[tuple(place)])}")


def check_code_shapes(options: Options, shapes: Mapping[str, Shape]) -> None:
    """Check codes and scales of blocks against the format and the shapes. Raises ``ShapeFault``."""
    form = CODE_FORMATS[options.get("stored_as") or DEFAULT_FORMAT]
    for name, stem in _iterate_inputs_in_codes(shapes):
        if form.bits == 4 and shapes[name][-1] % 2:
            raise ShapeFault(name, f"expected an even width, two codes of 4 bits in each byte, got {shapes[name][-1]}")
        blocks = f"{stem}_block_scale"
        if blocks in shapes and "swizzle" in options:
            rows, width = shapes[name][_axis_of_tokens(name)], shapes[name][-1]
            wanted = (rows, width // (form.group or 1))
            if form.group is None or (shapes[blocks][_axis_of_tokens(name)], shapes[blocks][-1]) != wanted:
                what = f"a scale for each {form.group} elements" if form.group else "a format with blocks"
                raise ShapeFault(
                    blocks, f"a swizzle needs {what} of each row, got shape {format_shape(shapes[blocks])}"
                )
            if options["swizzle"] == "4x4" and stem == "value" and (rows % 4 or wanted[1] % 4):
                raise ShapeFault(blocks, f"4x4 needs multiples of 4 rows and columns, got {format_shape(wanted)}")


def _iterate_inputs_in_codes(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the inputs that are given in codes, each with the prefix of its scales' names."""
    return ((name, stem) for name, stem in SCALE_PREFIX.items() if name in names and f"{stem}_scale" in names)


def _axis_of_tokens(name: str) -> int:
    """Return the axis of keys or queries; a page has its heads behind it."""
    return -3 if name.endswith("_pages") else -2


def _check_cumulative_lengths(name: str, limits: Array, length: int, of: str) -> None:
    if limits[0] != 0 or limits[-1] != length:
        wanted = f"limits from 0 to {length}, the length of {of}"
        raise ShapeFault(name, f"expected {wanted}, got {limits[0]:g} to {limits[-1]:g}")
    if (np.diff(limits) < 0).any():
        raise ShapeFault(name, "expected limits of which none is smaller than the one before it")


@dataclass(frozen=True, eq=False)
class _PackedPositions:
    """The sequence of each packed query and key, and its position in the sequence.

    A query's position counts from the first key of its sequence. The last query has the position of the last used key,
    so that the first queries may have negative positions.
    """

    sequence_of_query: Array
    sequence_of_key: Array
    query_position: Array
    key_position: Array
    is_used: Array

    @classmethod
    def from_inputs(cls, inputs: Inputs, *, from_start: bool = False) -> _PackedPositions:
        """Read the limits; ``from_start`` a sequence's first query stands at its first key instead."""
        starts, lengths, numbers = [], [], []
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            limits = inputs[name].astype(np.int64)
            starts.append(limits[:-1])
            lengths.append(np.diff(limits))
            numbers.append(np.repeat(np.arange(len(limits) - 1), lengths[-1]))
        used = np.asarray(inputs.get("key_lengths", lengths[1]), np.int64)
        of_query, of_key = numbers
        pairs = zip(numbers, starts, strict=True)
        in_query, in_key = (np.arange(len(owners)) - start[owners] for owners, start in pairs)
        offset = 0 if from_start else (used - lengths[0])[of_query]
        return cls(of_query, of_key, in_query + offset, in_key, in_key < used[of_key])


def _packed_to_masked(options: dict[str, Any], inputs: dict[str, Array]) -> _OptionsAndInputs:
    sequences = _PackedPositions.from_inputs(inputs, from_start=options.pop("alignment", "") == "top_left")
    allowed = (sequences.sequence_of_query[:, np.newaxis] == sequences.sequence_of_key) & sequences.is_used
    allowed &= pop_position_mask(options, sequences.query_position[:, np.newaxis], sequences.key_position)
    for name in ("key", "value"):
        inputs[name] = np.where(sequences.is_used[:, np.newaxis], inputs[name], np.zeros_like(inputs[name]))
    for name in ("key_lengths", "cu_seqlens_q", "cu_seqlens_k"):
        inputs.pop(name, None)
    return options, {**inputs, "mask": allowed[np.newaxis, np.newaxis]}


def _gather_pages(inputs: dict[str, Array]) -> Array:
    """Replace pages by the keys and values of each row of the table, and return which of these are used, (B, T)."""
    table, used = inputs.pop("block_table").astype(np.int64), inputs["key_lengths"].astype(np.int64)
    page = inputs["key_pages"].shape[1]
    positions = np.arange(table.shape[1] * page)
    is_used = positions < used[:, np.newaxis]  # (B, T)
    pages = np.where(is_used[:, ::page], table, 0)  # what is not used may be no page at all
    for name in ("key", "value"):
        inputs[name] = inputs.pop(f"{name}_pages")
        slots = inputs[name].shape[:2]
        for part in (name, *(f"{name}{ending}" for ending in _CODE_ENDINGS)):
            if part in inputs:
                cache = repeat_block_numbers(inputs[part], (*slots, *inputs[part].shape[2:]))
                rows = cache[pages].reshape(len(table), len(positions), *cache.shape[2:])  # (B, W, Lp, Hkv, ...) before
                used_rows = is_used.reshape(*is_used.shape, *[1] * (rows.ndim - 2))
                inputs[part] = np.where(used_rows, rows, np.zeros_like(rows)).swapaxes(1, 2)
    return is_used


def _pages_to_keys(options: dict[str, Any], inputs: dict[str, Array]) -> _OptionsAndInputs:
    is_used, queries = _gather_pages(inputs), inputs["query"].shape[-2]
    used, positions = inputs.pop("key_lengths").astype(np.int64), np.arange(is_used.shape[-1])
    offset = 0 * used if options.pop("alignment", "") == "top_left" else used - queries
    query_position = np.arange(queries) + offset[:, np.newaxis]  # (B, Lq)
    allowed = is_used[:, np.newaxis] & pop_position_mask(options, query_position[..., np.newaxis], positions)
    laid_out = options, {**inputs, "mask": allowed[:, np.newaxis]}
    return _widen_codes(*laid_out) if "key_scale" in inputs else laid_out


def _ragged_pages_to_keys(options: dict[str, Any], inputs: dict[str, Array]) -> _OptionsAndInputs:
    """Lay the keys of all sequences one after the other, each with all slots of its pages."""
    sequences, keys = _gather_pages(inputs).shape
    for name in inputs.keys() & _INPUTS_OF_KEYS:  # (S, Hkv, T, ...) -> (1, Hkv, S T, ...)
        inputs[name] = np.concatenate([*inputs[name]], axis=1)[np.newaxis]
    own_keys = inputs.pop("tree_mask", None)
    options, inputs = _packed_to_masked(options, {**inputs, "cu_seqlens_k": np.arange(sequences + 1) * keys})
    if own_keys is not None:
        inputs["mask"] &= np.tile(own_keys.astype(np.bool_), sequences)
    return _widen_codes(options, inputs) if "key_scale" in inputs else (options, inputs)


def _widen_codes(options: dict[str, Any], inputs: dict[str, Array]) -> _OptionsAndInputs:
    """Widen codes, which the working dtype holds exactly, and give each its own factor, and its shift if it has one.

    Factors of blocks are products of two scales, in float64, which holds them exactly.
    """
    dtype = inputs["key_scale"].dtype
    for name in QUERY_KEY_VALUE:
        if f"{name}_scale" not in inputs:
            continue
        widened = inputs[name].astype(dtype)
        scale = np.broadcast_to(inputs.pop(f"{name}_scale"), widened.shape[:-1])[..., np.newaxis]
        blocks, zero = inputs.pop(f"{name}_block_scale", None), inputs.pop(f"{name}_zero", None)
        if blocks is not None:
            scale = scale.astype(np.float64) * repeat_block_numbers(blocks.astype(np.float64), widened.shape)
        if zero is not None:
            inputs[f"{name}_shift"] = repeat_block_numbers(zero.astype(dtype), widened.shape)
        inputs[name], inputs[f"{name}_factor"] = widened, scale
    for name in ("stored_as", "packing", "swizzle"):
        options.pop(name, None)
    return options, inputs


def repeat_block_numbers(blocks: Array, shape: Shape) -> Array:
    """Give every element of an array of a shape the number of its block.

    Example:
        >>> repeat_block_numbers(np.array([[1, 2]]), (2, 4)).tolist()
        [[1, 1, 2, 2], [1, 1, 2, 2]]
    """
    for axis, length in enumerate(shape):
        blocks = np.repeat(blocks, length // max(blocks.shape[axis], 1), axis)
    return blocks


def pack_codes(options: dict[str, Any], inputs: dict[str, Array]) -> _OptionsAndInputs:
    """Lay codes and their block scales out as a function gets them; drop ``stored_as`` if the dtype implies it."""
    form = CODE_FORMATS[options.get("stored_as") or DEFAULT_FORMAT]
    for name, stem in list(_iterate_inputs_in_codes(inputs)):
        if form.bits < 8:
            codes = inputs[name].astype(numpy_dtype(form.elements))
            inputs[name] = _pack_into_bytes(codes, form.bits, options.get("packing"))
        if f"{stem}_block_scale" in inputs:
            inputs[f"{stem}_block_scale"] = block_scales_in_memory(options, inputs, name)
    if options.get("stored_as") in FORMATS_KNOWN_BY_DTYPE:
        options.pop("stored_as")
    return options, inputs


def unpacked_shapes(options: Options, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a function's inputs, with two codes in a byte counted as two numbers."""
    is_packed = CODE_FORMATS[options.get("stored_as") or DEFAULT_FORMAT].bits == 4
    wide = {
        name: (*shapes[name][:-1], 2 * shapes[name][-1]) for name, _ in _iterate_inputs_in_codes(shapes) if is_packed
    }
    return {**shapes, **wide}


def block_scales_in_memory(options: Options, inputs: Inputs, name: str) -> Array:
    """Return the scales of blocks of an input in codes as a function gets them: in rows, or as a swizzle has them."""
    stem, axis = SCALE_PREFIX[name], _axis_of_tokens(name)
    scales = inputs[f"{stem}_block_scale"]
    if "swizzle" not in options or (stem != "value" and options["swizzle"] == "4x4"):
        return scales
    form = CODE_FORMATS[options.get("stored_as") or DEFAULT_FORMAT]
    stored = scales.astype(numpy_dtype(str(form.scales))).swapaxes(axis, -2)
    return _swizzle_scales(stored, options["swizzle"]).swapaxes(axis, -2)


def _pack_into_bytes(codes: Array, bits: int, packing: str | None) -> Array:
    """Return codes in a byte each, or two of 4 bits along the last axis."""
    whole: Array = codes.view(np.uint8) & (2**bits - 1)
    if bits != 4:
        return whole
    first, second = whole[..., ::2], whole[..., 1::2]
    low, high = (second, first) if packing == "high_first" else (first, second)
    return np.ascontiguousarray(low | high << 4)


def _swizzle_scales(scales: Array, swizzle: str) -> Array:
    """Move scales of blocks, (..., T, S), to their places in a swizzle (``backends/contract.py``)."""
    bits, (rows, columns) = scales.view(np.uint8), scales.shape[-2:]
    row, column = np.indices((rows, columns))
    if swizzle == "4x4":
        groups = columns // 4
        row, column = row // 4 * 4 + column // groups, column % groups * 4 + row % 4
        height, width = rows, columns
    else:
        height, width = -(-rows // 128) * 128, -(-columns // 4) * 4
        inside = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        place = (row // 128 * (width // 4) + column // 4) * 512 + inside
        row, column = np.divmod(place, width)
    moved = np.zeros((*scales.shape[:-2], height, width), np.uint8)
    moved[..., row, column] = bits
    laid_out: Array = moved.view(scales.dtype)
    return laid_out


def _broadcast_norm_weights(options: dict[str, Any], inputs: dict[str, Array]) -> _OptionsAndInputs:
    """Give each head its row of the weights of the norms."""
    for name in ("query", "key"):
        heads, width = inputs[name].shape[-3], inputs[name].shape[-1]
        weight = inputs.pop(f"{name}_norm_weight", np.ones(1, inputs[name].dtype))
        rows = weight.reshape(heads, width) if len(weight) == heads * width else weight
        inputs[f"{name}_norm"] = np.ascontiguousarray(np.broadcast_to(rows, (heads, width)))
    return options, inputs


def _latent_to_keys(options: dict[str, Any], inputs: dict[str, Array]) -> _OptionsAndInputs:
    """Append the rotated parts to queries and latent vectors, which are the keys and values of one head."""
    latent = inputs.pop("latent")[:, np.newaxis]  # (B, 1, Lk, C)
    inputs["key"] = inputs["value"] = latent
    if "key_rotary" in inputs:
        inputs["query"] = np.concatenate([inputs["query"], inputs.pop("query_rotary")], axis=-1)
        inputs["key"] = np.concatenate([latent, inputs.pop("key_rotary")[:, np.newaxis]], axis=-1)
    return options, inputs


def count_key_blocks(options: Options, keys: int) -> int:
    """Return how many blocks of keys an index may name; without a block size, how many keys.

    Example:
        >>> count_key_blocks({"block_size": 4}, 9), count_key_blocks({}, 9)
        (3, 9)
    """
    return -(-keys // int(options.get("block_size") or 1))


def name_keys_once(indices: Array, blocks: int) -> Array:
    """Sort the indices of each query, with -1 in the place of what it names again, and of what is none of the blocks.

    Example:
        >>> name_keys_once(np.array([[2, 7, 0, 2]]), 3).tolist()
        [[0, 2, -1, -1]]
    """
    ordered = np.sort(indices, axis=-1)
    is_named = (ordered >= 0) & (ordered < blocks)
    is_named[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    return np.where(is_named, ordered, -1)


def _indices_to_mask(options: dict[str, Any], inputs: dict[str, Array]) -> _OptionsAndInputs:
    """Return a mask of the keys that each query names: (B, H, Lq, Lk), of length 1 along axes where all are alike."""
    indices, keys = inputs.pop("key_indices").astype(np.int64), inputs["key"].shape[-2]
    # Whatever names nothing meets a column behind the last block.
    named: Array = np.zeros((*indices.shape[:-1], count_key_blocks(options, keys) + 1), np.bool_)
    np.put_along_axis(named, indices, True, axis=-1)
    allowed = np.repeat(named[..., :-1], options.pop("block_size", None) or 1, axis=-1)[..., :keys]
    if allowed.shape[1] > 1:
        allowed = np.repeat(allowed, inputs["query"].shape[1] // allowed.shape[1], axis=1)
    return options, {**inputs, "mask": allowed}


def pop_position_mask(options: dict[str, Any], queries: Array, keys: Array) -> Array:
    """Return which keys each query may attend to by position, and remove these options."""
    allowed = np.ones(np.broadcast_shapes(queries.shape, keys.shape), np.bool_)
    if options.pop("is_causal", False):
        allowed &= keys <= queries
    if (window := options.pop("window", None)) is not None:
        for rule in make_window_conditions(window, queries, keys):
            allowed &= rule
    options.pop("poison", None)
    return allowed


_REMOVE_LAYOUT: Mapping[str, Callable[[dict[str, Any], dict[str, Array]], _OptionsAndInputs]] = {
    "packed_attention": _packed_to_masked,
    "paged_attention": _pages_to_keys,
    "ragged_paged_attention": _ragged_pages_to_keys,
    "quantized_attention": _widen_codes,
    "normalized_attention": _broadcast_norm_weights,
    "latent_attention": _latent_to_keys,
    "sparse_attention": _indices_to_mask,
}
"""The layout of each operation that is lowered to another, and of its gradients.

Gated attention is not listed: it has no layout, and a later step applies the gate (``attention/output_gate.py``).
"""
