"""Where each run ran, fact by fact."""

from __future__ import annotations

from typing import Any

import pandas as pd

from attncheck.reports.frames import Frames

_SAID_ELSEWHERE = {"environment", "complete"}


def environment_facts(frames: Frames) -> list[tuple[str, list[str]]]:
    """Return each fact's name and its text in every environment; empty where it is not known."""
    environments = frames.environments
    return [
        (name.removeprefix("version_").replace("_", " "), [_text(value) for value in environments[name]])
        for name in environments.columns
        if name not in _SAID_ELSEWHERE
    ]


def _text(value: Any) -> str:
    if pd.isna(value):
        return ""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)
