"""Which implementations there are, how each is named, and what somebody's own declares, imports and may not do."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from evaluating import attention_output, attention_problem, in_worker, own
from hypothesis import given
from hypothesis import strategies as st
from kernels import ATTENTION, kernel
from tables import tables_beside

from attncheck.backends import BACKENDS, LIBRARIES, BackendEntry, Mode, published_entry_points
from attncheck.common.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import (
    RequestedFunction,
    implementation_of_callable,
    load_user_implementation,
    select_implementations,
    separate_user_functions,
    with_distinct_names,
)
from attncheck.execution.implementations import (
    Implementation,
    ImplementationSelection,
    UserImplementation,
    bundled_implementations,
    make_user_entry,
)
from attncheck.execution.user_call import import_user_module, load_target, read_target_declarations
from attncheck.execution.user_code import LoadError, Target, find_origin
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on_backend
from attncheck.reading.problem import Problem

TABLES = tables_beside(__file__)

pytestmark = pytest.mark.usefixtures("forked_workers")

HERE = BackendEntry("here", "some_module", ("numpy",))
GONE = BackendEntry("gone", "some_module", ("no_such_framework",))
TABLE = {"here": HERE, "gone": GONE}
MODES = (Mode("jit", "some_module", "compiled", {"float32": "native"}), Mode("own", "some_module", "a kernel"))
MANY = {
    "here": BackendEntry("here", "some_module", ("numpy",), MODES),
    "gone": GONE,
    "other": BackendEntry("other", "some_module", ("numpy",), MODES[:1]),
}
Invoke = Callable[..., tuple[int, str, str]]


def names(chosen: ImplementationSelection) -> list[str]:
    return [item.name for item in chosen.implementations]


def test_a_backend_means_its_default_mode_and_what_is_not_installed_is_left_out_unless_it_is_asked_for() -> None:
    entry = BackendEntry("here", "some_module", ("numpy",), modes=MODES, default_mode="jit")
    table = {"here": entry}
    assert Implementation(entry) == Implementation(entry, "jit")
    for backends, patterns in ((None, None), (["here"], None), (None, ["here"])):
        assert names(bundled_implementations(backends, table, patterns)) == ["here.jit"]
    assert names(bundled_implementations(None, table, ["here.*"])) == ["here.eager", "here.jit", "here.own"]
    for entry in BACKENDS.values():
        assert entry.default_mode in entry.all_modes
    here = (Implementation(HERE),)
    for backends in (None, []):
        assert bundled_implementations(backends, TABLE) == ImplementationSelection(here, not_requested=("gone",))
    assert bundled_implementations(["gone", "here"], TABLE) == ImplementationSelection(
        here, missing=("gone",), requested_by_name=("here.eager",)
    )
    with pytest.raises(UsageError, match=r"^unknown backend 'nump'; expected here, gone$"):
        bundled_implementations(["here", "nump"], TABLE)


def test_patterns_choose_in_table_order_and_make_missing_what_they_name() -> None:
    for backends, patterns, expected in TABLES["patterns"]:
        assert names(bundled_implementations(backends, MANY, patterns)) == expected, (backends, patterns)
    for backends, patterns, left_out, missing in TABLES["missing"]:
        chosen = bundled_implementations(backends, MANY, patterns)
        assert ([*chosen.not_requested], [*chosen.missing]) == (left_out, missing), (backends, patterns)
        assert "gone.eager" not in names(chosen)


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("attention.py", "attn_kernel.py"):
        Path(file).touch()
    for pattern, meant in TABLES["unknown patterns"].items():
        with pytest.raises(UsageError) as error:
            bundled_implementations(None, MANY, ["here.jit", pattern])
        assert str(error.value).startswith(f"no implementation is called {pattern!r}; {meant}")
        assert str(error.value).endswith("; or use a glob such as 'torch.*', all, or file.py:function")


def test_a_library_runs_only_where_it_is_named_or_a_pattern_is() -> None:
    standard = bundled_implementations(None)
    assert sorted([item.entry.name for item in standard.implementations] + [*standard.not_requested]) == sorted(
        BACKENDS
    )
    for name, entry in LIBRARIES.items():
        default = f"{name}.{entry.default_mode}"
        for chosen in (bundled_implementations([name]), bundled_implementations(None, patterns=[name])):
            assert names(chosen) in ([default], [])
            assert chosen.missing == (() if entry.is_installed else (name,))


def test_a_mode_on_a_device_runs_only_where_a_pattern_names_devices() -> None:
    modes = (Mode("eager@cuda", "some_module", "for tests", device="cuda"),)
    table = {"here": BackendEntry("here", "some_module", ("numpy",), device_modes=modes)}

    def chosen(*patterns: str) -> list[str]:
        return names(bundled_implementations(None, table, patterns or None))

    assert chosen() == chosen("here") == chosen("here.*") == chosen("all") == ["here.eager"]
    assert chosen("here@cuda") == chosen("here.eager@cuda") == chosen("*@cuda") == ["here.eager@cuda"]
    assert chosen("here", "*@*") == ["here.eager", "here.eager@cuda"]
    (item,) = bundled_implementations(None, table, ["here@cuda"]).implementations
    assert (item.mode_declarations, item.cluster_resources) == (modes[0], {"here": 1.0, "GPU": 1.0})
    with pytest.raises(UsageError, match=r"^no implementation is called 'here.jit@cuda'"):
        chosen("here.jit@cuda")


# Published by a package, or somebody's own

MODULE = f'{ATTENTION}\nattention.capabilities = {{"dtypes": ["float64"]}}\n'
TEXTS = tables_beside(__file__)["user_code"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that publishes functions in its dist-info folder."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "my-kernels", "my_kernels", "1.2", MODULE)
    (site / "my_kernels-1.2.dist-info" / "entry_points.txt").write_text(TEXTS["points"], encoding="utf-8")
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("installed")
def test_one_is_chosen_by_its_published_name_and_called_so_in_reports(invoke: Invoke) -> None:
    assert {"my.flash", "plain", "gone"} <= published_entry_points().keys()
    assert "my.command" not in published_entry_points()
    found = select_implementations(None, ["my.flash", "plain"]).implementations
    assert [each.name for each in found] == ["my.flash", "plain.attention"]
    assert [dict(each.mode_declarations.classes) for each in found] == [{"float64": "native"}] * 2
    assert found[0].mode_declarations.description == "my_kernels:attention"
    with pytest.raises(UsageError, match=r"my_kernels:no_such_function: .* has no no_such_function"):
        select_implementations(None, ["gone"])
    code, out, _ = invoke("list", "implementations", "--json")
    assert code == 0
    (listed,) = [each for each in json.loads(out)["items"] if each["name"] == "my.flash"]
    assert (listed["version"], listed["is"]) == ("1.2", "published as my_kernels:attention")


def test_functions_of_one_name_get_as_much_of_their_paths_as_tells_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("old/kernel.py", "new/kernel.py", "a/old/kernel.py", "v1.2/kernel.py", "v1_2/kernel.py", "numpy.py"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(
            "class a: ...\nclass b: ...\ndef attention(): ...\ndef module(): ...\neager = 1\n", encoding="utf-8"
        )

    def named(*patterns: str, taken: Collection[str] = ()) -> list[str]:
        requested, _ = separate_user_functions(patterns)
        return [item.report_name for item in with_distinct_names(requested, taken)]

    here = re.sub(r"\W", "_", tmp_path.name)
    for patterns, expected in (
        (["old/kernel.py:attention"], ["kernel.attention"]),
        (["old/kernel.py:attention", "new/kernel.py:attention"], ["old_kernel.attention", "new_kernel.attention"]),
        (["new/kernel.py:attention", "old/kernel.py:attention"], ["new_kernel.attention", "old_kernel.attention"]),
        (["old/kernel.py:a.f", "old/kernel.py:b.f"], ["kernel.a_f", "kernel.b_f"]),
        (
            ["old/kernel.py:a.f", "old/kernel.py:b.f", "new/kernel.py:a.f", "new/kernel.py:attention"],
            ["old_kernel.a_f", "old_kernel.b_f", "new_kernel.a_f", "kernel.attention"],
        ),
        (
            ["old/kernel.py:attention", "a/old/kernel.py:attention"],
            [f"{here}_old_kernel.attention", "a_old_kernel.attention"],
        ),
        (["old/kernel.py:attention", "./old/kernel.py:attention"], ["kernel.attention"]),
        (["old/kernel.py:a.f", "./new/kernel.py:a.f"], ["old_kernel.f", "new_kernel.f"]),
    ):
        assert named(*patterns) == expected
    assert named("numpy.py:eager", taken={"torch.eager"}) == ["numpy.eager"]
    assert named("numpy.py:eager", taken={"numpy.eager"}) == [f"{here}_numpy.eager"]
    for patterns in (["v1.2/kernel.py", "v1_2/kernel.py"], ["old/kernel.py", "old/kernel.py:module"]):
        with pytest.raises(UsageError, match=r"would call all of them kernel\.module, and their paths do not tell"):
            named(*patterns)


@given(st.lists(st.lists(st.sampled_from(["a", "b", "a_b"]), min_size=1, max_size=3), min_size=2, max_size=6))
def test_no_two_functions_are_called_alike(paths: list[list[str]]) -> None:
    targets = dict.fromkeys(Target(f"/{'/'.join(path)}.py", "f") for path in paths)
    requested = [RequestedFunction(target.module, target) for target in targets]
    try:
        found = [item.report_name for item in with_distinct_names(requested)]
    except UsageError:
        whole = [re.sub("/", "_", target.module) for target in targets]
        assert len({*whole}) < len(whole), "whole paths tell them apart"
    else:
        assert len({*found}) == len(found)


def test_a_function_that_its_file_does_not_have_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("raise SystemExit\ndef attention(): ...\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"kernel\.py has no atention; did you mean attention\?"):
        separate_user_functions([f"{path}:atention"])
    path.write_text("raise SystemExit\nfrom others import *\n", encoding="utf-8")
    assert len(separate_user_functions([f"{path}:atention"])[0]) == 1, "its text leaves it open"


def test_functions_are_called_alike_by_file_module_and_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "__init__.py").touch()
    (tmp_path / "some" / "kernels.py").write_text(TEXTS["kernels"], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    kernels = importlib.import_module("some.kernels")
    for name in ("attention", "ready"):
        for target in (f"some/kernels.py:{name}", f"some.kernels:{name}"):
            assert names(select_implementations(None, [target])) == [f"some_kernels.{name}"]
        assert implementation_of_callable(getattr(kernels, name), None, None).name == f"some_kernels.{name}"
    assert implementation_of_callable(kernels.attention, None, "mine").name == "some_kernels.mine"
    assert implementation_of_callable(functools.partial(kernels.attention), None, None).name == "some_kernels.attention"
    assert implementation_of_callable(lambda query, key, value: value, None, None).name.endswith(".callable")
    for name in ("some", "some.kernels"):
        sys.modules.pop(name, None)
    for file, package in (("/home/me/my_kernel.py", "my_kernel"), (None, "own"), ("/tmp/notebook", "own")):
        main = ModuleType("__main__")  # a script, Python's own prompt, and a notebook
        main.__file__ = file
        exec("def attention(query, key, value): ...", vars(main))
        monkeypatch.setitem(sys.modules, "__main__", main)
        found = find_origin(main.attention)
        assert (found.package, found.function) == (package, "attention")


# What it declares and may not do

PLAIN = "\ndef attention(query, key, value, *, is_causal=False, scale=None): ...\n"
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a file, another one with every call; what this process imports of them is forgotten."""
    numbers = count()
    for name in ("path", "path_hooks"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])

    def write(text: str) -> str:
        path = tmp_path / f"kernel{next(numbers) or ''}.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    yield write
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def function_of(body: str) -> str:
    return f"def attention(query, key, value):\n    {body}\n"


