"""Outcomes that wait for others, in memory and in a file."""

from __future__ import annotations

import errno
import tempfile
from contextlib import closing
from typing import NoReturn

import numpy as np
import pytest

from attncheck.execution.worker import Computed, Failure
from attncheck.executors.waiting import WaitingOutcomes
from attncheck.plan import Unit
from attncheck.reading.dtypes import numpy_dtype

SERVING = {"float64": 1, "bfloat16": 3}


def outcome(seed: int) -> Computed:
    stage = np.random.default_rng(seed).normal(size=(1, 1, 8, 8)).astype(numpy_dtype("bfloat16"))
    return Computed({"weights": stage}, padded="with nothing", seconds=0.5)


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_a_unit_that_one_alone_serves_does_not_wait() -> None:
    with closing(WaitingOutcomes(lambda unit: SERVING[unit.dtype])) as waiting:
        assert list(waiting.add(Unit(0, 0, "float64"), "a", outcome(1)) or ()) == ["a"]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("held", [0, 200, 2**20])
def test_all_come_back_as_they_were_wherever_they_waited(
    held: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if full:
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    failure = Failure("unsupported", "no such keyword", ("mask",))
    with closing(WaitingOutcomes(lambda unit: SERVING[unit.dtype], held)) as waiting:
        for position in range(4):
            unit = Unit(position, position, "bfloat16")
            assert waiting.add(unit, "a", outcome(position)) is None
            assert waiting.add(unit, "b", failure) is None
        for position in (2, 0, 3, 1):
            found = waiting.add(Unit(position, position, "bfloat16"), "c", outcome(9))
            assert found is not None
            assert list(found) == ["a", "b", "c"]
            first, second, third = found.values()
            assert isinstance(first, Computed)
            assert isinstance(third, Computed)
            assert second == failure
            assert (first.padded, first.seconds) == ("with nothing", 0.5)
            assert first.stages["weights"].dtype == numpy_dtype("bfloat16")
            np.testing.assert_array_equal(first.stages["weights"], outcome(position).stages["weights"])
        assert (waiting._file is None) == (full or held == 2**20)
        assert waiting._held == 0
