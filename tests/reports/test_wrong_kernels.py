"""What the terminal says of three kernels, each with one fault: what is wrong, where, and where to read on."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from here import own_code_here

from attncheck.api import check
from attncheck.reports.defects import defects
from attncheck.reports.terminal import print_summary

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
COLUMNS, MOST_LINES = 100, 24
SCALE = "the default scale is 1/sqrt(3 D), not 1/sqrt(D)"
CORNER = "causality is aligned bottom-right (key j for query i iff j <= i + Lk - Lq)"
TAIL = "wrong_kernels.dropped_tail fails only where keys lie past the last full tile of 16: "


@pytest.mark.parametrize(
    ("name", "cases", "first", "second", "kinds"),
    [
        ("default_scale", ["attention", "probes/rounding/*"], SCALE, "", 2),
        ("other_corner", ["attention", "probes/masks/*"], CORNER, "", 1),
        ("dropped_tail", ["probes/long_rows/*", "probes/masks/*", "coincidences/*"], "", TAIL, 1),
    ],
)
def test_twenty_four_lines_say_what_is_wrong_and_where_to_read_on(
    name: str,
    cases: list[str],
    first: str,
    second: str,
    kinds: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "wrong_kernels", raising=False)
    kernel = getattr(__import__("wrong_kernels"), name)
    with own_code_here():
        frames = check(kernel, cases=cases, dtypes=["float64", "float32"]).frames
    capsys.readouterr()
    print_summary(frames, Path("results/latest/report/report.html"), quiet=False)
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert sum(max(1, math.ceil(len(line) / COLUMNS)) for line in lines) <= MOST_LINES
    assert "0x" not in text
    assert lines[0].startswith(f"wrong_kernels.{name} is wrong in ")
    assert first in lines[0]
    assert lines[1].startswith(second)
    numbers = [number for number, line in enumerate(lines) if line.startswith("  output[")]
    assert len(numbers) == kinds
    for number in numbers:
        where = r"[\w-]+: (\d+ cases \[.*\], the first [\w/-]+,|[\w/-]+ \[.*\]) wrong_kernels\.\w+"
        assert re.fullmatch(where, lines[number - 1])
        is_wrong = r"\] is \S+( in float32)?, should be [^\s:]+(: off by \S+ times the error bound)?$"
        assert re.search(is_wrong, lines[number])
    assert lines[-1] == "Report: results/latest/report/report.html"


DEFAULTS = {
    "1/D": lambda width: 1 / width,
    "1": lambda width: 1.0,
    "sqrt(D)": lambda width: width**0.5,
    "the root of the right one, as if one of query and key had it": lambda width: width**-0.25,
}


def test_a_default_scale_is_one_defect_and_told_by_what_it_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    right, said = __import__("wrong_kernels").right, {}
    for words, default in DEFAULTS.items():

        def kernel(query: Any, key: Any, value: Any, *, is_causal: bool = False, scale: float | None = None) -> Any:
            chosen = default(query.shape[-1]) if scale is None else scale  # noqa: B023 # called in this round
            return right(query, key, value, is_causal=is_causal, scale=chosen)

        with own_code_here():
            frames = check(kernel, cases=["attention"], dtypes=["float64"]).frames
        said[words] = [defect.text for defect in defects(frames) if defect.diagnosis]
    assert all(text.startswith("the default scale is ") for texts in said.values() for text in texts)
    last = {words: [re.split(" is | or ", text)[-1] for text in texts] for words, texts in said.items()}
    assert last == {words: [words] for words in DEFAULTS}
