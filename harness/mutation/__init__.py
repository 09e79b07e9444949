"""Faulty and right variants of the NumPy backend, and how well the cases distinguish the two.

Here a variant is a line of the table of backends, so that the harness runs it in a worker like any framework. Nothing
that imports NumPy may be imported: a worker that unpickles an entry has not limited its threads yet.
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


def variant_entry(name: str) -> VariantEntry:
    """Return the entry of a variant, by its name in the catalogue."""
    return VariantEntry(name, _CATALOGUE, ("numpy",))
