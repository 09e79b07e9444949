"""The inside of a worker process: one framework in one or several modes, one evaluation after the other.

Nothing that imports NumPy may be imported at the top: the number of threads has to be set before.
"""

from __future__ import annotations

import faulthandler
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.backends import BackendEntry
from attncheck.backends.contract import Backend

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncheck.backends.contract import UnsupportedError
    from attncheck.reading.problem import Problem

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# A choice: a message is a cell of a table; larger numbers make reports longer, smaller ones omit the cause.
_MAX_MESSAGE_LENGTH = 500
# A choice: twenty times the longest message, as colour codes and blanks are removed before it is shortened.
_MAX_EXAMINED_LENGTH = 10_000
_COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*m")
# A choice: larger results could exhaust the memory of the harness; smaller limits refuse cases that fit.
_MAX_RETURNED_BYTES = 2**33
_evaluation_numbers = count(1)
_EVALUATIONS_PER_COUNT = 64
"""Evaluations after which mappings are counted: thousands take milliseconds, as long as a small evaluation."""
MISSING_STAGE = "expected a stage named"


@dataclass(frozen=True)
class Observation:
    """Something that a call did besides returning numbers: its name in ``gating.behaviours``, and what was seen."""

    behaviour: str
    text: str


@dataclass(frozen=True)
class Computed:
    """The stages that an implementation returned, and how many seconds that took.

    ``ignored_conventions`` are conventions of the case that it has no keyword for, so that it was called without them.
    ``padded`` says what the call was padded with, which is dropped from the stages again. ``faults`` are, by stage,
    wrong padding, and the state of another call in the result.
    """

    stages: Mapping[str, NDArray[Any]]
    ignored_conventions: tuple[str, ...] = ()
    padded: str = ""
    faults: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = field(default=None, compare=False)
    observations: tuple[Observation, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Failure:
    """Why there are no stages; ``verdict`` is unsupported, untried, error, crash or timeout.

    ``lacks`` names what an implementation would need to support the case, if it is known. ``padded`` says what the
    call was padded with.
    """

    verdict: str
    message: str
    lacks: tuple[str, ...] = ()
    padded: str = ""
    seconds: float | None = field(default=None, compare=False)
    observations: tuple[Observation, ...] = field(default=(), compare=False)


Outcome = Computed | Failure


class AdvisedError(Exception):
    """An error that an implementation raised, with advice to its author."""

    def __init__(self, error: Exception, advice: str) -> None:
        super().__init__(advice)
        self.error, self.advice = error, advice


_backends: dict[str, Backend] = {}
"""The backends that this process has started, by the names of implementations."""
_current_log = ""


def start_implementation(
    entry: BackendEntry, mode: str, dtype: str, threads: int, log: str
) -> dict[str, str] | Failure:
    """Import and configure a mode of the framework, once per process; return what it says of itself."""
    _redirect_to_log(log)
    faulthandler.enable(all_threads=False)  # says in the log where a signal that ends the process came
    with suppress(ImportError):  # Windows has no such module
        import resource

        # A core file of a framework has gigabytes: writing it would take longer than the time limit.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_threads(threads)
    os.environ.update(entry.environment_of(mode))
    try:
        backend = entry.load(mode)
        backend.prepare(dtype, threads)
        _backends[f"{entry.name}.{mode}"] = backend
        return {name: to_one_line(text) for name, text in backend.describe().items()}
    except BaseException as error:  # whatever a framework raises while it starts, also SystemExit, is why it cannot run
        return Failure("error", f"{entry.name}.{mode} cannot be started: {_describe_error(error)}")


def get_started_backend(implementation: str, log: str) -> Backend:
    """Return the started backend of a name; from now on, its output goes to the log."""
    _redirect_to_log(log)
    return _backends[implementation]


def limit_threads(threads: int) -> None:
    """Give what NumPy and frameworks compute with so many threads; called before any of them is imported."""
    os.environ.update({name: str(threads) for name in THREAD_VARIABLES})


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation, the worker's bytes of memory after it, and whether the worker can be reused.

    ``compilation_seconds`` is the time that the call took to compile ``compiled_programs``, if that is known.
    """

    outcome: Outcome
    held_bytes: int
    is_process_reusable: bool
    compilation_seconds: float = 0.0
    compiled_programs: int = 0


def evaluate_and_measure(implementation: str, problem: Problem, log: str) -> EvaluationReport:
    """Run one operation of what was started; put back what it changed that the next one shares."""
    from attncheck.execution.process_state import THIS_PROCESS, ProcessState, has_many_mappings

    backend = get_started_backend(implementation, log)
    surroundings, compiled_before = ProcessState.snapshot(), _compilation_counts()
    outcome = with_observations(backend, evaluate_on_backend(backend, problem, calls_again=True))
    is_fit = surroundings.restore() and not (isinstance(outcome, Failure) and surroundings.has_new_threads())
    held, must_count = int(THIS_PROCESS.memory_info().rss), next(_evaluation_numbers) % _EVALUATIONS_PER_COUNT == 0
    is_fit = is_fit and not (must_count and has_many_mappings(held))
    seconds, programs = (now - before for now, before in zip(_compilation_counts(), compiled_before, strict=True))
    return EvaluationReport(outcome, held, is_fit, seconds, int(programs))


def with_observations(backend: Backend, outcome: Outcome) -> Outcome:
    """Add what a process that calls a user's function has observed since it was last asked."""
    observations = getattr(backend, "observations", None)
    if not observations:
        return outcome
    taken = tuple(observations)
    observations.clear()
    return replace(outcome, observations=taken)


def _compilation_counts() -> tuple[float, int]:
    """Return the seconds that this process has compiled programs of JAX, and the number of programs."""
    module = sys.modules.get("attncheck.backends.jax_jit")
    return getattr(module, "seconds_compiled", 0.0), getattr(module, "programs_compiled", 0)


def evaluate_on_backend(backend: Backend, problem: Problem, *, calls_again: bool = False) -> Outcome:
    """Run one operation of a backend; whatever it raises or returns is its result.

    Where it ``calls_again``, a user's function is called once more, which may not change what it returned.
    """
    import numpy as np

    from attncheck.backends.contract import UnsupportedError
    from attncheck.execution.operations import (
        apply_memory_layout,
        find_overwritten_results,
        find_unwritten_numbers,
        run_operation,
        should_call_again,
        unsupported_conventions,
    )
    from attncheck.spec import result_stages

    try:
        with np.errstate(all="ignore"):
            inputs = apply_memory_layout(problem.inputs, problem.memory_layout)
            stages = run_operation(backend, problem.operation, inputs, problem.options)
            arrays = {name: _to_checked_array(backend, name, tensor) for name, tensor in (stages or {}).items()}
            expected = result_stages(problem.operation, problem.options, problem.inputs)
            wanted = (
                arrays if problem.stages is None else {name: arrays[name] for name in arrays if name in problem.stages}
            )
            left_out = unsupported_conventions(backend, problem.operation, problem.options)
            if refused := _refuse_missing_stages(arrays, expected) or _refuse_too_large(wanted):
                return refused
            faults = find_unwritten_numbers(wanted)
            if calls_again and should_call_again(backend, problem):
                wanted = {name: np.array(array) for name, array in wanted.items()}
                faults = {**find_overwritten_results(backend, problem, stages, wanted), **faults}
            return Computed(wanted, left_out, faults=faults)
    except UnsupportedError as error:
        return unsupported_failure(error)
    except NotImplementedError as error:
        return Failure("unsupported", _describe_error(error))
    except BaseException as error:  # whatever an implementation raises, also SystemExit, is its result and not our end
        return Failure("error", _describe_error(error))


def unsupported_failure(error: UnsupportedError) -> Failure:
    """Return the outcome of a call that an implementation has no function or no parameter for."""
    return Failure("unsupported", to_one_line(str(error)), error.lacks)


def _refuse_missing_stages(arrays: Mapping[str, NDArray[Any]], expected: Sequence[str]) -> Failure | None:
    """Refuse a result without the operation's stages: with nothing to judge, the call would pass silently."""
    missing = [name for name in expected if name not in arrays]
    if arrays and not missing:
        return None
    returned = f"returned {', '.join(arrays) or 'no stages'}"
    return Failure("error", to_one_line(f"{returned}; {MISSING_STAGE} {missing[0]}" if missing else returned))


def _refuse_too_large(arrays: Mapping[str, NDArray[Any]]) -> Failure | None:
    """Refuse a result that is too large for the harness: some views take no memory until they are sent."""
    held = sum(array.nbytes for array in arrays.values())
    if held <= _MAX_RETURNED_BYTES:
        return None
    shapes = ", ".join(f"{name} {'x'.join(map(str, array.shape))}" for name, array in arrays.items())
    return Failure(
        "error", to_one_line(f"returned {held / 2**30:.0f} GiB, more than {_MAX_RETURNED_BYTES // 2**30} GiB: {shapes}")
    )


def _to_checked_array(backend: Backend, name: str, tensor: Any) -> NDArray[Any]:
    import numpy as np

    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"a stage is called {name!r}, expected a name")
    array = backend.to_numpy(tensor)
    if not isinstance(array, np.ndarray) and not np.isscalar(array):
        raise TypeError(f"stage {name} is a {type(array).__name__}, expected an array")
    array = np.asarray(array)
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        # Objects, texts and times can be neither sent between processes nor compared as numbers.
        raise TypeError(f"stage {name} is an array of {array.dtype}, expected numbers")
    return array


