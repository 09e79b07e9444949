"""Which implementations a run judges, and what becomes of those that are not installed."""

from __future__ import annotations

import pytest

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.harness.errors import UsageError
from attncheck.harness.running.implementations import Chosen, Implementation, choose_implementations

HERE = BackendEntry("here", "some_module", ("numpy",))
GONE = BackendEntry("gone", "some_module", ("no_such_framework",))
TABLE = {"here": HERE, "gone": GONE}


def test_an_implementation_is_named_by_backend_and_mode() -> None:
    assert Implementation(HERE).name == "here.eager"
    assert Implementation(HERE, "jit").name == "here.jit"


@pytest.mark.parametrize("names", [None, []], ids=["nothing", "an empty list"])
def test_what_is_not_installed_is_left_out_when_nobody_asked_for_it(names: list[str] | None) -> None:
    assert choose_implementations(names, TABLE) == Chosen((Implementation(HERE),), left_out=("gone",))


def test_what_is_asked_for_and_not_installed_is_missing() -> None:
    assert choose_implementations(["gone", "here"], TABLE) == Chosen((Implementation(HERE),), missing=("gone",))
    assert choose_implementations(["gone"], TABLE) == Chosen((), missing=("gone",))


def test_only_what_is_asked_for_runs_once_and_in_the_order_of_the_table() -> None:
    second = BackendEntry("second", "some_module", ("numpy",))
    table = {"here": HERE, "second": second, "third": BackendEntry("third", "some_module", ("numpy",))}
    chosen = choose_implementations(["second", "here", "second"], table)
    assert chosen == Chosen((Implementation(HERE), Implementation(second)))


def test_an_unknown_name_is_refused_with_the_names_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"^unknown backend 'nump'; expected here, gone$"):
        choose_implementations(["here", "nump"], TABLE)


def test_the_table_of_the_project_is_the_standard_one() -> None:
    chosen = choose_implementations(None)
    names = {item.entry.name for item in chosen.implementations}
    assert "numpy" in names
    assert names | set(chosen.left_out) == set(BACKENDS)
    assert not names & set(chosen.left_out)
