"""Kernels that repeat public reports of faults: in how many cases is each red, and what does the first screen say?

    python benchmarks/reported.py [KERNELS] [--cases PATTERNS]

Each class of ``reported_kernels.py`` is checked as users check a function. Prints for each in how many cases it is red
and what its first lines say: it is *named* if every diagnosis is one that is right for it, *located* if none is but a
line says rightly where it fails, *misleading* if a diagnosis is wrong, or something is offered as a declaration, and
*silent* otherwise. Ends with 1 if one is misleading or green, or the right kernel is red.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import reported_kernels
from measuring import on_one_thread

import attncheck
from attncheck.common.wording import CONVENTIONS_SEPARATOR, count_noun
from attncheck.reports.defects import cause_texts, declaration_lines, defects_of_column
from attncheck.reports.failure_patterns import pattern_lines

RIGHT_NAMES: Mapping[str, frozenset[str]] = {
    name: frozenset(names.split())
    for name, names in {
        "MaximumOfZeroIsKept": "low-rows-empty",
        "BiasDropsCausality": "causality-ignored",
        "UnwrittenSplitsAreMerged": "hidden-parts-of-16-merged",
        "FirstHeadIsRotated": "rotary-of-first-head-alone rotary-of-first-batch-entry-alone",
        "LongKeysForgetTheGate": "gate-ignored",
        "HalfOfTheColumnsIsWritten": "columns-unwritten",
        "RowsAreDividedByTheGroup": "causal-rows-over-group",
        "MaskDropsCausality": "causality-ignored",
        "CausalityDropsLengths": "key-lengths-ignored",
        "WindowNeedsAMask": "window-ignored",
        "WindowOnBothSides": "window-left-for-both",
        "LongKeysLoseTheMiddle": "keys-fitted",
        "DecodeDropsTheOldestKey": "window-too-narrow-left",
        "LongestLengthForAll": "key-lengths-of-longest key-lengths-ignored",
        "CausalityByGroupsOfFour": "causal-by-tiles-of-4 causality-ignored",
        "FirstEntryIsRotated": "rotary-writes-first-batch-entry",
        "HeadsArePositions": "rotary-heads-as-positions",
        "KeysOfZerosFillTheTile": "zero-score-keys-to-tiles-of-64",
        "MaskedAtAFiniteNumber": "masked-at-minus-1e4 empty-rows-uniform",
        "LowRowsAreTakenForEmpty": "low-rows-empty",
        "ValueTilesOverwriteTheFirst": "columns-over-the-first",
        "WideHeadsAreTruncated": "columns-unwritten",
        "WidthOfSixtyFour": "features-unread",
        "PrefillDropsTheSoftcap": "softcap-ignored",
        "WindowDropsTheSinks": "sinks-ignored",
        "HiddenTilesCountTheSinkTwice": "sinks-twice",
        "FurtherEntriesAreZero": "batch-entries-unwritten",
    }.items()
}
"""By kernel, the diagnoses that are right for it."""
OPERATIONS = {"LongKeysForgetTheGate": "gated_attention", "HalfOfTheColumnsIsWritten": "quantized_attention"}
"""What kernels are asked for, if it is not attention."""


def kernels() -> list[str]:
    """Return the names of the kernels, the right one first."""
    return ["Right", *RIGHT_NAMES]


def outcome_of(name: str, patterns: Sequence[str]) -> tuple[str, int, list[str]]:
    """Check a kernel; return how its first screen is, in how many cases it is red, and what is said."""
    target = f"{reported_kernels.__file__}:{name}.{OPERATIONS.get(name, 'attention')}"
    with tempfile.TemporaryDirectory() as folder:
        result = attncheck.check(target, cases=patterns, output=Path(folder) / "results")
        frames = result.frames
        (column,) = frames.columns
        found = [each for each in defects_of_column(frames, column) if each.is_shown_by_calls]
        declared, located = declaration_lines(frames), pattern_lines(frames)
        said = [text for text in ("; ".join(cause_texts(found)), *declared, *located) if text]
    red = {case for each in found for case in each.cases}
    names = {
        part
        for each in found
        if each.diagnosis
        for part in each.diagnosis.replace(" or ", CONVENTIONS_SEPARATOR).split(CONVENTIONS_SEPARATOR)
    }
    if not red:
        return ("right" if name == "Right" else "green"), 0, said
    right = RIGHT_NAMES.get(name, frozenset())
    if names - right or declared or name == "Right":
        return "misleading", len(red), said
    return ("named" if names else "located" if located else "silent"), len(red), said


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is said of each kernel; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help="classes of reported_kernels.py (default: all)")
    parser.add_argument("--cases", nargs="*", default=[], help="cases by their ids (default: all)")
    options = parser.parse_args(arguments)
    counts = Counter[str]()
    for name in options.kernels or kernels():
        outcome, red, said = outcome_of(name, options.cases)
        counts[outcome] += 1
        print(f"{outcome:10} {name:30} red in {count_noun(red, 'case')}: {'; '.join(said) or '-'}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["misleading"] + counts["green"] > 0)


if __name__ == "__main__":
    on_one_thread()
    sys.exit(main())
