"""Run problems in worker processes: one process per framework, with a time limit for each call.

A call reaches an implementation in these steps:

1. The runner pads the problem if the function requires certain shapes (``padding.py``). If no padding is exact, the
   outcome is ``unsupported``, and nothing is called.
2. The runner refuses problems whose scores do not fit into the worker's share of memory.
3. The runner starts a worker if there is none, or takes the process that read the function's declarations
   (``describing.py``). The worker imports the framework and loads the function once (``worker.py``).
4. The runner sends the problem through a pipe (``call.py``). While it waits, it checks the worker's memory and output.
5. The worker lays inputs out in memory, converts them to the framework's arrays, and calls the function
   (``operations.py``, ``user_call.py``). It checks for side effects, and restores the state of the process
   (``process_state.py``).
6. The worker sends the stages back as NumPy arrays. The runner strips the padding.

Implementations never run in the harness's process: they may crash, hang, print, or change the process. A process per
call would be safest, but a framework takes seconds to start. So a process serves many calls, and modes of one framework
share it. Each dtype that needs a separate process has one.

A worker that exceeds its time, dies, or takes too much memory is killed with all that it started, and the next
evaluation gets a new worker. No problem is evaluated twice, with one exception. If a call ends a process in which other
modes of its framework ran, it is evaluated again in a separate process, where no other mode is to blame, and its mode
stays there.

An implementation that kills its worker in every call costs a new worker, or a minute, each time. After ten equal ends
in a row (a crash or a timeout with the same reason), its remaining evaluations are not tried. An unsupported call does
not change the count; any other answer resets it.

The output of a worker goes to a file of limited size. The runner knows which part belongs to which evaluation.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Generic, TypeVar

from attncheck.backends import ALL_ENTRIES, Mode
from attncheck.common.errors import OutputError
from attncheck.common.progress import ActivityTimes
from attncheck.execution.call import (
    CallCancelled,
    CallTimeout,
    Limits,
    RemoteError,
    WorkerDied,
    WorkerProcess,
    process_tree_memory,
)
from attncheck.execution.describing import DescribedWorkers
from attncheck.execution.environment import with_cache_variables
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.padding import PaddedCall, pad_call, unsupported_before_call
from attncheck.execution.repeating import RepeatedCalls, repeat_calls
from attncheck.execution.sessions import EvaluatedSession, Session, StepResult, evaluate_session
from attncheck.execution.state_probe import StateProbe
from attncheck.execution.worker import (
    Computed,
    EvaluationReport,
    Failure,
    Outcome,
    evaluate_and_measure,
    start_implementation,
    to_one_line,
)
from attncheck.reading.case import Case
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.spec import STAGES_ON_SCORES, computed_stages
from attncheck.spec.verdicts import ALL_CASES

# A choice: more cost a new worker, or a time limit, each; fewer give up on a kernel that fails in a few cases.
MAX_EQUAL_CRASHES = 10
_VERDICTS_OF_ENDED_WORKERS = ("crash", "timeout")


@dataclass
class CrashStreak:
    """The number of times in a row that a worker has ended in the same way."""

    keep_going: bool = False
    _verdict: str = ""
    _reason: str = ""
    _count: int = 0

    def skipped_failure(self) -> Failure | None:
        """Return the failure of an evaluation that is skipped; None if it has to be tried."""
        if self.keep_going or self._count < MAX_EQUAL_CRASHES:
            return None
        return Failure(
            "untried",
            f"not tried: the {MAX_EQUAL_CRASHES} evaluations before ended the same way ({self._verdict}: "
            f"{self._reason}); --keep-going tries all",
        )

    def record_outcome(self, outcome: Outcome, reason: str) -> None:
        """Take note of an evaluation that was tried; ``reason`` is the part of its message that repeats."""
        if isinstance(outcome, Computed) or outcome.verdict not in (*_VERDICTS_OF_ENDED_WORKERS, "unsupported"):
            self._count = 0
        elif outcome.verdict in _VERDICTS_OF_ENDED_WORKERS:
            same = (outcome.verdict, reason) == (self._verdict, self._reason)
            self._verdict, self._reason, self._count = outcome.verdict, reason, self._count + 1 if same else 1


# A choice: a message quotes three lines, and a traceback fits; more bytes would only be read and thrown away.
_MAX_TAIL_BYTES = 2**12
# A choice: with less space, a failure is reported as that of a full disk; a larger number blames the disk too early.
_MIN_FREE_BYTES = 2**16
# A choice: more lines make a message longer; fewer may omit the cause, which often precedes the last line.
_MAX_LAST_LINES = 3
_FATAL_PREFIX = "Fatal Python error"
"""Python's own last words; the lines after it say where, the innermost first."""
# A choice: it bounds the quoted lines of a message; larger numbers make table cells longer.
_MAX_LINE_LENGTH = 300


