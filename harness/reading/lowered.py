"""Operations that are another one once their keys and values are laid out: packed, in pages, or in 8 bits.

Packed sequences attend with one mask for all of them; a key that no query may use is a key of zeros that is masked. The
pages of a cache are read into one array of keys for each batch entry, slots that are not used likewise. Nothing is
rounded by that, so exact answers and bounds are those of ``attention`` and ``attention_gradients``. Keys and values of
8 bits are widened, which is exact, too; their scales become factors, with a step of their own
(``attention/dequantization.py``). Weights of norms of queries and keys get a row for each
head, of ones where there are none (``attention/normalization.py``). Latent vectors are keys and values of one head,
from which a step makes those of every head (``attention/latents.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.canonical import AttentionProblem, within_window
from attncheck.reading.dtypes import largest_number
from attncheck.reading.shapes import ShapeFault
from attncheck.spec import OPERATIONS, Shape

Array = NDArray[Any]
Options = Mapping[str, Any]
Inputs = Mapping[str, Array]

_LARGE = 1e30


def lowered(operation: str, posed: AttentionProblem) -> tuple[str, AttentionProblem]:
    """Return the operation that one is once its keys and values are laid out, and its options and inputs.

    An operation that lowers to none comes back as it is. With the option ``alignment``, which no case has, positions
    count as it says: top_left from the first key of a sequence.
    """
    lowers_to = OPERATIONS[operation].lowers_to
    if lowers_to is None:
        return operation, posed
    return lowers_to, _LAID_OUT_BY[operation](posed)


def poisoned(options: Options, inputs: Inputs, dtype: str) -> dict[str, Array]:
    """Return the inputs with what no query may use of keys and values replaced, as the option ``poison`` says."""
    if not options.get("poison"):
        return dict(inputs)
    value = np.nan if options["poison"] == "nan" else min(_LARGE, largest_number(dtype))
    if "block_table" in inputs:
        unused, names = ~_used_slots(inputs), ("key_pages", "value_pages")
    else:
        unused, names = ~_Sequences.of(inputs).is_used, ("key", "value")
    others = {}
    for name in names:
        others[name] = inputs[name].copy()
        others[name][unused if name.endswith("pages") else np.s_[..., unused, :]] = value
    return {**inputs, **others}


def check_lowered(operation: str, options: Options, shapes: Mapping[str, Shape], counts: Inputs) -> None:
    """Hold the counts of packed sequences and paged caches against each other, and the widths of norms.

    ``counts`` are those of a case.

    Raises ``ShapeFault`` for the first that does not fit.
    """
    if OPERATIONS[operation].lowers_to is None:
        return
    if "block_table" in counts:
        _check_pages(shapes, counts)
    for name in ("query", "key"):
        if f"{name}_norm_weight" in shapes:
            _check_norm_weight(f"{name}_norm_weight", options, shapes[name], shapes[f"{name}_norm_weight"])
    if "cu_seqlens_q" not in counts:
        return
    if shapes["query"][0] != 1:
        raise ShapeFault(
            "query", f"expected a batch of 1, whose sequences lie one after the other, got {shapes['query'][0]}"
        )
    for name, of in (("cu_seqlens_q", "query"), ("cu_seqlens_k", "key")):
        _check_limits(name, counts[name], shapes[of][-2], of)
    lengths = np.diff(counts["cu_seqlens_k"])
    for number, (used, length) in enumerate(zip(counts.get("key_lengths", ()), lengths, strict=False)):
        if used > length:
            raise ShapeFault("key_lengths", f"sequence {number} has {length} keys, of which {used} cannot be used")


def _check_limits(name: str, limits: Array, length: int, of: str) -> None:
    if limits[0] != 0 or limits[-1] != length:
        raise ShapeFault(
            name, f"expected limits from 0 to {length}, the length of {of}, got {limits[0]:g} to {limits[-1]:g}"
        )
    if (np.diff(limits) < 0).any():
        raise ShapeFault(name, "expected limits of which none is smaller than the one before it")


def _check_norm_weight(name: str, options: Options, of: Shape, shape: Shape) -> None:
    is_full = options.get("norm_over") == "full"
    wanted = of[-1] * (of[-3] if is_full else 1)
    if shape[-1] != wanted:
        what = "all heads" if is_full else "a head"
        raise ShapeFault(name, f"expected a weight for each of the {wanted} elements of {what}, got {shape[-1]}")


def _check_pages(shapes: Mapping[str, Shape], counts: Inputs) -> None:
    pages, page = shapes["key_pages"][:2]
    table = counts["block_table"].reshape(shapes["block_table"])
    for entry, used in enumerate(counts["key_lengths"]):
        if (table[entry, : -(-int(used) // page)] >= pages).any():
            raise ShapeFault(
                "block_table", f"entry {entry} uses a page that is not there: there are {pages}, from 0 on"
            )


@dataclass(frozen=True, eq=False)
class _Sequences:
    """Packed sequences by query and by key: which one each belongs to, and where it stands in it.

    A query's position counts from the first key of its sequence, and the last query's is that of the last key that is
    used; those of the first queries may be negative.
    """

    of_query: Array
    of_key: Array
    query_position: Array
    key_position: Array
    is_used: Array

    @classmethod
    def of(cls, inputs: Inputs, *, from_start: bool = False) -> _Sequences:
        """Read the limits; ``from_start`` a sequence's first query stands at its first key instead."""
        starts, lengths, numbers = [], [], []
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            limits = inputs[name].astype(np.int64)
            starts.append(limits[:-1])
            lengths.append(np.diff(limits))
            numbers.append(np.repeat(np.arange(len(limits) - 1), lengths[-1]))
        used = np.asarray(inputs.get("key_lengths", lengths[1]), np.int64)
        of_query, of_key = numbers
        in_query, in_key = (np.arange(len(each)) - start[each] for each, start in zip(numbers, starts, strict=True))
        offset = 0 if from_start else (used - lengths[0])[of_query]
        return cls(of_query, of_key, in_query + offset, in_key, in_key < used[of_key])


