"""The peer that `attncheck check` is measured against: what a project would write without it.

One pytest process, a test per case, dtype and framework, each stage held against NumPy's with ``assert_allclose``.
It has no oracle, no bound, no process of its own for anything, and writes nothing. It is given its inputs ready made
(``speed.py`` writes them), as if they stood in the test; NumPy has no 16-bit arithmetic worth comparing with, so that
it computes those cases in float32. Tolerances are the usual ones for the dtype.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from attncheck.backends import BACKENDS
from attncheck.backends.contract import Backend
from attncheck.execution.operations import apply_memory_layout, run_operation
from attncheck.reading.problem import Problem

PROBLEMS: dict[tuple[str, str], Problem] = pickle.loads(Path(os.environ["PEER_PROBLEMS"]).read_bytes())
FRAMEWORKS = os.environ["PEER_BACKENDS"].split(",")
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3}
NARROW = ("bfloat16", "float16")


@lru_cache
def framework(name: str) -> Backend:
    """Import a framework, once."""
    os.environ.update(BACKENDS[name].environment)
    backend = BACKENDS[name].load()
    if name == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    return backend


def computed(name: str, problem: Problem) -> dict[str, Any]:
    """Return every stage as NumPy arrays."""
    backend = framework(name)
    with np.errstate(all="ignore"):
        stages = run_operation(
            backend, problem.operation, apply_memory_layout(problem.inputs, problem.memory_layout), problem.options
        )
    return {stage: np.asarray(backend.to_numpy(tensor)) for stage, tensor in stages.items()}


@lru_cache(maxsize=4)
def reference(case: str, dtype: str) -> dict[str, Any]:
    """Return NumPy's stages."""
    problem = PROBLEMS[case, dtype]
    if dtype in NARROW:
        wide = {name: a if a.dtype == bool else a.astype(np.float32) for name, a in problem.inputs.items()}
        problem = replace(problem, inputs=wide)
    return computed("numpy", problem)


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize(("case", "dtype"), PROBLEMS)
def test_agrees_with_numpy(case: str, dtype: str, name: str) -> None:
    """Hold every stage of one framework against NumPy's."""
    if name == "numpy" and dtype in NARROW:
        pytest.skip("NumPy has no such arithmetic")
    try:
        expected, found = reference(case, dtype), computed(name, PROBLEMS[case, dtype])
    except NotImplementedError as error:
        pytest.skip(str(error))
    for stage in expected.keys() & found.keys():
        tolerance = TOLERANCE[dtype]
        assert_allclose(
            found[stage].astype(np.float64), expected[stage].astype(np.float64), rtol=tolerance, atol=tolerance
        )
