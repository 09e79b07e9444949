"""A few at the same time, whoever is furthest behind first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock, Thread
from time import monotonic, sleep

import pytest

from attncheck.executors.priority_semaphore import PrioritySemaphore


@pytest.mark.parametrize("places", [1, 3])
def test_no_more_than_the_places_are_taken_and_all_come_through(places: int) -> None:
    turns, lock, inside, most = PrioritySemaphore(places), Lock(), 0, 0

    def work(steps: int) -> None:
        nonlocal inside, most
        for step in range(steps):
            with turns.acquire(step):
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(work, 50) for _ in range(8)]:
            future.result(timeout=30)
    assert 1 <= most <= places


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = monotonic() + 10
    while not holds():
        if monotonic() > deadline:
            pytest.fail(f"after 10 seconds it is still not so that {what}")
        sleep(0.001)


def test_whoever_is_furthest_behind_is_next() -> None:
    turns, order, held, everyone = PrioritySemaphore(1), [], Event(), Event()

    def hold() -> None:
        with turns.acquire(0):
            held.set()
            everyone.wait(10)

    def queue(done: int) -> None:
        with turns.acquire(done):
            order.append(done)

    with ThreadPoolExecutor(5) as threads:
        threads.submit(hold)
        held.wait(10)
        futures = [threads.submit(queue, done) for done in (7, 3, 9, 1)]
        try:
            _wait_until(lambda: len(turns._waiting) == 4, "four wait for the one place")
        finally:
            everyone.set()
        for future in futures:
            future.result(timeout=10)
    assert order == [1, 3, 7, 9]


def test_a_place_is_free_again_after_an_exception() -> None:
    turns = PrioritySemaphore(1)
    with pytest.raises(ValueError, match="oops"), turns.acquire(0):
        raise ValueError("oops")
    with turns.acquire(1):
        pass


def test_a_spare_place_is_one_that_nobody_waits_for() -> None:
    places = PrioritySemaphore(1)
    with places.spare(lambda: True) as has_place:
        assert has_place
        with places.spare(lambda: False) as has_another:
            assert not has_another
    with places.acquire(0):
        answers = iter([True, True, False])
        with places.spare(lambda: next(answers)) as has_place:  # it is wanted twice, and there is none
            assert not has_place
    with places.spare(lambda: True) as has_place:
        assert has_place


def test_no_place_is_spare_while_as_many_are_taken_as_there_are_processors() -> None:
    places = PrioritySemaphore(3, busy=2)
    with places.spare(lambda: True) as has_place:
        assert has_place
    with places.acquire(0), places.acquire(0):
        answers = iter([True, False])
        with places.spare(lambda: next(answers)) as has_place:
            assert not has_place
        with places.acquire(0):
            pass


def test_whoever_waits_comes_before_whoever_takes_what_is_spare() -> None:
    places, order = PrioritySemaphore(1), []
    begun = Event()

    def wait() -> None:
        begun.set()
        with places.acquire(5):
            order.append("waited")

    def help_out() -> None:
        with places.spare(lambda: True):
            order.append("spare")

    with places.acquire(0):
        waiting, helping = Thread(target=wait), Thread(target=help_out)
        waiting.start()
        begun.wait(10)
        while not places.is_awaited:
            pass
        helping.start()
    waiting.join(10)
    helping.join(10)
    assert order == ["waited", "spare"]
