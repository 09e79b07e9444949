"""attncheck inside pytest: one test per case and dtype, the explanation as its failure message.

    pytest --attncheck mymodule:attention                       # nothing to write

    from attncheck.pytest_plugin import conformance     # or one line in a test file
    test_attention = conformance(attention)

An expected failure is reported as xfail.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from attncheck.pytest_summary import Judged, NotJudged, StoppedError

if TYPE_CHECKING:
    # Every run of pytest in an environment with attncheck loads this module, so what is heavy waits until it is used.
    from attncheck.execution.implementations import Implementation
    from attncheck.execution.limits import Limits
    from attncheck.execution.runner import GroupRunner
    from attncheck.explain import Explanation
    from attncheck.reading.case import Case
    from attncheck.reading.expected_failures import ExpectedFailure
    from attncheck.reading.selection import Selection
    from attncheck.repeating import Call
    from attncheck.results.coverage import Minimum

_TIME_LIMIT = 60.0
_NODE = "attncheck"
"""What the ids of the tests of ``--attncheck`` begin with; they belong to no file."""
_PASTED = pytest.StashKey[tuple[str, ...]]()
"""The ids of such tests among the arguments of the command line."""


@dataclass(frozen=True)
class _Judge:
    """One implementation with its worker, which serves all tests of a session."""

    implementation: Implementation
    selection: Selection
    expected_failures: tuple[ExpectedFailure, ...]

    @classmethod
    def of(cls, implementation: Implementation, selection: Selection) -> _Judge:
        """Read what is known of it, once for all tests. Raises ``CaseError`` where a list cannot be used."""
        from attncheck.config import expected_failures_of

        return cls(implementation, selection, expected_failures_of([implementation.entry.name]))

    def complaint(self, case: Case, dtype: str) -> str | None:
        """Return why a case fails, as ``attncheck explain`` tells it; None where it holds.

        Skips what is unsupported, or has no exact answer: nothing passes that was not judged.
        """
        from attncheck.explain import explain_case

        process = _process(self.implementation, dtype)
        explanation = explain_case(case, self.implementation, dtype, _limits(), process.runner, self.expected_failures)
        before = process.add((case, dtype), explanation.failure)
        if explanation.failure.startswith("unsupported"):
            raise NotJudged(explanation.failure, explanation.lacks)
        if explanation.judgements and all(item.verdict == "unverified" for item in explanation.judgements):
            raise NotJudged(f"unverified: {explanation.outside or 'there is no exact answer to hold it against'}")
        failing = explanation.failing_stages
        if failing and all(stage in explanation.expected_failures for stage in failing):
            pytest.xfail(next(iter(explanation.expected_failures.values())))
        if failing and explanation.failure:
            raise StoppedError(self._story(explanation, before), pytrace=False)
        return self._story(explanation, before) if failing else None

    def _story(self, seen: Explanation, before: Sequence[Call]) -> str:
        """Tell a failure; of the first few, whether it takes the calls of the tests before it."""
        from attncheck.commands import command, words_again, words_of
        from attncheck.execution.limits import Limits
        from attncheck.reading.record import case_record
        from attncheck.repeating import RepeatedExplanation, explain_as_met, met_now
        from attncheck.reports.explanation import repeated_explanation_text

        explained, lines = RepeatedExplanation(seen), []
        if before and _REPEATED[self.implementation.name] >= _MAX_REPEATED:
            lines.append(
                f"Other tests called it before. Of the first {_MAX_REPEATED} failures alone is told if they matter."
            )
        elif before:
            _REPEATED[self.implementation.name] += 1
            found = explain_as_met(seen.case, self.implementation, seen.dtype, _limits(), met_now(seen, before))
            explained = found if found.repeated else explained
        standard = Limits(case_seconds=_TIME_LIMIT)
        again = words_of(self.implementation.name, words_again([self.implementation], standard, None))
        if again and explained.repeated is None:  # the command starts a fresh process, and knows of no other
            lines.append(command("explain", case_record(seen.case, {}), again, seen.dtype))
        return "\n".join([repeated_explanation_text(explained, self.selection.tags), *lines])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of attncheck."""
    group = parser.getgroup("attncheck", "attention conformance")
    group.addoption(
        "--attncheck",
        metavar="TARGET",
        action="append",
        default=[],
        help="judge an implementation: file.py:function, package.module:function, or a bundled one such as torch.sdpa",
    )
    group.addoption("--attncheck-cases", metavar="CASES", action="append", default=[], help="files, folders or globs")
    group.addoption("--attncheck-tag", metavar="TAG", action="append", default=[], help="only cases with this tag")
    group.addoption("--attncheck-dtype", metavar="DTYPE", action="append", default=[], help="only this dtype")
    group.addoption(
        "--attncheck-tile", metavar="N", action="append", default=[], help="the kernel's tile: cases at its edges, too"
    )
    group.addoption(
        "--attncheck-min-judged",
        metavar="N|N%",
        help="fail where an implementation was judged in fewer cases, or in a smaller share of those that ran",
    )
    group.addoption("--attncheck-framework", metavar="NAME", help="whose arrays the implementation takes")


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker that every test of attncheck carries; take its tests' ids from the arguments.

    pytest would look for a file of that name. Where nothing else is named, nothing else is collected.
    """
    config.addinivalue_line("markers", "attncheck(implementation): one case of attncheck on an implementation")
    pasted = tuple(each for each in config.args if each.startswith(f"{_NODE}::"))
    config.stash[_PASTED] = pasted
    config.args[:] = [each for each in config.args if each not in pasted]
    if pasted and not config.getoption("--attncheck"):
        raise pytest.UsageError(
            f"{pasted[0]} is a test of --attncheck: give that option too, as in "
            f"pytest --attncheck FILE.py:function {shlex.quote(pasted[0])}"
        )
    config.pluginmanager.register(Judged(_minimum(config)), "attncheck-judged")


def _minimum(config: pytest.Config) -> Minimum | None:
    """Return how much has to be judged: the option, or what the project says where nothing is picked."""
    given = config.getoption("--attncheck-min-judged")
    options = [config.getoption(f"--attncheck-{name}") for name in ("cases", "tag", "dtype")]
    picked = any(options) or bool(config.stash[_PASTED])
    if given is None and (picked or not config.getoption("--attncheck")):
        return None
    from attncheck.config import minimum_of
    from attncheck.errors import AttncheckError

    try:
        return minimum_of(given, complete=not picked)
    except AttncheckError as error:
        raise pytest.UsageError(f"attncheck: {error}".replace("--min-judged", "--attncheck-min-judged")) from None


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test per case and dtype for every ``--attncheck``."""
    targets: list[str] = config.getoption("--attncheck")
    if not targets or config.option.collectonly is None:
        return
    from attncheck.errors import AttncheckError
    from attncheck.execution.implementation_selection import select_implementations
    from attncheck.reading.tiles import read_tiles, tiles_named

    wanted = {name: config.getoption(f"--attncheck-{name}") for name in ("cases", "tag", "dtype", "framework")}
    try:
        tiles = read_tiles(config.getoption("--attncheck-tile"), "--attncheck-tile")
        pasted = config.stash[_PASTED]
        tiles += tiles_named(pasted)
        selection = _selection(tuple(wanted["cases"]), tuple(wanted["tag"]), tuple(wanted["dtype"]), tiles)
        chosen = select_implementations(None, targets, wanted["framework"])
        judges = [_Judge.of(implementation, selection) for implementation in chosen.implementations]
    except AttncheckError as error:
        raise pytest.UsageError(f"attncheck: {error}") from None
    if chosen.missing:
        raise pytest.UsageError(f"attncheck: {', '.join(chosen.missing)}: not installed")
    collector = _Cases.from_parent(session, name=_NODE, nodeid=_NODE)
    found = []
    for judge in judges:
        for case, dtype in _pairs(selection, wanted["dtype"]):
            name = f"{judge.implementation.name}[{case.id}-{dtype}]"
            # An id that pytest composes itself is, since 9.2, another one than the same text read back.
            given = {"name": name, "nodeid": f"{_NODE}::{name}"}
            found.append(_CaseItem.from_parent(collector, judge=judge, case=case, dtype=dtype, **given))
    items += _named(found, config.stash[_PASTED])


