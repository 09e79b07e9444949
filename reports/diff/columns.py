"""The columns of a difference's frames: what each means, and which frame has which, in order."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

DIFF_COLUMNS: Mapping[str, str] = {
    "environment": "label of the run, of both where they have different ones",
    "implementation": "backend and mode",
    "case": "id of the case",
    "dtype": "working dtype of inputs and results",
    "stage": "named intermediate, or derived quantity",
    "change": "of verdicts worse, better or other; of errors grew or shrank; else added, removed, changed",
    "before": "verdict, version or value in the first results; empty where there is none",
    "after": "the same in the second",
    "before_stage": "where it began to go wrong in the first results; empty where nothing failed",
    "after_stage": "the same in the second",
    "case_changed": "whether the two results mean different cases by this id, so that errors were not compared",
    "message": "what is wrong now, in words, or what was wrong before",
    "measure": "accumulated: against the exact answer; introduced: by the step from the implementation's own stage",
    "before_z": "largest error in units of its statistical scale, in the first results",
    "after_z": "the same in the second",
    "before_ratio": "largest error over its bound, in the first results; 1 is the limit",
    "after_ratio": "the same in the second",
    "before_tier": "within, warning (noisy), statistical or proven (wrong), in the first results",
    "after_tier": "the same in the second",
    "verdict": "one word: docs/reference/verdicts.md",
    "before_cases": "in how many cases the expected failure happened in the first results",
    "after_cases": "the same in the second",
    "reason": "why the failure is expected",
    "thread": "where that is discussed",
    "failing": "evaluations of the case that fail: of a removed case in the first results, else in the second",
    "what": "what of it differs",
}

VERDICT_CHANGES = (
    "change",
    "environment",
    "implementation",
    "case",
    "dtype",
    "before",
    "before_stage",
    "after",
    "after_stage",
    "case_changed",
    "message",
)
ERROR_CHANGES = (
    "change",
    "environment",
    "implementation",
    "case",
    "dtype",
    "stage",
    "measure",
    "before_z",
    "after_z",
    "before_ratio",
    "after_ratio",
    "before_tier",
    "after_tier",
)
KNOWN_CHANGES = (
    "change",
    "environment",
    "implementation",
    "verdict",
    "stage",
    "before_cases",
    "after_cases",
    "reason",
    "thread",
)
CASE_CHANGES = ("change", "case", "failing", "what")
ENVIRONMENT_CHANGES = ("change", "environment", "what", "before", "after")

_NUMBERS = {
    **dict.fromkeys(("before_z", "after_z", "before_ratio", "after_ratio"), "float64"),
    **dict.fromkeys(("before_cases", "after_cases", "failing"), "int64"),
    "case_changed": "bool",
}


def typed(frame: pd.DataFrame, columns: tuple[str, ...]) -> pd.DataFrame:
    """Return the columns in order and in their types, also where there is no row to tell them from."""
    return frame[list(columns)].astype({name: _NUMBERS.get(name, "str") for name in columns}).reset_index(drop=True)
