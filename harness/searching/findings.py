"""Findings of a search, and the folder that keeps them: case files, scripts, and how far the search came.

A problem is judged by a worker that stays; a failure has a verdict and a first stage. One that is new is written as a
case file that stands in any folder of cases: few numbers in the file itself, many beside it.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from attncheck.asking.answer import Answer
from attncheck.asking.engine import Engine
from attncheck.asking.question import Question
from attncheck.common.errors import CaseError, OutputError, UsageError
from attncheck.common.wording import slug
from attncheck.execution.implementations import Implementation
from attncheck.execution.padding import lack_of
from attncheck.reading.case import Case
from attncheck.reading.inputs import inputs_in
from attncheck.reading.loader import load_case_file
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import show
from attncheck.reading.written_cases import case_text, stored_arrays
from attncheck.results.format import SEARCH_STATE
from attncheck.searching.concrete import (
    Seen,
    asked_of,
    case_data,
    concrete_case,
    count_elements,
    has_nonfinite,
    identity_of,
    kind_of,
    read_concrete,
)
from attncheck.spec import statistics_dtype
from attncheck.spec.dtypes import largest_number, rounded_once
from attncheck.spec.verdicts import Verdict


@dataclass(frozen=True)
class Symptom:
    """The marks of one failure among others: its verdict, the first stage that is wrong, and which error was raised.

    A failure without stages (an error, a crash, a timeout) has no stage.
    """

    verdict: str
    stage: str = ""
    error: str = ""

    def is_like(self, other: Symptom) -> bool:
        """Return whether two failures may be of one fault: alike, but that one was recognised and the other not."""
        named = {Verdict.NUMERIC, Verdict.SEMANTIC}
        alike = self.verdict == other.verdict or {self.verdict, other.verdict} <= named
        return alike and (self.stage, self.error) == (other.stage, other.error)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.verdict, self.stage or self.error)))


def symptom_of(answer: Answer) -> Symptom | None:
    """Return how a case fails; None where it does not, where that is expected, or where it is not supported."""
    unexpected = [stage for stage in answer.failing_stages if stage not in answer.expected_failures]
    if not unexpected:
        return None
    if answer.failed is not None:
        verdict, message = answer.failed.verdict, answer.failed.message
        return Symptom(verdict, error=message.partition(":")[0] if verdict == Verdict.ERROR else "")
    first = answer.begins_at if answer.begins_at in unexpected else unexpected[0]
    verdicts = {each.stage: str(each.verdict) for each in answer.judgements}
    return Symptom(verdicts.get(first) or verdicts[unexpected[0]], first)


@dataclass
class ProblemSubject:
    """An implementation that problems are put to, by an engine; its worker was ``asked`` so many."""

    implementation: Implementation
    engine: Engine
    asked: int = 0
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    _numbers: count[int] = field(default_factory=count)

    def question(self, problem: Problem, name: str) -> Question:
        """Return a problem as a question. Raises ``CaseError`` where it is none."""
        identity = identity_of(problem, name)
        return Question(read_concrete(problem, Path(self._folder.name), identity), problem.dtype)

    def lacks_of(self, problem: Problem) -> tuple[str, ...]:
        """Return what the implementation lacks for a problem, as far as its parameters say."""
        lack = lack_of(self.implementation, problem, problem.as_call)
        return lack.lacks if lack else ()

    def ask(self, problem: Problem, name: str) -> Answer:
        """Have a problem computed and judged. Raises ``CaseError`` where it is none."""
        question = self.question(problem, name)
        self.asked += 1
        try:
            return self.engine.ask(self.implementation, question)
        finally:
            self._tidy(question.case)

    def begin(self, problem: Problem, name: str) -> Future[Answer]:
        """Have a problem computed, and judged beside what comes next. Raises ``CaseError`` where it is none."""
        question = self.question(problem, name)
        answered = self.engine.ask_in_background(self.implementation, question)
        self.asked += 1
        answered.add_done_callback(lambda _: self._tidy(question.case))
        return answered

    def symptom(self, problem: Problem) -> Symptom | None:
        """Return how a problem fails; None where it does not, or is none."""
        try:
            return symptom_of(self.ask(problem, f"try-{next(self._numbers)}"))
        except CaseError:
            return None

    def ask_in_new_process(self, problem: Problem) -> Answer:
        """Judge a problem in a process of its own. Raises ``CaseError`` where it is none."""
        question = self.question(problem, f"try-{next(self._numbers)}")
        try:
            return self.engine.ask_in_new_process(self.implementation, question)
        finally:
            self._tidy(question.case)

    def _tidy(self, case: Case) -> None:
        """Remove the arrays of what was judged: there may be many thousands of problems."""
        for path in Path(self._folder.name).glob(f"{case.id.rpartition('/')[2]}-*.npy"):
            path.unlink()

    def stop(self) -> None:
        """Kill whatever computes a problem now."""
        self.engine.workers.stop()

    def close(self) -> None:
        """End the workers."""
        self.engine.close()
        self._folder.cleanup()


_FORMAT = 1


@dataclass(frozen=True)
class Finding:
    """A failure of an implementation, on the simplest problem that shows it.

    ``file`` and ``script`` lie in the folder of the search; ``element`` says where it is worst. ``problem`` is the
    number of what was drawn. It ``has_nonfinite`` numbers where it takes NaN or infinity. One that ``needs_calls`` does
    not happen in a fresh process: so many other calls came before. ``times`` counts the problems that fail alike.
    ``numbers`` are those of the element that is worst, by ``FAILURE_NUMBERS``.
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

    def explains(self, problem: Problem) -> bool:
        """Return whether a problem has all that this failure takes: what is asked, and axes as long, or longer."""
        if self.needs_calls:  # what matters is not the problem
            return kind_of(problem) == self.operation
        if kind_of(problem) != self.operation or not set(self.asked) <= asked_of(problem):
            return False
        if self.has_nonfinite and not has_nonfinite(problem):
            return False
        lengths = problem.lengths
        return all(lengths.get(letter, 0) >= length for letter, length in self.lengths.items())

    @property
    def title(self) -> str:
        """The finding in a line."""
        asked = f" with {', '.join(self.asked)}" if self.asked else ""
        shapes = ", ".join(f"{name} {show(shape)}" for name, shape in self.shapes.items())
        return f"{self.symptom.verdict} {self.symptom.stage or self.symptom.error}: {self.operation}{asked}, {shapes}"


