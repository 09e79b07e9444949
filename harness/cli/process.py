"""The process of a command: its standard streams, and errors that are a lack of memory.

A reader that has seen enough closes the pipe, as ``head`` does. The command then goes on without it, and ends with the
exit code of its answer. If the standard output cannot be written for another reason, such as a full disk, the command
ends in one line. Whatever standard error cannot take is lost: there is no other place for it.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from attncheck.common.errors import AttncheckError, ExitCode, OutputError
from attncheck.common.wording import escape_to_one_line

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class StandardOutputError(OutputError):
    """The standard output cannot be written."""

    exit_code = ExitCode.NOT_RUN


class OutOfMemory(AttncheckError):
    """The command needs more memory than it may have."""

    exit_code = ExitCode.NOT_RUN


class _LossyStream(io.FileIO):
    """A standard stream that loses what nobody reads, and what it cannot take after its first error."""

    def __init__(self, descriptor: int, *, must_succeed: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._must_succeed = must_succeed
        self.is_lost = False

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes. Raises ``StandardOutputError`` once, for an error that is no closed pipe."""
        size = memoryview(data).nbytes
        if self.is_lost:
            return size
        try:
            return super().write(data)
        except OSError as error:
            self.is_lost = True
            if isinstance(error, BrokenPipeError) or not self._must_succeed:
                return size
            raise StandardOutputError.from_os_error("the standard output", error) from None


def open_closed_streams() -> None:
    """Open standard streams that are closed (``>&-``): a pipe to a worker would take the number of one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, for workers too
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


@contextmanager
def guard_streams() -> Iterator[None]:
    """Replace standard output and error by streams that lose what cannot be written, or fail with one line."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        try:
            raw = _LossyStream(stream.fileno(), must_succeed=name == "stdout")
        except (AttributeError, OSError, ValueError):  # no file, such as a text of whoever embeds the command line
            continue
        buffer = io.BufferedWriter(raw)
        guarded = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
        guarded.reconfigure(write_through=stream.write_through)
        setattr(sys, name, guarded)
    try:
        yield
    finally:
        for name, stream in before.items():
            with suppress(StandardOutputError):  # reported when it happened
                getattr(sys, name).flush()
            setattr(sys, name, stream)


def has_reader() -> bool:
    """Return whether somebody may still read the standard output."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not (isinstance(raw, _LossyStream) and raw.is_lost)


_MIN_MIB = 768
"""MiB of addresses that NumPy, pandas, pyarrow and their threads need. Measured with two processors, ``check`` and
``report`` end well from 684 MiB on. With less, libraries end the process themselves, wait for threads that did not
start, or raise errors that do not name memory."""
_MIN_MIB_TO_LIST = 384
"""The same for commands that load neither pandas nor pyarrow."""


def require_memory(*, only_lists: bool) -> None:
    """Raise ``OutOfMemory`` if a command may have fewer addresses than the libraries that it loads need."""
    limit, least = _address_space_limit(), _MIN_MIB_TO_LIST if only_lists else _MIN_MIB
    if limit and limit < least << 20:
        raise OutOfMemory(
            f"not enough memory: this process may have {limit >> 20:,} MiB of addresses (ulimit -v); expected at least "
            f"{least:,} MiB; raise the limit"
        )


_OUT_OF_MEMORY_PATTERN = re.compile(
    r"failed to map segment|cannot allocate memory|can't start new thread|failed to (?:launch|start) \w* ?thread"
    r"|resource temporarily unavailable|cannot create thread|out of memory|std::bad_alloc",
    re.IGNORECASE,
)
"""Messages of the loader, of Python and of libraries about missing memory or address space for a thread."""
_MAX_MESSAGE_LETTERS = 200


def as_memory_error(error: BaseException) -> OutOfMemory | None:
    """Return the error of a command that ended for lack of memory; None if it ended for another reason.

    A partially imported library raises unrelated errors later, so earlier errors count, too.
    """
    lacks = [item for item in _error_chain(error) if _is_out_of_memory(item)]
    if not lacks:
        return None
    limit = _address_space_limit()
    allowed = f"; this process may have {limit >> 20:,} MiB of addresses (ulimit -v)" if limit else ""
    message = escape_to_one_line(" ".join(str(lacks[-1]).split()), _MAX_MESSAGE_LETTERS) or type(lacks[-1]).__name__
    return OutOfMemory(f"not enough memory ({message}){allowed}; raise the limit, or free some memory")


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all errors before it, the latest first."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            yield current
            waiting += [current.__context__, current.__cause__]


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return not isinstance(error, AttncheckError) and bool(_OUT_OF_MEMORY_PATTERN.search(str(error)))


def _address_space_limit() -> int:
    """Return the address space limit of this process in bytes; 0 if there is none, or it is unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if limit == resource.RLIM_INFINITY else limit
