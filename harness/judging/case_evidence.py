"""What the rows of a failing case carry for the diagnosis, which all cases of a run decide together.

The verdict of a case does not depend on it. ``diagnosis.examine`` finds it and ``diagnosis.decision`` weighs it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from attncheck.verdicts import Verdict


@dataclass(frozen=True)
class Fit:
    """A reading that explains a case; ``unsure`` names all that have its answer there, ``description`` it alone.

    ``factor`` is the number that was fitted, over the one that the case means. ``shared`` is the description where all
    cases that the reading explains have that one.
    """

    name: str
    description: str
    stage: str
    verdict: str
    answer: str
    unsure: str = ""
    is_fitted: bool = False
    factor: float | None = None
    shared: str = ""


@dataclass(frozen=True)
class Plain:
    """How a row reads where nothing is named, as which message it was written, and which stages are ``right``."""

    verdict: str
    message: str
    begins_at: str
    written: str
    right: Sequence[str] = ()


@dataclass(frozen=True)
class Evidence:
    """What one failing case says of its implementation; nothing in rows that only follow from others.

    ``failing`` is the first stage that fails, ``operation`` that of the case.
    """

    fits: tuple[Fit, ...] = ()
    refuted: frozenset[str] = frozenset()
    failing: str = ""
    operation: str = ""


def pack(evidence: Evidence, plain: Plain) -> str:
    """Write what a row has to carry."""
    record = {**asdict(evidence), "refuted": sorted(evidence.refuted), "plain": asdict(plain)}
    return json.dumps(record, ensure_ascii=False)


def unpack(text: str) -> tuple[Evidence, Plain] | None:
    """Read what a row carries; None where that is damaged: the row then stays as it was written."""
    try:
        record = json.loads(text)
        fits = tuple(Fit(**each) for each in record["fits"])
        plain = Plain(**{**record["plain"], "right": tuple(record["plain"].get("right", ()))})
        Verdict(plain.verdict)
        where = str(record["failing"]), str(record["operation"])
        return Evidence(fits, frozenset(record["refuted"]), *where), plain
    except (ValueError, TypeError, KeyError):
        return None
