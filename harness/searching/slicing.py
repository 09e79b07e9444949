"""A problem with fewer elements along some axes: every input is cut alike, by the letters of the specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attncheck.searching.concrete import Array, ConcreteCase
from attncheck.spec import HEADS, InputSpec

Kept = Mapping[str, NDArray[np.intp]]
"""The positions that are kept of axes, by their letters."""

_NORM_WEIGHTS = {"query_norm_weight": "H", "key_norm_weight": "Hkv"}


def axes_of(problem: ConcreteCase, name: str) -> tuple[str, ...]:
    """Return the letters of an input's axes; weights of norms go along widths, perhaps of all heads."""
    if name not in _NORM_WEIGHTS:
        return problem.specs[name].axes
    return (f"{_NORM_WEIGHTS[name]}*D" if problem.options.get("norm_over") == "full" else "D",)


def letters_of(problem: ConcreteCase) -> list[str]:
    """Return the axes that a problem can be cut along, by their letters: those that other axes follow from are none."""
    found = dict.fromkeys(
        letter for name in problem.inputs for axis in axes_of(problem, name) for letter in axis.split("*")
    )
    own = [letter for letter in found if letter != "T" or "Lk" not in found]
    return [letter for letter in own if letter not in ("S", "S1")]


def extent(problem: ConcreteCase, letter: str) -> int:
    """Return how many positions an axis has to be cut; of query heads, how many share a head of keys and values."""
    lengths = problem.lengths
    return lengths[letter] // lengths["Hkv"] if letter == "H" and "Hkv" in lengths else lengths[letter]


def cut(problem: ConcreteCase, kept: Kept) -> ConcreteCase:
    """Keep these positions along these axes; keys and values of a past stand before the others.

    Raises ``ShapeFault`` for axes that do not fit together.
    """
    lengths = problem.lengths
    whole = dict(_with_heads(problem, dict(kept)))
    if "T" in lengths and "T" not in whole and whole.keys() & {"P", "Lk"}:
        past = whole.get("P", np.arange(lengths.get("P", 0)))
        new = whole.get("Lk", np.arange(lengths.get("Lk", 0)))
        whole["T"] = np.concatenate([past, lengths.get("P", 0) + new])
    inputs = {name: _cut_input(problem, name, array, whole) for name, array in problem.inputs.items()}
    options = dict(problem.options)
    for option, letter in zip(HEADS, ("H", "Hkv"), strict=True):
        if option in options and letter in whole:
            options[option] = len(whole[letter])
    return problem.changed(inputs=inputs, options=options)


def _with_heads(problem: ConcreteCase, kept: dict[str, NDArray[np.intp]]) -> dict[str, NDArray[np.intp]]:
    """Let query heads go with the heads of keys and values that they share, and be as many for each of these."""
    lengths = problem.lengths
    if "Hkv" not in lengths or "H" not in lengths:
        return kept
    group = lengths["H"] // lengths["Hkv"]
    if "Hkv" in kept and "H" not in kept:
        kept["H"] = (kept["Hkv"][:, np.newaxis] * group + np.arange(group)).ravel()
    elif "H" in kept and "Hkv" not in kept:  # positions in a group, of every group
        kept["H"] = (np.arange(lengths["Hkv"])[:, np.newaxis] * group + kept["H"]).ravel()
    return kept


def _cut_input(problem: ConcreteCase, name: str, array: Array, kept: Kept) -> Array:
    spec, lengths = problem.specs[name], problem.lengths
    if array.dtype.kind in "iu" and spec.at_most in kept:
        array = np.searchsorted(kept[spec.at_most], array).astype(np.int64)
    for position, axis in enumerate(axes_of(problem, name)):
        parts = axis.split("*")
        if not kept.keys() & set(parts) or (spec.broadcast and array.shape[position] == 1):
            continue
        array = array.take(_positions(parts, kept, lengths), position)
    return array


def _positions(letters: Sequence[str], kept: Kept, lengths: Mapping[str, int]) -> NDArray[np.intp]:
    """Return the positions that are kept of an axis of heads and widths side by side."""
    found = np.zeros(1, np.intp)
    for letter in letters:
        own = kept.get(letter)
        own = np.arange(lengths[letter]) if own is None else own
        found = (found[:, np.newaxis] * lengths[letter] + own).ravel()
    return found


def without_sequence(problem: ConcreteCase, number: int) -> ConcreteCase:
    """Leave one of several packed sequences out."""
    kept = {}
    for name, letter in (("cu_seqlens_q", "Lq"), ("cu_seqlens_k", "Lk")):
        begin, end = problem.inputs[name][number : number + 2]
        kept[letter] = np.delete(np.arange(problem.lengths[letter]), np.s_[int(begin) : int(end)])
    lengths = problem.inputs.get("key_lengths")
    shorter = cut(problem.changed(inputs={k: v for k, v in problem.inputs.items() if k != "key_lengths"}), kept)
    inputs = {**shorter.inputs}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        inputs[name] = np.delete(inputs[name], number + 1 if number == 0 else number)
    if lengths is not None:
        inputs["key_lengths"] = np.delete(lengths, number)
    return problem.changed(inputs=inputs)


def with_counts_that_fit(problem: ConcreteCase) -> ConcreteCase:
    """Lower counts to what there is of what they count."""
    lengths, inputs = problem.lengths, dict(problem.inputs)
    for name, array in inputs.items():
        spec: InputSpec = problem.specs[name]
        if spec.whole and spec.at_most in lengths:
            inputs[name] = np.minimum(array, lengths[spec.at_most])
    return problem.changed(inputs=inputs)
