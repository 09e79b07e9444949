"""attncheck's harness: cases read, run on every implementation, judged and written down.

The public API is what this module offers; everything is imported when it is first used, so that the command line starts
at once and a worker can set its threads before NumPy is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.harness.api import CheckResult as CheckResult
    from attncheck.harness.api import check as check
    from attncheck.harness.errors import AttncheckError as AttncheckError
    from attncheck.harness.errors import ExitCode as ExitCode
    from attncheck.harness.errors import UsageError as UsageError
    from attncheck.harness.merge import merge_runs as merge_runs
    from attncheck.harness.reading.case import Case as Case
    from attncheck.harness.reading.selection import select_cases as select_cases
    from attncheck.harness.results.reader import read_runs as read_runs
    from attncheck.harness.run import Settings as Settings
    from attncheck.harness.run import run_cases as run_cases
    from attncheck.harness.running.executor import Limits as Limits
    from attncheck.harness.running.implementations import choose_implementations as choose_implementations
    from attncheck.harness.verdicts import Verdict as Verdict

_HOMES = {
    "AttncheckError": "errors",
    "Case": "reading.case",
    "CheckResult": "api",
    "ExitCode": "errors",
    "Limits": "running.executor",
    "Settings": "run",
    "UsageError": "errors",
    "Verdict": "verdicts",
    "check": "api",
    "choose_implementations": "running.implementations",
    "merge_runs": "merge",
    "read_runs": "results.reader",
    "run_cases": "run",
    "select_cases": "reading.selection",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