def to_one_line(text: str) -> str:
    r"""Make one line of a text of foreign origin: nothing in it can move a cursor, and every encoding can write it.

    Example:
        >>> to_one_line("\x1b[31mFAILED\x1b[0m\n  at line 3")
        'FAILED at line 3'
    """
    words = " ".join(_COLOUR_CODES.sub("", text).split())
    line = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in words)
    return line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[: _MAX_MESSAGE_LENGTH - 3]}..."


def _describe_error(error: BaseException) -> str:
    if isinstance(error, AdvisedError):
        message = _describe_error(error.error)
        room = _MAX_MESSAGE_LENGTH - len(error.advice) - 5
        return to_one_line(f"{message if len(message) <= room else f'{message[:room]}...'}; {error.advice}")
    name = type(error).__name__
    try:
        return to_one_line(f"{name}: {str(error)[:_MAX_EXAMINED_LENGTH]}")
    except BaseException as another:  # a message that cannot be made is the implementation's fault, too
        return to_one_line(f"{name}, whose message cannot be shown: {type(another).__name__}")


def _redirect_to_log(log: str) -> None:
    """Send printed output to the log of the implementation that is evaluated; several may take turns."""
    global _current_log
    if log != _current_log:
        redirect_output(log)
        _current_log = log


_log_to_copy: Path | None = None


def redirect_output(log: str, *, passed_on: bool = False) -> None:
    """Send what the framework prints to a file: standard output belongs to the command line.

    What is ``passed_on`` is copied to the next file that output is sent to.
    """
    global _log_to_copy
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if _log_to_copy is not None:
        with suppress(OSError):
            os.write(descriptor, _log_to_copy.read_bytes())
    _log_to_copy = Path(log) if passed_on else None
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A worker is killed in the end, and would take its last words along.
            stream.reconfigure(line_buffering=True)
