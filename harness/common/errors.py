"""Errors, one named exception per kind, each with the exit code that the command line gives it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of the command line; the first that applies, in the order bad input, disagree, not run."""

    AGREE = 0
    DISAGREE = 1
    BAD_INPUT = 2
    NOT_RUN = 3
    INTERRUPTED = 130


@dataclass(frozen=True)
class Diagnostic:
    """One mistake in a case file: its place, and the expected value.

    Example:
        >>> print(Diagnostic("cases/mask.yaml", "expected a boolean", line=12, case="Mask", field="options.is_causal"))
        cases/mask.yaml:12: case "Mask": options.is_causal: expected a boolean
    """

    file: str
    message: str
    line: int | None = None
    case: str | None = None
    field: str | None = None

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        parts = [where, f'case "{self.case}"' if self.case else None, self.field or None, self.message]
        return ": ".join(part for part in parts if part)


class AttncheckError(Exception):
    """Any failure that the user sees as one line instead of a traceback."""

    exit_code = ExitCode.BAD_INPUT


class CaseError(AttncheckError):
    """A case file cannot be used; carries one or more faults."""

    def __init__(self, faults: list[Diagnostic]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


class NothingToRerun(AttncheckError):
    """There is nothing to run, because no unit failed last time."""

    exit_code = ExitCode.AGREE


class UsageError(AttncheckError):
    """The command or call asks for something that does not exist or does not make sense."""


class OnnxDataError(AttncheckError):
    """ONNX's test data cannot be read."""


class OutputError(AttncheckError):
    """A folder or file cannot be written."""

    @classmethod
    def from_os_error(cls, path: Path | str, error: OSError) -> OutputError:
        """Return the error of a path that cannot be written, with the reason and what to do about it."""
        why = os.strerror(error.errno) if error.errno else str(error)
        return cls(f"{path} cannot be written: {why}{_ADVICE.get(error.errno or 0, '')}")

    @classmethod
    @contextmanager
    def convert_os_errors(cls, path: Path | str) -> Iterator[None]:
        """Turn an ``OSError`` of what is written inside into this error."""
        try:
            yield
        except OSError as error:
            raise cls.from_os_error(path, error) from None


_FULL_ADVICE = "; free some space and repeat the command, a run with --resume"
_FORBIDDEN_ADVICE = "; allow writing there, or name another place"
_ADVICE = {
    errno.ENOSPC: _FULL_ADVICE,
    errno.EDQUOT: _FULL_ADVICE,
    errno.EFBIG: "; raise the limit on the size of files (ulimit -f) and repeat the command, a run with --resume",
    errno.EROFS: _FORBIDDEN_ADVICE,
    errno.EACCES: _FORBIDDEN_ADVICE,
    errno.EPERM: _FORBIDDEN_ADVICE,
}


class ClusterError(AttncheckError):
    """A cluster cannot go on with a run."""

    exit_code = ExitCode.NOT_RUN


class ResultsError(AttncheckError):
    """A results directory cannot be read."""
