"""The surroundings of a run, as environment.json has them, and the folder in which frameworks keep what they compiled.

Of a user's implementation these are the distributions that its numbers may depend on, and its framework. They follow
from the imports of its own modules: that of the function, those of its package, and local files that these import. What
a distribution imports in turn is that distribution's affair.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import platform
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.common.processors import INSTRUCTION_SETS, emulated_isa, processor_flags
from attncheck.common.store import cache_folder
from attncheck.execution.user_code import unwrap_function

Entry = TypeVar("Entry", bound=BackendEntry)


def with_cache_variables(entry: Entry, *, keep: bool) -> Entry:
    """Add the variables by which its framework keeps what it compiles, or with ``keep`` false does not.

    What the user's environment says already stands. Without a folder that can be written nothing is kept.
    """
    framework = next((known for known in BACKENDS.values() if known.packages == entry.packages), entry)
    variables = _cache_variables(framework) if keep else framework.without_cache
    added = {name: text for name, text in variables.items() if name not in os.environ}
    return replace(entry, environment={**entry.environment, **added}) if added else entry


def _cache_variables(framework: BackendEntry) -> Mapping[str, str]:
    # Reading kernels back from the cache overflows a thread's stack on macOS with jaxlib before 0.10.
    if not framework.cache or sys.platform == "darwin":
        return {}
    folder = cache_folder() / _cache_folder_name(framework.packages[0])
    with suppress(OSError):
        # Whoever may write there may run code here.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return {}
    return {name: text.format(folder=folder) for name, text in framework.cache.items()}


@lru_cache
def _cache_folder_name(package: str) -> str:
    features = [platform.machine(), *cpu_features(), emulated_isa() or ""]
    cpu = hashlib.sha256("\n".join(features).encode()).hexdigest()[:12]
    return f"{package}-{package_version(package)}-{platform.python_version()}-{cpu}"


RECORDED_VARIABLES = (
    *("PJRT_NPROC", "TF_ENABLE_ONEDNN_OPTS", "JAX_PLATFORMS", "MKL_CBWR", "OMP_NUM_THREADS"),
    *sorted(INSTRUCTION_SETS["amx"].variables),
)
"""Variables that change a framework's numbers or threads, recorded if they are set."""


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_features() -> list[str]:
    """Return the instruction sets that this machine's CPU has: those that NumPy knows, and those for matrices."""
    import numpy as np  # later than a worker is started

    simd = np.show_config(mode="dicts")["SIMD Extensions"]
    matrices = (flag.upper() for flag in processor_flags() or () if flag.startswith("amx_"))
    return sorted({*simd.get("baseline", []), *simd.get("found", []), *matrices})


def describe_environment(entries: Iterable[BackendEntry], threads: int) -> dict[str, Any]:
    """Return versions, platform, CPU features and settings of this machine."""
    entries = list(entries)
    packages = {"attncheck", "numpy", *(package for entry in entries for package in entry.packages)}
    imported = {name: number for entry in entries for name, number in entry.distributions.items()}
    installed = {name: number for name in packages if (number := package_version(name)) is not None}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_features": cpu_features(),
        "isa": emulated_isa(),
        "processors": os.cpu_count(),
        "threads_per_worker": threads,
        "versions": dict(sorted((imported | installed).items())),
        "flags": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
        "byte_order": sys.byteorder,
    }


_FRAMEWORK_OF: Mapping[str, str] = {
    package: entry.name for entry in BACKENDS.values() if entry.name != "numpy" for package in entry.packages
}


def _frameworks_among(packages: Iterable[str]) -> set[str]:
    return {_FRAMEWORK_OF[package] for package in packages if package in _FRAMEWORK_OF}


@dataclass(frozen=True)
class Imports:
    """The versions of the distributions that are imported, by name, and the top-level packages.

    ``library_distribution`` is the distribution that a function of a library belongs to; a file of a user's has none.
    Of whoever imports no framework, ``framework_by_library`` has those of others that import one, each with the
    framework.
    """

    versions: Mapping[str, str]
    packages: frozenset[str]
    library_distribution: str = ""
    framework_by_library: Mapping[str, str] = field(default_factory=dict)

    @property
    def framework(self) -> str | None:
        """The one framework, besides NumPy, that is imported; None for none or several."""
        frameworks = _frameworks_among(self.packages) or {*self.framework_by_library.values()}
        return frameworks.pop() if len(frameworks) == 1 else None

    @property
    def array_framework(self) -> str | None:
        """The framework of whoever imports it without NumPy, or is a library's function, and so takes its arrays."""
        return None if "numpy" in self.packages and not self.library_distribution else self.framework


_DISTRIBUTION_SUFFIXES = (".dist-info", ".egg-info", ".egg-link", "EGG-INFO")
"""Of the names of files and folders that describe a distribution."""


@lru_cache(maxsize=1)  # every function of a run is looked at; reading all distributions takes a tenth of a second
def _distributions_by_package(installed: tuple[tuple[str, ...], ...]) -> Mapping[str, Sequence[str]]:
    """Return the distributions that have each top-level package, as long as these are ``installed``."""
    return packages_distributions()


