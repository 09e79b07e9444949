"""What a run runs on, as environment.json has it, and the folder in which frameworks keep what they compiled."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.processors import INSTRUCTION_SETS, emulated_isa, processor_flags
from attncheck.store import cache_folder

Entry = TypeVar("Entry", bound=BackendEntry)


def with_cache(entry: Entry, *, keep: bool) -> Entry:
    """Add the variables by which its framework keeps what it compiles, or with ``keep`` false does not.

    What the user's environment says already stands. Without a folder that can be written nothing is kept.
    """
    framework = next((known for known in BACKENDS.values() if known.packages == entry.packages), entry)
    variables = _kept(framework) if keep else framework.without_cache
    added = {name: text for name, text in variables.items() if name not in os.environ}
    return replace(entry, environment={**entry.environment, **added}) if added else entry


def _kept(framework: BackendEntry) -> Mapping[str, str]:
    # Reading kernels back from the cache overflows a thread's stack on macOS with jaxlib before 0.10.
    if not framework.cache or sys.platform == "darwin":
        return {}
    folder = cache_folder() / _kind(framework.packages[0])
    with suppress(OSError):
        # Whoever may write there may run code here.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return {}
    return {name: text.format(folder=folder) for name, text in framework.cache.items()}


@lru_cache
def _kind(package: str) -> str:
    features = [platform.machine(), *cpu_features(), emulated_isa() or ""]
    cpu = hashlib.sha256("\n".join(features).encode()).hexdigest()[:12]
    return f"{package}-{package_version(package)}-{platform.python_version()}-{cpu}"


FLAGS = (
    *("PJRT_NPROC", "TF_ENABLE_ONEDNN_OPTS", "JAX_PLATFORMS", "MKL_CBWR", "OMP_NUM_THREADS"),
    *sorted(INSTRUCTION_SETS["amx"].variables),
)
"""Variables that change a framework's numbers or threads, recorded where they are set."""


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
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_features": cpu_features(),
        "isa": emulated_isa(),
        "processors": os.cpu_count(),
        "threads_per_worker": threads,
        "versions": dict(sorted((_of_distributions(entries) | _of_packages(entries)).items())),
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        "byte_order": sys.byteorder,
    }


def _of_packages(entries: Iterable[BackendEntry]) -> dict[str, str]:
    """Return the versions of the frameworks."""
    packages = {"attncheck", "numpy", *(package for entry in entries for package in entry.packages)}
    return {name: found for name in packages if (found := package_version(name)) is not None}


def _of_distributions(entries: Iterable[BackendEntry]) -> dict[str, str]:
    """Return the versions of what people's own implementations import, as they were found when these were loaded."""
    return {name: found for entry in entries for name, found in entry.distributions.items()}
