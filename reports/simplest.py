"""Failing cases from the simplest to the most involved, each with its shape and what it probes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from attncheck.reading.shapes import axis_lengths, lengths_text
from attncheck.reports.frames import Frames
from attncheck.spec import OPERATIONS, Options, inputs_of

Record = Mapping[str, Any]


def simplest_first(frames: Frames, wrong: pd.DataFrame) -> pd.DataFrame:
    """Sort what is wrong with implementations by its cases; what is wrong with documents and records comes last."""
    if wrong.empty:
        return wrong
    order = {case: simplicity(frames.cases[case]) for case in wrong["case"].unique()}
    keys = [
        (not (implementation and dtype), *(order[case] if implementation and dtype else (0, 0)))
        for case, implementation, dtype in zip(wrong["case"], wrong["implementation"], wrong["dtype"], strict=True)
    ]
    return wrong.iloc[sorted(range(len(keys)), key=keys.__getitem__)].reset_index(drop=True)


def simplicity(case: Record) -> tuple[int, int]:
    """Sort key of a case record: how many elements its inputs have, then how much is given that need not be."""
    return sum(math.prod(shape) for shape in case["inputs"].values()), len(given_of(case))


def given_of(case: Record) -> list[str]:
    """Return the options and inputs of a case record that need not be given, by name."""
    options = case["options"]
    optional = () if case["operation"] not in OPERATIONS else _optional(case)
    return [
        *(name for name in Options.__dataclass_fields__ if options.get(name) not in (None, False)),
        *(name for name in case["inputs"] if name in optional),
    ]


def _optional(case: Record) -> list[str]:
    score = case["options"].get("score")
    try:
        return [name for name, spec in inputs_of(case["operation"], score).items() if not spec.required]
    except (KeyError, TypeError):  # a record that somebody else wrote
        return []


def lengths_of(case: Record) -> dict[str, int]:
    """Return the length of every axis of a case record; empty where nothing is known of its shapes."""
    if case["operation"] not in OPERATIONS:
        return {}
    return axis_lengths(
        case["operation"], case["options"], {name: tuple(shape) for name, shape in case["inputs"].items()}
    )


def shape_text(case: Record) -> str:
    """Write the shape of a case record: B=1 H=4 Hkv=2 Lq=3 Lk=5 D=8."""
    return lengths_text(lengths_of(case))


def described(case: Record) -> str:
    """Say what shape a case record has, and what it probes."""
    probes = f"probes {', '.join(case['tags'])}" if case["tags"] else ""
    return "; ".join(filter(None, (shape_text(case), probes)))
