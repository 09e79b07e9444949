"""One variant as a line of the table of backends, so that the harness runs it in a worker like any framework.

NumPy is not imported here: the entry reaches the worker before its threads are limited.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

from attncheck.backends import BackendEntry
from attncheck.backends.contract import Backend

_CATALOGUE = "attncheck.mutation.catalogue"


@dataclass(frozen=True)
class VariantEntry(BackendEntry):
    """The variant of the catalogue that has the entry's name."""

    def load(self, mode: str = "eager") -> Backend:
        """Import the catalogue and return the variant."""
        return cast(Backend, import_module(self.module).variant_named(self.name))


def entry_of(name: str) -> VariantEntry:
    """Return the entry of a variant, by its name in the catalogue."""
    return VariantEntry(name, _CATALOGUE, ("numpy",))
