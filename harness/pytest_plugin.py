"""attncheck inside pytest: one test per case and dtype, the explanation as its failure message.

    pytest --attncheck mymodule:attention                       # nothing to write

    from attncheck.pytest_plugin import conformance     # or one line in a test file
    test_attention = conformance(attention)

An expected failure is reported as xfail.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import pytest

from attncheck import pytest_items
from attncheck.common.errors import AttncheckError
from attncheck.settings.options import (
    ConformanceKeywords,
    GateKeywords,
    RunOptions,
    add_keywords_to_signature,
    find_options,
    read_options,
)

if TYPE_CHECKING:
    # Every run of pytest in an environment with attncheck loads this module, so what is heavy waits until it is used.
    from attncheck.reading.case import Case
    from attncheck.results.coverage import MinimumJudged

_TEST_IDS = pytest.StashKey[tuple[str, ...]]()
"""The ids of such tests among the arguments of the command line."""
_RUN_OPTIONS = pytest.StashKey[RunOptions]()
"""The options of attncheck on the command line."""


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
    for option in find_options(RunOptions).values():
        if option.flag.pytest_metavar_and_help:
            metavar, text = option.flag.pytest_metavar_and_help
            several: dict[str, Any] = {"action": "append", "default": []} if option.is_list else {}
            group.addoption(f"--attncheck-{option.bare_name}", metavar=metavar, help=text, **several)


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker that every test of attncheck carries; take its tests' ids from the arguments.

    pytest would look for a file of that name. Where nothing else is named, nothing else is collected.

    Raises ``UsageError`` for such an id without ``--attncheck``.
    """
    config.addinivalue_line("markers", "attncheck(implementation): one case of attncheck on an implementation")
    pasted = tuple(word for word in config.args if word.startswith(f"{pytest_items.COLLECTOR_NAME}::"))
    config.addinivalue_line("markers", "attncheck_gate(function): the gate of attncheck on a kernel")
    config.stash[_TEST_IDS] = pasted
    config.args[:] = [word for word in config.args if word not in pasted]
    if pasted and not config.getoption("--attncheck"):
        raise pytest.UsageError(
            f"{pasted[0]} is a test of --attncheck: give that option too, as in "
            f"pytest --attncheck FILE.py:function {shlex.quote(pasted[0])}"
        )
    config.stash[_RUN_OPTIONS] = _read_options(config)
    config.pluginmanager.register(pytest_items.JudgedSummary(_required_coverage(config)), "attncheck-judged")


def _read_options(config: pytest.Config) -> RunOptions:
    """Return the options of the command line. Raises ``UsageError`` where one cannot be read."""
    values = {}
    for option in find_options(RunOptions).values():
        if option.flag.pytest_metavar_and_help:
            name = f"--attncheck-{option.bare_name}"
            with _errors_in_one_line():
                values[option.name] = option.parse(config.getoption(name) or None, name)
    return RunOptions(**values)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Make what is wrong with options, cases or an implementation one line of pytest's."""
    try:
        yield
    except AttncheckError as error:
        raise pytest.UsageError(f"attncheck: {error}") from None


