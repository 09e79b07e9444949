"""Where a callable was written that is handed over as an object: so it is called as the same one named by its file."""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from typing import Any

from attncheck.execution.user_code import name_of


@dataclass(frozen=True)
class Origin:
    """A module, and what the callable is called there."""

    module: str
    function: str

    @property
    def package(self) -> str:
        """What reports call it before the dot; what was written nowhere in particular is somebody's ``own``."""
        return name_of(self.module) if self.module else "own"


def origin_of(target: Any) -> Origin:
    """Say where a callable comes from: its module, and its name there, which a decorator or an alias may have given."""
    written = innermost(target)
    name = str(getattr(written, "__name__", type(written).__name__))
    module = getattr(written, "__module__", None)
    module = module if isinstance(module, str) else ""
    if not module.startswith("__main__"):
        there = vars(sys.modules[module]) if module in sys.modules else {}
        if there.get(name) is not target:
            name = next((each for each, value in there.items() if value is target and each.isidentifier()), name)
        return Origin(module, name)
    file = getattr(sys.modules.get(module), "__file__", None)
    return Origin(file if isinstance(file, str) and file.endswith(".py") else "", name)


def innermost(target: Any) -> Any:
    """Return the function that somebody wrote, inside what was put around it."""
    while isinstance(target, functools.partial):
        target = target.func
    return inspect.unwrap(target) if callable(target) else target
