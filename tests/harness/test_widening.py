"""Users' functions that refuse most of what they are asked: nothing is green that was hardly judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluating import own
from here import command_here, own_code_here

from attncheck import accuracy
from attncheck.accuracy import find_widening
from attncheck.execution.call import Limits
from attncheck.reading.selection import select_cases

KERNEL = """
import numpy as np

def attention(query, key, value, *, mask=None, scale=None):
    assert scale is None or isinstance(scale, float)
    if {refuses}:
        raise NotImplementedError("not of these shapes")
    group = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, group, 1), np.repeat(value, group, 1)
    scores = query @ key.swapaxes(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
RESTRICTED = "query.shape[2] != key.shape[2] or query.shape[3] != value.shape[3] or query.shape[2] % 16"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with own_code_here():
        yield


def kernel(refuses: str, after: str = "", mask: str = "mask=None") -> str:
    text = KERNEL.format(refuses=refuses).replace("mask=None", mask)
    Path("kernel.py").write_text(f"{text}\n{after}\n", encoding="utf-8")
    return "kernel.py:attention"


def check(target: str, *words: str) -> tuple[int, Any, Any, str]:
    """Return the exit code, the document, what it counts of the function, and what went to standard error."""
    code, out, err = command_here(["check", "--json", "-i", target, *words])
    document = json.loads(out)
    (counts,) = document["coverage"].values()
    return code, document, counts, err


def test_the_loosest_requirements_are_found_by_which_refused_cases_are_computed() -> None:
    cases = select_cases(["attention/*", "values/*", "kernel_shapes/lengths/*"]).cases
    found = find_widening(own(kernel(RESTRICTED)), cases, Limits())
    assert found is not None
    assert found.requires.items() >= {("lengths", "equal"), ("value_width", "equal")}
    assert max(value for value in found.requires.values() if isinstance(value, int)) == 16
    assert 0 < found.computed <= found.tried


def test_who_is_judged_in_less_than_a_tenth_does_not_agree_and_is_told_what_helps() -> None:
    target = kernel("query.shape[3] % 16 or query.shape[2] % 8")
    for words, expected in (([], 3), (["--min-judged", "1"], 0)):
        code, document, _, err = check(target, "attention/*", "kernel_shapes/masks/*", "kernel_shapes/widths/*", *words)
        assert (code, document["failures"]) == (expected, []), err
        assert document["answer"].endswith("too few cases to say that it agrees") == (code == 3)
        advice = 'declare attention.requires = {"width_multiple": 16, "query_length_multiple": 8} below it'
        assert any(advice in line for line in document["too_few_judged"]) == (code == 3)


def test_what_no_padding_helps_or_takes_too_long_has_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = select_cases(["attention/*"]).cases
    assert find_widening(own(kernel("True")), cases, Limits()) is None
    monkeypatch.setattr(accuracy, "_MOST_SECONDS", 0.0)
    assert find_widening(own(kernel(RESTRICTED)), cases, Limits()) is None


def test_a_case_without_what_a_function_requires_is_unsupported() -> None:
    *_, counts, _ = check(kernel("False", mask="mask").replace("*, ", ""), "attention/*")
    assert counts["lacks"]["no mask in the case"] > 0


def test_padding_that_makes_millions_of_scores_of_a_few_is_not_asked() -> None:
    target = kernel("query.shape[2] != key.shape[2]", 'attention.requires = {"lengths": "equal"}')
    *_, counts, _ = check(target, "large/*")
    assert counts["lacks"]["padding of few queries to many keys"] > 0
    assert counts["stopped"] == 0


def test_a_dtype_that_is_asked_for_is_run_though_the_function_declares_nothing() -> None:
    wide = """
def wide(query, key, value):
    return attention(*(each.astype(np.float32) for each in (query, key, value))).astype(query.dtype)
"""
    target = kernel("False", wide).replace(":attention", ":wide")
    code, _, counts, err = check(target, "attention/*", "-d", "float16")
    assert (code, counts["judged"] > 0) == (0, True), err
    assert "declares no float16: as that was asked for, it is held to the class eager there" in err
