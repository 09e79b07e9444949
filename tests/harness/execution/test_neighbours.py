"""Calls that differ in one thing alone: what a function keeps under too small a key shows, and nothing else does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import attncheck
from attncheck.backends import numpy_backend
from attncheck.backends.contract import Backend
from attncheck.execution.neighbours import NeighbourCalls
from attncheck.execution.operations import UNWRITTEN, Task
from attncheck.execution.worker import Computed, Outcome, evaluate_on
from attncheck.judging.judge import NEVER_WRITTEN

Given = dict[str, Any]
Memo = dict[Any, Any]
LENGTHS = range(5, 13)
"""Of keys: with so many shapes each thing is changed before a case and behind one."""


def keeping(name: str, *key: str) -> Callable[[Memo, Given], Given]:
    """Take a keyword from the first call of its shapes, and of these other keywords."""

    def change(memo: Memo, given: Given) -> Given:
        kept = (name, given["key"].shape, *(np.asarray(given.get(each, 0)).tobytes() for each in key))
        found = memo.setdefault(kept, given.get(name))
        rest = {each: value for each, value in given.items() if each != name}
        return rest if found is None else {**rest, name: found}

    return change


def mask_batch_kept(memo: Memo, given: Given) -> Given:
    """Read the mask of the first batch entry where the first call of these shapes had one for all."""
    if "mask" not in given:
        return given
    entries = memo.setdefault(given["key"].shape, given["mask"].shape[0])
    return {**given, "mask": given["mask"][:1]} if entries == 1 else given


def scale_ignored(memo: Memo, given: Given) -> Given:
    return {name: value for name, value in given.items() if name != "scale"}


ALL = {"scale": 0.4, "is_causal": True, "window": (3, 0), "softcap": 2.0}
KERNELS: dict[str, tuple[Callable[[Memo, Given], Given], str]] = {
    "scale by shapes": (keeping("scale"), "scale"),
    "causality by shapes": (keeping("is_causal"), "is_causal"),
    "window by shapes": (keeping("window"), "window"),
    "cap by shapes": (keeping("softcap"), "softcap"),
    "mask by shapes": (keeping("mask", "is_causal"), "the mask"),
    "bias by shapes": (keeping("bias"), "the bias"),
    "key lengths by shapes": (keeping("key_lengths"), "the key lengths"),
    "query offsets by shapes": (keeping("query_offsets", "is_causal"), "query_offsets"),
    "the mask's batch axis by shapes": (mask_batch_kept, "the mask's batch axis"),
    "scale by itself": (keeping("scale", "scale"), ""),
    "mask by itself": (keeping("mask", "mask"), ""),
    "nothing": (lambda memo, given: given, ""),
    "a scale that is ignored": (scale_ignored, ""),
}


def tasks(option: str) -> Iterator[Task]:
    """Yield problems with an option or input, all of other shapes."""
    draw = np.random.default_rng(42)
    for keys in LENGTHS:
        arrays = {name: draw.standard_normal((2, 2, keys, 4)) for name in ("query", "key", "value")}
        more = {
            "mask": draw.random((2, 1, keys, keys)) < 0.6,
            "bias": draw.standard_normal((2, 2, keys, keys)),
            "key_lengths": np.array([keys - 1, keys // 2]),
            "query_offsets": np.array([2, 3]),
        }
        named = "is_causal" if option == "query_offsets" else option  # offsets alone say nothing
        options = {name: value for name, value in ALL.items() if name == named}
        yield Task("attention", options, {**arrays, **{name: each for name, each in more.items() if name == option}})


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_second_of_two_calls_shows_what_the_first_left_behind_in_both_orders(kernel: str) -> None:
    change, expected = KERNELS[kernel]
    memo: Memo = {}
    backend = SimpleNamespace(
        from_numpy=lambda array: array,
        to_numpy=lambda array: array,
        attention=lambda **given: numpy_backend.attention(**change(memo, given)),
    )

    def evaluate(task: Task) -> Outcome:
        return evaluate_on(cast(Backend, backend), task)

    @contextmanager
    def in_fresh_process() -> Iterator[None]:
        kept = dict(memo)
        memo.clear()
        yield
        memo.clear()
        memo.update(kept)

    faults: set[str] = set()
    are_right: set[bool] = set()
    for option in (*ALL, "mask", "bias", "key_lengths", "query_offsets"):
        memo.clear()
        calls = NeighbourCalls(evaluate, in_fresh_process)
        for task in tasks(option):
            found = calls.beside(task, lambda task=task: evaluate(task))  # type: ignore[misc]
            assert isinstance(found, Computed)
            if found.faults:
                faults |= set(found.faults.values())
                right = numpy_backend.attention(**task.inputs, **task.options)["output"]
                are_right.add(bool(np.array_equal(found.stages["output"], right)))
    said = f"the second of two calls that differ only in {expected} gives the first call's numbers"
    if not expected:
        assert faults == set()
    else:
        assert said in faults
        assert faults <= {said, f"{said.replace(' gives', chr(39) + 's batch axis gives')}"}
        # Behind its neighbour a case is wrong itself; in front of it, its neighbour is.
        assert are_right >= ({True, False} if expected in ALL else {False})


@pytest.mark.skipif(sys.platform != "linux", reason="glibc fills memory")
def test_what_is_left_unwritten_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hollow.py"
    path.write_text(
        "import numpy as np\n"
        "from attncheck.backends import numpy_backend\n"
        "def attention(query, key, value, *, scale=None):\n"
        "    output = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)\n"
        "    output[..., 1:] = numpy_backend.attention(query, key, value, scale=scale)['output'][..., 1:]\n"
        "    return output\n",
        encoding="utf-8",
    )
    found = [
        row
        for row in attncheck.check(f"{path}:attention", cases=["attention/*scale*"]).failures
        if row.comparison == "stage"
    ]
    assert {(row.diagnosis, row.message.partition(":")[0]) for row in found} == {(NEVER_WRITTEN, UNWRITTEN)}


def test_a_check_names_it(tmp_path: Path) -> None:
    path = tmp_path / "kept.py"
    path.write_text(
        "import numpy as np\n"
        "scales = {}\n"
        "def attention(query, key, value, *, scale=None):\n"
        "    first = query.shape[-1] ** -0.5 if scale is None else scale\n"
        "    scores = query @ key.swapaxes(-1, -2) * query.dtype.type(scales.setdefault(key.shape, first))\n"
        "    weights = np.exp(scores - scores.max(-1, keepdims=True))\n"
        "    return weights / weights.sum(-1, keepdims=True) @ value\n",
        encoding="utf-8",
    )
    found = attncheck.check(f"{path}:attention", cases=["attention/*scale*"], dtypes=["float32"])
    messages = {row.message.partition(" numbers;")[0] for row in found.failures}
    assert "the second of two calls that differ only in scale gives the first call's" in messages
