"""What is said of failures: what their cases say together, and those that a fresh process does not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from here import own_code_here
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tables import tables_beside

from attncheck.api import check
from attncheck.backends import numpy_backend
from attncheck.diagnosing import SETTLED, ReturnedStages
from attncheck.execution.worker import Computed
from attncheck.explain import calls_before, fewest
from attncheck.judging.units import Judge
from attncheck.reading.case import Case
from attncheck.results.format import StoredArray
from attncheck.results.last_failed import RunWatch
from attncheck.results.writer import ResultsWriter
from attncheck.store import VARIABLE

pytestmark = pytest.mark.usefixtures("forked_workers")


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_the_fewest_calls_are_exactly_those_that_it_takes(given: tuple[int, set[int]]) -> None:
    length, needed = given
    failing: list[Sequence[int]] = [range(length)]

    def fails_after(calls: Sequence[int]) -> bool:
        if fails := needed <= set(calls):
            failing.append(calls)
        return fails

    assert fewest(range(length), fails_after)
    assert list(failing[-1]) == sorted(needed)


def test_what_was_asked_before_begins_behind_the_last_death_and_has_the_same_process_alone() -> None:
    asked = dict.fromkeys(
        [("a", "float64"), ("a", "float32"), ("b", "float32"), ("c", "float16"), ("d", "float32")], ""
    )
    place, dtypes = ("d", "float32"), ("float64", "float32")
    assert calls_before(asked, place, dtypes) == [("a", "float64"), ("a", "float32"), ("b", "float32")]
    asked["a", "float64"] = "crash: the worker process was ended by SIGKILL"
    assert calls_before(asked, place, dtypes) == [("a", "float32"), ("b", "float32")]
    asked["b", "float32"] = "timeout: not done after 1 s"
    assert calls_before(asked, place, dtypes) == []
    assert calls_before(asked, ("gone", "float32"), dtypes) == []


# What failing cases say together

Array = NDArray[Any]
TEXTS = tables_beside(__file__)["diagnosing"]


def ignoring_causality(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
    return np.asarray(numpy_backend.attention(query, key, value)["output"])


def write_causal(folder: Path, lengths: Sequence[int]) -> str:
    """Write a case for each number of queries into a folder."""
    texts = [
        TEXTS["of_queries"].replace("NAME", f"Queries {n}" + " again" * (n in lengths[:at]))
        for at, n in enumerate(lengths)
    ]
    cases = [text.replace("LENGTH", str(n)) for text, n in zip(texts, lengths, strict=True)]
    folder.mkdir()
    (folder / "causal.yaml").write_text(TEXTS["causal"] + "".join(cases), encoding="utf-8")
    return str(folder)


@pytest.fixture
def causal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write eleven cases, with two to twelve queries, into a folder."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    with own_code_here():
        yield write_causal(tmp_path / "cases", range(2, 13))


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases that are diagnosed by exact arithmetic."""
    found: list[str] = []
    examine = Judge.examine

    def noted(self: Judge, case: Case, *arguments: Any) -> Any:
        found.append(case.id)
        return examine(self, case, *arguments)

    monkeypatch.setattr(Judge, "examine", noted)
    return found


def test_the_simplest_cases_are_examined_once_after_all_verdicts_and_what_they_name_is_handed_on(
    causal: str, examined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    see = RunWatch.see

    def noted(self: RunWatch, rows: Any) -> bool:
        seen.append(len(examined))
        return see(self, rows)

    monkeypatch.setattr(RunWatch, "see", noted)
    result = check(ignoring_causality, cases=[causal])
    assert seen == [0] * 11
    assert {(row.verdict, row.diagnosis) for row in result.failures} == {("numeric", "causality-ignored")}
    rows = result.frames.results
    assert (set(rows["verdict"]), set(rows["diagnosis"])) == ({"numeric"}, {"causality-ignored"})
    assert all(message.startswith("causality is ignored; ") for message in rows["message"])
    assert len(examined) == SETTLED
    assert check(ignoring_causality, cases=[causal]).failures == result.failures
    assert len(examined) == SETTLED, "what two runs have in common is diagnosed once"


def test_a_case_that_a_name_does_not_explain_is_examined_and_has_no_name(causal: str, examined: list[str]) -> None:
    def attention(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
        return ignoring_causality(query, key, value) + (query.shape[-2] == 12)

    failures = check(attention, cases=[causal]).failures
    names = {row.case.partition("causal/")[2]: row.diagnosis for row in failures}
    assert names.pop("queries-12") is None
    assert set(names.values()) == {"causality-ignored"}
    assert (examined[-1].partition("causal/")[2], len(examined)) == ("queries-12", SETTLED + 1)


def test_the_rest_has_no_name_where_the_simplest_cases_say_nothing(causal: str, examined: list[str]) -> None:
    def attention(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
        return np.random.default_rng(1).standard_normal(query.shape)

    failures = check(attention, cases=[causal]).failures
    assert ({row.diagnosis for row in failures}, len(failures), len(examined) < 11) == ({None}, 11, True)


@pytest.mark.usefixtures("causal")
def test_an_accuracy_that_only_large_cases_tell_is_that_of_the_small_ones_too(tmp_path: Path) -> None:
    def attention(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
        narrow = (each.astype(np.float32) for each in (query, key, value))
        return np.asarray(numpy_backend.attention(*narrow, is_causal=is_causal)["output"], np.float64)

    failures = check(attention, cases=[write_causal(tmp_path / "few", [1, 2, 3, 1, 2, 3, 16, 17, 18])]).failures
    assert [row.diagnosis for row in failures] == ["accuracy-of-float32"] * 9


def test_what_an_earlier_part_of_a_run_has_kept_is_read_from_its_folder(tmp_path: Path) -> None:
    output = np.arange(3.0)
    writer = ResultsWriter(tmp_path)
    writer.add_arrays([StoredArray("file/one", "float64", "kernel", "output", output)])
    writer.flush()
    returned = ReturnedStages(tmp_path, {("kernel", "file/two", "float64"): Computed({"output": output + 1})})
    for case, expected in (("file/one", output), ("file/two", output + 1)):
        found = returned(("kernel", case, "float64"))
        assert found is not None
        np.testing.assert_array_equal(found.stages["output"], expected)
    assert returned(("kernel", "file/three", "float64")) is None
    assert returned(("another", "file/one", "float64")) is None
