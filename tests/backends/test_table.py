"""The table of frameworks: read without importing any, complete, and what tox, make, CI and types follow."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from attncheck.backends import ALL_ENTRIES, BACKENDS, LIBRARIES, PYTHON_VERSIONS, BackendEntry, Mode
from attncheck.backends.contract import EmptyRows
from attncheck.backends.devices import HIDDEN_DEVICE_VARIABLES, VISIBLE_DEVICE_VARIABLES, NoDeviceError, on_device
from attncheck.reports.defects import thread_address
from attncheck.spec import DTYPES
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.options import DECLARABLE_CONVENTIONS

ROOT = Path(__file__).parents[2]
MODES = {f"{entry.name}.{mode.name}": mode for entry in ALL_ENTRIES.values() for mode in entry.all_modes.values()}


def python(code: str) -> str:
    """Run code in a new interpreter, where nothing has been imported yet, and return what it prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def origin(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)


def test_reading_the_table_and_loading_numpy_imports_no_other_framework() -> None:
    code = (
        "import sys\n"
        "from attncheck.backends import BACKENDS, ALL_ENTRIES\n"
        "[entry.is_installed for entry in ALL_ENTRIES.values()]\n"
        "packages = {package for entry in ALL_ENTRIES.values() for package in entry.packages}\n"
        "print(sorted(sys.modules.keys() & packages))\n"
        "print(BACKENDS['numpy'].load().__name__)\n"
        "print(sorted(sys.modules.keys() & (packages - {'numpy'} | {'pandas', 'scipy'})))"
    )
    assert python(code).splitlines() == ["[]", "attncheck.backends.numpy_backend", "[]"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc, which only Linux has")
def test_numpys_threads_can_be_limited_after_the_table_was_read() -> None:
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


def test_every_line_is_filed_under_its_name_and_every_module_has_its_line() -> None:
    for name, entry in BACKENDS.items():
        assert entry.name == name
        # Never named after the library that it wraps: run directly, numpy.py would hide NumPy.
        assert origin(entry.module).stem not in entry.packages
        assert list(entry.all_modes) == ["eager", *(mode.name for mode in entry.modes)]
        eager = entry.all_modes["eager"]
        assert (eager.module, eager.classes) == (entry.module, entry.classes)
    folder = origin("attncheck.backends").parent
    files = {f"attncheck.backends.{path.stem}" for path in folder.glob("*_backend.py")}
    assert files == {entry.module for entry in BACKENDS.values()}
    for entry in LIBRARIES.values():
        assert not entry.module  # a mode of the name may be the library's own, as transformers has one
        assert entry.default_mode in entry.all_modes
    # Only JAX needs a process of its own, and only for 64 bits.
    own_process = {entry.name: entry.own_process_for for entry in BACKENDS.values() if entry.own_process_for}
    assert own_process == {"jax": frozenset({"float64"})}


def test_every_mode_says_what_it_is_and_declares_numerical_classes_that_exist_and_conventions_with_a_source() -> None:
    eager = {entry.module for entry in BACKENDS.values()}
    for name, mode in MODES.items():
        assert origin(mode.module)
        assert mode.name.isidentifier(), name
        assert mode.description, name
        assert mode.classes, name
        assert set(mode.classes) <= set(DTYPES), name
        for dtype, rounding_model in mode.classes.items():
            assert rounding_model_named(rounding_model, dtype).dtype == dtype, name
        for option, convention in mode.conventions.items():
            assert convention.value in {"empty_rows": get_args(EmptyRows), **DECLARABLE_CONVENTIONS}[option], name
            assert len(convention.reason.split()) >= 8, name
            assert thread_address(convention.source), name
        # One that takes the option gives what it is asked for.
        assert not (mode.module in eager and mode.conventions), name
    # What nobody documents as intended is no convention: backends/expected_failures has the others without zeros.
    declared = {name for name, mode in MODES.items() if mode.conventions and name.partition(".")[0] in BACKENDS}
    assert declared == {
        *(f"torch.{mode}" for mode in ("sdpa", "sdpa_math", "sdpa_flash", "mha")),
        *(f"torch.{mode}" for mode in ("causal_upper_left", "causal_lower_right", "flex", "flex_compile")),
    }
    # NumPy's float16 products add up in float16, which no class allows, and bfloat16 is none of its own types.
    assert all(set(mode.classes) == {"float64", "float32"} for mode in BACKENDS["numpy"].all_modes.values())


def test_finding_an_installed_framework_does_not_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "framework_that_raises.py").write_text("raise RuntimeError('imported')")
    # A mere folder of its name, such as of experiments, or one that an uninstall left behind, is not the framework.
    (tmp_path / "framework_folder" / "notes").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("framework_folder") is not None
    for package, installed in (
        ("framework_that_raises", True),
        ("framework_that_nobody_wrote", False),
        ("framework_folder", False),
    ):
        assert BackendEntry("some", "some_backend", (package, "and_its_friend")).is_installed is installed


