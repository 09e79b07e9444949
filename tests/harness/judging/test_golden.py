"""Exact values and error bounds of every case are what they were, unless a commit changes them on purpose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from golden import changes, fingerprints, read_golden, standard_part

from attncheck.attention import errors as bounds_terms
from attncheck.reading.selection import select_cases
from attncheck.spec import ROUNDING_MODELS

HOW_TO_ACCEPT = "If that is meant: python tests/harness/judging/golden.py, and say in the commit why they are bounds."


def test_exact_values_and_bounds_of_the_standard_cases_are_as_recorded() -> None:
    cases = select_cases(()).cases
    found = dict(fingerprints(cases, part=standard_part(cases)))
    assert len(found) > 0.2 * len(cases)
    for model in ROUNDING_MODELS:
        assert sum(f" {model}=" in text for text in found.values()) > 10, "every model is held in many cases"
    changed = changes(read_golden(), found, cases)
    assert not changed, "\n".join([*changed[:40], f"{len(changed)} changed in all. {HOW_TO_ACCEPT}"])


def test_a_changed_bound_is_seen_and_another_processor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, own = select_cases(["softmax.yaml"]).cases[:5], bounds_terms._FLOAT64_SLACK
    before = dict(fingerprints(cases))
    for factor, is_seen in ((1 + 2.0**-10, True), (1 + 2.0**-48, False)):
        monkeypatch.setattr(bounds_terms, "_FLOAT64_SLACK", own * factor)
        changed = changes(before, dict(fingerprints(cases)), cases)
        assert bool(changed) == is_seen
        assert not any(" exact" in line for line in changed)
    assert changes(before, before, cases[1:])[0].endswith("no longer there")
    assert changes({}, before, cases[:1])[0].endswith("not in the golden file")
