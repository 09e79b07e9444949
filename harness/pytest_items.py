"""The tests of ``--attncheck``: one per case and dtype of each implementation, which belong to no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attncheck.options import RunOptions
    from attncheck.pytest_judge import ImplementationJudge
    from attncheck.reading.case import Case
    from attncheck.reading.selection import Selection

NODE = "attncheck"
"""What the ids of these tests begin with."""


class _CaseCollector(pytest.Collector):
    """Where the tests of ``--attncheck`` hang in the tree of a session."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


class CaseItem(pytest.Item):
    """One case in one dtype."""

    def __init__(self, *, judge: ImplementationJudge, case: Case, dtype: str, **given: Any) -> None:
        super().__init__(**given)
        self.judge, self.case, self.dtype = judge, case, dtype
        self.add_marker(pytest.mark.attncheck(implementation=judge.implementation.name))

    def runtest(self) -> None:
        """Judge the case."""
        self.judge.check(self.case, self.dtype)

    def reportinfo(self) -> tuple[str, int, str]:
        """Say where the case stands."""
        return self.case.file, self.case.line - 1, self.name


def items_of(
    session: pytest.Session, judges: Sequence[ImplementationJudge], dtypes: Sequence[str], ids: Sequence[str]
) -> list[CaseItem]:
    """Return the tests of implementations that ``ids`` name, all where there are none.

    Raises ``UsageError`` for an id that names no test.
    """
    collector = _CaseCollector.from_parent(session, name=NODE, nodeid=NODE)
    found = []
    for judge in judges:
        for case, dtype in cases_in_dtypes(judge.selection, dtypes):
            name = f"{judge.implementation.name}[{case.id}-{dtype}]"
            # An id that pytest composes itself is, since 9.2, another one than the same text read back.
            given = {"name": name, "nodeid": f"{NODE}::{name}"}
            found.append(CaseItem.from_parent(collector, judge=judge, case=case, dtype=dtype, **given))
    return _named(found, ids)


def _named(items: list[CaseItem], ids: Sequence[str]) -> list[CaseItem]:
    """Return the tests that the ids name, all where there are none; an id without a case names all of its own."""
    for each in ids:
        if not any(_is_named(item, each) for item in items):
            raise pytest.UsageError(
                f"not found: {each}; the ids of {len(items)} tests begin with "
                f"{', '.join(dict.fromkeys(item.nodeid.partition('[')[0] for item in items))}: "
                "--collect-only lists them"
            )
    return [item for item in items if not ids or any(_is_named(item, each) for each in ids)]


def _is_named(item: CaseItem, wanted: str) -> bool:
    return item.nodeid == wanted or item.nodeid.startswith(f"{wanted}[")


@cache
def select_cases(options: RunOptions) -> Selection:
    """Return the cases that are asked for. Raises ``CaseError`` where a file has a fault."""
    from attncheck.config import selected
    from attncheck.errors import CaseError

    selection = selected(options)
    if selection.faults:
        raise CaseError(list(selection.faults))
    return selection


def cases_in_dtypes(selection: Selection, dtypes: Sequence[str]) -> Iterator[tuple[Case, str]]:
    """Yield every case in each of its dtypes, or in those of them that are asked for."""
    return ((case, dtype) for case in selection.cases for dtype in case.dtypes if not dtypes or dtype in dtypes)