# A framework is added in one place.

FRAMEWORKS = [entry for name, entry in BACKENDS.items() if name != "numpy"]  # NumPy is no extra: everything needs it
TOX = {f"py{python.replace('.', '')}": python for python in PYTHON_VERSIONS}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tox(section: str, key: str) -> list[str]:
    """Return the lines of a setting of tox.ini, without comments."""
    parser = ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    return [line for line in parser[section][key].splitlines() if line and not line.startswith("#")]


def environments() -> Iterator[str]:
    """Yield the names of the environments that tox runs, written out."""
    for line in tox("tox", "env_list"):
        prefix, _, choices = line.partition("{")
        yield from (f"{prefix}{each.strip()}" for each in choices.rstrip("}").split(",")) if choices else [line]


def on(python: str) -> list[str]:
    """Return the names of the backends that are tested on a release of Python."""
    return [name for name, entry in BACKENDS.items() if python in entry.pythons]


def test_tox_installs_selects_and_checks_every_framework_on_every_python_that_it_has_and_one_for_all() -> None:
    wanted = [f"{prefix}-{name}" for prefix, python in TOX.items() for name in (*on(python), "all")]
    assert list(environments()) == ["quality", *wanted, *(f"py311-{name}" for name in LIBRARIES)]
    extras = dict(line.split(": ") for line in tox("testenv", "extras") if ": " in line)
    assert extras == {
        **{name: name for name in ALL_ENTRIES if name != "numpy"},
        **{
            f"{prefix}-all": "all" if len(on(python)) == len(BACKENDS) else ", ".join(on(python)[1:])
            for prefix, python in TOX.items()
        },
    }
    lines = tox("testenv", "set_env")
    selected = dict(line.split(": SELECTED = ") for line in lines if ": SELECTED = " in line)
    without = " and ".join(f"not {entry.name}" for entry in FRAMEWORKS)
    alone = {name: name for name in ALL_ENTRIES if name != "numpy"}
    needing = " or ".join(entry.name for entry in FRAMEWORKS)
    assert selected == {"numpy": without, **alone, "all": needing}
    checked = dict(line.split(": BACKENDS = ") for line in lines if ": BACKENDS = " in line)
    everywhere = {f"{prefix}-all": ",".join(on(python)) for prefix, python in TOX.items()}
    assert checked == {**{name: name for name in ALL_ENTRIES}, **everywhere}


def test_markers_make_ci_and_lists_of_expected_failures_know_every_framework(pytestconfig: pytest.Config) -> None:
    assert set(ALL_ENTRIES) <= {marker.partition(":")[0] for marker in pytestconfig.getini("markers")}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"--backend (\S+)", makefile)) == {",".join(BACKENDS)}
    (listed,) = re.findall(r"^TEST_ENVIRONMENTS \?= (\S+)$", makefile, re.MULTILINE)
    listed = listed.replace("$(python_tag)", "py311")
    (counted,) = re.findall(r"^ENVIRONMENTS = \((.*)\)$", (ROOT / ".ci" / "count.py").read_text("utf-8"), re.MULTILINE)
    assert set(listed.split(",")) - {"quality"} == set(re.findall(r'"([^"]+)"', counted))
    assert set(listed.split(",")) <= set(environments())
    assert {path.stem for path in (ROOT / "backends" / "expected_failures").glob("*.yaml")} <= set(ALL_ENTRIES)


# Where tensors lie. No accelerator is needed: ``cpu:0`` is a device by name, and torch's ``meta`` holds no numbers.

VIEWS = {
    "dense": np.arange(24.0).reshape(2, 3, 4),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "every second": np.arange(48.0).reshape(4, 12)[:, ::2],
    "broadcast": np.broadcast_to(np.arange(3.0), (4, 3)),
    "empty": np.zeros((2, 0, 3)),
    "one number": np.array(7.0),
}


