"""The command with three backends of the folder, which notes when something was judged: test_cli.py."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.cli import main
from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter

add_rows = ResultsWriter.add_rows


def add_and_note(writer: ResultsWriter, rows: Iterable[Row]) -> None:
    add_rows(writer, rows)
    Path("judged").touch()


ResultsWriter.add_rows = add_and_note
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
BACKENDS.clear()
for name in ("first", "second", "slow"):
    BACKENDS[name] = BackendEntry(name, name + "_backend", ("numpy",))
main()
