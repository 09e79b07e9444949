"""What the terminal says of three kernels, each with one fault: what is wrong, where, and where to read on."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
from here import own_code_here

from attncheck.api import check
from attncheck.reports.terminal import print_summary

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
COLUMNS, MOST_LINES = 100, 24
SCALE = "the default scale is 1/sqrt(3 D), not 1/sqrt(D)"
CORNER = "causality is aligned bottom-right (key j for query i iff j <= i + Lk - Lq)"
TAIL = "wrong_kernels.dropped_tail fails only where keys lie past the last full tile of 16: "


@pytest.mark.parametrize(
    ("name", "cases", "first", "second"),
    [
        ("default_scale", ["attention", "probes/rounding/*"], SCALE, ""),
        ("other_corner", ["attention", "probes/masks/*"], CORNER, ""),
        ("dropped_tail", ["probes/long_rows/*", "probes/masks/*", "coincidences/*"], "", TAIL),
    ],
)
def test_twenty_four_lines_say_what_is_wrong_and_where_to_read_on(
    name: str,
    cases: list[str],
    first: str,
    second: str,
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
    failures = [line for line in lines if line.startswith(("numeric: ", "semantic: "))]
    assert len(failures) == 3
    assert all(re.fullmatch(r"\w+: [\w/-]+ \[float64(, float32)?\] wrong_kernels\.\w+", line) for line in failures)
    numbers = [line for line in lines if line.startswith("  output[")]
    assert len(numbers) == 3
    assert all(
        re.search(r"\] is \S+( in float64)?, should be [^\s:]+(: off by \S+ times the error bound)?$", line)
        for line in numbers
    )
    assert lines[-1] == "Report: results/latest/report/report.html"
