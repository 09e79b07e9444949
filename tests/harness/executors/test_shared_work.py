"""The work that several workers of the same implementations share."""

from __future__ import annotations

import pytest

from attncheck.executors import shared_work
from attncheck.executors.shared_work import CHUNK, SharedWork
from attncheck.plan import Unit


def units(number: int) -> list[Unit]:
    return [Unit(position, position, "float64") for position in range(number)]


def test_every_unit_is_taken_once_in_order() -> None:
    work, taken = SharedWork(units(10)), []
    while not work.is_done:
        taken += work.take(3)
    assert [unit.position for unit in taken] == list(range(10))
    assert not work.take(3)


def test_nothing_is_done_before_it_is_taken_and_no_units_are_done_at_once() -> None:
    assert SharedWork([]).is_done
    assert not SharedWork(units(1)).is_done


@pytest.mark.parametrize(
    ("taken", "seconds", "is_long"),
    [
        (1, 100.0, False),  # the first chunk is still computed: nothing is known of the speed
        (2, 0.1, False),
        (2, 100.0, True),
        (9, 100.0, False),  # one chunk is left, which another worker would not get done any sooner
    ],
)
def test_the_rest_is_long_where_it_would_take_long_at_the_speed_so_far(
    taken: int, seconds: float, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [5.0]
    monkeypatch.setattr(shared_work, "perf_counter", lambda: now[0])
    work = SharedWork(units(10 * CHUNK))
    for _ in range(taken):
        work.take(CHUNK)
    now[0] += seconds
    assert work.is_long is is_long
