"""Tables of tests as data: ``tables.yaml`` beside them, and case files that several have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CASES: dict[str, str] = yaml.load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def tables_beside(file: str) -> dict[str, Any]:
    """Return the tables of a test file's folder, by their names."""
    return dict(yaml.load(Path(file).with_name("tables.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader))
