"""attncheck inside pytest: one test per case and dtype, the explanation as its failure message.

    pytest --attncheck mymodule:attention                       # nothing to write

    from attncheck.pytest_plugin import conformance     # or one line in a test file
    test_attention = conformance(attention)

An expected failure is reported as xfail.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from attncheck.pytest_items import NODE, cases_in_dtypes, items_of, select_cases
from attncheck.pytest_judge import ImplementationJudge, close_workers
from attncheck.pytest_summary import Judged

if TYPE_CHECKING:
    # Every run of pytest in an environment with attncheck loads this module, so what is heavy waits until it is used.
    from attncheck.reading.case import Case
    from attncheck.results.coverage import Minimum

_PASTED = pytest.StashKey[tuple[str, ...]]()
"""The ids of such tests among the arguments of the command line."""


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
    group.addoption("--attncheck-signature", metavar="NAME", help="the library that the function is called like")


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker that every test of attncheck carries; take its tests' ids from the arguments.

    pytest would look for a file of that name. Where nothing else is named, nothing else is collected.

    Raises ``UsageError`` for such an id without ``--attncheck``.
    """
    config.addinivalue_line("markers", "attncheck(implementation): one case of attncheck on an implementation")
    pasted = tuple(each for each in config.args if each.startswith(f"{NODE}::"))
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
    ids = config.stash[_PASTED]
    items += items_of(session, _judges(config, targets, ids), config.getoption("--attncheck-dtype"), ids)


def _judges(config: pytest.Config, targets: Sequence[str], ids: Sequence[str]) -> list[ImplementationJudge]:
    """Return the implementations of the options, and their cases: with the tiles of those that ``ids`` name.

    Raises ``UsageError`` where an implementation or a case cannot be used.
    """
    from attncheck.errors import AttncheckError
    from attncheck.execution.implementation_selection import select_implementations
    from attncheck.reading.tiles import read_tiles, tiles_named

    wanted = (tuple(config.getoption(f"--attncheck-{name}")) for name in ("cases", "tag", "dtype"))
    try:
        tiles = read_tiles(config.getoption("--attncheck-tile"), "--attncheck-tile")
        selection = select_cases(*wanted, tiles + tiles_named(ids))
        framework, signature = (config.getoption(f"--attncheck-{name}") for name in ("framework", "signature"))
        chosen = select_implementations(None, targets, framework, signature=signature)
        judges = [ImplementationJudge.of(implementation, selection) for implementation in chosen.implementations]
    except AttncheckError as error:
        raise pytest.UsageError(f"attncheck: {error}") from None
    if chosen.missing:
        raise pytest.UsageError(f"attncheck: {', '.join(chosen.missing)}: not installed")
    return judges


def pytest_sessionfinish() -> None:
    """End the workers."""
    close_workers()


def conformance(
    function: Callable[..., Any] | str,
    *,
    cases: Sequence[str] = (),
    tags: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    tiles: Sequence[int] = (),
    framework: str | None = None,
    signature: str | None = None,
) -> Callable[..., None]:
    """Return a test function with a test per case and dtype, for one line in a test file.

    Args:
        function: As in ``attncheck.check``, and so are the others.
        cases: Paths of files or folders, or globs over the bundled cases.
        tags: Select the cases that have one of these tags.
        dtypes: Select these dtypes.
        tiles: Sizes of the kernel's tiles, whose cases are added.
        framework: The framework whose arrays the function takes and returns.
        signature: The library that the function is called like.

    Returns:
        A function that pytest parametrises by case and dtype.

    Raises:
        Collector.CollectError: If the function or the cases cannot be used; pytest shows it without a traceback.
    """
    from attncheck.errors import AttncheckError
    from attncheck.execution.implementation_selection import select_callable, select_implementations
    from attncheck.reading.tiles import read_tiles

    try:
        selection = select_cases(tuple(cases), tuple(tags), tuple(dtypes), read_tiles(tiles, "tiles"))
        implementation = (
            select_implementations(None, [function], framework, signature=signature).implementations[0]
            if isinstance(function, str)
            else select_callable(function, framework, None, signature)
        )
        judge = ImplementationJudge.of(implementation, selection)
    except AttncheckError as error:
        # Told without a traceback, once for the file that calls this.
        raise pytest.Collector.CollectError(f"attncheck: {error}") from None
    pairs = [pytest.param(case, dtype, id=f"{case.id}-{dtype}") for case, dtype in cases_in_dtypes(selection, dtypes)]

    @pytest.mark.attncheck(implementation=implementation.name)
    @pytest.mark.parametrize(("case", "dtype"), pairs)
    def test_conformance(case: Case, dtype: str) -> None:
        judge.check(case, dtype)

    return test_conformance
