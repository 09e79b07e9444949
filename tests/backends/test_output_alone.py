"""Compiled modes that return the output alone: the numbers of the formula, and what a compiler makes of such code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from attncheck.backends import BACKENDS, numpy_backend

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(195320)
INPUTS = {
    "query": RNG.normal(size=(2, 4, 3, 6)),
    "key": RNG.normal(size=(2, 2, 5, 6)),
    "value": RNG.normal(size=(2, 2, 5, 4)),
}
MASKS = {"mask": RNG.random((2, 1, 3, 5)) < 0.8, "bias": RNG.normal(size=(1, 4, 1, 5))}
MASKS["mask"][..., 0] = True
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plainly": (INPUTS, {}),
    "masked": ({**INPUTS, **MASKS}, {"scale": 0.3}),
    "causal": (INPUTS, {"is_causal": True, "window": (1, None)}),
}


def modes() -> list[Any]:
    names = ("torch.compile_output", "tensorflow.function_output", "tensorflow.xla_output", "jax.jit_output")
    return [
        pytest.param(
            name,
            marks=[
                getattr(pytest.mark, framework),
                pytest.mark.skipif(not BACKENDS[framework].is_installed, reason=f"{framework} is not installed"),
            ],
        )
        for name in names
        for framework in [name.partition(".")[0]]
    ]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", modes())
def test_the_output_alone_comes_back_and_is_right(judge_mode: Judge, mode: str, call: str) -> None:
    assert judge_mode(mode, "float32", "attention", *CALLS[call]) == {"output": "agree"}


@pytest.fixture
def compiled() -> Iterator[Any]:
    import torch

    backend, threads = BACKENDS["torch"].load("compile_output"), torch.get_num_threads()
    kept = {"recompile_limit": 8, "accumulated_recompile_limit": 256, "fail_on_recompile_limit_hit": False}
    with torch._dynamo.config.patch(**kept), torch._inductor.config.patch(force_disable_caches=True):
        backend.prepare("float64", 1)
        yield backend
    torch.set_num_threads(threads)


@pytest.mark.torch
@pytest.mark.skipif(not BACKENDS["torch"].is_installed, reason="torch is not installed")
def test_torch_rewrites_what_reads_as_attention(compiled: Any) -> None:
    """Otherwise the mode would be that of the eager code once more."""
    from torch._dynamo.utils import counters

    inputs = {name: np.repeat(array, 4 // array.shape[1], axis=1)[..., :4] for name, array in INPUTS.items()}
    for more in ({}, {"bias": MASKS["bias"]}):
        before = counters["inductor"]["fuse_attention"]
        tensors = {name: compiled.from_numpy(array) for name, array in {**inputs, **more}.items()}
        output = compiled.to_numpy(compiled.attention(**tensors)["output"])
        assert counters["inductor"]["fuse_attention"] == before + 1
        np.testing.assert_allclose(output, numpy_backend.attention(**inputs, **more)["output"], rtol=1e-12)
