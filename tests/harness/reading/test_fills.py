"""Fills of masks: what a case may say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attncheck.errors import CaseError

Load = Callable[[str], Any]

CASE = """\
title: Fills
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
cases:
  - name: The case at hand
    options: {mask_fill: -1.0e+9}
    inputs:
      query: {draw: randn, shape: [3, 4]}
      key: {draw: randn, shape: [6, 4]}
      value: {draw: randn, shape: [6, 4]}
      mask: {values: [[1, 0, 1, 1, 0, 0]]}
"""
WITHOUT_MASK = "".join(line for line in CASE.splitlines(keepends=True) if "mask: {" not in line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WITHOUT_MASK, "nothing does here"),
        (CASE.replace("-1.0e+9", "65505"), "expected at most 65504"),
        (CASE.replace("-1.0e+9", "-.inf"), "expected a finite number"),
    ],
    ids=["nothing masked", "too large", "minus infinity"],
)
def test_fills_that_cannot_be_are_refused(load_text: Load, text: str, message: str) -> None:
    with pytest.raises(CaseError) as error:
        load_text(text)
    [fault] = error.value.faults
    assert fault.field == "options.mask_fill"
    assert message in fault.message


@pytest.mark.parametrize("option", ["is_causal: true", "window: [1, 1]"])
def test_any_rule_may_be_filled(load_text: Load, option: str) -> None:
    assert load_text(WITHOUT_MASK.replace("mask_fill", f"{option}, mask_fill"))


def test_other_operations_have_no_fill(load_text: Load) -> None:
    with pytest.raises(CaseError, match="does not apply to normalized_attention"):
        load_text(CASE.replace("operation: attention", "operation: normalized_attention"))
