"""The bundled corpus: reading it takes most of a second, once in a process."""

from __future__ import annotations

from functools import cache

from attncheck.reading.selection import CaseSelection, select_cases


@cache
def bundled() -> CaseSelection:
    """Return all that is bundled."""
    return select_cases()
