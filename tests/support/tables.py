"""Tables of tests as data: ``tables.yaml`` beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def tables_beside(file: str) -> dict[str, Any]:
    """Return the tables of a test file's folder, by their names."""
    return dict(yaml.load(Path(file).with_name("tables.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader))