def name_of(symptom: Symptom, problem: Problem, implementation: str) -> str:
    """Return the sentence that a case is called by."""
    asked = ", ".join(sorted(asked_of(problem)))
    what = f"{kind_of(problem)}{f' with {asked}' if asked else ''}"
    where = f" at {symptom.stage}" if symptom.stage else f" ({symptom.error})" if symptom.error else ""
    return f"{implementation} was {symptom.verdict}{where}: {what} in {problem.dtype}"[:200]


def file_name(symptom: Symptom, problem: Problem, identity: str) -> str:
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
    place: str = ""
    """The file or module of a user's implementation, since two may have one name."""

    @classmethod
    def of(cls, path: Path, implementation: str, place: str = "") -> SearchFolder:
        """Open a folder, with what an earlier search of the implementation left. Raises ``UsageError``."""
        state = path / SEARCH_STATE
        if not state.exists():
            return cls(path, implementation, place=place)
        try:
            record = json.loads(state.read_text(encoding="utf-8"))
            seen = TypeAdapter(Seen).validate_python(record["seen"])
            findings = TypeAdapter(list[Finding]).validate_python(record["findings"])
            before = record.get("place", "")
            found = cls(
                path, record["implementation"], record["next"], record["asked"], seen, findings, before or place
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{state}: cannot be read ({error}); name another --output, or remove it") from None
        if (found.implementation, found.place) != (implementation, place or found.place):
            of = found.place or found.implementation
            raise UsageError(f"{path} holds a search of {of}; name another --output, or remove it")
        return found

    def write(self) -> None:
        """Write the state; what is there is replaced when all of it is written. Raises ``OutputError``."""
        record: dict[str, Any] = {
            "format": _FORMAT,
            "implementation": self.implementation,
            "place": self.place,
            "next": self.next_numbers,
            "asked": self.asked,
            "findings": [asdict(each) for each in self.findings],
            "seen": self.seen.record(),
        }
        path = self.path / SEARCH_STATE
        partial = path.with_suffix(".partial")
        with OutputError.where(path):
            self.path.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
            partial.replace(path)


MAX_IN_FILE = 2048
"""Numbers of all inputs that are written into the case file; more go into an .npz file beside it."""


def write_case(problem: Problem, path: Path, name: str, found_by: str) -> Case:
    """Write a problem as a file with one case, and return the case as it is read back.

    Raises ``OutputError`` where it cannot be written.
    """
    with OutputError.where(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if count_elements(problem) <= MAX_IN_FILE:
            inputs = {each: _in_file(problem, each) for each in problem.inputs}
        else:
            inputs = _beside(problem, path.with_suffix(".npz"))
        path.write_text(case_text(case_data(problem, inputs, name, found_by)), encoding="utf-8")
    return written_case(path)


def written_case(path: Path) -> Case:
    """Read a case back that was written. Its id does not have the folder, so that two searches can be compared.

    Raises ``CaseError`` if it is gone or cannot be read.
    """
    [case] = load_case_file(path, path.name, path.stem, ())
    return replace(case, path=str(path))


def read_written(path: Path) -> Problem:
    """Read the problem back that was written as a case; raises what ``written_case`` does."""
    case = written_case(path)
    return concrete_case(case, case.dtypes[0])


def holds(case: Case, problem: Problem, folder: Path) -> bool:
    """Return whether a case that was written gives an implementation the very numbers of a problem."""
    drawn = read_concrete(problem, folder, "search/again")
    one, other = (inputs_in(each, problem.dtype).arrays for each in (case, drawn))
    return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)


def _is_same(one: Array, other: Array) -> bool:
    """Return whether two arrays are equal bit by bit, except for which NaN there is."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    wide, other_wide = (each.astype(np.float64) for each in (one, other))
    is_equal = (wide == other_wide) & (np.signbit(wide) == np.signbit(other_wide))
    return alike and bool((is_equal | (np.isnan(wide) & np.isnan(other_wide))).all())


def _in_file(problem: Problem, name: str) -> dict[str, Any]:
    array, spec = problem.inputs[name], problem.specs[name]
    first = array.ravel()[:1]
    if not array.size or (
        array.size > 4 and not spec.whole and array.tobytes() == np.full_like(array, first).tobytes()
    ):
        constant = _number(problem, name, float(first[0])) if array.size else 0
        return {"constant": constant, "shape": list(array.shape)}
    return {"values": _nested(problem, name, array)}


def _nested(problem: Problem, name: str, array: Array) -> Any:
    if array.ndim:
        return [_nested(problem, name, part) for part in array]
    return array.item() if array.dtype.kind in "biu" else _number(problem, name, float(array))


def _number(problem: Problem, name: str, value: float) -> float | int:
    """Return the number of fewest digits that is stored as this one."""
    spec = problem.specs[name]
    if not math.isfinite(value) or spec.boolean or spec.whole or spec.is_narrow:
        return _whole(value)
    dtype = statistics_dtype(problem.dtype) if spec.statistics else problem.dtype
    for digits in range(1, 17):
        short = float(f"{value:.{digits}g}")
        if abs(short) <= largest_number(dtype) and float(rounded_once(np.array(short), dtype)) == value:
            value = short
            break
    return _whole(value)


def _whole(value: float) -> float | int:
    """Write a whole number without a point; 0 with a sign needs it."""
    is_whole = math.isfinite(value) and value == int(value) and abs(value) < 1e6
    return int(value) if is_whole and (value or math.copysign(1, value) > 0) else value


def _beside(problem: Problem, path: Path) -> dict[str, Any]:
    content, checksum = stored_arrays(problem.inputs)
    path.write_bytes(content)
    return {name: {"file": path.name, "name": name, "sha256": checksum} for name in problem.inputs}
