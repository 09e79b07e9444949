"""Which files a watched check depends on, and when one of them is saved: looked at again and again, nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

SECONDS_BETWEEN = 0.2
"""Between two looks at the files."""
SECONDS_AT_REST = 0.1
"""For so long nothing may change before a save counts as done: editors write in several steps."""
SECONDS_AWAY = 5.0
"""For so long a file that was there may be missing: some editors rename it away before they write it again."""
_MAX_FILES = 500
_CASE_FILES = ("*.yaml", "*.yml")

State = tuple[int, int, int] | None
"""When a file was modified, its size and its number on the disk; None where there is none."""
States = Mapping[Path, State]


def state_of(path: Path) -> State:
    """Look at a file without opening it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def changed(before: States, now: States) -> list[Path]:
    """Return the files that are new, gone or not what they were."""
    return sorted(path for path in {*before, *now} if before.get(path) != now.get(path))


@dataclass
class WatchedFiles:
    """The files of kernels, what they import from their own folders, and files and folders of cases."""

    kernels: Sequence[Path]
    cases: Sequence[Path] = ()
    _imported: dict[Path, tuple[State, tuple[Path, ...]]] = field(default_factory=dict)

    def states(self) -> States:
        """Look at all files: which they are may have changed, too."""
        found = {path: state_of(path) for path in self._case_files()}
        for kernel in self.kernels:
            waiting = [kernel]
            while waiting and len(found) < _MAX_FILES:
                path = waiting.pop()
                if path not in found:
                    found[path] = state_of(path)
                    waiting += self._imports(path, found[path], kernel.parent)
        return found

    def wait(self, before: States, pause: Callable[[float], None] = sleep) -> tuple[list[Path], States]:
        """Wait until something is not as it was ``before`` and is at rest; return what changed, and how all is now."""
        while not changed(before, now := self.states()):
            pause(SECONDS_BETWEEN)
        begun = monotonic()
        while True:
            pause(SECONDS_AT_REST)
            earlier, now = now, self.states()
            is_away = any(now.get(path) is None and before.get(path) is not None for path in self.kernels)
            if earlier == now and not (is_away and monotonic() - begun < SECONDS_AWAY):
                # A file that was written back as it was is no change after all.
                return (found, now) if (found := changed(before, now)) else self.wait(before, pause)

    def _case_files(self) -> Iterator[Path]:
        for path in self.cases:
            if path.is_dir():
                yield from (found for pattern in _CASE_FILES for found in path.rglob(pattern))
            else:
                yield path

    def _imports(self, path: Path, state: State, folder: Path) -> tuple[Path, ...]:
        """Return the files beside a kernel that one of its files imports; while it cannot be read, those of before."""
        known = self._imported.get(path)
        if known is not None and known[0] == state:
            return known[1]
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return known[1] if known else ()
        found = tuple(dict.fromkeys(_files_of(tree, path, folder)))
        self._imported[path] = (state, found)
        return found


def _files_of(tree: ast.AST, path: Path, folder: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from _files_called(folder, each.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            start = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            parts = node.module.split(".") if node.module else []
            for each in node.names:
                yield from _files_called(start, [*parts, each.name])


def _files_called(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Give the files that an import of a dotted name reads below a folder; the last part may be no module."""
    for part in parts:
        yield from (found for found in (folder / f"{part}.py", folder / part / "__init__.py") if found.is_file())
        folder /= part