class WorkerLog:
    """The file that a worker's standard output and standard error go to."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """``max_bytes`` bytes are kept of what was printed before."""
        self.path = path
        self._most = max_bytes
        self._begun = 0

    def mark_evaluation_start(self) -> None:
        """Record the file's size: the output from now on belongs to a new evaluation."""
        if self._size_in_bytes() > self._most:
            with suppress(OSError):  # keep the end of a log that grew too long: the worker writes on after it
                with self.path.open("rb") as file:
                    file.seek(-min(_MAX_TAIL_BYTES, self._size_in_bytes()), os.SEEK_END)
                    end = file.read()
                self.path.write_bytes(b"[what was printed before is left out]\n" + end)
        self._begun = self._size_in_bytes()

    def count_printed_bytes(self) -> int:
        """Return how many bytes this evaluation has printed."""
        return max(self._size_in_bytes() - self._begun, 0)

    def quote_last_lines(self) -> str:
        """Return the last lines of this evaluation, to be appended to a reason; empty if there are none."""
        lines = [line for line in self._read_tail().splitlines() if line.strip()]
        fatal = next((number for number, line in enumerate(lines) if line.startswith(_FATAL_PREFIX)), None)
        last = lines[-_MAX_LAST_LINES:]
        if fatal is not None:
            line_of = next((line for line in lines[fatal:] if line.lstrip().startswith("File ")), None)
            last = [*lines[:fatal][1 - _MAX_LAST_LINES :], " at ".join(filter(None, (lines[fatal], line_of)))]
        if not last:
            return ""
        text = " | ".join(to_one_line(line[-_MAX_LINE_LENGTH:]) for line in last)
        cut = text if len(text) <= _MAX_LINE_LENGTH else f"...{text[3 - _MAX_LINE_LENGTH :]}"
        return f"; its last line{'s' * (len(last) > 1)}: {cut}"

    def require_writable(self) -> None:
        """Raise ``OutputError`` if a worker could not open the file."""
        try:
            self.path.open("ab").close()
        except OSError as error:
            raise OutputError.from_os_error(self.path, error) from None

    def require_space(self) -> None:
        """Raise ``OutputError`` if the disk is full: of what cannot print then, that is the reason and no other."""
        with suppress(OSError):
            if shutil.disk_usage(self.path.parent).free < _MIN_FREE_BYTES:
                raise OutputError.from_os_error(self.path, OSError(errno.ENOSPC, ""))

    def _size_in_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _read_tail(self) -> str:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begun = self._begun if self._begun <= size else 0
                file.seek(max(begun, size - _MAX_TAIL_BYTES))
                return file.read(_MAX_TAIL_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return ""


Key = TypeVar("Key")
Answer = TypeVar("Answer")

_MAX_SESSION_LIMITS = 5
"""Times the limit of an evaluation that all calls of a session together may take."""
_MAX_RESTARTS = 3
"""So often in a row a worker that ran before is started again in vain."""
_NOT_IN_STANDARD = Failure(
    "unsupported", f"left out: it runs the standard cases; {ALL_CASES} runs every one", (ALL_CASES,)
)
_BUNDLED_MEMORY = 7 * 2**28
"""Bytes, above which a worker of a bundled framework is replaced: three of them fit into 6 GiB beside the harness."""
_MEMORY_AMOUNT = re.compile(r" [0-9.]+ (?=[GM]iB)")
"""The amount that a worker took too much of, which is another number every time."""


@dataclass(frozen=True)
class WorkerGroup:
    """One worker process: an implementation, and the dtypes that it can serve together."""

    implementation: Implementation
    dtypes: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for logs: the implementation and its dtypes."""
        return f"{self.implementation.name}-{'-'.join(self.dtypes)}"

    def runs_case(self, dtype: str, *, in_standard: bool) -> bool:
        """Return whether it serves a dtype, and others do not stand for the case that is meant."""
        return dtype in self.dtypes and (in_standard or not self.implementation.runs_only_standard_cases)

    @property
    def is_bundled(self) -> bool:
        """Return whether the table of backends has it, so that it holds a framework and what that compiled."""
        entry = self.implementation.entry
        return entry is ALL_ENTRIES.get(entry.name)

    @property
    def imports_framework(self) -> bool:
        """Return whether its worker imports a framework, which takes seconds; NumPy is there in any case."""
        return self.is_bundled and self.implementation.entry.packages[0] != "numpy"

    @property
    def process_key(self) -> tuple[str, ...]:
        """Return the key of groups that one process can serve."""
        entry = self.implementation.entry
        if not self.is_bundled or self.implementation.mode_declarations.own_process:
            return (self.name,)
        alone = (dtype for dtype in self.dtypes if dtype in entry.own_process_for)
        device = self.implementation.mode_declarations.device
        return (entry.name, *([device] if device else []), *alone)


def group_by_process(implementation: Implementation, dtypes: Sequence[str]) -> list[WorkerGroup]:
    """Split the dtypes of an implementation over the processes that they need."""
    alone = [dtype for dtype in dtypes if dtype in implementation.entry.own_process_for]
    together = tuple(dtype for dtype in dtypes if dtype not in alone)
    groups = [WorkerGroup(implementation, (dtype,)) for dtype in alone]
    return [*groups, WorkerGroup(implementation, together)] if together else groups


_MIN_SCORE_STAGES = 2
"""Scores, and the weights that are made of them."""


def refuse_too_many_scores(mode: Mode, problem: Problem, max_bytes: int) -> Failure | None:
    """Return why a mode is not asked for a problem: score matrices that it holds take more than ``max_bytes`` bytes.

    Counted are the stages of their shape that the operation computes, each of which modular code returns. Scores that
    are given as inputs are there already.
    """
    if not mode.stores_all_scores or "query" not in problem.inputs:
        return None
    elements = count_scores(problem.operation, problem.options, problem.inputs)
    computed = set(STAGES_ON_SCORES).intersection(computed_stages(problem.operation, problem.options, problem.inputs))
    stages = max(len(computed), _MIN_SCORE_STAGES)
    size = elements * problem.inputs["query"].dtype.itemsize * stages
    if size <= max_bytes:
        return None
    needed = f"would hold {elements:,} scores in {stages} stages, {size / 2**30:.1f} GiB"
    limit = f"a worker's share of the memory limit is {max_bytes / 2**30:.1f} GiB"
    return Failure("unsupported", f"{needed}; {limit}", ("more memory",))


class WorkerSlot:
    """The place of one worker process; the groups that share it come one after the other."""

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.process: WorkerProcess | None = None
        self.started: set[str] = set()

    def close(self) -> None:
        """End the process, and all that it started."""
        process, self.process = self.process, None
        self.started.clear()
        if process is not None:
            process.kill()


class GroupRunner(Generic[Key]):
    """Runs the problems of one group in its worker, one after the other; a failure is an outcome, not an end."""

    def __init__(
        self,
        group: WorkerGroup,
        limits: Limits,
        log_directory: Path,
        slot: WorkerSlot | None = None,
        described: DescribedWorkers | None = None,
        number: int = 1,
        *,
        probes_state: bool = False,
    ) -> None:
        """Make a runner, whose ``number`` is another one for each runner of a group.

        A worker in which the implementation was ``described`` is taken before another one is started. Where it is asked
        ``probes_state``, a user's function is called around some cases with one option or input changed.
        """
        self.group = group
        self._described = described
        self.description: dict[str, str] = {}
        self._limits = limits
        several = f"-{number}" if number > 1 else ""
        self._log = WorkerLog(log_directory / f"{group.name}{several}.txt", limits.max_output)
        self._slot = slot or WorkerSlot()
        self._starts_left = 1
        self._given_up: Failure | None = None
        self.is_stopped = False
        self.is_starting = False
        """True while the worker imports the framework and the implementation."""
        self._crash_limit = CrashStreak(limits.keep_going)
        self._end_reason = ""
        self._meanwhile: Callable[[], None] = lambda: None
        self.times = ActivityTimes()
        is_user = isinstance(group.implementation.entry, UserImplementation)
        self._state_probe = StateProbe(self._pad_and_evaluate, self._use_new_slot) if probes_state and is_user else None

    def stop(self) -> None:
        """Kill the worker; nothing more is reported."""
        self.is_stopped = True
        process = self._slot.process
        if process is not None:
            process.kill()

    def outcome_of_left_out_case(self, case: Case, dtype: str, problem: Callable[[], Problem]) -> Failure:
        """Return the outcome of a case that the implementation is not asked for, or could not do if it were."""
        implementation = self.group.implementation
        if lack := self.known_unsupported_outcome(case, dtype):
            return lack
        if not implementation.is_padded:
            return _NOT_IN_STANDARD
        padding = pad_call(implementation, problem())
        return padding if isinstance(padding, Failure) else _NOT_IN_STANDARD

    def known_unsupported_outcome(self, case: Case, dtype: str) -> Failure | None:
        """Return the outcome of a case that the implementation cannot be asked for, before its problem is made."""
        if not isinstance(self.group.implementation.entry, UserImplementation):
            return None
        return unsupported_before_call(self.group.implementation, case, dtype)

    def evaluate(self, problem: Problem, on_wait: Callable[[], None] = lambda: None) -> Outcome:
        """Evaluate one problem in the worker, which is started if there is none; ``close`` ends it.

        ``on_wait`` is done while the worker computes, and is no part of the seconds that an answer took.
        """
        if self._state_probe is not None:
            return self._state_probe.evaluate_with_changed_calls(
                problem, partial(self._evaluate_timed, problem, on_wait)
            )
        return self._evaluate_timed(problem, on_wait)

    def _evaluate_timed(self, problem: Problem, on_wait: Callable[[], None]) -> Outcome:
        begun, self._meanwhile = perf_counter(), on_wait
        outcome = self._pad_and_evaluate(problem)
        self._meanwhile = lambda: None
        process = self._slot.process
        answered = process.answered if process is not None else 0.0
        seconds = (answered if answered > begun else perf_counter()) - begun
        self.times.add_seconds("all", seconds)
        return replace(outcome, seconds=seconds)

    @contextmanager
    def _use_new_slot(self) -> Iterator[None]:
        """Evaluate meanwhile in a new worker."""
        kept, self._slot = self._slot, WorkerSlot()
        try:
            yield
        finally:
            self._slot.close()
            self._slot = kept

    def evaluate_session(self, session: Session) -> tuple[StepResult, ...] | Failure:
        """Do the steps of a session in the worker, one after the other, each padded to what it requires.

        Each call may take as long as an evaluation, and all calls together at most ``_MAX_SESSION_LIMITS`` times that.
        """
        implementation = self.group.implementation
        paddings = [pad_call(implementation, step.problem) for step in session.steps]
        if failure := next((padding for padding in paddings if isinstance(padding, Failure)), None):
            return failure
        steps = tuple(
            replace(step, problem=padding.problem) if isinstance(padding, PaddedCall) else step
            for step, padding in zip(session.steps, paddings, strict=True)
        )
        failed = self._given_up or (None if implementation.name in self._slot.started else self._start_implementation())
        if failed is not None:
            return failed
        seconds = self._limits.case_seconds * min(session.call_count, _MAX_SESSION_LIMITS)
        answer = self._call_in_worker(
            seconds, evaluate_session, implementation.name, Session(steps), str(self._log.path)
        )
        if isinstance(answer, Failure):
            return answer
        self._close_unless_reusable(answer)
        return tuple(
            replace(result, outcome=padding.strip_padding(result.outcome))
            if isinstance(padding, PaddedCall)
            else result
            for padding, result in zip(paddings, answer.results, strict=True)
        )

    def repeat_calls(
        self, problems: Sequence[Problem], order: Sequence[int], seconds: float
    ) -> RepeatedCalls | Failure:
        """Make calls in some order in the worker, and return the distinct results of each problem.

        Calls end after so many seconds.
        """
        implementation = self.group.implementation
        paddings = [pad_call(implementation, problem) for problem in problems]
        if failure := next((padding for padding in paddings if isinstance(padding, Failure)), None):
            return failure
        calls = [
            padding.problem if isinstance(padding, PaddedCall) else problem
            for padding, problem in zip(paddings, problems, strict=True)
        ]
        failed = self._given_up or (None if implementation.name in self._slot.started else self._start_implementation())
        if failed is not None:
            return failed
        answer = self._call_in_worker(
            seconds + self._limits.case_seconds,
            repeat_calls,
            implementation.name,
            calls,
            order,
            seconds,
            str(self._log.path),
        )
        return answer if isinstance(answer, Failure) else answer.strip_padding(paddings)

    def _close_unless_reusable(self, answer: EvaluationReport | EvaluatedSession) -> None:
        if answer.held_bytes > self._limits.soft_memory_limit or not answer.is_process_reusable:
            self.close()

    def _pad_and_evaluate(self, problem: Problem) -> Outcome:
        padding = pad_call(self.group.implementation, problem)
        if isinstance(padding, PaddedCall):
            return padding.strip_padding(self._evaluate_unless_refused(padding.problem))
        return padding or self._evaluate_unless_refused(problem)

    def _evaluate_unless_refused(self, problem: Problem) -> Outcome:
        if too_large := refuse_too_many_scores(
            self.group.implementation.mode_declarations, problem, self._limits.memory_of_each
        ):
            return too_large
        if untried := self._given_up or self._crash_limit.skipped_failure():
            return untried
        self._end_reason = ""
        outcome = self._evaluate_and_retry_alone(problem)
        self._crash_limit.record_outcome(outcome, self._end_reason)
        return outcome

    def _evaluate_and_retry_alone(self, problem: Problem) -> Outcome:
        outcome = self._evaluate_in_slot(problem)
        ended = isinstance(outcome, Failure) and self._slot.process is None
        if not (ended and self._slot.shared) or self.is_stopped:
            return outcome
        self._slot, self._starts_left, self._given_up, self._end_reason = WorkerSlot(), 1, None, ""
        return self._evaluate_in_slot(problem)

    def _evaluate_in_slot(self, problem: Problem) -> Outcome:
        name = self.group.implementation.name
        if name not in self._slot.started and (failure := self._start_implementation()) is not None:
            return failure
        seconds = self._limits.case_seconds
        if self.group.implementation.mode_declarations.runs_only_standard_cases:
            seconds += self._limits.start_seconds  # it compiles first, which says nothing of the code that is judged
        answer = self._call_in_worker(seconds, evaluate_and_measure, name, problem, str(self._log.path))
        if isinstance(answer, Failure):
            return answer
        self.times.add_seconds("compiling", answer.compilation_seconds, answer.compiled_programs)
        if isinstance(answer.outcome, Failure):
            self._log.require_space()
        self._close_unless_reusable(answer)
        return answer.outcome

    def _start_implementation(self) -> Failure | None:
        implementation, dtype = self.group.implementation, self.group.dtypes[0]
        entry = with_cache_variables(implementation.entry, keep=self._limits.compilation_cache)
        what = (entry, implementation.mode, dtype, self._limits.threads, str(self._log.path))
        if self._slot.process is None and self._described is not None and isinstance(entry, UserImplementation):
            self._log.require_writable()
            self._slot.process = self._described.take_worker(entry, self._limits.threads)
        self.is_starting = True
        try:
            with self.times.measure("importing"):
                answer = self._call_in_worker(self._limits.start_seconds, start_implementation, *what)
        finally:
            self.is_starting = False
        if isinstance(answer, Failure):
            self.close()
            # What has started before may do so again: somebody may have killed it. What never has is not asked twice.
            self._starts_left -= 1
            self._given_up = None if self._starts_left > 0 else answer
            return answer
        self.description, self._starts_left = answer, _MAX_RESTARTS
        self._slot.started.add(implementation.name)
        return None

    def _call_in_worker(self, seconds: float, function: Callable[..., Answer], *arguments: object) -> Answer | Failure:
        """Call a function in the worker; what kills it becomes a failure, and the next call gets a new one."""
        self._log.mark_evaluation_start()
        try:
            if self._slot.process is None:
                self._log.require_writable()
                self._slot.process = WorkerProcess()
            return self._slot.process.call(
                function, *arguments, seconds=seconds, cancel_reason=self._reason_to_stop, on_wait=self._meanwhile
            )
        except RemoteError as raised:
            verdict, message = "error", str(raised)
        except CallTimeout:
            verdict, message = "timeout", f"not done after {seconds:g} s; the worker was stopped"
        except CallCancelled as stopped:
            verdict, message = "crash", f"{stopped}; the worker was stopped"
        except WorkerDied as ended:
            verdict, message = "crash", f"the worker process {ended}"
        self.close()
        if not self.is_stopped:
            self._log.require_space()
        self._end_reason = _MEMORY_AMOUNT.sub("", message)
        return Failure(verdict, f"{message}{self._log.quote_last_lines()}")

    def _reason_to_stop(self) -> str:
        """Return why the worker has to be stopped; empty if it may continue."""
        if self.is_stopped:
            return "the run ends"
        process, target = self._slot.process, getattr(self.group.implementation.entry, "target", None)
        mark = process.mark if process is not None and target is not None and target.is_blind else ""
        held = process_tree_memory(process.pid, mark) if process is not None else 0
        if held > (most := self._limits.hard_memory_limit):
            return f"it held {held / 2**30:.1f} GiB of memory, more than {most / 2**30:.1f} GiB"
        printed, most = self._log.count_printed_bytes(), self._limits.max_output
        return f"it printed {printed / 2**20:.1f} MiB, more than {most / 2**20:.1f} MiB" if printed > most else ""

    def close(self) -> None:
        """End the worker, and all that it started."""
        self._slot.close()


def group_runners(
    groups: Sequence[WorkerGroup],
    limits: Limits,
    log_directory: Path,
    described: DescribedWorkers | None = None,
    number: int = 1,
) -> list[list[GroupRunner[Key]]]:
    """Return the runners of all groups; those in one list share a worker, and may not run side by side.

    A further ``number`` makes further runners of the same groups, which may.
    """
    together: dict[tuple[str, ...], list[WorkerGroup]] = {}
    for group in groups:
        together.setdefault(group.process_key, []).append(group)
    runners = []
    for sharing in together.values():
        slot = WorkerSlot(shared=len(sharing) > 1)
        most = min(limits.soft_memory_limit, _BUNDLED_MEMORY) if sharing[0].is_bundled else limits.soft_memory_limit
        worker_limits = replace(limits, soft_memory_limit=most)
        runners.append(
            [
                GroupRunner[Key](group, worker_limits, log_directory, slot, described, number, probes_state=True)
                for group in sharing
            ]
        )
    return runners


def evaluate_in_turn(
    calls: Sequence[tuple[GroupRunner[Key], Key]],
    make_problem: Callable[[GroupRunner[Key], Key], Problem | Failure],
    report: Callable[[GroupRunner[Key], Key, Outcome], None],
) -> None:
    """Evaluate one problem after the other, each by its runner, and report its outcome; end if a runner is stopped.

    What is known without a call is reported as it is. While a worker computes, the next problem is made.
    """
    made: dict[int, Problem | Failure] = {}

    def make_next(number: int) -> None:
        """Make the next problem from this number on; what that raises is raised when it is its turn."""
        with suppress(Exception):
            while number < len(calls):
                if number not in made:
                    made[number] = make_problem(*calls[number])
                if not isinstance(made[number], Failure):
                    return
                number += 1

    for number, (runner, key) in enumerate(calls):
        if runner.is_stopped:
            return
        problem = made.pop(number) if number in made else make_problem(runner, key)
        outcome = problem if isinstance(problem, Failure) else runner.evaluate(problem, partial(make_next, number + 1))
        if not runner.is_stopped:
            report(runner, key, outcome)
