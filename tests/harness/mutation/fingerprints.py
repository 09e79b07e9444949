"""What every subject of the catalogue is, and the very bits that it returns, to be compared before and after a change.

    python tests/harness/mutation/fingerprints.py write before.json [PATTERNS]
    python tests/harness/mutation/fingerprints.py compare before.json after.json

The problems are those of the tests, or small cases of the corpus that PATTERNS select. Bits depend on the machine and
on its libraries, so that a file of them can be compared with another one of the same machine alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from attncheck.execution.worker import Computed, Failure, Task, evaluate_on
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.mutant import Subject
from attncheck.reading.dtypes import numpy_dtype
from attncheck.reading.selection import select_cases

DTYPES = ("float64", "float32", "float16", "bfloat16")


def metadata(subject: Subject) -> dict[str, Any]:
    """Return what a subject says of itself."""
    told = {
        item.name: getattr(subject, item.name) for item in fields(subject) if item.name not in ("backend", "without")
    }
    hidden = sorted(subject.backend.hidden)
    return {
        "kind": type(subject).__name__,
        **told,
        "hidden": hidden,
        "without": bool(getattr(subject, "without", None)),
    }


def problems_of_tests() -> Iterator[tuple[str, str, Task]]:
    """Yield dtype, name and task of the tests' own problems."""
    from conftest import _problems, _with_options
    from test_kernel_faults import _problems as _of_kernels

    for name, task in (_problems() | _with_options() | _of_kernels()).items():
        for dtype in DTYPES:
            stored = numpy_dtype(dtype)
            arrays = {key: each.astype(stored) if each.dtype.kind == "f" else each for key, each in task.inputs.items()}
            yield dtype, name, Task(task.operation, task.options, arrays, task.memory_layout)


def problems_of_cases(patterns: list[str]) -> Iterator[tuple[str, str, Task]]:
    """Yield dtype, id and task of small cases."""
    from attncheck.mutation.unit import units_of

    for case in select_cases(patterns).cases:
        for unit in units_of(case, 0):
            if unit.is_for_all:
                yield unit.dtype, case.id, unit.task


def fingerprint(subject: Subject, task: Task) -> str:
    """Return a hash of what a subject returns, or of what it raises."""
    with np.errstate(all="ignore"):
        outcome = evaluate_on(subject.backend, task)
    digest = hashlib.sha256()
    if isinstance(outcome, Failure):
        digest.update(f"{outcome.verdict} {outcome.message}".encode())
    else:
        assert isinstance(outcome, Computed)
        for name, array in outcome.stages.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:12]


def written(problems: Iterator[tuple[str, str, Task]]) -> dict[str, Any]:
    """Return metadata and bits of every subject, in the order of the catalogue."""
    found: dict[str, Any] = {name: {**metadata(each), "bits": {}} for name, each in SUBJECTS.items()}
    for dtype, name, task in problems:
        for subject in SUBJECTS.values():
            if dtype in subject.dtypes:
                found[subject.name]["bits"][f"{dtype} {name}"] = fingerprint(subject, task)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a line for every subject that is not what it was."""
    if (same := [name for name in before if name in after]) != [name for name in after if name in before]:
        yield "the order of subjects"
    yield from (f"{name}: only in one of the two" for name in before.keys() ^ after.keys())
    for name in same:
        one, other = before[name], after[name]
        changed = [key for key in one if key != "bits" and one[key] != other.get(key)]
        bits = [problem for problem, value in one["bits"].items() if other["bits"].get(problem) != value]
        if changed:
            yield f"{name}: {', '.join(f'{key} was {one[key]!r}, is {other.get(key)!r}' for key in changed)}"
        if bits:
            yield f"{name}: {len(bits)} of {len(one['bits'])} problems, such as {', '.join(bits[:4])}"


def main(command: str, *arguments: str) -> int:
    """Write a file, or compare two."""
    if command == "write":
        path, *patterns = arguments
        problems = problems_of_cases(patterns) if patterns else problems_of_tests()
        Path(path).write_text(json.dumps(written(problems), indent=1), encoding="utf-8")
        return 0
    before, after = (json.loads(Path(path).read_text(encoding="utf-8")) for path in arguments)
    found = list(differences(before, after))
    print("\n".join(found) or "nothing changed")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
