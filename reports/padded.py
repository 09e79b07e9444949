"""Which cases were padded to what an implementation requires (docs/kernels.md), and with what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from attncheck.reports.frames import Column, Frames, once_for_frames, records
from attncheck.verdicts import Verdict

_KIND = re.compile(r"([a-z ]+) \([^)]*\)(?:, |$)")
"""What was added, and to which axes: zero columns (D 5 to 8, Dv 3 to 8), masked keys (T 7 to 16)."""


@once_for_frames
def padded_cases(frames: Frames) -> dict[Column, tuple[int, dict[str, int]]]:
    """Return, for every implementation that was padded at all, in how many cases, and in how many with what."""
    results = frames.results
    rows = results[results["padded"].notna() & results["verdict"].ne(Verdict.UNSUPPORTED)]
    found = {}
    for column in frames.columns:
        is_own = rows["environment"].eq(column.environment) & rows["implementation"].eq(column.implementation)
        own = rows[is_own].drop_duplicates(["case", "padded"])
        if len(own):
            kinds = {(row["case"], kind) for row in records(own) for kind in _KIND.findall(row["padded"])}
            counts = Counter(kind for _, kind in sorted(kinds))
            found[column] = own["case"].nunique(), dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    return found


def padded_sentences(frames: Frames) -> Iterator[str]:
    """Say of each implementation in how many cases it was padded with what."""
    for column, (cases, kinds) in padded_cases(frames).items():
        name = column.title(with_environment=len(frames.asked) > 1, with_version=False)
        was = "1 case was" if cases == 1 else f"{cases:,} cases were"
        parts = [f"{count:,} with {kind}" for kind, count in kinds.items()]
        if not parts:  # rows that somebody else wrote
            yield f"On {name}, {was} padded."
        elif len(parts) == 1:
            yield f"On {name}, {was} padded with {next(iter(kinds))}, as it requires."
        else:
            yield f"On {name}, {was} padded, as it requires: {', '.join(parts[:-1])} and {parts[-1]}."
