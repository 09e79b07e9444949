"""A case's options over those of its file: which apply, which make sense together, in the form that the rest takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

from attncheck.reading import model
from attncheck.reading.array_kinds import Array
from attncheck.reading.diagnostics import CaseFileError
from attncheck.reading.number_checks import spelled_out
from attncheck.reading.yaml_scalars import FieldPath
from attncheck.spec import ASKED_BY, DEFAULT_SCORE, HEADS, OPERATIONS, OPTIONS, SCORE_SPECS

_ADDED = frozenset(
    name for operation in OPERATIONS.values() for name, spec in operation.inputs.items() if spec.may_be_infinite
)
"""Inputs that forbid a key where they are -inf."""
_LARGEST_FILL = 65504
ONLY_WITH_SOME_SCORES: Mapping[str, tuple[str, ...]] = {
    option: tuple(name for name, score in SCORE_SPECS.items() if option in score.options)
    for option in OPTIONS
    if any(option in score.options for score in SCORE_SPECS.values())
}
"""Options of scoring that some kinds of score alone have."""


def read_options(defaults: model.Options, entry: model.CaseEntry, operation: str, where: FieldPath) -> dict[str, Any]:
    """Merge a case's options over the file's; the case's own must apply to it, the file's are for those that they fit.

    A window becomes a pair. Raises ``CaseFileError``.
    """
    own = entry.options.model_dump(exclude_none=True)
    allowed = OPERATIONS[operation].options
    for name in own:
        if name not in allowed:
            listed = ", ".join(sorted(allowed)) or "no options"
            raise CaseFileError((*where, "options", name), f"does not apply to {operation}, which takes {listed}")
    shared = {name: value for name, value in defaults.model_dump(exclude_none=True).items() if name in allowed}
    idle = _idle(shared | own, operation, entry)
    for name, reason in idle.items():
        if name in own:
            raise CaseFileError((*where, "options", name), reason)
    options = {name: value for name, value in (shared | own).items() if name not in idle}
    paths = {name: ((*where, "options", name) if name in own else ("defaults", "options", name)) for name in options}
    _check(options, operation, where, paths)
    if "window" in options:
        options["window"] = tuple(options["window"])
    return options


def check_empty_rows(
    entry: model.CaseEntry,
    options: Mapping[str, Any],
    inputs: Mapping[str, Array],
    named: Mapping[str, Array],
    keys: int,
    where: FieldPath,
) -> None:
    """Refuse a word on rows without a key in a case that can have none, and a fill where nothing says no."""
    if entry.options.empty_rows is None and entry.options.mask_fill is None:
        return
    infinite = any(map(math.isinf, chain(*(spelled_out(inputs[name], named) for name in _ADDED & inputs.keys()))))
    masks = ASKED_BY["masked"]
    forbidden = masks & inputs.keys() or any(options.get(name) for name in masks)
    if keys and not forbidden and entry.options.mask_fill is not None:
        message = "stands in the place of scores that a mask, causality, a window or lengths forbid; nothing does here"
        raise CaseFileError((*where, "options", "mask_fill"), message)
    if keys and not forbidden and not infinite:
        message = "says what a query gives that may attend to no key; nothing forbids a key here"
        raise CaseFileError((*where, "options", "empty_rows"), message)


def _idle(options: Mapping[str, Any], operation: str, entry: model.CaseEntry) -> dict[str, str]:
    """Return the options that say nothing of such a case, each with the reason."""
    idle: dict[str, str] = {}
    if "alignment" in options and not options.get("is_causal") and "window" not in options:
        idle["alignment"] = "says where queries stand for is_causal or a window, and this case has neither"
    if "alignment" in options and "query_offsets" in entry.inputs:
        idle["alignment"] = "says where queries stand, and query_offsets say it of each batch entry"
    for name in options:
        needed = OPTIONS[name].needs
        if needed is not None and needed not in entry.inputs:
            idle[name] = f"says something of {needed}, which this case has not"
    if not OPERATIONS[operation].has_projections and entry.layout == "split":
        for name in HEADS:
            idle[name] = "says how inputs in `layout: merged` are split; these inputs have an axis of heads"
    return idle


def _check(options: Mapping[str, Any], operation: str, where: FieldPath, paths: Mapping[str, FieldPath]) -> None:
    if OPERATIONS[operation].has_projections and "heads" not in options:
        raise CaseFileError((*where, "options"), f"{operation} needs options.heads")
    for name, scores in ONLY_WITH_SOME_SCORES.items():
        if name in options and options.get("score", DEFAULT_SCORE) not in scores:
            raise CaseFileError(paths[name], f"the {options['score']} score has no {name}")
    for name, spec in OPTIONS.items():
        if name in options and spec.type is float and not math.isfinite(options[name]):
            raise CaseFileError(paths[name], f"expected a finite number, got {options[name]}")
    if options.get("mask_fill", 0) > _LARGEST_FILL:
        message = f"expected at most {_LARGEST_FILL}, which every dtype holds, got {options['mask_fill']}"
        raise CaseFileError(paths["mask_fill"], message)
    if options.get("window") == [None, None]:
        raise CaseFileError(paths["window"], "bounds nothing on either side; expected a number of keys on one at least")
    heads, kv_heads = options.get("heads"), options.get("kv_heads")
    if heads and kv_heads and heads % kv_heads:
        raise CaseFileError(
            paths["kv_heads"], f"{heads} query heads cannot share {kv_heads} key and value heads evenly"
        )
