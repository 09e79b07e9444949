"""Worker processes of the fuzzing campaign: each takes its share of the inputs, within limits of time and memory.

An input that takes too long is stopped by an alarm in its worker. The parent finds an input that the alarm does not
stop, or that ends its worker, and starts a new worker for the inputs after it.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attncheck.common.store import CACHE_VARIABLE

SECONDS = 5.0
"""Processor time that an input may take: on a busy machine, its time by the clock says nothing about the reader."""
_WAITING = 60.0
"""Time by the clock that an input may take: a reader of a pipe waits, and uses no processor time."""
_GRACE = 10.0
"""So much longer, and the alarm does not reach the worker any more."""
_WRITING = frozenset({"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"})
_RUNNING = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "ctypes.dlopen")


@dataclass
class Tally:
    """What became of the inputs of one target."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, str]] = field(default_factory=list)
    """Number of an input, and what it did: a traceback, too slow, died."""
    slowest: tuple[float, int] = (0.0, -1)
    peak_bytes: int = 0
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        """How many there were."""
        return sum(self.outcomes.values())


class _TooSlowError(BaseException):
    """An input ran past its time; not an Exception, so that nothing takes it for its own."""


def make_input(target: str, seed: int, number: int, folder: Path) -> None:
    """Make input number n of a seed in an empty folder."""
    import fuzz_targets

    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # of what is hostile because it is deep, the readers are to hear, not its maker
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the maker's own, of members of one name for instance
            fuzz_targets.TARGETS[target].make(folder, random.Random(f"{seed} {target} {number}"))
    finally:
        sys.setrecursionlimit(usual)


def run_target(target: str, seed: int, inputs: int, processes: int, gib: float, output: Path) -> Tally:
    """Take all inputs of a target; what fails is kept under ``output``."""
    context, tally, begun = mp.get_context("forkserver"), Tally(), time.monotonic()
    waiting = [iter(range(share, inputs, processes)) for share in range(processes)]
    workers = [_Worker(context, target, seed, list(share), gib) for share in waiting]
    reported = time.monotonic()
    while workers:
        for worker in list(workers):
            for message in worker.messages():
                _count(tally, message, target, seed, output)
            if worker.is_done:
                workers.remove(worker)
            elif died := worker.died():
                _count(tally, died, target, seed, output)
                worker.restart()
        time.sleep(0.05)
        if time.monotonic() - reported > 30:
            reported = time.monotonic()
            print(
                f"{target}: {tally.inputs:,} of {inputs:,}, {len(tally.findings)} findings", file=sys.stderr, flush=True
            )
    tally.seconds = time.monotonic() - begun
    return tally


def _count(tally: Tally, message: Any, target: str, seed: int, output: Path) -> None:
    outcomes, findings, slowest, peak = message
    tally.outcomes.update(outcomes)
    tally.slowest = max(tally.slowest, slowest)
    tally.peak_bytes = max(tally.peak_bytes, peak)
    for number, reported in findings:
        tally.findings.append((number, reported))
        folder = output / "findings" / f"{target}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "input").mkdir(parents=True)
        (folder / "what.txt").write_text(reported, encoding="utf-8", errors="replace")
        with suppress(Exception):  # where this ended the worker, it was seen there
            make_input(target, seed, number, folder / "input")


