"""Small problems made by hand: each variant can be told from the reference by at least one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends.contract import Backend
from attncheck.harness.running.operations import run_operation
from attncheck.harness.running.worker import Task

Arrays = dict[str, NDArray[Any]]
Stages = dict[str, NDArray[Any]]


def _attention_inputs(rng: np.random.Generator, batch: int, heads: int, queries: int, keys: int) -> Arrays:
    return {
        "query": rng.normal(size=(batch, heads, queries, 9)),
        "key": rng.normal(size=(batch, heads, keys, 9)),
        "value": rng.normal(size=(batch, heads, keys, 11)),
    }


def _multi_head_inputs(rng: np.random.Generator) -> Arrays:
    """Two heads of width 3; every weight is square, so that transposing one is silent."""
    weights = {f"{name}_weight": rng.normal(size=(6, 6)) for name in ("query", "key", "value", "output")}
    biases = {f"{name}_bias": rng.normal(size=6) for name in ("query", "key", "value", "output")}
    models = {
        "query": rng.normal(size=(3, 4, 6)),
        "key": rng.normal(size=(3, 5, 6)),
        "value": rng.normal(size=(3, 5, 6)),
    }
    return models | weights | biases


def _problems() -> dict[str, Task]:
    rng = np.random.default_rng(20170612)
    square = _attention_inputs(rng, 3, 3, 6, 6)
    steep = _attention_inputs(rng, 1, 1, 70, 97)
    steep["query"], steep["key"] = np.ones((1, 1, 70, 9)), np.zeros((1, 1, 97, 9))
    steep["key"][..., 0] = 45 * np.arange(97)  # logits grow by 15 a key: no block may forget to rescale
    own_mask = rng.random((3, 1, 6, 6)) < 0.6
    own_mask[..., 0] = True
    padding = np.arange(6) < np.array([6, 3, 2])[:, np.newaxis, np.newaxis, np.newaxis]
    bias = rng.normal(size=(1, 3, 6, 6))
    rows = np.array([[3e4, 0, -1, 2], [0, 0, -30, 1], [-6e4, -6e4, -6e4, -6e4 - 4], [1000, 900, 1000, 0]])
    logits = rows[np.newaxis, np.newaxis]
    allowed = np.array([[False, True, True, True], [True] * 4, [True] * 4, [False] * 4])
    return {
        "plain": Task("attention", {}, _attention_inputs(rng, 2, 3, 4, 6)),
        "explicit scale": Task("attention", {"scale": 0.77}, _attention_inputs(rng, 2, 3, 4, 6)),
        "scale zero": Task("attention", {"scale": 0.0, "is_causal": True}, _attention_inputs(rng, 2, 3, 4, 6)),
        "negative scale": Task("attention", {"scale": -0.3, "is_causal": True}, _attention_inputs(rng, 2, 3, 4, 6)),
        "mask and bias": Task("attention", {}, square | {"mask": own_mask, "bias": bias}),
        "mask and causal": Task("attention", {"is_causal": True}, square | {"mask": own_mask}),
        "bias and causal": Task("attention", {"is_causal": True}, square | {"bias": bias}),
        "padding": Task("attention", {}, square | {"mask": padding}),
        "mask per head": Task(
            "masking", {}, {"scores": np.zeros((1, 3, 6, 6)), "mask": rng.random((1, 3, 6, 6)) < 0.5}
        ),
        "decoding": Task("masking", {"is_causal": True}, {"scores": rng.normal(size=(1, 1, 1, 5))}),
        "lifted by the bias": Task(
            "masking", {}, {"scores": logits, "mask": allowed, "bias": np.full((1, 1, 1, 4), 1e4)}
        ),
        "steep and long": Task("attention", {"is_causal": True}, steep),
        "steep and open": Task("attention", {}, steep),
        "long": Task("attention", {}, _attention_inputs(rng, 2, 1, 35, 37)),
        "large scores": Task("softmax", {}, {"scores": logits}),
        "large masked scores": Task(
            "attention",
            {"scale": 1.0},
            {"query": rows[np.newaxis, np.newaxis], "key": np.eye(4)[np.newaxis, np.newaxis]}
            | {"value": rng.normal(size=(1, 1, 4, 5)), "mask": allowed},
        ),
        "general": Task(
            "scoring",
            {"score": "general"},
            {**_pick(rng, 5, 6), "weight": rng.normal(size=(5, 5))},
        ),
        "additive": Task("scoring", {"score": "additive"}, _additive(rng, 1.0)),
        "additive, saturated": Task("scoring", {"score": "additive"}, _additive(rng, 400.0)),
        "multi-head": Task("multi_head_attention", {"heads": 2}, _multi_head_inputs(rng)),
    }


def _pick(rng: np.random.Generator, width: int, keys: int) -> Arrays:
    return {"query": rng.normal(size=(2, 3, 4, width)), "key": rng.normal(size=(2, 3, keys, width))}


def _additive(rng: np.random.Generator, spread: float) -> Arrays:
    return {
        **_pick(rng, 5, 6),
        "query_weight": spread * rng.normal(size=(5, 7)),
        "key_weight": spread * rng.normal(size=(5, 7)),
        "score_vector": rng.normal(size=7),
        "score_bias": rng.normal(size=7),
    }


@pytest.fixture(scope="session")
def problems() -> dict[str, Task]:
    return _problems()


@pytest.fixture(scope="session")
def solve() -> Callable[[Backend, Task, str], Stages]:
    """Run a problem in a dtype."""

    def run(backend: Backend, task: Task, dtype: str) -> Stages:
        arrays = {name: array if array.dtype == bool else array.astype(dtype) for name, array in task.inputs.items()}
        with np.errstate(all="ignore"):
            return dict(run_operation(backend, task.operation, arrays, task.options))

    return run
