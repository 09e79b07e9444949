"""Runs a test once for every backend and dtype; a framework that is not installed is skipped by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS, BackendEntry
from attncheck.backends.contract import Backend, Tensor

Run = Callable[..., dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class Setting:
    """A prepared backend and the dtype it is asked to compute in."""

    name: str
    backend: Backend
    dtype: np.dtype[Any]


def _param(entry: BackendEntry, dtype: str) -> Any:
    marks = [pytest.mark.skipif(not entry.is_installed, reason=f"{entry.packages[0]} is not installed")]
    if entry.name != "numpy":  # always there, so it has no marker
        marks.append(getattr(pytest.mark, entry.name))
    return pytest.param((entry, dtype), id=f"{entry.name}-{dtype}", marks=marks)


# Of module scope, so that a process-wide switch is turned once per module and hypothesis may use the fixtures.
@pytest.fixture(
    scope="module", params=[_param(entry, dtype) for entry in BACKENDS.values() for dtype in ("float32", "float64")]
)
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    entry, dtype = request.param
    with mock.patch.dict(os.environ, entry.environment):
        backend = entry.load()
        restore = _remember_switches(entry.name)
        backend.prepare(dtype, 1)
        yield Setting(entry.name, backend, np.dtype(dtype))
        restore()


def _remember_switches(name: str) -> Callable[[], None]:
    """Return what undoes ``prepare``, where it leaves a mark on the process that another test could notice."""
    if name == "jax":
        import jax

        before = jax.config.jax_enable_x64
        return lambda: jax.config.update("jax_enable_x64", before)
    if name == "torch":
        import torch

        threads = torch.get_num_threads()
        return lambda: torch.set_num_threads(threads)
    return lambda: None


@pytest.fixture(scope="module")
def run(setting: Setting) -> Run:
    """Return what calls an operation by name with NumPy arrays, cast to the dtype, and returns its stages as such."""

    def convert(value: Any) -> Tensor:
        if not isinstance(value, np.ndarray):
            return value
        return setting.backend.from_numpy(value if value.dtype == bool else value.astype(setting.dtype))

    def call(operation: str, *args: Any, **options: Any) -> dict[str, NDArray[Any]]:
        stages = getattr(setting.backend, operation)(
            *(convert(value) for value in args), **{name: convert(value) for name, value in options.items()}
        )
        return {name: setting.backend.to_numpy(stage) for name, stage in stages.items()}

    return call


@pytest.fixture(scope="module")
def unit(setting: Setting) -> float:
    """Return u, the unit roundoff of the setting's dtype, in which every tolerance is stated."""
    return float(np.finfo(setting.dtype).eps) / 2