def _required_coverage(config: pytest.Config) -> MinimumJudged | None:
    """Return how much has to be judged: the option, or what the project says where nothing is picked."""
    options = config.stash[_RUN_OPTIONS]
    picked = any(options.case_selection.values()) or bool(config.stash[_TEST_IDS])
    if options.min_judged is None and (picked or not config.getoption("--attncheck")):
        return None
    from attncheck.settings.config import minimum_to_be_judged

    with _errors_in_one_line():
        return minimum_to_be_judged(options, complete=not picked)


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test per case and dtype for every ``--attncheck``."""
    targets: list[str] = config.getoption("--attncheck")
    if not targets or config.option.collectonly is None:
        return
    ids, options = config.stash[_TEST_IDS], config.stash[_RUN_OPTIONS]
    items += pytest_items.make_items(session, _make_judges(options, targets, ids), options.dtypes, ids)


def _make_judges(
    options: RunOptions, targets: Sequence[str], ids: Sequence[str]
) -> list[pytest_items.ImplementationJudge]:
    """Return the implementations of the options, and their cases: with the tiles of those that ``ids`` name.

    Raises ``UsageError`` where an implementation or a case cannot be used.
    """
    from attncheck.execution.implementation_selection import select_implementations
    from attncheck.reading.selection import find_tiles_in_names

    with _errors_in_one_line():
        selection = pytest_items.select_cases(replace(options, tiles=options.tiles + find_tiles_in_names(ids)))
        chosen = select_implementations(None, targets, **options.as_keywords)
        judges = [
            pytest_items.ImplementationJudge.of(item, selection, options.store) for item in chosen.implementations
        ]
    if chosen.missing:
        raise pytest.UsageError(f"attncheck: {', '.join(chosen.missing)}: not installed")
    return judges


def pytest_sessionfinish() -> None:
    """End the workers."""
    pytest_items.close_workers()


@add_keywords_to_signature(ConformanceKeywords)
def conformance(function: Callable[..., Any] | str, **keywords: Unpack[ConformanceKeywords]) -> Callable[..., None]:
    """Return a test function with a test per case and dtype, for one line in a test file.

    Args:
        function: As in ``attncheck.check``, and so are the others.
        cases: Paths of files or folders, or globs over the bundled cases.
        tags: Select the cases that have one of these tags.
        dtypes: Select these dtypes.
        tiles: Sizes of the kernel's tiles, whose cases are added.
        framework: The framework whose arrays the function takes and returns.
        signature: The library whose signature the function follows.
        declare: Declarations for the function.

    Returns:
        A function that pytest parametrises by case and dtype.

    Raises:
        Collector.CollectError: If the function or the cases cannot be used; pytest shows it without a traceback.
    """
    from attncheck.execution.implementation_selection import implementation_of_callable, select_implementations

    try:
        options = read_options(keywords)
        selection = pytest_items.select_cases(options)
        if isinstance(function, str):
            (implementation,) = select_implementations(None, [function], **options.as_keywords).implementations
        else:
            implementation = implementation_of_callable(function, **options.as_keywords)
        implementation = pytest_items.with_unique_name(implementation)
        judge = pytest_items.ImplementationJudge.of(implementation, selection, options.store)
    except AttncheckError as error:
        # Told without a traceback, once for the file that calls this.
        raise pytest.Collector.CollectError(f"attncheck: {error}") from None
    units = pytest_items.cases_in_dtypes(selection, options.dtypes)
    pairs = [pytest.param(case, dtype, id=f"{case.id}-{dtype}") for case, dtype in units]

    @pytest.mark.attncheck(implementation=implementation.name)
    @pytest.mark.parametrize(("case", "dtype"), pairs)
    def test_conformance(case: Case, dtype: str) -> None:
        judge.check(case, dtype)

    return test_conformance


@add_keywords_to_signature(GateKeywords, budget=90.0, seed=None, forbids_delegation=False, output=None)
def gate(function: Callable[..., Any] | str, **keywords: Unpack[GateKeywords]) -> Callable[[], None]:
    """Return a test function that runs the gate on a kernel, with the marker ``attncheck_gate``.

    Args:
        function: As in ``attncheck.gate``, and so are the others.
        budget: The seconds that the gate may take.
        seed: The seed of the problems. Default: a new one in every run, which a failure shows.
        forbids_delegation: Whether a kernel that computes by calling another attention is refused.
        output: Keep the results of the standard cases in this folder.
        framework: The framework whose arrays the function takes and returns.
        signature: The library whose signature the function follows.
        declare: Declarations for the function.
    """

    @pytest.mark.attncheck_gate(function=function)
    def test_gate() -> None:
        from attncheck.api import gate as run_gate

        result = run_gate(function, **keywords)
        if not result.may_be_merged:
            pytest.fail(f"{result}\n\nThe same problems again: seed={result.seed}", pytrace=False)

    return test_gate