def here(target: str) -> Implementation:
    """Load a target in this process, as its worker does."""
    meant = Target.parse(target)
    entry = make_user_entry(meant, read_target_declarations(load_target(meant), meant.attribute), None)
    return Implementation(entry, next(iter(entry.all_modes)))


def outcome_here(target: str, problem: Problem | None = None) -> Outcome:
    return evaluate_on_backend(here(target).entry.load(), problem or attention_problem())


def failure_of(target: str) -> Failure:
    outcome = outcome_here(target)
    assert isinstance(outcome, Failure), outcome
    return outcome


def computed(outcome: Outcome) -> Computed:
    assert isinstance(outcome, Computed), outcome
    return outcome


def test_what_is_called_with_which_inputs_and_options(write: Write, tmp_path: Path) -> None:
    found, problem = own(f"{write(ATTENTION)}:attention"), attention_problem()
    assert found.name == "kernel.attention"
    renamed = ATTENTION.replace("attention(query, key, value", "my_kernel(q, k, v").replace("key, -1", "k, -1")
    renamed = renamed.replace("query", "q").replace("@ value", "@ v")
    for outcome in (*in_worker(found, [problem], tmp_path), outcome_here(f"{write(renamed)}:my_kernel")):
        np.testing.assert_allclose(computed(outcome).stages["output"], attention_output(problem), rtol=1e-13)
    text = f"{ATTENTION}\ndef softmax(scores):\n    return {{'weights': scores * 0 + 0.5}}\n"
    softmax = Problem("softmax", {}, {"scores": np.array([[[[0.0, 1.0]]]])})
    assert (computed(outcome_here(write(text), softmax)).stages["weights"] == 0.5).all(), "a module offers all of it"
    scores = write("def general_scores(query, key, weight):\n    return query @ weight @ key.mT")
    inputs = {"query": np.ones((1, 1, 2, 3)), "key": np.ones((1, 1, 4, 5)), "weight": np.ones((3, 5))}
    outcome = outcome_here(scores, Problem("scoring", {"score": "general"}, inputs))  # its third input is no value
    np.testing.assert_array_equal(computed(outcome).stages["scores"], np.full((1, 1, 2, 4), 15.0))
    target = f"{write(ATTENTION)}:attention"
    lacks = Failure("unsupported", "takes no softcap", ("softcap",))
    assert outcome_here(target, attention_problem(softcap=3.0)) == lacks
    assert outcome_here(target, softmax) == Failure("unsupported", "has no softmax", ("softmax()",))
    denying = f"{write(ATTENTION + 'attention.capabilities = dict(value_width=False)')}:attention"
    assert outcome_here(denying) == Failure("unsupported", "says that it has no value width", ("value width",))