def _named(items: list[_CaseItem], pasted: tuple[str, ...]) -> list[_CaseItem]:
    """Return the tests that the ids name, all where there are none; an id without a case names all of its own."""
    for each in pasted:
        if not any(_is_named(item, each) for item in items):
            raise pytest.UsageError(
                f"not found: {each}; the ids of {len(items)} tests begin with "
                f"{', '.join(dict.fromkeys(item.nodeid.partition('[')[0] for item in items))}: "
                "--collect-only lists them"
            )
    return [item for item in items if not pasted or any(_is_named(item, each) for each in pasted)]


def _is_named(item: _CaseItem, pasted: str) -> bool:
    return item.nodeid == pasted or item.nodeid.startswith(f"{pasted}[")


def pytest_sessionfinish() -> None:
    """End the workers."""
    for process in _PROCESSES.values():
        process.runner.close()
    _PROCESSES.clear()
    _REPEATED.clear()


class _Cases(pytest.Collector):
    """Where the tests of ``--attncheck`` hang in the tree of a session."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


class _CaseItem(pytest.Item):
    """One case in one dtype."""

    def __init__(self, *, judge: _Judge, case: Case, dtype: str, **given: Any) -> None:
        super().__init__(**given)
        self.judge, self.case, self.dtype = judge, case, dtype
        self.add_marker(pytest.mark.attncheck(implementation=judge.implementation.name))

    def runtest(self) -> None:
        complaint = self.judge.complaint(self.case, self.dtype)
        if complaint is not None:
            pytest.fail(complaint, pytrace=False)

    def reportinfo(self) -> tuple[str, int, str]:
        return self.case.file, self.case.line - 1, self.name


def conformance(
    function: Callable[..., Any] | str,
    *,
    cases: Sequence[str] = (),
    tags: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    tiles: Sequence[int] = (),
    framework: str | None = None,
) -> Callable[..., None]:
    """Return a test function with a test per case and dtype, for one line in a test file.

    Args:
        function: As in ``attncheck.check``, and so are the others.
        cases: Paths of files or folders, or globs over the bundled cases.
        tags: Select the cases that have one of these tags.
        dtypes: Select these dtypes.
        tiles: Sizes of the kernel's tiles, whose cases are added.
        framework: The framework whose arrays the function takes and returns.

    Returns:
        A function that pytest parametrises by case and dtype.

    Raises:
        Collector.CollectError: If the function or the cases cannot be used; pytest shows it without a traceback.
    """
    from attncheck.errors import AttncheckError
    from attncheck.execution.implementation_selection import select_callable, select_implementations
    from attncheck.reading.tiles import read_tiles

    try:
        selection = _selection(tuple(cases), tuple(tags), tuple(dtypes), read_tiles(tiles, "tiles"))
        implementation = (
            select_implementations(None, [function], framework).implementations[0]
            if isinstance(function, str)
            else select_callable(function, framework, None)
        )
        judge = _Judge.of(implementation, selection)
    except AttncheckError as error:
        # Told without a traceback, once for the file that calls this.
        raise pytest.Collector.CollectError(f"attncheck: {error}") from None
    pairs = [pytest.param(case, dtype, id=f"{case.id}-{dtype}") for case, dtype in _pairs(selection, dtypes)]

    @pytest.mark.attncheck(implementation=implementation.name)
    @pytest.mark.parametrize(("case", "dtype"), pairs)
    def test_conformance(case: Case, dtype: str) -> None:
        complaint = judge.complaint(case, dtype)
        if complaint is not None:
            pytest.fail(complaint, pytrace=False)

    return test_conformance


_MAX_REPEATED = 5
"""Failures of an implementation that are looked at in a fresh process, too: each starts its framework anew."""
_REPEATED: Counter[str] = Counter()


def _limits() -> Limits:
    """Every test is tried: when to stop is pytest's to say (``--maxfail``)."""
    from attncheck.execution.limits import Limits

    return Limits(case_seconds=_TIME_LIMIT, keep_going=True)


