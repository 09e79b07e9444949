"""Every exact value and every error bound of the corpus is what it was, unless a commit changes one on purpose."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from golden import fingerprints, fingerprints_on_all_cores, is_same, read_golden

from attncheck.attention import errors as bounds_terms
from attncheck.reading.selection import select_cases

HOW_TO_ACCEPT = "If that is meant: python tests/harness/judging/golden.py, and say in the commit why they are bounds."


def test_every_exact_value_and_bound_is_as_recorded() -> None:
    recorded, found = read_golden(), fingerprints_on_all_cores(select_cases(()).cases)
    changes = _changes(recorded, found)
    assert not changes, "\n".join([*changes[:40], f"{len(changes)} changed in all. {HOW_TO_ACCEPT}"])


@pytest.mark.parametrize(("factor", "is_seen"), [(1 + 2.0**-10, True), (1 + 2.0**-48, False)])
def test_a_changed_bound_is_seen_and_another_processor_is_not(
    factor: float, *, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = select_cases(["softmax.yaml"]).cases
    before = dict(fingerprints(cases))
    monkeypatch.setattr(bounds_terms, "_OWN_ROUNDING", bounds_terms._OWN_ROUNDING * factor)
    changed = [line for line in _changes(before, dict(fingerprints(cases))) if "exact" not in line]
    assert bool(changed) == is_seen


def _changes(recorded: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Say which cases came, went, or have other exact values or bounds."""
    lines = [f"{name}: not in the golden file" for name in found if name not in recorded]
    lines += [f"{name}: no longer there" for name in recorded if name not in found]
    for name in sorted(recorded.keys() & found.keys()):
        old, new = (dict(part.split("=") for part in text[name].split(" ")) for text in (recorded, found))
        differing = [part for part in {**old, **new} if not is_same(old.get(part, ""), new.get(part, ""))]
        if differing:
            lines.append(f"{name}: {', '.join(differing)}")
    return lines