def test_who_imports_one_framework_alone_or_by_a_library_is_given_its_arrays(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torch", "jax"):
        (tmp_path / f"{name}.py").touch()
    install(tmp_path, "layers", "layers", "1.0", "import numpy, torch\n")
    for imported, framework, hint in TABLES["imports"]:
        entry = here(f"{write(f'import {imported}' + PLAIN)}:attention").entry
        assert isinstance(entry, UserImplementation)
        assert (entry.framework, len(entry.hints)) == (framework, int(bool(hint)))
        assert hint in "".join(entry.hints)
    install(tmp_path, "of_torch", "of_torch", "1.0", "import numpy, torch" + PLAIN)
    assert here("of_torch:attention").entry.framework == "torch", "a library's own function"


def test_what_a_file_declares_its_functions_declare_unless_they_say_otherwise(write: Write) -> None:
    said = 'conventions = {"heads": "tiled"}\nrequires = {"width_multiple": 8}\nproperties = {"colour": "red"}\n'
    own = 'attention.requires = {"width_multiple": 4}\n'
    entry = here(f"{write(said + function_of('return query') + own)}:attention").entry
    assert isinstance(entry, UserImplementation)
    assert (entry.conventions, entry.properties) == ({"heads": "tiled"}, {})
    assert entry.requirements == {"attention": {"width_multiple": 4}}
    of_function = 'attention.classes = {"float16": "fused"}\nattention.capabilities = {"grouped_heads": False}\n'
    found = here(write(function_of("return query") + of_function))
    assert dict(found.mode_declarations.classes) == {"float64": "native", "float32": "native", "float16": "fused"}
    of_file = write(function_of("return query") + 'capabilities = {"value_width": False}\n')
    assert outcome_here(of_file) == Failure("unsupported", "says that it has no value width", ("value width",))


def test_what_is_declared_for_a_function_counts_as_if_it_did(write: Write) -> None:
    own = 'attention.capabilities = {"dtypes": ["float64"]}\nattention.requires = {"width_multiple": 8}\n'
    file = write(function_of("return query") + own)
    for target in (file, f"{file}:attention"):
        for text, field, value in TABLES["declared"]:
            entry = load_user_implementation(Target.parse(target, "", [text]), None).entry
            assert getattr(entry, field) == value, text
    for text, message in TABLES["undeclarable"]:
        with pytest.raises((LoadError, UsageError), match=message):
            load_user_implementation(Target.parse(f"{file}:attention", "", [text]), None)


def test_what_a_function_or_its_module_requires_is_padded_in_the_run(write: Write, tmp_path: Path) -> None:
    asserting = "    assert query.shape[-1] == value.shape[-1]\n    scores ="
    text = ATTENTION.replace("    scores =", asserting, 1).replace("mask=None", "scale=None, mask=None")
    text = text.replace("query.shape[-1] ** -0.5", "query.shape[-1] ** -0.5 if scale is None else scale")
    text += "attention.requires = {'value_width': 'equal'}"
    found = own(f"{write(text)}:attention")
    outcome = computed(in_worker(found, [attention_problem()], tmp_path)[0])
    assert outcome.padded == "zero columns (D 5 to 6)"
    np.testing.assert_allclose(outcome.stages["output"], attention_output(attention_problem()), rtol=1e-13)
    text = ATTENTION + "requires = {'width_multiple': 8}\ndef softmax(scores): ...\nsoftmax.requires = {'widths': [4]}"
    requires = here(write(text)).shape_requirements
    assert requires("attention") == ({"width_multiple": 8}, {"mask"})
    assert requires("softmax") == ({"widths": [4]}, frozenset())
    assert requires("dot_scores") == ({}, frozenset())


def test_only_what_it_raises_itself_says_that_a_function_does_not_support_a_case(write: Write) -> None:
    for body, verdict in (
        ("raise NotImplementedError('no')", "unsupported"),
        ("import abc\n    raise NotImplementedError(abc)", "unsupported"),
        ("import numbers\n    numbers.Complex.__add__(1, 2)", "error"),
    ):
        outcome = failure_of(f"{write(function_of(body))}:attention")
        assert outcome.verdict == verdict
        assert ("let it raise NotImplementedError itself" in outcome.message) == (verdict == "error")


def test_what_cannot_be_used_or_selected_or_does_what_it_may_not_says_why(write: Write) -> None:
    for text, target, message in TABLES["unusable"]:
        with pytest.raises((LoadError, UsageError)) as error:
            here(f"{write(text.replace('ATTENTION ', ATTENTION))}:{target}")
        assert message in str(error.value)
    for body, message in TABLES["forbidden"]:
        outcome = failure_of(f"{write(function_of(body))}:attention")
        assert (outcome.verdict, message in outcome.message) == ("error", True), outcome
    for implementations, framework, message in (
        ([f"{write('')}:attention"], None, r"kernel\d+\.py has no attention"),
        (["nowhere.py:attention"], None, r"no file nowhere\.py"),
        ([], "torch", r"name one: file\.py:function"),
    ):
        with pytest.raises(UsageError, match=message):
            select_implementations(None, implementations, framework)
    target = Target.parse(f"{write('import time; time.sleep(60)')}:attention")
    with pytest.raises(UsageError, match=r"not loaded after 0\.3 s"):
        load_user_implementation(target, None, Limits(start_seconds=0.3))


# A kernel, and what it takes its number from: a module beside it, a package's module, and a folder without __init__.
SOURCES = {
    "kernel.py": "",
    "other.py": "from other import NUMBER",
    "parts/inner.py": "from parts.inner import NUMBER",
    "spread/inner.py": "from spread.inner import NUMBER",
}


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep compiled files, as Python does by default, and let nothing of an import outlive a test."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name in ("path", "path_hooks"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    cached, modules = {*sys.path_importer_cache}, {*sys.modules}
    yield
    for path in {*sys.path_importer_cache} - cached:
        del sys.path_importer_cache[path]
    _forget(modules)


def _forget(before: set[str]) -> None:
    for name in {*sys.modules} - before:
        del sys.modules[name]


def save(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    os.utime(path, (1e9, 1e9))


@pytest.mark.usefixtures("imports")
@pytest.mark.parametrize("where", SOURCES)
@pytest.mark.parametrize("by_name", [False, True])
def test_what_files_say_now_is_read(where: str, by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "kernel.py", SOURCES[where])
    save(tmp_path / "parts" / "__init__.py", "")
    before = {*sys.modules}
    for number in (1, 2):
        save(tmp_path / where, f"NUMBER = {number}")
        found: Any = import_user_module("kernel" if by_name else str(tmp_path / "kernel.py"))
        assert number == found.NUMBER
        _forget(before)


# What is imported, with its versions

KERNEL = kernel(
    first="import lazily",
    before="from typing import TYPE_CHECKING\nimport helper, fast_parts\nif TYPE_CHECKING:\n    import never_there\n",
)


def install(folder: Path, distribution: str, package: str, number: str, source: str = "") -> None:
    """Leave a package behind as pip does: its module, and a dist-info folder that says what it has."""
    (folder / f"{package}.py").write_text(source, encoding="utf-8")
    for old in folder.glob(f"{package}-*.dist-info/*"):
        old.unlink()
    info = folder / f"{package}-{number}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {number}\n", encoding="utf-8"
    )
    (info / "top_level.txt").write_text(f"{package}\n", encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A kernel that imports a distribution at its top, one when it is called, and one through a file beside it."""
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / "helper.py").write_text("__version__ = '7'\nimport deeper.inside\n", encoding="utf-8")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "__init__.py").touch()
    (tmp_path / "deeper" / "inside.py").write_text("import far_parts\n", encoding="utf-8")
    install(tmp_path, "fast-parts", "fast_parts", "1.0", "import hidden_parts\n")
    install(tmp_path, "lazily", "lazily", "2.0")
    install(tmp_path, "Far.Parts", "far_parts", "3.0")
    install(tmp_path, "hidden-parts", "hidden_parts", "4.0")
    return tmp_path


def versions_of(target: str) -> dict[str, str]:
    entry = own(target).entry
    assert isinstance(entry, UserImplementation)
    return dict(entry.distributions)


def test_what_its_own_modules_import_is_found_and_what_these_import_in_turn_is_not(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    imported = {"Far.Parts": "3.0", "fast-parts": "1.0", "helper": "7", "lazily": "2.0", "numpy": version("numpy")}
    assert versions_of("kernel.py:attention") == imported
    install(project, "kernels", "kernels", "5.0", "import lazily\ndef attention(query, key, value): ...\n")
    assert load_user_implementation(Target.parse("kernels:attention"), None).package == "kernels", (
        "that of its distribution"
    )
    assert versions_of("kernels:attention") == {"kernels": "5.0", "lazily": "2.0"}, "a package counts itself"
    found = implementation_of_callable(lambda query, key, value: np.zeros(3), None, None)
    assert found.entry.distributions["numpy"] == version("numpy"), "and values what they use"


def test_an_upgrade_is_named_and_no_run_is_resumed_with_it(project: Path, invoke: Invoke) -> None:
    command = ("run", "attention/e*", "-i", "kernel.py:attention", "--dtype", "float64", "--quiet", "--output")
    assert invoke(*command, "before")[0] == 0
    install(project, "fast-parts", "fast_parts", "1.1")
    code, _, err = invoke(*command, "before", "--resume")
    assert (code, "cannot be resumed: versions" in err) == (2, True)
    assert invoke(*command, "after")[0] == 0
    versions = json.loads((project / "after" / "environment.json").read_text())["versions"]
    assert versions["fast-parts"] == "1.1"
    _, out, _ = invoke("diff", "before", "after")
    (changed,) = [line for line in out.splitlines() if "fast-parts" in line]
    assert ("1.0" in changed, "1.1" in changed, "lazily" in out) == (True, True, False)
