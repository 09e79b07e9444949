"""Kernels of somebody's own, right and wrong, and small cases of which properties are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import user_implementation
from attncheck.execution.user_code import Target
from attncheck.properties.run import Asking, ask_implementations, questions_of
from attncheck.reading.case import Case
from attncheck.results.format import Row

KERNEL = """\
import numpy as np

CALLS, ROOM = [], {}

def attention(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, key_lengths=None,
              past_key=None, past_value=None):
    CALLS.append(query.shape)
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        key, value = np.concatenate([past_key, key], 2), np.concatenate([past_value, value], 2)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    allowed = np.ones((batch, heads, queries, keys), bool)
    if mask is not None:
        allowed = allowed & mask
    if is_causal:
        allowed = allowed & (np.arange(keys) <= past + np.arange(queries)[:, None])
    if key_lengths is not None:
        allowed = allowed & (np.arange(keys) < key_lengths.reshape(-1, 1, 1, 1))
    added = np.broadcast_to(np.zeros((), query.dtype) if bias is None else bias, allowed.shape)
    output = np.zeros((batch, heads, queries, value.shape[-1]), query.dtype)
    log_sum_exp = np.full((batch, heads, queries), -np.inf, query.dtype)
    for place in np.ndindex(batch, heads, queries):
        entry, head, row = place
        own = allowed[place]
        if own.any():
            scores = (key[entry, head][own] * query[place]).sum(-1) * np.asarray(scale, query.dtype) + added[place][own]
            weights = np.exp(scores - scores.max())
            total = weights.sum()
            output[place] = (weights[:, None] * value[entry, head][own]).sum(0) / total
            log_sum_exp[place] = np.log(total) + scores.max()
    return {"output": output.astype(query.dtype), "log_sum_exp": log_sum_exp.astype(query.dtype)}
"""
CASES = """
title: Small calls
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 3}, dtypes: [float32]}
arrays:
  query: {draw: randn, shape: [3, 2, 9, 8]}
  key: {draw: randn, shape: [3, 2, 9, 8]}
  value: {draw: randn, shape: [3, 2, 9, 8]}
cases:
  - name: A prompt
    inputs: {query: query, key: key, value: value}
    options: {is_causal: true}
    properties: [NAMES]
"""
LoadText = Callable[[str], list[Case]]
Ask = Callable[..., list[Row]]


@pytest.fixture(scope="session")
def cases_with(load_text: LoadText) -> Callable[[Sequence[str]], list[Case]]:
    """Return a prompt of which these properties are asked."""
    return lambda names: load_text(CASES.replace("NAMES", ", ".join(names)))


@pytest.fixture
def ask(tmp_path: Path, cases_with: Callable[[Sequence[str]], list[Case]]) -> Ask:
    """Ask properties of the kernel with something replaced, and with what is written below it."""

    def asked(names: Sequence[str], *changes: tuple[str, str], below: str = "") -> list[Row]:
        text = KERNEL
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "kernel.py"
        path.write_text(f"{text}\n{below}\n", encoding="utf-8")
        implementation = user_implementation(Target.of(f"{path}:attention"), None)
        asking = Asking(limits=Limits(case_seconds=60))
        return ask_implementations([implementation], questions_of(cases_with(names), asking), asking)

    return asked
