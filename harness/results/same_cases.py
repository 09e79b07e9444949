"""Whether two runs mean the same case by the same id: what is computed, of what, and what is expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

_COMPUTED = ("operation", "options", "inputs", "storage", "memory_layout", "merged")
"""What a case's numbers follow from. Its title, tags, notes and line may change, and dtypes be added."""
_EXPECTED = ("expected", "dtypes")

Cases = Mapping[str, Mapping[str, Any]]


def differing_cases(cases: Mapping[str, Cases]) -> dict[str, str]:
    """Return the cases that are not computed alike in all runs, given by label, and what differs first."""
    first: dict[str, str] = {}
    differing: dict[str, str] = {}
    for label, of_run in cases.items():
        for identity, case in of_run.items():
            if not case["operation"]:
                continue  # a run without a record of it does not say what it computed
            other = first.setdefault(identity, label)
            if other == label or identity in differing:
                continue
            if changes := changed(cases[other][identity], case):
                differing[identity] = f"{changes[0]} ({other} and {label})"
    return differing


def changed(before: Mapping[str, Any], after: Mapping[str, Any], *, expectations: bool = False) -> list[str]:
    """Say what of a case differs, a line each; ``expectations`` adds its dtypes and what is expected of it."""
    names = (*_COMPUTED, *_EXPECTED) if expectations else _COMPUTED
    return [
        f"{name} {_show(before.get(name))} became {_show(after.get(name))}"
        for name in names
        if (before.get(name) or None) != (after.get(name) or None)
    ]


def first_differing_input(inputs: Mapping[str, Mapping[str, NDArray[Any]]]) -> str:
    """Say which input is not the same in all runs, given by label; empty where every bit is."""
    labels = list(inputs)
    for label in labels[1:]:
        one, other = inputs[labels[0]], inputs[label]
        for name in sorted(one.keys() | other.keys()):
            if name not in one or name not in other or not _equal(one[name], other[name]):
                return f"the input {name} differs ({labels[0]} and {label})"
    return ""


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _show(value: object) -> str:
    text = "nothing" if value in (None, {}, []) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
