"""The eager functions compiled by XLA: right by the exact answer, whatever the compiler fuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attncheck.backends import BACKENDS
from attncheck.backends.contract import Backend

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif(not BACKENDS["jax"].is_installed, reason="jax is not installed"),
]

SERVICES = {"prepare", "describe", "from_numpy", "to_numpy"}

Judge = Callable[..., dict[str, str]]

RNG = np.random.default_rng(810)
QUERY, KEY, VALUE = RNG.normal(size=(2, 4, 3, 6)), RNG.normal(size=(2, 2, 5, 6)), RNG.normal(size=(2, 2, 5, 7))
ALL_KEYS = np.repeat(KEY, 2, axis=1)
ATTENTION = {"query": QUERY, "key": KEY, "value": VALUE}
MASKS = {
    "mask": np.array([True, True, False, True, True, True, True, True, True, True]).reshape(2, 1, 1, 5),
    "bias": RNG.normal(size=(1, 4, 1, 5)),
    "key_lengths": np.array([5, 3]),
}
OPTIONS = {"scale": 0.3, "softcap": 1.5, "is_causal": True, "window": (2, None)}
PROJECTIONS = {
    "query_weight": RNG.normal(size=(8, 12)),
    "key_weight": RNG.normal(size=(8, 6)),
    "value_weight": RNG.normal(size=(8, 6)),
    "output_weight": RNG.normal(size=(12, 5)),
    "output_bias": RNG.normal(size=5),
}
MODELS = {"query": RNG.normal(size=(2, 3, 8)), "key": RNG.normal(size=(2, 5, 8)), "value": RNG.normal(size=(2, 5, 8))}
ADDITIVE = {"query_weight": RNG.normal(size=(6, 8)), "key_weight": RNG.normal(size=(6, 8))}

CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dot": ("scoring", {"query": QUERY, "key": ALL_KEYS}, {"scale": 0.7, "softcap": 2.0}),
    "cosine": ("scoring", {"query": QUERY, "key": ALL_KEYS}, {"score": "cosine", "scale": 3.0}),
    "general": ("scoring", {"query": QUERY, "key": ALL_KEYS, "weight": RNG.normal(size=(6, 6))}, {"score": "general"}),
    "additive": (
        "scoring",
        {"query": QUERY, "key": ALL_KEYS, **ADDITIVE, "score_vector": RNG.normal(size=8)},
        {"score": "additive"},
    ),
    "masking": ("masking", {"scores": RNG.normal(size=(2, 4, 3, 5)), **MASKS}, {"is_causal": True, "window": (1, 0)}),
    "softmax": ("softmax", {"scores": RNG.normal(size=(2, 4, 3, 5))}, {}),
    "attention": ("attention", {**ATTENTION, **MASKS}, OPTIONS),
    "past": ("attention", {**ATTENTION, "past_key": KEY[:, :, :2], "past_value": VALUE[:, :, :2]}, {"window": (3, 1)}),
    "gradients": ("attention_gradients", {**ATTENTION, **MASKS, "grad_output": RNG.normal(size=(2, 4, 3, 7))}, OPTIONS),
    "heads": ("multi_head_attention", {**MODELS, **PROJECTIONS}, {"heads": 4, "kv_heads": 2, "is_causal": True}),
}
STAGES = {
    "dot": {"raw_scores", "scores", "capped"},
    "masking": {"biased", "masked"},
    "softmax": {"weights", "log_sum_exp"},
    "attention": {"raw_scores", "scores", "capped", "biased", "masked", "weights", "log_sum_exp", "output"},
    "past": {"raw_scores", "scores", "masked", "weights", "log_sum_exp", "output"},
    "gradients": {"grad_query", "grad_key", "grad_value", "grad_bias"},
}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_compiled_agrees_with_the_exact_answer_at_every_stage(judge_mode: Judge, call: str, dtype: str) -> None:
    verdicts = judge_mode("jax.jit", dtype, *CALLS[call])
    assert set(verdicts.values()) == {"agree"}, verdicts
    assert STAGES.get(call, {"scores"}) <= set(verdicts)


def test_every_operation_is_one_compiled_program() -> None:
    import jax

    from attncheck.backends import jax_backend, jax_jit

    program = type(jax.jit(lambda number: number))
    operations = set(jax_jit.__all__) - SERVICES
    assert operations == {name for name in vars(Backend) if not name.startswith("_")} - SERVICES
    for name in operations:
        assert isinstance(getattr(jax_jit, name), program), name
        assert getattr(jax_jit, name).__wrapped__ is getattr(jax_backend, name)


def test_a_row_without_a_key_is_zero_and_so_are_its_gradients(judge_mode: Judge) -> None:
    mask = np.array([True, False, True]).reshape(1, 1, 3, 1)
    inputs = {**ATTENTION, "mask": mask}
    assert set(judge_mode("jax.jit", "float32", "attention", inputs, {}).values()) == {"agree"}
    inputs["grad_output"] = RNG.normal(size=(2, 4, 3, 7))
    assert set(judge_mode("jax.jit", "float32", "attention_gradients", inputs, {}).values()) == {"agree"}
