"""What an interrupted run left in a results directory, for a run that goes on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attncheck.harness.errors import UsageError
from attncheck.harness.results.format import Row
from attncheck.harness.results.parts import read_rows, remove_damaged
from attncheck.harness.results.reader import read_run
from attncheck.harness.results.writer import is_unbegun

_SAME = ("implementations", "versions", "classes", "python", "platform", "cpu_features", "threads_per_worker", "flags")
"""Of environment.json: what the numbers may depend on."""


@dataclass(frozen=True)
class Earlier:
    """The rows that were judged, and which (case, dtype) are thereby done: all rows of one are written together.

    ``names`` are its label and command, which stay; ``backends`` is what its workers said of themselves.
    """

    rows: tuple[Row, ...] = ()
    finished: frozenset[tuple[str, str]] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    backends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


NOTHING = Earlier()
"""Of a run that begins."""


def read_earlier(directory: Path, environment: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> Earlier:
    """Read what an earlier run of the same plan left: ``NOTHING`` where there is no directory, or an empty one.

    ``NOTHING``, too, where a run was killed before it had said what it is, or while it replaced another one.

    Parts that cannot be read are removed: what they held is computed again. Raises ``UsageError`` where the earlier
    run was another one, and ``ResultsError`` where the directory holds something else.
    """
    if not directory.exists() or (directory.is_dir() and is_unbegun(directory)):
        return NOTHING
    run = read_run(directory)
    if not (directory / "cases.json").exists():
        return NOTHING
    remove_damaged(directory)
    for name in _SAME:
        _require_same(directory, name, run.environment.get(name), environment[name])
    before, now = run.cases, {case["id"]: case for case in cases}
    for identity in sorted(before.keys() | now.keys()):
        _require_same(directory, f"the case {identity}", before.get(identity), now.get(identity))
    rows = tuple(Row(**record) for record in read_rows(directory)[0].to_pylist())
    finished = frozenset((row.case, row.dtype) for row in rows)
    names = {name: run.environment[name] for name in ("label", "command")}
    return Earlier(rows, finished, names, run.environment.get("backends", {}))


def _require_same(directory: Path, what: str, before: Any, now: Any) -> None:
    if _plain(before) == _plain(now):
        return
    change = f"was {_short(before)} and is {_short(now)}" if len(_short(before) + _short(now)) < 200 else "is another"
    raise UsageError(
        f"the run in {directory} cannot be resumed: {what} {change}; run it anew without --resume, or in another folder"
    )


def _plain(content: Any) -> Any:
    return json.loads(json.dumps(content))


def _short(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False)