@dataclass
class _Process:
    """The worker of an implementation and some dtypes, which stays for the tests that follow, and what it was asked."""

    runner: GroupRunner[Any]
    asked: list[Call]

    def add(self, call: Call, failure: str) -> list[Call]:
        """Remember a call and return those before it; one that ended the process is the last of its own."""
        from attncheck.results.checked import killed_the_worker

        before = self.asked
        self.asked = [] if killed_the_worker(failure) else [*before, call]
        return before


_PROCESSES: dict[str, _Process] = {}


def _process(implementation: Implementation, dtype: str) -> _Process:
    """Return the worker of an implementation and dtype. Skips what is not declared."""
    import tempfile
    from pathlib import Path

    from attncheck.execution.runner import GroupRunner, group_by_process

    groups = group_by_process(implementation, list(implementation.declared.classes))
    group = next((each for each in groups if dtype in each.dtypes), None)
    if group is None:
        raise NotJudged(f"unsupported: declares no {dtype}", (dtype,))
    if group.name not in _PROCESSES:
        _PROCESSES[group.name] = _Process(GroupRunner(group, _limits(), Path(tempfile.mkdtemp("attncheck"))), [])
    return _PROCESSES[group.name]


@cache
def _selection(
    cases: tuple[str, ...], tags: tuple[str, ...], dtypes: tuple[str, ...], tiles: tuple[int, ...] = ()
) -> Selection:
    from attncheck.config import selected
    from attncheck.errors import CaseError

    selection = selected(cases, tags, dtypes, tiles=tiles)
    if selection.faults:
        raise CaseError(list(selection.faults))
    return selection


def _pairs(selection: Selection, dtypes: Sequence[str]) -> Iterator[tuple[Case, str]]:
    return ((case, dtype) for case in selection.cases for dtype in case.dtypes if not dtypes or dtype in dtypes)
