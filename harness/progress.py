"""Progress on a terminal; nothing in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(*, visible: bool) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows evaluations done and planned, on standard error if that is a terminal."""
    console = Console(stderr=True)
    if not (visible and console.is_terminal):
        yield lambda _done, _total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("evaluations", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