class _Worker:
    """One process, begun anew behind an input that it does not survive."""

    def __init__(self, context: Any, target: str, seed: int, numbers: list[int], gib: float) -> None:
        self._context, self._arguments, self._numbers = context, (target, seed, gib), numbers
        self._now = context.Array("d", [-1.0, 0.0], lock=False)  # which input, begun when
        self._begin()

    def _begin(self) -> None:
        self._pipe, end = self._context.Pipe(duplex=False)
        self._process = self._context.Process(target=_work, args=(*self._arguments, self._numbers, self._now, end))
        self._process.start()
        end.close()
        self._said_bye = False

    def messages(self) -> Iterator[Any]:
        try:
            while self._pipe.poll():
                message = self._pipe.recv()
                if message is None:
                    self._said_bye = True
                else:
                    yield message
        except EOFError:
            return

    @property
    def is_done(self) -> bool:
        return self._said_bye

    def died(self) -> Any:
        """Return the finding of an input that ended its worker, or that does not end; None while all is well."""
        number, begun = int(self._now[0]), self._now[1]
        if number < 0 and not self._process.is_alive():
            raise RuntimeError(f"a worker ended before its first input: exit code {self._process.exitcode}")
        stuck = number >= 0 and begun > 0 and time.monotonic() - begun > _WAITING + _GRACE
        if not stuck and self._process.is_alive():
            return None
        if stuck:
            self._process.kill()
        self._process.join()
        what = "does not end, and hears no alarm" if stuck else f"ended its worker: exit code {self._process.exitcode}"
        kind = "over 5 s" if stuck else "died"
        return Counter({kind: 1}), [(number, f"{kind}: {what}\n")], (_WAITING + _GRACE if stuck else 0.0, number), 0

    def restart(self) -> None:
        self._numbers = [number for number in self._numbers if number > int(self._now[0])]
        self._now[0], self._now[1] = -1.0, 0.0
        self._begin()


def _work(target: str, seed: int, gib: float, numbers: list[int], now: Any, pipe: Any) -> None:
    """Take inputs one by one, and say every so often what became of them."""
    import fuzz_targets

    of_target = fuzz_targets.TARGETS[target]
    limit = int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    warnings.simplefilter("error")  # what would be printed on somebody's terminal is a finding too
    folder = Path(tempfile.mkdtemp(prefix="attncheck-fuzz-"))
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    (folder / "warm").mkdir()
    of_target.warm(folder / "warm")
    guard = _Guard(folder)
    for timer in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(timer, _alarm)
    outcomes: Counter[str] = Counter()
    findings: list[tuple[int, str]] = []
    slowest, reported = (0.0, -1), time.monotonic()
    try:
        for number in numbers:
            place = folder / "input"
            place.mkdir()
            now[0] = number
            make_input(target, seed, number, place)
            now[1], begun = time.monotonic(), time.process_time()
            outcome, finding = _take(of_target, place, guard)
            seconds, now[1] = time.process_time() - begun, 0.0
            slowest = max(slowest, (seconds, number))
            outcomes[outcome] += 1
            if finding:
                findings.append((number, finding))
            shutil.rmtree(place)
            if time.monotonic() - reported > 1 or finding:
                pipe.send((outcomes, findings, slowest, _peak()))
                outcomes, findings, reported = Counter(), [], time.monotonic()
        pipe.send((outcomes, findings, slowest, _peak()))
        pipe.send(None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take(of_target: Any, place: Path, guard: _Guard) -> tuple[str, str]:
    """Take one input; return what became of it, and the finding if it is one."""
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, _WAITING)
        with guard:
            outcome: str = of_target.take(place)
    except _TooSlowError:
        return "over 5 s", "over 5 s:\n" + traceback.format_exc()
    except Exception:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    if guard.seen:
        return "ran or wrote", f"ran or wrote: {guard.seen}\n"
    return outcome, ""


def _alarm(*_: object) -> None:
    raise _TooSlowError


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _is_for_writing(opened: tuple[Any, ...]) -> bool:
    """Report whether a path is opened to write: by ``open`` with a mode, or ``os.open`` with flags alone.

    A descriptor is no path. It was opened by one of the two.
    """
    path, mode, flags = opened
    return not isinstance(path, int) and bool(set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR))


class _Guard:
    """Notes what Python does while an input is taken that reading a file never needs: processes, files elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._active = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def __enter__(self) -> None:
        self.seen = []
        self._active = True

    def __exit__(self, *_: object) -> None:
        self._active = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event.startswith(_RUNNING):
            self.seen.append(f"{event} {arguments!r:.200}")
        writes = event in _WRITING or (event == "open" and _is_for_writing(arguments))
        if writes and not str(arguments[0]).startswith(self._folder):
            self.seen.append(f"{event} {arguments!r:.200}")
