"""What is judged: a backend in a mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.harness.errors import UsageError


@dataclass(frozen=True)
class Implementation:
    """A backend in a mode. The only mode so far is eager: the operations called one after the other."""

    entry: BackendEntry
    mode: str = "eager"

    def numerical_class(self, dtype: str) -> str:
        """Return the numerical class that is declared for a dtype: which roundings are allowed.

        Operations called one after the other store every intermediate; in float64 and float32 that is the native class.
        """
        return "native" if dtype in ("float64", "float32") else self.mode

    @property
    def name(self) -> str:
        """The name in every report, such as torch.eager."""
        return f"{self.entry.name}.{self.mode}"


@dataclass(frozen=True)
class Chosen:
    """The implementations that can run, and the backends that cannot, each with the reason.

    ``missing`` were asked for by name and are not installed, ``left_out`` were not asked for and are not installed.
    """

    implementations: tuple[Implementation, ...]
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def choose_implementations(names: Sequence[str] | None, table: Mapping[str, BackendEntry] = BACKENDS) -> Chosen:
    """Choose the backends with these names, or every installed one. Raises ``UsageError`` for an unknown name."""
    unknown = [name for name in names or () if name not in table]
    if unknown:
        raise UsageError(f"unknown backend {unknown[0]!r}; expected {', '.join(table)}")
    wanted = [entry for entry in table.values() if not names or entry.name in names]
    absent = tuple(entry.name for entry in wanted if not entry.is_installed)
    return Chosen(
        implementations=tuple(Implementation(entry) for entry in wanted if entry.is_installed),
        left_out=() if names else absent,
        missing=absent if names else (),
    )
