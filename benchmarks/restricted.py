"""Sixteen kinds of call that libraries have: how much is judged, how long it takes, in how much memory.

    python benchmarks/restricted.py

Each kind is a right kernel with the words of a kind of library, which refuses what that kind does not take. It is
checked as somebody's first try, and again with the requirements that the first screen advises. Exits 1 where less than
a tenth is judged of a kind that refuses shapes, and nothing is advised. No padding makes a call causal.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from everything import Measured, run
from measuring import table
from numpy.typing import NDArray

Array = NDArray[Any]

_MASKED = ("mask", "is_causal", "scale")
KINDS: Mapping[str, tuple[Sequence[str], frozenset[str]]] = {
    "all words": (_MASKED, frozenset()),
    "equal lengths": (_MASKED, frozenset({"lengths"})),
    "equal lengths, no scale": (("mask", "is_causal"), frozenset({"lengths"})),
    "one width": (_MASKED, frozenset({"width"})),
    "one width, no scale": (("mask", "is_causal"), frozenset({"width"})),
    "one head each": (_MASKED, frozenset({"heads"})),
    "one of lengths, widths and heads": (_MASKED, frozenset({"lengths", "width", "heads"})),
    "no mask": (("is_causal", "scale"), frozenset()),
    "no mask, no scale": (("is_causal",), frozenset()),
    "no mask, equal lengths": (("is_causal", "scale"), frozenset({"lengths"})),
    "no word at all": ((), frozenset()),
    "no causality": (("mask", "scale"), frozenset()),
    "masks of keys": (_MASKED, frozenset({"keys"})),
    "masks of keys, equal lengths": (_MASKED, frozenset({"keys", "lengths"})),
    "causal alone": (("is_causal", "scale"), frozenset({"causal"})),
    "causal alone, equal lengths": (("is_causal",), frozenset({"causal", "lengths"})),
}
"""The words of a kind, and in what it is restricted."""


def _refuses(query: Array, key: Array, value: Array, words: Mapping[str, Any], limits: frozenset[str]) -> str:
    """Return what a kind does not take of a call; empty if it takes it."""
    mask = words.get("mask")
    is_unmet = {
        "lengths": query.shape[2] != key.shape[2],
        "width": query.shape[3] != value.shape[3],
        "heads": query.shape[1] != key.shape[1],
        "keys": mask is not None and mask.ndim == 4 and mask.shape[1:3] != (1, 1),
        "causal": not words.get("is_causal"),
    }
    return ", ".join(sorted(limit for limit in limits if is_unmet[limit]))


def kernel(words: Sequence[str], limits: frozenset[str]) -> Callable[..., Array]:
    """Return a right kernel with these words, which refuses what it is restricted in."""

    def attention(query: Array, key: Array, value: Array, **given: Any) -> Array:
        if refused := _refuses(query, key, value, given, limits):
            raise NotImplementedError(f"restricted in {refused}")
        key, value = (np.repeat(each, query.shape[1] // key.shape[1], axis=1) for each in (key, value))
        scale = given.get("scale")
        scores = query @ key.swapaxes(-1, -2) * query.dtype.type(query.shape[-1] ** -0.5 if scale is None else scale)
        allowed = np.ones(scores.shape, np.bool_) if given.get("mask") is None else given["mask"]
        allowed = allowed & np.tri(*scores.shape[-2:], dtype=np.bool_) if given.get("is_causal") else allowed
        scores = np.where(allowed, scores, -np.inf)
        with np.errstate(all="ignore"):
            powers = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=np.finfo(scores.dtype).min))
            weights = np.where(allowed.any(axis=-1, keepdims=True), powers / powers.sum(axis=-1, keepdims=True), 0)
            return weights.astype(value.dtype) @ value

    inputs = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("query", "key", "value")]
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in words]
    attention.__signature__ = inspect.Signature([*inputs, *options])  # type: ignore[attr-defined]
    return attention


NAMES = {re.sub(r"\W+", "_", name): name for name in KINDS}
globals().update({name: kernel(*KINDS[kind]) for name, kind in NAMES.items()})


def check(name: str, requires: str, folder: Path) -> tuple[Measured, dict[str, Any]]:
    """Check a kind; return what it took, and what ``--json`` says."""
    options = ["--json", "--no-report", "--quiet", "--output", str(folder / name)]
    options += ["--declare", f"requires={requires}"] if requires else []
    measured, printed = run(["--implementation", f"{__file__}:{name}", *options], folder, os.environ)
    return measured, json.loads(printed[printed.index("{\n") :])


def main() -> None:
    """Check every kind as it is, and as advised; print a line for each."""
    rows, is_lost = [], False
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in NAMES.items():
            requires = ""
            for _ in range(2):
                measured, document = check(name, requires, Path(folder))
                (counts,) = document["coverage"].values()
                judged = f"{counts['judged']} of {counts['asked'] - counts['not_offered']}"
                rows.append([kind, requires or "-", judged, f"{measured.wall:.0f} s", f"{measured.memory:.1f} GiB"])
                advised = re.search(r"requires = (\{.*?\})", "".join(document["too_few_judged"]))
                is_padded, requires = bool(requires), advised[1] if advised and not requires else ""
                if not requires:
                    refuses_shapes = bool(KINDS[kind][1] & {"lengths", "width", "heads"})
                    is_lost |= bool(document["too_few_judged"]) and refuses_shapes and not is_padded
                    break
    print("\n".join(table(("kind", "requires", "judged", "seconds", "memory"), rows)))
    sys.exit(is_lost)


if __name__ == "__main__":
    main()
