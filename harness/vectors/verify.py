"""Outputs that were computed elsewhere, run as an implementation: judged, and recorded in a folder of results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cloudpickle

from attncheck.config import expected_failures_of
from attncheck.errors import UsageError
from attncheck.execution.implementation_selection import user_implementation
from attncheck.execution.implementations import ImplementationSelection
from attncheck.execution.limits import Limits
from attncheck.execution.user_code import Target
from attncheck.reading.selection import Selection
from attncheck.run import RunSummary, Settings, run_cases
from attncheck.store import user_store
from attncheck.vectors.recorded import RecordedOutputs

NAME = "vectors.outputs"


def run_recorded(recorded: RecordedOutputs, selection: Selection, dtypes: Sequence[str], output: Path) -> RunSummary:
    """Judge recorded outputs in the selected cases of the vectors. Raises ``UsageError`` where there are none."""
    known = frozenset(recorded.cases)
    cases = tuple(case for case in selection.cases if case.id in known)
    if not cases:
        raise UsageError("the vectors hold none of these cases; name the cases that they were written of")
    if not recorded.names:
        raise UsageError("the outputs have no name of a stage of the vectors, such as attention/a-case/float32/output")
    limits = Limits(keep_going=True)
    chosen = user_implementation(Target("", "", cloudpickle.dumps(recorded)), None, limits, NAME)
    settings = Settings(
        output,
        dtypes=tuple(dtypes),
        limits=limits,
        command=sys.orig_argv,
        expected_failures=expected_failures_of([chosen.entry.name]),
        tags=selection.tags,
        picked={"cases": [case.id for case in cases]} if len(cases) < len(selection.cases) else {},
        store=user_store(),
    )
    return run_cases(cases, ImplementationSelection((chosen,)), settings, replace(selection, cases=cases).faults)