def _packed(posed: AttentionProblem) -> AttentionProblem:
    options = dict(posed.options)
    found = _Sequences.of(posed.inputs, from_start=options.pop("alignment", "") == "top_left")
    allowed = (found.of_query[:, np.newaxis] == found.of_key) & found.is_used
    allowed &= _by_position(options, found.query_position[:, np.newaxis], found.key_position)
    unused = ~found.is_used[:, np.newaxis]
    kept = {"query", "sinks", "grad_output"}
    others = {name: array for name, array in posed.inputs.items() if name in kept}
    laid_out: dict[str, Array] = {
        name: np.where(unused, np.zeros_like(posed.inputs[name]), posed.inputs[name]) for name in ("key", "value")
    }
    return AttentionProblem(options, {**others, **laid_out, "mask": allowed[np.newaxis, np.newaxis]})


def _paged(posed: AttentionProblem) -> AttentionProblem:
    inputs, options = posed.inputs, dict(posed.options)
    table, used = inputs["block_table"].astype(np.int64), inputs["key_lengths"].astype(np.int64)
    page, queries = inputs["key_pages"].shape[1], inputs["query"].shape[-2]
    positions = np.arange(table.shape[1] * page)
    is_used = positions < used[:, np.newaxis]  # (B, T)
    pages = np.where(is_used[:, ::page], table, 0)  # what is not used may be no page at all
    laid_out = {}
    for name in ("key", "value"):
        cache = inputs[f"{name}_pages"]
        rows = cache[pages].reshape(len(table), len(positions), *cache.shape[2:])  # (B, W, Lp, Hkv, D) before
        laid_out[name] = np.where(is_used[..., np.newaxis, np.newaxis], rows, np.zeros_like(rows)).swapaxes(1, 2)
    offset = 0 * used if options.pop("alignment", "") == "top_left" else used - queries
    query_position = np.arange(queries) + offset[:, np.newaxis]  # (B, Lq)
    allowed = is_used[:, np.newaxis] & _by_position(options, query_position[..., np.newaxis], positions)
    others = {name: array for name, array in inputs.items() if name in {"query", "sinks"}}
    return AttentionProblem(options, {**others, **laid_out, "mask": allowed[:, np.newaxis]})


def _quantized(posed: AttentionProblem) -> AttentionProblem:
    """Widen keys and values, which the working dtype holds exactly, and give each key its own factor."""
    inputs = dict(posed.inputs)
    for name in ("key", "value"):
        widened = inputs[name].astype(inputs["query"].dtype)
        scale = np.broadcast_to(inputs.pop(f"{name}_scale"), widened.shape[:-1])
        inputs[name], inputs[f"{name}_factor"] = widened, scale[..., np.newaxis]
    options = {name: value for name, value in posed.options.items() if name != "stored_as"}
    return AttentionProblem(options, inputs)


def _normalized(posed: AttentionProblem) -> AttentionProblem:
    """Give each head its row of the weights of the norms."""
    inputs = dict(posed.inputs)
    for name in ("query", "key"):
        heads, width = inputs[name].shape[-3], inputs[name].shape[-1]
        weight = inputs.pop(f"{name}_norm_weight", np.ones(1, inputs[name].dtype))
        rows = weight.reshape(heads, width) if len(weight) == heads * width else weight
        inputs[f"{name}_norm"] = np.ascontiguousarray(np.broadcast_to(rows, (heads, width)))
    return AttentionProblem(dict(posed.options), inputs)


def _latent(posed: AttentionProblem) -> AttentionProblem:
    """Put what is rotated behind queries and latent vectors, which are the keys and values of one head."""
    inputs = dict(posed.inputs)
    latent = inputs.pop("latent")[:, np.newaxis]  # (B, 1, Lk, C)
    inputs["key"] = inputs["value"] = latent
    if "key_rotary" in inputs:
        inputs["query"] = np.concatenate([inputs["query"], inputs.pop("query_rotary")], axis=-1)
        inputs["key"] = np.concatenate([latent, inputs.pop("key_rotary")[:, np.newaxis]], axis=-1)
    return AttentionProblem(dict(posed.options), inputs)


def _used_slots(inputs: Inputs) -> Array:
    """Return which slots of which pages hold a key that any batch entry uses: (Np, Lp)."""
    is_used: Array = np.zeros(inputs["key_pages"].shape[:2], np.bool_)
    page = is_used.shape[1]
    for pages, used in zip(inputs["block_table"].astype(np.int64), inputs["key_lengths"].astype(np.int64), strict=True):
        positions = np.arange(used)
        is_used[pages[positions // page], positions % page] = True
    return is_used


def _by_position(options: dict[str, Any], queries: Array, keys: Array) -> Array:
    """Say who may attend to whom by position, and take the options that say so out."""
    allowed = np.ones(np.broadcast_shapes(queries.shape, keys.shape), np.bool_)
    if options.pop("is_causal", False):
        allowed &= keys <= queries
    if (window := options.pop("window", None)) is not None:
        for rule in within_window(window, queries, keys):
            allowed &= rule
    options.pop("poison", None)
    return allowed


_LAID_OUT_BY: Mapping[str, Callable[[AttentionProblem], AttentionProblem]] = {
    "packed_attention": _packed,
    "packed_attention_gradients": _packed,
    "paged_attention": _paged,
    "quantized_attention": _quantized,
    "normalized_attention": _normalized,
    "latent_attention": _latent,
}
"""How each operation that lowers to another is laid out."""
