"""Which rounding models hold for an implementation: a kernel that trades accuracy is held to each."""

from __future__ import annotations

from pathlib import Path

import pytest
import traded_kernels
from evaluating import own

from attncheck import check
from attncheck.accuracy import lines_of, measure_accuracy, small_cases
from attncheck.execution.call import Limits
from attncheck.reading.selection import select_cases
from attncheck.reports.summary import headline


def test_the_tightest_class_that_holds_is_the_one_that_a_kernel_is_right_to() -> None:
    kernels = Path(traded_kernels.__file__)
    cases = small_cases(select_cases(["attention", "half_precision", "values"]).cases)
    for name, wrong in (("sage1", "fused"), ("flash3_fp8", "sage1"), ("flash4", "")):
        found = measure_accuracy(own(f"{kernels}:{name}"), cases, "float16", Limits())
        uses = {each.name: each for each in found.classes}
        assert found.is_measured
        assert found.holds_declared == (not found.wrong_anyhow)
        assert found.declared == name
        assert 0 < uses[name].used < 1
        if wrong:
            assert found.tightest == name
            assert uses[wrong].wrong
            assert uses[wrong].used > 1
            # An infinity leaves those that share its scale no code, whatever is permitted.
            assert any("infinity" in each for each in found.wrong_anyhow)
        else:  # an output alone does not show a cubic
            assert found.tightest == "fused"
            assert '  attention.classes = {"float16": "fused"}' in lines_of(found)


def test_the_first_line_names_what_a_verdict_gave_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target, cases = (
        f"{traded_kernels.__file__}:tanh_approx",
        ["attention/logits-of-eighty-*", "attention/an-explicit-*"],
    )
    for dtype, held in (("float16", ", held to tanh_approx in float16"), ("float32", "")):
        frames = check(target, cases=cases, dtypes=[dtype]).frames
        assert headline(frames) == f"traded_kernels.tanh_approx agrees with the exact answer{held}"
