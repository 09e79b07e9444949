"""Run the small cases on modules, as a script does that has no main guard: test_isolation.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from attncheck import Limits, Settings, run, run_cases, select_cases
from attncheck.backends import BackendEntry
from attncheck.execution.implementations import Implementation, ImplementationSelection

with Path("times").open("a") as times:
    times.write("x")
entries = [BackendEntry(name, module, ("numpy",)) for name, module in json.loads(sys.argv[1])]
selection = select_cases(["small"])
chosen = ImplementationSelection(tuple(Implementation(entry) for entry in entries))
limits = Limits(workers=len(entries))
run.available_processors = lambda: 2 * len(entries)  # half of which are for workers: all of these are alive at once
summary = run_cases(selection.cases, chosen, Settings(Path("out"), dtypes=("float64",), limits=limits))
print(int(summary.exit_code), summary.evaluations)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("dask", "distributed")))
