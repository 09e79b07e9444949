"""The conformance harness for attention.

Example::

    import attncheck

    result = attncheck.check(my_attention)
    assert result.agrees, result.explain()

Everything that this module offers is imported when it is first used, so that the command line starts at once and a
worker can set its threads before NumPy is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str

    from attncheck.api import CheckResult as CheckResult
    from attncheck.api import ask as ask
    from attncheck.api import check as check
    from attncheck.api import explain as explain
    from attncheck.api import gate as gate
    from attncheck.api import measure_conventions as measure_conventions
    from attncheck.asking.answer import Answer as Answer
    from attncheck.asking.conventions import MeasuredConvention as MeasuredConvention
    from attncheck.common.errors import AttncheckError as AttncheckError
    from attncheck.common.errors import CaseError as CaseError
    from attncheck.common.errors import ExitCode as ExitCode
    from attncheck.common.errors import UsageError as UsageError
    from attncheck.execution.call import Limits as Limits
    from attncheck.execution.implementations import bundled_implementations as bundled_implementations
    from attncheck.gating.run import GateResult as GateResult
    from attncheck.interchange.capturing import Capture as Capture
    from attncheck.interchange.capturing import CaptureWarning as CaptureWarning
    from attncheck.interchange.capturing import capture as capture
    from attncheck.reading.case import Case as Case
    from attncheck.reading.selection import select_cases as select_cases
    from attncheck.reports.merge import merge_runs as merge_runs
    from attncheck.results.reader import read_runs as read_runs
    from attncheck.run import Settings as Settings
    from attncheck.run import run_cases as run_cases
    from attncheck.spec.verdicts import Verdict as Verdict

_OFFERED = {
    "api": ("CheckResult", "ask", "check", "explain", "gate", "measure_conventions"),
    "asking.answer": ("Answer",),
    "asking.conventions": ("MeasuredConvention",),
    "interchange.capturing": ("Capture", "CaptureWarning", "capture"),
    "common.errors": ("AttncheckError", "CaseError", "ExitCode", "UsageError"),
    "execution.call": ("Limits",),
    "execution.implementations": ("bundled_implementations",),
    "gating.run": ("GateResult",),
    "reports.merge": ("merge_runs",),
    "reading.case": ("Case",),
    "reading.selection": ("select_cases",),
    "results.reader": ("read_runs",),
    "run": ("Settings", "run_cases"),
    "spec.verdicts": ("Verdict",),
}
_HOMES = {name: module for module, names in _OFFERED.items() for name in names}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("attncheck")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