@pytest.mark.parametrize(
    "name", [pytest.param(entry.name, marks=getattr(pytest.mark, entry.name)) for entry in FRAMEWORKS]
)
def test_what_is_put_on_a_device_is_the_same_numbers_and_one_that_is_not_there_is_said(name: str) -> None:
    plain: Any = BACKENDS[name].load()
    assert on_device(plain, name, "") is plain
    backend: Any = on_device(plain, name, "cpu:0")
    for view in VIEWS.values():
        array = view.astype(np.float32)
        np.testing.assert_array_equal(backend.to_numpy(backend.from_numpy(array)), array)
    description = backend.describe()
    assert (description["device"], description["version"]) == ("cpu:0", plain.describe()["version"])
    absent: Any = on_device(plain, name, "cuda:99")
    with pytest.raises(NoDeviceError, match=rf"^{name} \S+ does not see cuda:99"):
        absent.require_device()


@pytest.mark.torch
def test_strides_are_kept_on_torchs_device_and_eager_code_makes_all_that_it_needs_there() -> None:
    plain: Any = BACKENDS["torch"].load()
    backend: Any = on_device(plain, "torch", "meta")
    for array in VIEWS.values():
        own, moved = plain.from_numpy(array), backend.from_numpy(array)
        assert moved.device.type == "meta"
        assert tuple(moved.shape) == array.shape
        assert not array.size or moved.stride() == own.stride()
    # meta refuses to compute with what lies elsewhere.
    for call in (
        {"is_causal": True, "window": (2, 1)},
        {"key_lengths": np.array([2, 4])},
        {"is_causal": True, "query_offsets": np.array([1, 0])},
    ):
        put = {name: backend.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in call.items()}
        query, key = backend.from_numpy(np.ones((2, 2, 3, 4))), backend.from_numpy(np.ones((2, 2, 5, 4)))
        output = backend.attention(query, key, key, **put)["output"]
        assert (output.device.type, tuple(output.shape)) == ("meta", (2, 2, 3, 4))


def test_a_mode_on_a_device_is_the_mode_without_it_is_named_so_and_leaves_room_there() -> None:
    for entry in ALL_ENTRIES.values():
        for mode in entry.device_modes:
            name, _, device = mode.name.partition("@")
            assert mode.device == device
            assert entry.get_mode(mode.name) is mode
            assert mode.name not in entry.all_modes
            assert mode.classes
            if name in entry.all_modes:
                own: Mode = entry.all_modes[name]
                assert (own.module, own.attribute) == (mode.module, mode.attribute)
    jax, triton = BACKENDS["jax"], ALL_ENTRIES["triton"]
    assert jax.environment_of("jit") == {**jax.environment, **HIDDEN_DEVICE_VARIABLES}
    assert jax.environment_of("jit@cuda") == {**jax.environment, **VISIBLE_DEVICE_VARIABLES}
    # An interpreter is set for the mode that runs in it alone.
    assert triton.environment_of("fused")["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in triton.environment_of("fused@cuda")


def test_every_framework_is_an_extra_pinned_and_typed_and_the_pythons_are_those_of_the_package() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    assert {name: extras[name][0] for name in extras if name not in ("dask", "draw", "parquet", "all")} == {
        name: entry.requirement for name, entry in ALL_ENTRIES.items() if name != "numpy"
    }
    assert extras["all"] == [f"attncheck[{','.join(entry.name for entry in FRAMEWORKS)},draw,parquet]"]
    assert BACKENDS["numpy"].requirement in project["dependencies"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert named == list(PYTHON_VERSIONS)
    assert project["requires-python"] == f">={PYTHON_VERSIONS[0]}"
    assert all(set(entry.pythons) <= set(PYTHON_VERSIONS) and entry.pythons for entry in BACKENDS.values())
    # A package that another one fixes, as torch does triton, is pinned for its own environment only.
    pins = [(ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "tox.ini")]
    pinned = re.findall(r"^(?: +\w+: )?([\w-]+)==", "\n".join(pins), re.MULTILINE)
    (override,) = pyproject()["tool"]["mypy"]["overrides"]
    for name, entry in ALL_ENTRIES.items():
        assert set(entry.packages) <= set(pinned), name
        assert re.split(r"[<>=]", entry.requirement)[0] == entry.packages[0], name
        importable = set(entry.packages) - {"jaxlib", "numpy"}  # nothing imports the one, and the other has types
        assert {f"{package.replace('-', '_')}.*" for package in importable} <= set(override["module"]), name
    # mypy holds each framework against the contract.
    (checked,) = re.findall(r"_CONFORMING: .* = \((.*)\)", (ROOT / "backends" / "__init__.py").read_text("utf-8"))
    assert checked.split(", ") == [entry.module.rpartition(".")[2] for entry in BACKENDS.values()]
