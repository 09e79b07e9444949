"""What `attncheck repro` calls its scripts: two cases never share one because their names begin alike."""

from __future__ import annotations

from collections import Counter

from attncheck.cli.explaining import script_name
from attncheck.reading.selection import select_cases

LONG = "file/" + "-".join(["word"] * 20)


def test_a_short_name_is_kept() -> None:
    assert (
        script_name("folder/file/a-short-name", "torch.sdpa", "float32") == "repro_a_short_name_torch.sdpa_float32.py"
    )


def test_long_names_that_begin_alike_stay_apart() -> None:
    first, second = (script_name(f"{LONG}-{end}", "numpy.eager", "float64") for end in ("one", "two"))
    assert first != second
    assert first == script_name(f"{LONG}-one", "numpy.eager", "float64")
    assert len(first) == len("repro_") + 60 + len("_numpy.eager_float64.py")


def test_no_two_cases_of_the_corpus_share_a_name() -> None:
    names = Counter(script_name(case.id, "numpy.eager", "float32") for case in select_cases(tiles=[48]).cases)
    assert max(names.values()) == 1
