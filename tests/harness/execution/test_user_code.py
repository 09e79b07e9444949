"""Somebody's own implementation: what it declares and may not do, what it imports, and what its files say now."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions, version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import ATTENTION, kernel
from tables import tables_beside

from attncheck.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.environment import InstalledPackages
from attncheck.execution.implementation_selection import select_callable, select_implementations, user_implementation
from attncheck.execution.implementations import Implementation, UserImplementation, entry_of
from attncheck.execution.operations import Task
from attncheck.execution.runner import Group, GroupRunner
from attncheck.execution.user_call import FromSource, declarations, import_user_module, load
from attncheck.execution.user_code import LoadError, Target, is_own
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on

pytestmark = pytest.mark.usefixtures("forked_workers")

TABLES = tables_beside(__file__)

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


def problem(**options: object) -> Task:
    rng = np.random.default_rng(7)
    inputs = {
        "query": rng.normal(size=(1, 2, 3, 5)),
        "key": rng.normal(size=(1, 2, 4, 5)),
        "value": rng.normal(size=(1, 2, 4, 6)),
    }
    return Task("attention", options, inputs)


def test_the_name_that_reports_give_it_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("kernel.py", "torch.py"):
        Path(name).touch()
    assert Target.of("kernel.attention") == Target.of("kernel.py:attention")
    assert Target.of("kernel.module") == Target.of("kernel.py")
    assert is_own("kernel.attention")
    assert not any(map(is_own, ("torch.sdpa", "other.attention", "torch.*")))


def here(target: str) -> Implementation:
    """Load a target in this process, as its worker does."""
    meant = Target.of(target)
    entry = entry_of(meant, declarations(load(meant), meant.attribute), None)
    return Implementation(entry, next(iter(entry.all_modes)))


def outcome_here(target: str, task: Task) -> Outcome:
    return evaluate_on(here(target).entry.load(), task)


def outcome_of(implementation: Implementation, task: Task, folder: Path, seconds: float = 30) -> Outcome:
    runner: GroupRunner[str] = GroupRunner(Group(implementation, ("float64",)), Limits(case_seconds=seconds), folder)
    try:
        return runner.evaluate(task)
    finally:
        runner.close()


def reference() -> np.ndarray:
    task = problem()
    query, key, value = (task.inputs[name] for name in ("query", "key", "value"))
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(5)
    weights = np.exp(scores)
    result: np.ndarray = weights / weights.sum(-1, keepdims=True) @ value
    return result


def test_a_function_of_a_file_is_called_whatever_its_names(write: Write, tmp_path: Path) -> None:
    (found,) = select_implementations(None, [f"{write(ATTENTION)}:attention"]).implementations
    assert found.name == "kernel.attention"
    renamed = ATTENTION.replace("attention(query, key, value", "my_kernel(q, k, v").replace("key, -1", "k, -1")
    renamed = renamed.replace("query", "q").replace("@ value", "@ v")
    for outcome in (outcome_of(found, problem(), tmp_path), outcome_here(f"{write(renamed)}:my_kernel", problem())):
        assert isinstance(outcome, Computed), outcome
        np.testing.assert_allclose(outcome.stages["output"], reference(), rtol=1e-13)


def test_a_module_by_itself_offers_whatever_it_calls_as_the_contract_does(write: Write) -> None:
    text = f"{ATTENTION}\ndef softmax(scores):\n    return {{'weights': scores * 0 + 0.5}}\n"
    outcome = outcome_here(write(text), Task("softmax", {}, {"scores": np.array([[[[0.0, 1.0]]]])}))
    assert isinstance(outcome, Computed)
    assert (outcome.stages["weights"] == 0.5).all()


def test_what_is_no_parameter_or_is_denied_is_unsupported(write: Write) -> None:
    target = f"{write(ATTENTION)}:attention"
    assert outcome_here(target, problem(softcap=3.0)) == Failure("unsupported", "takes no softcap", ("softcap",))
    scores = Task("softmax", {}, {"scores": np.zeros((1, 1, 1, 2))})
    assert outcome_here(target, scores) == Failure("unsupported", "has no softmax", ("softmax()",))
    denying = f"{write(ATTENTION + 'attention.capabilities = dict(value_width=False)')}:attention"
    expected = Failure("unsupported", "says that it has no value width", ("value width",))
    assert outcome_here(denying, problem()) == expected


@pytest.mark.parametrize(
    ("keywords", "missing"),
    [("*, mask=None", ("empty_rows",)), ("*, mask=None, empty_rows='zero'", ()), ("*, mask=None, **more", ())],
)
def test_who_is_asked_for_a_convention(write: Write, tmp_path: Path, keywords: str, missing: tuple[str, ...]) -> None:
    returned = "np.full_like(output, {'nan': np.nan}.get(locals().get('more', locals())['empty_rows'], 0))"
    text = (ATTENTION if missing else kernel(returned)).replace("*, mask=None", keywords)
    outcome = outcome_here(f"{write(text)}:attention", problem(empty_rows="nan"))
    assert isinstance(outcome, Computed), outcome
    assert outcome.not_asked == missing
    assert bool(np.isnan(outcome.stages["output"]).all()) is not bool(missing)


def test_a_function_whose_third_input_is_no_value_is_not_looked_at_as_if_it_were(write: Write, tmp_path: Path) -> None:
    target = write("def general_scores(query, key, weight):\n    return query @ weight @ key.mT")
    inputs = {"query": np.ones((1, 1, 2, 3)), "key": np.ones((1, 1, 4, 5)), "weight": np.ones((3, 5))}
    outcome = outcome_here(target, Task("scoring", {"score": "general"}, inputs))
    assert isinstance(outcome, Computed), outcome
    np.testing.assert_array_equal(outcome.stages["scores"], np.full((1, 1, 2, 4), 15.0))


def test_what_a_function_declares_is_read_before_it_runs(write: Write) -> None:
    declared = (
        "attention.capabilities = {'dtypes': ['float32', 'float16'], 'grouped_heads': False}\n"
        "attention.classes = {'float16': 'fused'}\nattention.conventions = {'empty_rows': 'nan'}\n"
        "attention.resources = {'GPU': 1}\nattention.framework = 'numpy'\n"
    )
    (found,) = select_implementations(None, [f"{write(ATTENTION + declared)}:attention"]).implementations
    assert dict(found.declared.classes) == {"float32": "native", "float16": "fused"}
    assert {name: each.value for name, each in found.declared.conventions.items()} == {"empty_rows": "nan"}
    assert found.needs == {"numpy": 1, "GPU": 1}


def test_who_imports_one_framework_alone_is_given_its_arrays(write: Write, tmp_path: Path) -> None:
    for name in ("torch", "jax"):
        (tmp_path / f"{name}.py").touch()
    for imported, framework, told in (
        ("torch", "torch", "imports torch alone and is given torch's arrays; --framework numpy gives it NumPy's"),
        ("torch, numpy", "numpy", "imports torch and is given NumPy's arrays"),
        ("torch, jax", "numpy", ""),
        ("math", "numpy", ""),
    ):
        entry = here(f"{write(f'import {imported}' + PLAIN)}:attention").entry
        assert isinstance(entry, UserImplementation)
        assert (entry.framework, len(entry.hints)) == (framework, int(bool(told)))
        assert told in "".join(entry.hints)


def test_what_a_function_requires_is_padded_in_the_run(write: Write, tmp_path: Path) -> None:
    asserting = "    assert query.shape[-1] == value.shape[-1]\n    scores ="
    text = ATTENTION.replace("    scores =", asserting, 1).replace("mask=None", "scale=None, mask=None")
    text = text.replace("query.shape[-1] ** -0.5", "query.shape[-1] ** -0.5 if scale is None else scale")
    text += "attention.requires = {'value_width': 'equal'}"
    (found,) = select_implementations(None, [f"{write(text)}:attention"]).implementations
    outcome = outcome_of(found, problem(), tmp_path)
    assert isinstance(outcome, Computed), outcome
    assert outcome.padded == "zero columns (D 5 to 6)"
    np.testing.assert_allclose(outcome.stages["output"], reference(), rtol=1e-13)


def test_what_a_module_requires_goes_for_its_functions_that_say_nothing(write: Write) -> None:
    text = ATTENTION + "requires = {'width_multiple': 8}\ndef softmax(scores): ...\nsoftmax.requires = {'widths': [4]}"
    found = here(write(text))
    assert found.requires("attention") == ({"width_multiple": 8}, {"mask"})
    assert found.requires("softmax") == ({"widths": [4]}, frozenset())
    assert found.requires("dot_scores") == ({}, frozenset())


def test_an_error_about_shapes_says_how_they_are_declared(write: Write) -> None:
    for line, is_advised in (
        ("assert query.shape[-1] % 8 == 0", True),
        ("assert query.shape[-1] % 8 == 0, 'head size'", True),
        ("raise RuntimeError('head_dim should be a multiple of 8')", True),
        ("raise ValueError('block size must be a power of 2')", True),
        ("raise ValueError('out of luck')", False),
        ("assert False", False),
        ("raise NotImplementedError('head size must be a multiple of 8')", False),
    ):
        text = f"def attention(query, key, value):\n    {line}\n"
        outcome = outcome_here(f"{write(text)}:attention", problem())
        assert isinstance(outcome, Failure)
        advice = 'attention.requires = {"width_multiple": 8} (docs/kernels.md)'
        assert (advice in outcome.message) is is_advised
        outcome = outcome_here(f"{write(text + 'attention.requires = dict(min_width=1)')}:attention", problem())
        assert isinstance(outcome, Failure)
        assert "declare" not in outcome.message


def test_only_what_it_raises_itself_says_that_a_function_does_not_support_a_case(write: Write) -> None:
    for body, verdict in (
        ("raise NotImplementedError('no')", "unsupported"),
        ("import abc\n    raise NotImplementedError(abc)", "unsupported"),
        ("import numbers\n    numbers.Complex.__add__(1, 2)", "error"),
    ):
        text = f"def attention(query, key, value):\n    {body}\n"
        outcome = outcome_here(f"{write(text)}:attention", problem())
        assert isinstance(outcome, Failure)
        assert outcome.verdict == verdict
        assert ("let it raise NotImplementedError itself" in outcome.message) == (verdict == "error")


def test_a_target_that_cannot_be_used_says_why(write: Write) -> None:
    for text, target, message in TABLES["unusable"]:
        with pytest.raises((LoadError, UsageError)) as error:
            here(f"{write(text.replace('ATTENTION ', ATTENTION))}:{target}")
        assert message in str(error.value)


def test_what_cannot_be_selected_is_a_usage_error(write: Write) -> None:
    for implementations, framework, message in (
        ([f"{write('')}:attention"], None, r"kernel\.py has no attention"),
        (["nowhere.py:attention"], None, r"no file nowhere\.py"),
        ([], "torch", r"name one: file\.py:function"),
    ):
        with pytest.raises(UsageError, match=message):
            select_implementations(None, implementations, framework)
    target = Target.of(f"{write('import time; time.sleep(60)')}:attention")
    with pytest.raises(UsageError, match=r"not loaded after 0\.3 s"):
        user_implementation(target, None, Limits(start_seconds=0.3))


def test_what_no_implementation_may_do_is_an_error_with_its_reason(write: Write) -> None:
    for body, message in TABLES["forbidden"]:
        text = f"def attention(query, key, value):\n    {body}\n"
        outcome = outcome_here(f"{write(text)}:attention", problem())
        assert isinstance(outcome, Failure)
        assert (outcome.verdict, message in outcome.message) == ("error", True), outcome


# A kernel, and what it takes its number from: a module beside it, a package's module, and a folder without __init__.
SOURCES = {
    "its own": ("kernel.py", "", "NUMBER = {}"),
    "beside": ("other.py", "from other import NUMBER", "NUMBER = {}"),
    "package": ("parts/inner.py", "from parts.inner import NUMBER", "NUMBER = {}"),
    "namespace": ("spread/inner.py", "from spread.inner import NUMBER", "NUMBER = {}"),
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
    name, imported, text = SOURCES[where]
    save(tmp_path / "kernel.py", imported)
    save(tmp_path / "parts" / "__init__.py", "")
    before = {*sys.modules}
    for number in (1, 2):
        save(tmp_path / name, text.format(number))
        found: Any = import_user_module("kernel" if by_name else str(tmp_path / "kernel.py"))
        assert number == found.NUMBER
        _forget(before)


@pytest.mark.usefixtures("imports")
def test_an_installed_package_is_imported_as_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    save(installed / "library.py", "")
    save(tmp_path / "kernel.py", "import library, attncheck.errors")
    sys.path.append(str(installed))
    import_user_module(str(tmp_path / "kernel.py"))
    for name in ("library", "attncheck.errors"):
        spec = importlib.import_module(name).__spec__
        assert spec is not None
        assert not isinstance(spec.loader, FromSource)


Invoke = Callable[..., tuple[int, str, str]]

KERNEL = kernel(
    first="import lazily",
    before="from typing import TYPE_CHECKING\nimport helper, fast_parts\nif TYPE_CHECKING:\n    import never_there\n",
)


def test_what_has_a_package_is_what_the_standard_library_says() -> None:
    expected = {name: set(found) for name, found in packages_distributions().items() if name.isidentifier()}
    installed = InstalledPackages()
    assert {name: set(installed.of(name)) for name in expected} == expected
    assert "numpy" in installed
    assert "nump" not in installed
    assert installed.of("no_such_package") == ()


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
    (found,) = select_implementations(None, [target]).implementations
    assert isinstance(found.entry, UserImplementation)
    return dict(found.entry.distributions)


def test_what_its_own_modules_import_is_found_and_what_these_import_in_turn_is_not(project: Path) -> None:
    assert versions_of(f"{project / 'kernel.py'}:attention") == {
        "Far.Parts": "3.0",
        "fast-parts": "1.0",
        "helper": "7",
        "lazily": "2.0",
        "numpy": version("numpy"),
    }


def test_a_package_counts_itself_and_values_what_they_use(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    install(project, "kernels", "kernels", "5.0", "import lazily\ndef attention(query, key, value): ...\n")
    assert versions_of("kernels:attention") == {"kernels": "5.0", "lazily": "2.0"}
    found = select_callable(lambda query, key, value: np.zeros(3), None, None)
    assert found.entry.distributions["numpy"] == version("numpy")


def test_an_upgrade_is_named_and_no_run_is_resumed_with_it(project: Path, invoke: Invoke) -> None:
    command = ("run", "attention/e*", "-i", "kernel.py:attention", "--dtype", "float64", "--quiet", "--output")
    assert invoke(*command, "before")[0] == 0
    install(project, "fast-parts", "fast_parts", "1.1")
    code, _, said = invoke(*command, "before", "--resume")
    assert (code, "cannot be resumed: versions" in said) == (2, True)
    assert invoke(*command, "after")[0] == 0
    versions = json.loads((project / "after" / "environment.json").read_text())["versions"]
    assert versions["fast-parts"] == "1.1"
    _, out, _ = invoke("diff", "before", "after")
    (changed,) = [line for line in out.splitlines() if "fast-parts" in line]
    assert "1.0" in changed
    assert "1.1" in changed
    assert "lazily" not in out
