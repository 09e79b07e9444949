"""Runs a test once for every backend and kind of dtype; a framework that is not installed is skipped by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import ALL_ENTRIES, BACKENDS, BackendEntry
from attncheck.backends.contract import Backend, Tensor
from attncheck.execution.operations import run_operation
from attncheck.judging.judge_stages import judge_stages
from attncheck.judging.truth import find_truth
from attncheck.reading.expected_failures import find_recorded_empty_rows, load_bundled_expected_failures
from attncheck.reading.problem import Problem

Run = Callable[..., dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class Setting:
    """A prepared backend and the dtype it is asked to compute in."""

    name: str
    backend: Backend
    dtype: np.dtype[Any]


def _param(entry: BackendEntry, dtype: str) -> Any:
    marks = [getattr(pytest.mark, entry.name)] if entry.name != "numpy" else []  # which is always there
    return pytest.param((entry, dtype), id=f"{entry.name}-{dtype}", marks=marks)


def _params(*dtypes: str) -> list[Any]:
    return [_param(entry, dtype) for entry in BACKENDS.values() for dtype in dtypes if dtype in entry.classes]


@contextmanager
def _prepared(entry: BackendEntry, dtype: str, mode: str = "eager") -> Iterator[Setting]:
    with mock.patch.dict(os.environ, entry.environment_of(mode)):
        backend = entry.load(mode)
        restore = _remember_switches(entry.name)
        backend.prepare(dtype, 1)
        # NumPy knows bfloat16 only by the type that ml_dtypes adds to it.
        yield Setting(entry.name, backend, np.dtype(getattr(ml_dtypes, dtype, dtype)))
        restore()


@pytest.fixture(scope="session")
def prepared() -> Callable[..., Any]:
    """Return what prepares a backend for a dtype while a ``with`` lasts."""
    return _prepared


# The code knows two kinds of dtypes: those of the format itself, and 16 bits, whose sums are wider. JAX compiles all
# anew for each.
@pytest.fixture(
    scope="module", params=[param for param in (*_params("float64"), *_params("bfloat16")) if param.id != "jax-float64"]
)
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    entry, dtype = request.param
    # JAX compiles every operation by itself outside jax.jit, and the whole of a function inside it.
    with _prepared(entry, dtype, entry.default_mode) as found:
        yield found


@pytest.fixture(scope="module", params=_params("bfloat16", "float16"))
def half_setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    """Return a backend in a format of 16 bits, where it declares one."""
    entry, dtype = request.param
    with _prepared(entry, dtype, entry.default_mode) as found:
        yield found


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
    return _caller(setting)


@pytest.fixture(scope="module")
def run_half(half_setting: Setting) -> Run:
    """Return the same in 16 bits."""
    return _caller(half_setting)


def _caller(setting: Setting) -> Run:
    def convert(name: str, value: Any) -> Tensor:
        if not isinstance(value, np.ndarray):
            return value
        kept = value.dtype == bool or name in {"key_lengths", "query_offsets"}
        return setting.backend.from_numpy(value if kept else value.astype(setting.dtype))

    def call(operation: str, *args: Any, **options: Any) -> dict[str, NDArray[Any]]:
        stages = getattr(setting.backend, operation)(
            *(convert("", value) for value in args), **{name: convert(name, value) for name, value in options.items()}
        )
        return {name: setting.backend.to_numpy(stage) for name, stage in stages.items()}

    return call


def _given_without_a_key(name: str, dtype: str) -> dict[str, str]:
    """Return what a mode gives for a row without a key, as it declares or as is known of it; nothing where zeros."""
    framework, _, mode = name.partition(".")
    declared = ALL_ENTRIES[framework].all_modes[mode].conventions
    recorded = find_recorded_empty_rows(load_bundled_expected_failures([framework]), name, "any", dtype)
    values = [declared["empty_rows"].value] if "empty_rows" in declared else list(recorded)
    return {"empty_rows": values[0]} if values else {}


@pytest.fixture(scope="session")
def judge_mode() -> Callable[..., dict[str, str]]:
    """Return what runs one operation in a mode, such as ``jax.jit``, and says the verdict on each stage.

    Numbers are rounded to the dtype once; the exact answer and the bounds are the harness's own.
    """

    def judge(name: str, dtype: str, operation: str, inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, str]:
        framework, _, mode = name.partition(".")
        declared = ALL_ENTRIES[framework].all_modes[mode]
        with _prepared(ALL_ENTRIES[framework], dtype, mode) as prepared:
            stored = {
                each: array if array.dtype.kind in "biu" else array.astype(prepared.dtype)
                for each, array in inputs.items()
            }
            stages = run_operation(prepared.backend, operation, stored, options)
            arrays = {stage: prepared.backend.to_numpy(tensor) for stage, tensor in stages.items()}
        asked = {**options, **({} if operation == "scoring" else _given_without_a_key(name, dtype))}
        truth = find_truth(Problem(operation, asked, stored, dtype)).for_returned_dtypes(arrays)
        shapes = {stage: exact.high.shape for stage, exact in truth.exact.items()}
        found = judge_stages(truth, arrays, shapes, declared.classes[dtype])
        return {judgement.stage: str(judgement.verdict) for judgement in found}

    return judge
