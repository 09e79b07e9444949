"""Progress of a run, and the time that it takes.

On a terminal standard error has a bar, and failures as they happen, else a line every few seconds. The seconds of
processes side by side are added up, by what was done in them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Protocol

from attncheck.common.wording import join_words

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_PER_LINE = 5.0
"""Between two lines if there is no terminal; a shorter run prints none. A choice: a log of an hour has 720 lines."""
MAX_FAILURES_SHOWN = 20
"""Failures that are shown one by one, as many as the summary lists; the others are counted."""


class WatchedExecutor(Protocol):
    """The part of an executor that a progress display reads while the run goes on."""

    @property
    def starting_frameworks(self) -> Sequence[str]:
        """The names of the frameworks that workers import at the moment."""

    @property
    def calls_left(self) -> Mapping[str, int]:
        """The number of calls of each implementation that have not returned yet; empty if it is not known."""


class ProgressWatcher:
    """Receives the progress of a run; this class shows nothing."""

    def watch_executor(self, executor: WatchedExecutor) -> None:
        """Take note of the executor of the run."""

    def update(self, done: int, total: int) -> None:
        """Take note of the number of evaluations that are done, and of all."""

    def report_failure(self, line: str, *, is_shown: bool = True) -> None:
        """Take note of a failing evaluation; subclasses may show it."""


_MIN_SHARE_FOR_ESTIMATE = 0.05
"""The part of a run that has to be done before its rate is shown: the first evaluations wait for imports."""


class RemainingTime:
    """Estimates the seconds that a run still takes: the longest of each implementation's calls left over its own pace.

    One pace for all would be wrong: an implementation that compiles each case takes a hundred times as long per call,
    and is alone at the end. The pace of an implementation is measured from the first look at which a call of it has
    returned, so that its start does not count.
    """

    def __init__(self) -> None:
        self._at_start: dict[str, int] = {}
        self._first: dict[str, tuple[float, int]] = {}

    def estimate(self, now: float, calls_left: Mapping[str, int]) -> float | None:
        """Return the seconds left; None if the pace of an implementation that has calls left is not known yet.

        Example:
            >>> remaining = RemainingTime()
            >>> [remaining.estimate(now, {"slow": 100 - now, "fast": 100 - 50 * now}) for now in (0, 1, 2)]
            [None, None, 98.0]
        """
        seconds, is_known = 0.0, True
        for name, left in calls_left.items():
            if left < self._at_start.setdefault(name, left):
                began, left_then = self._first.setdefault(name, (now, left))
                is_known = is_known and (left < left_then or not left)
                seconds = max(seconds, left * (now - began) / max(left_then - left, 1))
            elif left:
                is_known = False
        return seconds if is_known else None


@dataclass
class ProgressLines(ProgressWatcher):
    """Passes lines of progress to ``write``, if there is no terminal.

    The pace is measured from the first evaluation that is done, so that starting workers does not count.
    """

    write: Callable[[str], None]
    clock: Callable[[], float] = monotonic
    done: int = 0
    total: int = 0
    failures: int = 0
    executor: WatchedExecutor | None = None
    _begun: tuple[int, float] | None = None
    _remaining: RemainingTime = field(default_factory=RemainingTime)

    def watch_executor(self, executor: WatchedExecutor) -> None:
        """Take note of the executor of the run."""
        self.executor = executor

    def update(self, done: int, total: int) -> None:
        """Take note of the progress of the run."""
        self.done, self.total = done, total
        if done and self._begun is None:
            self._begun = (done, self.clock())

    def report_failure(self, line: str, *, is_shown: bool = True) -> None:
        """Count a failure."""
        self.failures += 1

    def write_progress(self) -> None:
        """Write the progress of the run until all is done: frameworks that are imported, evaluations, the time left."""
        starting = describe_starting(self.executor)
        now = self.clock()
        calls_left = {} if self.executor is None else self.executor.calls_left
        left = self._remaining.estimate(now, calls_left)
        if self._begun is None:
            if starting:
                self.write(f"attncheck: {starting}")
            return
        if self.done == self.total:
            return
        parts = [f"{self.done:,} of {self.total:,} evaluations", f"{self.failures:,} failing"]
        seconds, made = now - self._begun[1], self.done - self._begun[0]
        if made >= _MIN_SHARE_FOR_ESTIMATE * self.total and seconds > 0:
            rate = made / seconds
            parts += [f"{rate:,.0f} a second" if rate >= 10 else f"{rate:.2g} a second"]
            left = left if calls_left else (self.total - self.done) / rate
            parts += [] if left is None else [f"{format_duration(left)} left"]
        self.write(f"attncheck: {', '.join([*parts, *([starting] if starting else [])])}")


def describe_starting(executor: WatchedExecutor | None) -> str:
    """Return words for the frameworks that are being imported: ``starting torch and jax ...``; empty for none."""
    frameworks = executor.starting_frameworks if executor else ()
    return f"starting {join_words(frameworks)} ..." if frameworks else ""


def format_duration(seconds: float) -> str:
    """Write a time as people do: 42 s, 3:07 min, 1:02 h.

    Example:
        >>> format_duration(42), format_duration(187), format_duration(3720)
        ('42 s', '3:07 min', '1:02 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    small, unit = (whole, "min") if whole < 3600 else (round(whole / 60), "h")
    return f"{small // 60}:{small % 60:02} {unit}"


class ProgressBar(ProgressWatcher):
    """Shows a bar on a terminal, and the first failures above it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("evaluations", total=None, failures=0, executor=None)
        self._failures = self._shown = 0

    def watch_executor(self, executor: WatchedExecutor) -> None:
        """Show the frameworks that are being imported, or the time left, after the bar."""
        self._progress.update(self._task, executor=executor)

    def update(self, done: int, total: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, total=total)

    def report_failure(self, line: str, *, is_shown: bool = True) -> None:
        """Show a failure above the bar, or say once that the others are counted."""
        self._failures += 1
        self._progress.update(self._task, failures=self._failures)
        if not is_shown:
            return
        self._shown += 1
        if self._shown <= MAX_FAILURES_SHOWN:
            self._progress.console.print(line, style="red", soft_wrap=True)
        elif self._shown == MAX_FAILURES_SHOWN + 1:
            self._progress.console.print("further failures are only counted", soft_wrap=True)


@contextmanager
def show_progress(*, visible: bool) -> Iterator[ProgressWatcher]:
    """Yield the watcher of a run's progress; it shows nothing unless it is ``visible``."""
    if not visible:
        yield ProgressWatcher()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    remaining = RemainingTime()

    class TimeLeft(TimeRemainingColumn):
        """The frameworks that are being imported, or the remaining time, as soon as it can be estimated."""

        def render(self, task: Task) -> Text:
            executor: WatchedExecutor | None = task.fields["executor"]
            if starting := describe_starting(executor):
                return Text(starting)
            calls_left = executor.calls_left if executor else {}
            left = remaining.estimate(monotonic(), calls_left)
            if task.percentage < 100 * _MIN_SHARE_FOR_ESTIMATE:
                return Text()
            if calls_left:
                return Text("" if left is None else f"{format_duration(left)} left")
            return super().render(task)

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if console.is_terminal and sys.stderr.isatty():  # FORCE_COLOR makes no terminal of a file
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failures]} failing"),
            TimeElapsedColumn(),
            TimeLeft(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            yield ProgressBar(progress)
        return
    lines = ProgressLines(_print_to_stderr)
    with _call_periodically(SECONDS_PER_LINE, lines.write_progress):
        yield lines


def _print_to_stderr(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _call_periodically(seconds: float, tick: Callable[[], None]) -> Iterator[None]:
    """Call ``tick`` periodically in a thread, also while an evaluation hangs."""
    is_over = Event()

    def repeat() -> None:
        while not is_over.wait(seconds):
            tick()

    thread = Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


ARITHMETIC_COUNTS: Counter[str] = Counter()
"""How many exact stages double words settled in this process, and how many went on to balls, since it was cleared."""


@dataclass(frozen=True)
class ActivityTimes:
    """Seconds by activity, in the order in which each began first, and the number of programs that it compiled."""

    seconds: dict[str, float] = field(default_factory=dict)
    programs: dict[str, int] = field(default_factory=dict)
    _adding: Lock = field(default_factory=Lock, repr=False, compare=False)

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Count the time that something takes."""
        begun = perf_counter()
        try:
            yield
        finally:
            self.add_seconds(activity, perf_counter() - begun)

    def add_seconds(self, activity: str, seconds: float, programs: int = 0) -> None:
        """Count seconds that were measured elsewhere, and the programs that were compiled in them."""
        with self._adding:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds
            self.programs[activity] = self.programs.get(activity, 0) + programs

    def __str__(self) -> str:
        """Return the activities that took a tenth of a second or more, in words.

        Example:
            >>> times = ActivityTimes()
            >>> times.add_seconds("compiling jax.jit", 51.2, programs=120)
            >>> times.add_seconds("report", 1.3)
            >>> str(times)
            'compiling jax.jit 51.2 s (120 programs), report 1.3 s'
        """
        counts = {what: f" ({programs:,} programs)" for what, programs in self.programs.items() if programs}
        return ", ".join(
            f"{what} {seconds:.1f} s{counts.get(what, '')}" for what, seconds in self.seconds.items() if seconds >= 0.05
        )
