"""The table of frameworks: it can be read, and asked what is installed, without importing any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from attncheck.attention.rounding import rounding_model_named
from attncheck.backends import BACKENDS, EVERYTHING, LIBRARIES, BackendEntry, Mode
from attncheck.backends.contract import EmptyRows
from attncheck.reports.defects import address_of
from attncheck.spec import DTYPES

MODES = {f"{entry.name}.{mode.name}": mode for entry in EVERYTHING.values() for mode in entry.all_modes.values()}


def python(code: str, **environment: str) -> str:
    """Run code in a new interpreter, where nothing has been imported yet, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout.strip()


def test_reading_the_table_and_asking_what_is_installed_imports_no_framework_and_not_even_numpy() -> None:
    code = (
        "import sys\n"
        "from attncheck.backends import EVERYTHING\n"
        "[entry.is_installed for entry in EVERYTHING.values()]\n"
        "packages = {each for entry in EVERYTHING.values() for each in entry.packages}\n"
        "print(sorted(sys.modules.keys() & packages))"
    )
    assert python(code) == "[]"


def test_loading_the_numpy_backend_imports_no_other_framework() -> None:
    code = (
        "import sys\n"
        "from attncheck.backends import BACKENDS\n"
        "print(BACKENDS['numpy'].load().__name__)\n"
        "print(sorted(sys.modules.keys() & {'torch', 'tensorflow', 'keras', 'jax', 'jaxlib', 'pandas', 'scipy'}))"
    )
    assert python(code).splitlines() == ["attncheck.backends.numpy_backend", "[]"]


def test_every_line_is_filed_under_its_name_and_names_a_module_that_exists() -> None:
    for name, entry in BACKENDS.items():
        assert entry.name == name
        spec = find_spec(entry.module)
        assert spec is not None
        assert spec.origin is not None
        # Never named after the library that it wraps: run directly, numpy.py would hide NumPy.
        assert Path(spec.origin).stem not in entry.packages


def test_every_backend_module_in_the_folder_has_its_line_in_the_table() -> None:
    spec = find_spec("attncheck.backends")
    assert spec is not None
    assert spec.origin is not None
    files = {f"attncheck.backends.{path.stem}" for path in Path(spec.origin).parent.glob("*_backend.py")}
    assert files == {entry.module for entry in BACKENDS.values()}


def test_every_mode_says_what_it_is_and_declares_numerical_classes_that_exist_and_conventions_with_a_source() -> None:
    eager = {entry.module for entry in BACKENDS.values()}
    for name, mode in MODES.items():
        spec = find_spec(mode.module)
        assert spec is not None, name
        assert spec.origin is not None, name
        assert mode.name.isidentifier(), name
        assert mode.description, name
        assert mode.classes, name
        assert set(mode.classes) <= set(DTYPES), name
        for dtype, rounding_model in mode.classes.items():
            assert rounding_model_named(rounding_model, dtype).dtype == dtype, name
        assert set(mode.conventions) <= {"empty_rows"}, name
        for convention in mode.conventions.values():
            assert convention.value in get_args(EmptyRows), name
            assert len(convention.reason.split()) >= 8, name
            assert address_of(convention.source), name
        # One that takes the option gives what it is asked for.
        assert not (mode.module in eager and mode.conventions), name


def test_what_nobody_documents_as_intended_is_no_convention_of_a_mode() -> None:
    # The others that give no zeros do so in expected failures: backends/expected_failures.
    declared = {f"{entry.name}.{mode.name}" for entry in BACKENDS.values() for mode in entry.modes if mode.conventions}
    assert declared == {
        *(f"torch.{mode}" for mode in ("sdpa", "sdpa_math", "sdpa_flash", "mha")),
        *(f"torch.{mode}" for mode in ("causal_upper_left", "causal_lower_right", "flex", "flex_compile")),
    }


def test_a_library_has_no_eager_code_and_none_of_the_names_of_frameworks() -> None:
    for entry in LIBRARIES.values():
        assert not entry.module  # a mode of the name may be the library's own, as transformers has one
        assert entry.default_mode in entry.all_modes
    assert not BACKENDS.keys() & LIBRARIES.keys()
    assert {**BACKENDS, **LIBRARIES} == EVERYTHING


def test_the_eager_mode_is_the_frameworks_own_module_and_no_two_modes_have_one_name() -> None:
    for entry in BACKENDS.values():
        names = ["eager", *(mode.name for mode in entry.modes)]
        assert list(entry.all_modes) == names
        assert len(set(names)) == len(names)
        assert entry.all_modes["eager"].module == entry.module
        assert entry.all_modes["eager"].classes == entry.classes


def test_numpy_has_no_mode_of_sixteen_bits() -> None:
    # Its float16 products add up in float16, which no class allows, and bfloat16 is none of its own types.
    for mode in BACKENDS["numpy"].all_modes.values():
        assert set(mode.classes) == {"float64", "float32"}


def test_a_mode_may_be_an_object_in_a_module() -> None:
    mode = Mode("other", "attncheck.backends.contract", "an object", attribute="Backend")
    entry = BackendEntry("some", "attncheck.backends.numpy_backend", ("numpy",), modes=(mode,))
    assert entry.load("other").__name__ == "Backend"  # type: ignore[attr-defined]
    assert entry.load().__name__ == "attncheck.backends.numpy_backend"  # type: ignore[attr-defined]


def test_a_framework_is_installed_when_it_can_be_found_and_finding_it_does_not_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "framework_that_raises.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert BackendEntry("some", "some_backend", ("framework_that_raises", "and_its_friend")).is_installed
    assert not BackendEntry("other", "other_backend", ("framework_that_nobody_wrote",)).is_installed


def test_a_mere_folder_of_the_frameworks_name_is_not_the_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such as a folder of experiments in the working directory, or one that an uninstall left behind.
    (tmp_path / "framework_folder" / "notes").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("framework_folder") is not None
    assert not BackendEntry("some", "some_backend", ("framework_folder",)).is_installed


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc, which only Linux has")
def test_a_process_may_limit_numpys_threads_after_it_has_read_the_table() -> None:
    # As the worker does: it is told what to load, then how many threads. NumPy's BLAS looks once, when it is loaded.
    code = (
        "import os\n"
        "from attncheck.backends import BACKENDS\n"
        "os.environ.update(dict.fromkeys(['OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'], '1'))\n"
        "BACKENDS['numpy'].load()\n"
        "import numpy\n"
        "numpy.ones((600, 600)) @ numpy.ones((600, 600))\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    assert python(code) == "1"


def test_only_jax_needs_a_process_of_its_own_and_only_for_64_bits() -> None:
    assert {entry.name: entry.own_process_for for entry in BACKENDS.values() if entry.own_process_for} == {
        "jax": frozenset({"float64"})
    }
