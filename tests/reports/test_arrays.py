"""Kept arrays are read one case at a time, from every run, and errors over bounds are worked out from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest

from attncheck.reports.arrays import KeptArrays, error_ratio
from attncheck.reports.frames import Frames
from attncheck.results.format import EXACT, INPUTS, StoredArray, bound_name

WriteRun = Callable[..., Path]


def stored(
    array: Any, case: str = "file/one", dtype: str = "float64", name: str = "numpy.eager", stage: str = "output"
) -> StoredArray:
    return StoredArray(case, dtype, name, stage, np.asarray(array))


def test_arrays_come_back_by_environment_implementation_and_stage(
    write_run: WriteRun, make_row: Callable[..., Any], frames_of: Callable[..., Frames]
) -> None:
    half = np.array([[1.5, np.nan]], dtype=ml_dtypes.bfloat16)
    first = write_run([make_row()], label="old", arrays=[stored([[1.0, 2.0]]), stored(half, dtype="bfloat16")])
    second = write_run(
        [make_row()],
        label="new",
        arrays=[stored([True], name=INPUTS, stage="mask"), stored(0.25, name=EXACT), stored([9.0], case="file/two")],
    )
    arrays = frames_of(first, second).arrays
    found = arrays.of("file/one", "float64")
    assert {key: array.tolist() for key, array in found.items()} == {
        ("old", "numpy.eager", "output"): [[1.0, 2.0]],
        ("new", INPUTS, "mask"): [True],
        ("new", EXACT, "output"): 0.25,
    }
    (narrow,) = arrays.of("file/one", "bfloat16").values()
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow.astype(np.float32), half.astype(np.float32))
    assert arrays.units() == (("file/one", "bfloat16"), ("file/one", "float64"), ("file/two", "float64"))


def test_what_was_not_kept_is_empty(write_run: WriteRun) -> None:
    assert KeptArrays().of("a", "float64") == {}
    assert KeptArrays().units() == ()
    arrays = KeptArrays({"local": write_run()})
    assert arrays.of("file/one", "float64") == {}


def test_only_the_row_groups_that_are_asked_for_are_read_and_few_stay_in_memory(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_run(arrays=[stored(np.full(3, n), case=f"file/{n}") for n in range(8)])
    (part,) = (directory / "arrays").glob("*.parquet")
    pq.write_table(pq.read_table(part), part, row_group_size=2)
    read: list[int] = []
    whole = pq.ParquetFile.read_row_groups

    def counted(self: Any, groups: list[int], columns: list[str]) -> Any:
        if "data" in columns:
            read.extend(groups)
        return whole(self, groups, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counted)
    arrays = KeptArrays({"local": directory})
    assert arrays.units()[-1] == ("file/7", "float64")
    assert read == []
    for case in (5, 4, 5, 0, 7):
        assert arrays.of(f"file/{case}", "float64")["local", "numpy.eager", "output"].tolist() == [case] * 3
    assert read == [2, 0, 3]
    arrays.of("file/4", "float64")  # no longer in memory
    assert read == [2, 0, 3, 2]


def damage_footer(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:200])


def damage_data(part: Path) -> None:
    content = part.read_bytes()
    part.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])


@pytest.mark.parametrize("damage", [damage_footer, damage_data])
def test_what_cannot_be_read_is_as_if_it_were_not_kept(damage: Callable[[Path], None], write_run: WriteRun) -> None:
    first, second = (write_run(arrays=[stored(np.arange(99.0))], name=name) for name in ("first", "second"))
    damage(first / "arrays" / "part-00000.parquet")
    found = KeptArrays({"a": first, "b": second}).of("file/one", "float64")
    assert list(found) == [("b", "numpy.eager", "output")]


def test_the_error_ratio_is_nan_where_nothing_is_judged_and_infinite_where_nan_stands_alone() -> None:
    nan, inf = np.nan, np.inf
    computed = np.array([1.5, 1.0, 7.0, 7.0, nan, nan, inf, 2.0])
    exact = np.array([1.0, 1.0, nan, 1.0, nan, 1.0, inf, 1.0])
    allowed = np.array([0.25, 0.0, inf, nan, 0.0, 0.5, 0.0, 0.0])
    np.testing.assert_array_equal(error_ratio(computed, exact, allowed), [2.0, 0.0, nan, nan, 0.0, inf, 0.0, inf])


def test_the_error_ratio_of_a_real_run_is_what_its_rows_say(document_frames: Frames) -> None:
    rows = document_frames.results
    rows = rows[(rows["dtype"] == "float32") & (rows["ratio"] > 0) & rows["case"].str.contains("base_r")]
    assert len(rows) > 4
    for row in rows.itertuples():
        kept = document_frames.arrays.of(row.case, "float32")
        computed, exact, bound = (
            kept[row.environment, name, row.stage] for name in (row.implementation, EXACT, bound_name("native"))
        )
        assert np.nanmax(error_ratio(computed, exact, bound)) == pytest.approx(row.ratio, rel=1e-6)
