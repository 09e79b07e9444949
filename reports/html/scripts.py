"""The standalone scripts that a results directory may hold: scripts/index.json names one per cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from attncheck.errors import ResultsError
from attncheck.reports.frames import Column
from attncheck.reports.html.anchors import slug
from attncheck.results.format import SCRIPTS_FOLDER
from attncheck.results.records import read_json

_MAX_BYTES = 100_000
"""A script that is larger holds large inputs: `attncheck repro` writes it again."""


@dataclass(frozen=True)
class Script:
    """A script: its file name and its text."""

    name: str
    text: Markup


class Scripts:
    """Reads scripts until the budget is spent."""

    def __init__(self, directories: Mapping[str, Path], most: int) -> None:
        self._folders = {label: directory / SCRIPTS_FOLDER for label, directory in directories.items()}
        self._names = {label: _index(folder) for label, folder in self._folders.items()}
        self._left = most

    def of(self, case: str, dtype: str, column: Column) -> Script | None:
        """Return the script of a cell, if there is one."""
        name = self._names.get(column.environment, {}).get(f"{case}|{column.implementation}|{dtype}")
        if name is None or self._left <= 0:
            return None
        path = self._folders[column.environment] / name
        try:
            # A link could show any file of whoever makes the report.
            if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_BYTES:
                return None
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        self._left -= len(text)
        return Script(f"{slug(f'{case} {column.implementation} {dtype}')}.py", _as_text(text))


def _as_text(text: str) -> Markup:
    """Escape a text that stands between tags: there quotes, of which scripts have many, are harmless."""
    return Markup(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _index(folder: Path) -> dict[str, str]:
    """Read which file belongs to which cell; names that lead elsewhere are left out."""
    try:
        content = read_json(folder / "index.json") or {}
    except ResultsError:
        return {}
    return {key: name for key, name in content.items() if isinstance(name, str) and name and Path(name).name == name}
