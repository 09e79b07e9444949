"""What a run ran on, as it is written to environment.json."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from attncheck.backends import BackendEntry

FLAGS = ("XLA_FLAGS", "PJRT_NPROC", "TF_ENABLE_ONEDNN_OPTS", "JAX_PLATFORMS", "MKL_CBWR", "OMP_NUM_THREADS")
"""Variables that change a framework's numbers or threads, recorded where they are set."""


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_features() -> list[str]:
    """Return the instruction sets that this machine's CPU has, as NumPy found them."""
    simd = np.show_config(mode="dicts")["SIMD Extensions"]
    return sorted({*simd.get("baseline", []), *simd.get("found", [])})


def describe_environment(entries: Iterable[BackendEntry], threads: int) -> dict[str, Any]:
    """Return versions, platform, CPU features and settings of this machine."""
    entries = list(entries)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_features": cpu_features(),
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
