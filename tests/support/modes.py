"""Modes of frameworks and libraries as tests name and call them."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from numpy.typing import NDArray

from attncheck.backends import ALL_ENTRIES, LIBRARIES
from attncheck.execution.operations import run_operation


def needing(name: str, *values: Any) -> Any:
    """Return parameters of a test that needs an implementation's package; its name alone, if none are given."""
    mark, named = getattr(pytest.mark, name.partition(".")[0]), {"id": name} if values else {}
    return pytest.param(*(values or [name]), marks=mark, **named)


def asked(
    name: str, operation: str, inputs: dict[str, NDArray[Any]], dtype: str = "float32", **options: Any
) -> dict[str, NDArray[Any]]:
    """Call a mode's function with arrays in a dtype, and return its stages."""
    framework, _, mode = name.partition(".")
    with mock.patch.dict(os.environ, ALL_ENTRIES[framework].environment_of(mode)):
        backend: Any = ALL_ENTRIES[framework].load(mode)
        if framework in LIBRARIES:  # frameworks keep what others of this process prepared
            backend.prepare(dtype, 1)
        stored = {each: array.astype(dtype) if array.dtype.kind == "f" else array for each, array in inputs.items()}
        stages = run_operation(backend, operation, stored, options)
        return {stage: backend.to_numpy(tensor) for stage, tensor in stages.items()}
