"""What a worker prints: a file of which each evaluation's share is known, and which does not grow without end."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from attncheck.errors import OutputError
from attncheck.execution.worker import clean

_KEPT = 2**12
_MIN_SPACE = 2**16
_LAST_LINES = 3
_FATAL = "Fatal Python error"
"""Python's own last words; the lines after it say where, the innermost first."""
_LONGEST = 300


class Log:
    """The file that a worker's standard output and standard error go to."""

    def __init__(self, path: Path, most: int) -> None:
        """``most`` bytes are kept of what was printed before."""
        self.path = path
        self._most = most
        self._begun = 0

    def begin(self) -> None:
        """What is printed from now on belongs to another evaluation than what was printed before."""
        if self._size() > self._most:
            self._shorten()
        self._begun = self._size()

    def printed(self) -> int:
        """Return how many bytes have been printed since ``begin``."""
        return max(self._size() - self._begun, 0)

    def last_words(self) -> str:
        """Return what was printed last since ``begin``, to be put behind a reason; empty where nothing was."""
        lines = [line for line in self._end().splitlines() if line.strip()]
        fatal = next((number for number, line in enumerate(lines) if line.startswith(_FATAL)), None)
        if fatal is None:
            last = lines[-_LAST_LINES:]
        else:
            line_of = next((line for line in lines[fatal:] if line.lstrip().startswith("File ")), None)
            last = [*lines[:fatal][1 - _LAST_LINES :], " at ".join(filter(None, (lines[fatal], line_of)))]
        if not last:
            return ""
        text = " | ".join(clean(line[-_LONGEST:]) for line in last)
        cut = text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"
        return f"; its last line{'s' * (len(last) > 1)}: {cut}"

    def require_writable(self) -> None:
        """Raise ``OutputError`` where a worker could not open the file."""
        try:
            self.path.open("ab").close()
        except OSError as error:
            raise OutputError.of(self.path, error) from None

    def require_space(self) -> None:
        """Raise ``OutputError`` where the disk is full: of what cannot print then, that is the reason and no other."""
        with suppress(OSError):
            if shutil.disk_usage(self.path.parent).free < _MIN_SPACE:
                raise OutputError.of(self.path, OSError(errno.ENOSPC, ""))

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _end(self) -> str:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begun = self._begun if self._begun <= size else 0
                file.seek(max(begun, size - _KEPT))
                return file.read(_KEPT).decode("utf-8", errors="replace")
        except OSError:
            return ""

    def _shorten(self) -> None:
        """Keep the end of a log that grew too long: the worker writes on behind it."""
        with suppress(OSError):
            with self.path.open("rb") as file:
                file.seek(-min(_KEPT, self._size()), os.SEEK_END)
                end = file.read()
            self.path.write_bytes(b"[what was printed before is left out]\n" + end)
