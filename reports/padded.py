"""Which cases were padded to what an implementation requires (docs/kernels.md), and with what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from attncheck.reports.frames import Column, Frames, once_for_frames, records
from attncheck.verdicts import Verdict
from attncheck.wording import listed

_KIND = re.compile(r"([a-z ]+) \([^)]*\)(?:, |$)")
"""What was added, and to which axes: zero columns (D 5 to 8, Dv 3 to 8), masked keys (T 7 to 16)."""


_FOLDED = "a block mask"
"""What packed sequences are called with where there is no function for them. Nothing requires it."""


@dataclass(frozen=True)
class Padded:
    """The cases in which one implementation was padded, of these ``padded`` by kind, and those that were ``folded``."""

    cases: int
    padded: int
    kinds: dict[str, int]
    folded: int


@once_for_frames
def padded_cases(frames: Frames) -> dict[Column, Padded]:
    """Return, for every implementation that was padded at all, in how many cases, and in how many with what."""
    results = frames.results
    rows = results[results["padded"].notna() & results["verdict"].ne(Verdict.UNSUPPORTED)]
    found = {}
    for column in frames.columns:
        is_own = rows["environment"].eq(column.environment) & rows["implementation"].eq(column.implementation)
        own = rows[is_own].drop_duplicates(["case", "padded"])
        if len(own):
            kinds = {(row["case"], kind) for row in records(own) for kind in _KIND.findall(row["padded"]) or [""]}
            counts = Counter(kind for _, kind in kinds if kind)
            folded = counts.pop(_FOLDED, 0)
            others = len({case for case, kind in kinds if kind != _FOLDED})
            ordered = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
            found[column] = Padded(own["case"].nunique(), others, ordered, folded)
    return found


def padded_sentences(frames: Frames) -> Iterator[str]:
    """Say of each implementation in how many cases it was padded with what."""
    for column, found in padded_cases(frames).items():
        name = column.title(with_environment=len(frames.asked) > 1, with_version=False)
        parts = [f"{count:,} with {kind}" for kind, count in found.kinds.items()]
        if found.folded:
            yield (
                f"On {name}, which has no function for packed sequences, {_cases(found.folded)} called with "
                f"{_FOLDED} instead."
            )
        if found.padded and not parts:  # rows that somebody else wrote
            yield f"On {name}, {_cases(found.padded)} padded."
        elif len(parts) == 1:
            yield f"On {name}, {_cases(found.padded)} padded with {next(iter(found.kinds))}, as it requires."
        elif parts:
            yield f"On {name}, {_cases(found.padded)} padded, as it requires: {listed(parts)}."


def _cases(count: int) -> str:
    return "1 case was" if count == 1 else f"{count:,} cases were"
