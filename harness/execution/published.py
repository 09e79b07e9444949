"""The implementations that installed packages publish."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

ENTRY_POINTS = "attncheck.implementations"
"""The group of entry points: ``[project.entry-points."attncheck.implementations"]``."""


def published() -> dict[str, EntryPoint]:
    """Return the implementations that installed packages publish in the entry point group, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
