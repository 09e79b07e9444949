"""Random packed sequences, paged caches, keys of 8 bits, norms and latent vectors, made of plain attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.dtypes import EIGHT_BITS, rounded_once
from attncheck.searching.options import Asked, Inputs
from attncheck.searching.shapes import Random
from attncheck.spec import PROJECTIONS

Array = NDArray[Any]

_LARGEST_CODE = 400
_PAGES = (1, 3, 4, 16)
_SOME_UNUSED = 0.5
_SOME_ROTATED = 0.7
_SOME_RAGGED = 0.5
"""Of packs, so many whose sequences have lengths of their own, and no keys that are not used."""


def lay_out(kind: str, random: Random, operands: Inputs, asked: Asked) -> Inputs:
    """Make every batch entry a sequence of a pack, or of a paged cache with keys that are not used; or round keys."""
    if kind == "quantized_attention":
        return _quantized(random, operands)
    if kind == "normalized_attention":
        return _normalized(random, operands, asked)
    if kind == "latent_attention":
        return _latent(random, operands, asked)
    keys = operands["key"].shape[2]
    batch = len(operands["key"])
    used = np.full(batch, keys)
    if random.rand() < _SOME_UNUSED:
        used = random.randint(0, keys + 1, batch)
        asked.names.append("lengths")
    if random.rand() < _SOME_UNUSED:
        asked.options["is_causal"] = True
        asked.names.append("causal")
    return (_paged if kind == "paged_attention" else _packed)(random, operands, used)


def _normalized(random: Random, operands: Inputs, asked: Asked) -> Inputs:
    """Normalise queries and keys in any way, some with weights."""
    asked.options["norm"] = str(random.choice(("rms", "l2")))
    asked.options["epsilon"] = float(10.0 ** random.uniform(-6, 0))
    is_full = random.rand() < _SOME_UNUSED
    asked.options["norm_over"] = "full" if is_full else "head"
    asked.names += [asked.options["norm"], asked.options["norm_over"]]
    if "rotary_cos" in asked.inputs and random.rand() < _SOME_UNUSED:
        asked.options["norm_after_rotation"] = True
        asked.names.append("rotated first")
    weights = {}
    for name in ("query", "key"):
        if random.rand() < _SOME_UNUSED:
            _, heads, _, width = operands[name].shape
            weights[f"{name}_norm_weight"] = random.uniform(-2, 2, width * (heads if is_full else 1))
    return {**operands, **weights}


def _latent(random: Random, operands: Inputs, asked: Asked) -> Inputs:
    """Take keys and values of the first head for latent vectors; a rotated part is as large as the rest."""
    query, key, value = (operands[name] for name in PROJECTIONS)
    latent = np.concatenate([key[:, 0], value[:, 0]], axis=-1)
    size = 1 / np.sqrt(latent.shape[-1])
    inputs: Inputs = {"query": query, "latent": latent}
    for name, width in (("key", key.shape[-1]), ("value", value.shape[-1])):
        inputs[f"{name}_projection"] = size * random.randn(query.shape[1], latent.shape[-1], width)
    if random.rand() < _SOME_ROTATED:
        width = int(random.randint(1, 9))
        for name, array in (("query", query), ("key", latent)):
            inputs[f"{name}_rotary"] = np.std(array) * random.randn(*array.shape[:-1], width)
        asked.names.append("rotated part")
    return inputs


def _packed(random: Random, operands: Inputs, used: Array) -> Inputs:
    """Put the entries one after the other: whole, with lengths of keys, or each only as long as it is used."""
    queries, keys = (np.full(len(used), operands[name].shape[2]) for name in ("query", "key"))
    is_ragged = random.rand() < _SOME_RAGGED
    if is_ragged:
        queries, keys = random.randint(1, queries + 1), used
    found = {name: _joined(array, keys if name in ("key", "value") else queries) for name, array in operands.items()}
    found |= {"cu_seqlens_q": _limits(queries), "cu_seqlens_k": _limits(keys)}
    return found if is_ragged else found | {"key_lengths": used}


def _joined(array: Array, lengths: Array) -> Array:
    """Join the first rows of every entry, (B, H, L, D), to one entry."""
    entries = [entry[:, :length] for entry, length in zip(array, lengths, strict=True)]
    return np.concatenate(entries, axis=1)[np.newaxis]


def _limits(lengths: Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)])


def _paged(random: Random, operands: Inputs, used: Array) -> Inputs:
    page = int(random.choice(_PAGES))
    batch, _, keys, _ = operands["key"].shape
    width = -(-keys // page)
    order = random.permutation(batch * width + 2)  # two pages are nobody's
    table = order[: batch * width].reshape(batch, width)
    inputs: Inputs = {"query": operands["query"], "block_table": table, "key_lengths": used}
    for name in ("key", "value"):
        rows = operands[name].swapaxes(1, 2)  # (B, Lk, Hkv, D)
        padded = np.concatenate([rows, np.zeros((batch, width * page - keys, *rows.shape[2:]))], axis=1)
        pages = np.full((len(order), page, *rows.shape[2:]), np.nan)
        pages[table.ravel()] = padded.reshape(-1, page, *rows.shape[2:])
        inputs[f"{name}_pages"] = pages
    return inputs


def _quantized(random: Random, operands: Inputs) -> Inputs:
    """Round keys and values to 8 bits, with a scale for all, for each head or for each key."""
    inputs = {"query": operands["query"]}
    for name in ("key", "value"):
        array = operands[name]
        axes = ((0, 1, 2, 3), (0, 2, 3), (3,))[random.randint(3)]
        largest = np.abs(array).max(axis=axes, keepdims=True, initial=1e-9)
        scale = largest / _LARGEST_CODE * random.uniform(1, 1.9)
        inputs[name] = rounded_once(array / scale, str(random.choice(list(EIGHT_BITS))))
        inputs[f"{name}_scale"] = scale[..., 0]
    return inputs
