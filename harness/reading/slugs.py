"""Names as they stand in ids."""

from __future__ import annotations

import re


def slug(name: str) -> str:
    """Return a case's name, or what is added to it, as it stands in an id."""
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")
