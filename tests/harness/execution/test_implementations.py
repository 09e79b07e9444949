"""Which implementations a run judges, and what becomes of those that are not installed."""

from __future__ import annotations

import pytest

from attncheck.backends import BACKENDS, LIBRARIES, BackendEntry, Mode
from attncheck.errors import UsageError
from attncheck.execution.implementations import (
    Implementation,
    ImplementationSelection,
    bundled_implementations,
    every_implementation,
)

HERE = BackendEntry("here", "some_module", ("numpy",))
GONE = BackendEntry("gone", "some_module", ("no_such_framework",))
TABLE = {"here": HERE, "gone": GONE}


def test_a_backend_means_its_default_mode_wherever_no_mode_is_named() -> None:
    entry = BackendEntry(
        "here", "some_module", ("numpy",), modes=(Mode("jit", "some_module", "for tests"),), default_mode="jit"
    )
    table = {"here": entry}
    assert Implementation(entry) == Implementation(entry, "jit")
    for chosen in (
        bundled_implementations(None, table),
        bundled_implementations(["here"], table),
        bundled_implementations(None, table, ["here"]),
    ):
        assert [each.name for each in chosen.implementations] == ["here.jit"]
    assert [each.name for each in bundled_implementations(None, table, ["here.*"]).implementations] == [
        "here.eager",
        "here.jit",
    ]
    for entry in BACKENDS.values():
        assert entry.default_mode in entry.all_modes


def test_an_implementation_is_named_by_backend_and_mode() -> None:
    assert Implementation(HERE).name == "here.eager"
    assert Implementation(HERE, "jit").name == "here.jit"


def test_its_version_is_that_of_the_package_that_the_mode_names_or_of_the_framework() -> None:
    mode = Mode("layer", "some_module", "for tests", package="layers")
    entry = BackendEntry("here", "some_module", ("numpy", "layers"), modes=(mode,))
    assert Implementation(entry).package == "numpy"
    assert Implementation(entry, "layer").package == "layers"
    for implementation in every_implementation():
        assert implementation.package in implementation.entry.packages


@pytest.mark.parametrize("names", [None, []], ids=["nothing", "an empty list"])
def test_what_is_not_installed_is_left_out_when_nobody_asked_for_it(names: list[str] | None) -> None:
    assert bundled_implementations(names, TABLE) == ImplementationSelection((Implementation(HERE),), left_out=("gone",))


def test_what_is_asked_for_and_not_installed_is_missing() -> None:
    assert bundled_implementations(["gone", "here"], TABLE) == ImplementationSelection(
        (Implementation(HERE),), missing=("gone",), by_name=("here.eager",)
    )
    assert bundled_implementations(["gone"], TABLE) == ImplementationSelection((), missing=("gone",))


def test_only_what_is_asked_for_runs_once_and_in_the_order_of_the_table() -> None:
    second = BackendEntry("second", "some_module", ("numpy",))
    table = {"here": HERE, "second": second, "third": BackendEntry("third", "some_module", ("numpy",))}
    chosen = bundled_implementations(["second", "here", "second"], table)
    assert chosen == ImplementationSelection(
        (Implementation(HERE), Implementation(second)), by_name=("here.eager", "second.eager")
    )


def test_an_unknown_name_is_refused_with_the_names_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"^unknown backend 'nump'; expected here, gone$"):
        bundled_implementations(["here", "nump"], TABLE)


def test_the_table_of_the_project_is_the_standard_one() -> None:
    chosen = bundled_implementations(None)
    names = {item.entry.name for item in chosen.implementations}
    assert "numpy" in names
    assert names | set(chosen.left_out) == set(BACKENDS)
    assert not names & set(chosen.left_out)


MODES = (Mode("jit", "some_module", "compiled", {"float32": "native"}), Mode("own", "some_module", "a kernel"))
MANY = {
    "here": BackendEntry("here", "some_module", ("numpy",), MODES),
    "gone": GONE,
    "other": BackendEntry("other", "some_module", ("numpy",), MODES[:1]),
}


def _names(names: list[str] | None, patterns: list[str] | None) -> list[str]:
    return [item.name for item in bundled_implementations(names, MANY, patterns).implementations]


def test_without_a_pattern_every_backend_runs_in_its_eager_mode() -> None:
    assert _names(None, None) == _names(None, []) == ["here.eager", "other.eager"]
    assert _names(["here"], None) == ["here.eager"]