def _installed_distributions() -> tuple[tuple[str, ...], ...]:
    """Return each folder of ``sys.path`` that has distributions, with their names; a kernel's folder seldom has any."""
    installed = []
    for folder in dict.fromkeys(Path(entry).absolute() for entry in sys.path):
        names = [str(folder)]
        with suppress(OSError):
            names += sorted(path.name for path in folder.iterdir() if path.name.endswith(_DISTRIBUTION_SUFFIXES))
        if len(names) > 1 or folder.is_file():  # an archive
            installed.append(tuple(names))
    return tuple(installed)


def find_imports(target: Any) -> Imports:
    """Return the imports of a loaded implementation's modules."""
    installed = _distributions_by_package(_installed_distributions())
    name, imported = _module_and_used_packages(target)
    local, packages = {name.partition(".")[0]}, set(imported)
    waiting = {*local, *imported}
    while waiting:
        package = waiting.pop()
        # A package of no distribution is a file next to the kernel: its imports are the kernel's, too.
        if package in local or (package not in installed and _has_file(sys.modules.get(package))):
            new = {
                name
                for module in _loaded_modules_of(package)
                for name in _third_party_packages(_modules_named_in(module))
            } - packages
            local.add(package)
            packages |= new
            waiting |= new - local
    versions = {
        distribution: number
        for package in {*local, *packages}
        for distribution in installed.get(package, ())
        if not _is_namespace_package(package) and (number := package_version(distribution)) is not None
    }
    uninstalled = {package: _version_attribute(package) for package in local if package not in installed}
    versions |= {package: number for package, number in uninstalled.items() if number is not None}
    top = name.partition(".")[0]
    homes = (distribution for distribution in installed.get(top, ()) if distribution in versions)
    home = next(homes, "") if top else ""
    return Imports(
        dict(sorted(versions.items())), frozenset(packages), home, _libraries_importing_frameworks(packages, local)
    )


def _libraries_importing_frameworks(packages: Collection[str], local: Collection[str]) -> Mapping[str, str]:
    """Return the one framework that each package which is not ``local`` imports; {} if ``packages`` has a framework.

    The search only reads the names in their modules, because to read the source of a large library takes seconds.
    """
    if _frameworks_among(packages):
        return {}
    named = {
        package: {
            name
            for module in _loaded_modules_of(package)
            for name in _third_party_packages(_modules_of_values([*vars(module).values()]))
        }
        for package in sorted({*packages} - {*local})
    }
    frameworks_in = {package: _frameworks_among(names) for package, names in named.items()}
    return {package: frameworks.pop() for package, frameworks in frameworks_in.items() if len(frameworks) == 1}


def _module_and_used_packages(target: Any) -> tuple[str, set[str]]:
    """Return the name of the module that a target is written in, and the packages that its own globals name.

    A function that was sent by value has no module here, but has the globals that it uses.
    """
    if inspect.ismodule(target):
        return target.__name__, set()
    written = unwrap_function(target)
    name = getattr(written, "__module__", None)
    function = getattr(written, "__func__", written)
    used = [*getattr(function, "__globals__", {}).values(), *_closure_values(function)]
    return (name if isinstance(name, str) else ""), set(_third_party_packages(_modules_of_values(used)))


def _closure_values(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # not filled yet
            yield cell.cell_contents


def _loaded_modules_of(package: str) -> list[ModuleType]:
    loaded = list(sys.modules.items())
    return [module for name, module in loaded if name.partition(".")[0] == package and isinstance(module, ModuleType)]


def _modules_of_values(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, type | FunctionType | BuiltinFunctionType):
            yield str(value.__module__)


def _modules_named_in(module: ModuleType) -> Iterator[str]:
    """Yield the modules of a module's values and of its source's imports, also in functions that have not run yet."""
    yield from _modules_of_values(list(vars(module).values()))
    with suppress(AttributeError, OSError, SyntaxError, ValueError, RecursionError):  # compiled, or made by hand
        yield from _imported_modules(Path(str(module.__file__)).read_bytes())


@cache  # every function of a file is looked at
def _imported_modules(source: bytes) -> Sequence[str]:
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    plain = (alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names)
    parts = (node for node in imports if isinstance(node, ast.ImportFrom) and not node.level)
    return (*plain, *filter(None, (node.module for node in parts)))


def _third_party_packages(names: Iterable[str]) -> Iterator[str]:
    packages = (name.partition(".")[0] for name in names)
    return (package for package in packages if package not in sys.stdlib_module_names and package not in ("", "None"))


def _has_file(module: ModuleType | None) -> bool:
    return bool(getattr(module, "__file__", None))


def _is_namespace_package(package: str) -> bool:
    """Return whether several distributions may share a package, so that its distribution is ambiguous."""
    module = sys.modules.get(package)
    return module is not None and not _has_file(module) and hasattr(module, "__path__")


def _version_attribute(package: str) -> str | None:
    """Return the ``__version__`` of a package that no distribution has; None without a usable one."""
    version = getattr(sys.modules.get(package), "__version__", None)
    return version if isinstance(version, str) and 0 < len(version) <= 100 and version.isprintable() else None
