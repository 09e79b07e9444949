"""What a search found, and the folder that keeps it: case files, scripts, and how far the search came."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attncheck.errors import OutputError, UsageError
from attncheck.reading.shapes import show
from attncheck.reading.slugs import slug
from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.judging import Symptom
from attncheck.searching.novelty import Seen, asked_of, kind_of

STATE = "search.json"
_FORMAT = 1


@dataclass(frozen=True)
class Finding:
    """A failure of an implementation, on the simplest problem that shows it.

    ``file`` and ``script`` lie in the folder of the search; ``element`` says where it is worst. ``problem`` is the
    number of what was drawn. It ``has_nonfinite`` numbers where it takes NaN or infinity. One that ``needs_calls`` does
    not happen in a fresh process: so many other calls came before. ``times`` counts the problems that fail alike.
    ``numbers`` are those of the element that is worst, as ``Explanation.numbers`` has them.
    """

    symptom: Symptom
    operation: str
    dtype: str
    asked: tuple[str, ...]
    lengths: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    problem: int
    tries: int
    is_smallest: bool
    element: str
    file: str
    script: str = ""
    has_nonfinite: bool = False
    needs_calls: int = 0
    times: int = 1
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def explains(self, problem: ConcreteCase) -> bool:
        """Whether a problem has all that this failure takes: what is asked, and axes as long, or longer."""
        if self.needs_calls:  # what matters is not the problem
            return kind_of(problem) == self.operation
        if kind_of(problem) != self.operation or not set(self.asked) <= asked_of(problem):
            return False
        if self.has_nonfinite and not problem.has_nonfinite:
            return False
        lengths = problem.lengths
        return all(lengths.get(letter, 0) >= length for letter, length in self.lengths.items())

    @property
    def title(self) -> str:
        """What it is, in a line."""
        asked = f" with {', '.join(self.asked)}" if self.asked else ""
        shapes = ", ".join(f"{name} {show(shape)}" for name, shape in self.shapes.items())
        return f"{self.symptom.verdict} {self.symptom.stage or self.symptom.error}: {self.operation}{asked}, {shapes}"


def name_of(symptom: Symptom, problem: ConcreteCase, implementation: str) -> str:
    """Return the sentence that a case is called by."""
    asked = ", ".join(sorted(asked_of(problem)))
    what = f"{kind_of(problem)}{f' with {asked}' if asked else ''}"
    where = f" at {symptom.stage}" if symptom.stage else f" ({symptom.error})" if symptom.error else ""
    return f"{implementation} was {symptom.verdict}{where}: {what} in {problem.dtype}"[:200]


def file_name(symptom: Symptom, problem: ConcreteCase, identity: str) -> str:
    """Return what a file is called: what is asked, how it fails, and a mark of its numbers."""
    asked = sorted(each for each in asked_of(problem))[:4]
    mark = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return f"{slug(' '.join([kind_of(problem), *asked, str(symptom)]))[:80].strip('-')}-{mark}.yaml"


@dataclass
class SearchFolder:
    """The state of searches of one implementation: what was found, what was seen, and the next number of each seed."""

    path: Path
    implementation: str
    next_numbers: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    seen: Seen = field(default_factory=Seen)
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path, implementation: str) -> SearchFolder:
        """Open a folder, with what an earlier search of the implementation left. Raises ``UsageError``."""
        state = path / STATE
        if not state.exists():
            return cls(path, implementation)
        try:
            record = json.loads(state.read_text(encoding="utf-8"))
            found = cls(path, record["implementation"], record["next"], record["asked"], Seen.of(record["seen"]))
            found.findings = [_finding(each) for each in record["findings"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{state}: cannot be read ({error}); name another --output, or remove it") from None
        if found.implementation != implementation:
            raise UsageError(f"{path} holds a search of {found.implementation}; name another --output, or remove it")
        return found

    def write(self) -> None:
        """Write the state; what is there is replaced when all of it is written. Raises ``OutputError``."""
        record: dict[str, Any] = {
            "format": _FORMAT,
            "implementation": self.implementation,
            "next": self.next_numbers,
            "asked": self.asked,
            "findings": [asdict(each) for each in self.findings],
            "seen": self.seen.record(),
        }
        path = self.path / STATE
        partial = path.with_suffix(".partial")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise OutputError.of(path, error) from None


def _finding(record: dict[str, Any]) -> Finding:
    own = {
        "symptom": Symptom(**record["symptom"]),
        "asked": tuple(record["asked"]),
        "shapes": {name: tuple(shape) for name, shape in record["shapes"].items()},
    }
    return Finding(**{**record, **own})