@pytest.mark.parametrize(
    ("names", "patterns", "chosen"),
    [
        (None, ["all"], ["here.eager", "here.jit", "here.own", "other.eager", "other.jit"]),
        (None, ["here.*"], ["here.eager", "here.jit", "here.own"]),
        (None, ["*.jit"], ["here.jit", "other.jit"]),
        (None, ["other.jit", "here.own"], ["here.own", "other.jit"]),
        (None, ["here.jit", "here.*", "*.jit"], ["here.eager", "here.jit", "here.own", "other.jit"]),
        (["other"], ["all"], ["other.eager", "other.jit"]),
        (["other"], ["*.jit"], ["other.jit"]),
    ],
)
def test_patterns_bundled_implementations_once_and_in_the_order_of_the_table(
    names: list[str] | None, patterns: list[str], chosen: list[str]
) -> None:
    assert _names(names, patterns) == chosen


@pytest.mark.parametrize(
    ("names", "patterns", "left_out", "missing"),
    [
        (None, ["all"], ("gone",), ()),
        (None, ["*.eager"], ("gone",), ()),
        (None, ["gone.*"], (), ("gone",)),
        (None, ["all", "gone.eager"], (), ("gone",)),
        (["gone"], ["all"], (), ("gone",)),
        (None, ["here.jit"], (), ()),
    ],
)
def test_what_is_not_installed_is_missing_only_where_a_pattern_names_it(
    names: list[str] | None, patterns: list[str], left_out: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    chosen = bundled_implementations(names, MANY, patterns)
    assert (chosen.left_out, chosen.missing) == (left_out, missing)
    assert "gone.eager" not in {item.name for item in chosen.implementations}


EVERY_NAME = "expected one of here, here.eager, here.jit, here.own, gone, gone.eager, other, other.eager, other.jit"


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("here.xla", EVERY_NAME),
        ("her", "did you mean here or other? (`attncheck list implementations` lists all)"),
        ("nope.*", EVERY_NAME),
        ("ALL", EVERY_NAME),
        ("", EVERY_NAME),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_names_that_exist(pattern: str, meant: str) -> None:
    with pytest.raises(UsageError) as error:
        bundled_implementations(None, MANY, ["here.jit", pattern])
    glob = "a glob such as 'torch.*', or all, will do"
    assert str(error.value) == f"no implementation is called {pattern!r}; {meant}; {glob}"


def test_a_library_runs_only_where_it_is_named_or_a_pattern_is() -> None:
    assert not {item.entry.name for item in bundled_implementations(None).implementations} & LIBRARIES.keys()
    assert not set(bundled_implementations(None).left_out) & LIBRARIES.keys()
    assert not {item.entry.name for item in bundled_implementations(list(BACKENDS)).implementations} & LIBRARIES.keys()
    for name, entry in LIBRARIES.items():
        default = f"{name}.{entry.default_mode}"
        for chosen in (bundled_implementations([name]), bundled_implementations(None, patterns=[name])):
            assert [item.name for item in chosen.implementations] in ([default], [])
            assert chosen.missing == (() if entry.is_installed else (name,))


def test_a_mode_on_a_device_runs_only_where_a_pattern_names_devices() -> None:
    modes = (Mode("eager@cuda", "some_module", "for tests", device="cuda"),)
    table = {"here": BackendEntry("here", "some_module", ("numpy",), device_modes=modes)}

    def chosen(*patterns: str) -> list[str]:
        return [item.name for item in bundled_implementations(None, table, patterns or None).implementations]

    assert chosen() == chosen("here") == chosen("here.*") == chosen("all") == ["here.eager"]
    assert chosen("here@cuda") == chosen("here.eager@cuda") == chosen("*@cuda") == ["here.eager@cuda"]
    assert chosen("here", "*@*") == ["here.eager", "here.eager@cuda"]
    (item,) = bundled_implementations(None, table, ["here@cuda"]).implementations
    assert item.declared is modes[0]
    assert item.needs == {"here": 1.0, "GPU": 1.0}
    with pytest.raises(UsageError, match=r"^no implementation is called 'here.jit@cuda'"):
        chosen("here.jit@cuda")


def test_a_mode_declares_its_own_numerical_classes() -> None:
    classes = {item.name: item.declared.classes for item in every_implementation(MANY)}
    assert classes["here.jit"] == {"float32": "native"}
    compiled = Implementation(MANY["here"], "jit")
    assert compiled.rounding_model("float32") == "native"
    assert compiled.rounding_model("bfloat16") is None
    assert Implementation(BACKENDS["numpy"]).rounding_model("bfloat16") is None
    assert Implementation(BACKENDS["torch"]).rounding_model("bfloat16") == "eager"
