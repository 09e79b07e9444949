"""Findings of a search, and the folder that stores them: case files, scripts, and the state of the search.

A reused worker runs each problem. A failure has a verdict and a first stage. A new failure is written as a case file
that works in any folder of cases: few numbers in the file itself, many in an .npz file next to it.
"""

from __future__ import annotations

import hashlib
import json
import math
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
from attncheck.diagnosis.decision import NAME_SEPARATOR
from attncheck.execution.implementations import Implementation
from attncheck.execution.padding import unsupported_reason
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_inputs
from attncheck.reading.loader import load_case_file
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import format_shape
from attncheck.reading.written_cases import format_case_file, pack_npz
from attncheck.results.format import SEARCH_STATE
from attncheck.searching.concrete import (
    FeatureCounts,
    case_file_content,
    case_of_problem,
    concrete_problem,
    count_elements,
    drawn_case_id,
    has_nonfinite,
    operation_and_score,
    required_features,
)
from attncheck.spec import statistics_dtype
from attncheck.spec.dtypes import largest_number, round_to
from attncheck.spec.verdicts import Verdict


@dataclass(frozen=True)
class Symptom:
    """The features that distinguish a failure: its verdict, the first wrong stage, and the error that was raised.

    A failure without stages (an error, a crash, a timeout) has no stage.
    """

    verdict: str
    stage: str = ""
    error: str = ""

    def is_similar_to(self, other: Symptom) -> bool:
        """Return whether two failures may have one cause: equal, or only one of them has a diagnosis.

        Example:
            >>> undiagnosed, diagnosed = Symptom("numeric", "scores"), Symptom("semantic", "scores")
            >>> undiagnosed.is_similar_to(diagnosed), undiagnosed.is_similar_to(Symptom("numeric", "weights"))
            (True, False)
        """
        named = {Verdict.NUMERIC, Verdict.SEMANTIC}
        alike = self.verdict == other.verdict or {self.verdict, other.verdict} <= named
        return alike and (self.stage, self.error) == (other.stage, other.error)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.verdict, self.stage or self.error)))


def symptom_of(answer: Answer) -> Symptom | None:
    """Return the symptom of a failing case; None if it does not fail, if that is expected, or if it is unsupported."""
    unexpected = [stage for stage in answer.failing_stages if stage not in answer.expected_failures]
    if not unexpected:
        return None
    if answer.failed is not None:
        verdict, message = answer.failed.verdict, answer.failed.message
        return Symptom(verdict, error=message.partition(":")[0] if verdict == Verdict.ERROR else "")
    first = answer.begins_at if answer.begins_at in unexpected else unexpected[0]
    verdicts = {judgement.stage: str(judgement.verdict) for judgement in answer.judgements}
    return Symptom(verdicts.get(first) or verdicts[unexpected[0]], first)


@dataclass
class ProblemSubject:
    """An implementation that an engine runs on problems; ``run_count`` counts the problems that its worker has run."""

    implementation: Implementation
    engine: Engine
    run_count: int = 0
    _try_numbers: count[int] = field(default_factory=count)

    def as_question(self, problem: Problem, name: str) -> Question:
        """Return a problem as a question. Raises ``CaseError`` if it is no valid case."""
        identity = drawn_case_id(problem, name)
        return Question(case_of_problem(problem, None, identity, max_listed=0), problem.dtype)

    def missing_features(self, problem: Problem) -> tuple[str, ...]:
        """Return the features that the implementation lacks for a problem, as far as its parameters show."""
        lack = unsupported_reason(self.implementation, problem, problem.as_call)
        return lack.lacks if lack else ()

    def run_and_judge(self, problem: Problem, name: str) -> Answer:
        """Run and judge a problem. Raises ``CaseError`` if it is no valid case."""
        question = self.as_question(problem, name)
        self.run_count += 1
        return self.engine.ask(self.implementation, question)

    def start_in_background(self, problem: Problem, name: str) -> Future[Answer]:
        """Run a problem, and judge it while the next ones run. Raises ``CaseError`` if it is no valid case."""
        question = self.as_question(problem, name)
        answered = self.engine.ask_in_background(self.implementation, question)
        self.run_count += 1
        return answered

    def run_for_symptom(self, problem: Problem) -> Symptom | None:
        """Return the symptom of a problem; None if it does not fail, or is no valid case."""
        try:
            return symptom_of(self.run_and_judge(problem, f"try-{next(self._try_numbers)}"))
        except CaseError:
            return None

    def run_in_new_process(self, problem: Problem) -> Answer:
        """Run and judge a problem in a new process. Raises ``CaseError`` if it is no valid case."""
        question = self.as_question(problem, f"try-{next(self._try_numbers)}")
        return self.engine.run_in_new_process(self.implementation, question)

    def stop_workers(self) -> None:
        """Kill the workers that run a problem."""
        self.engine.workers.kill_running_calls()

    def close(self) -> None:
        """End the workers."""
        self.engine.close()


_FORMAT_VERSION = 1
"""Version of the content of the state file."""


@dataclass(frozen=True)
class SearchFinding:
    """A failure of an implementation, on the simplest problem that shows it.

    ``file`` and ``script`` are in the folder of the search; ``element`` describes the worst element. ``problem`` is the
    number of the drawn problem. It ``has_nonfinite`` inputs if it needs NaN or infinity. If it ``needs_calls``, it does
    not happen in a fresh process: so many other calls came before. ``times`` counts the problems that fail in this way.
    ``numbers`` are those of the worst element, by ``FAILURE_NUMBERS``.
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
        """Return whether a problem has all that this failure needs: the same features, and axes at least as long."""
        if self.needs_calls:  # the problem does not matter
            return operation_and_score(problem) == self.operation
        if operation_and_score(problem) != self.operation or not set(self.asked) <= required_features(problem):
            return False
        if self.has_nonfinite and not has_nonfinite(problem):
            return False
        lengths = problem.axis_lengths
        return all(lengths.get(letter, 0) >= length for letter, length in self.lengths.items())

    @property
    def diagnosis(self) -> str:
        """The names of the readings that fit all problems of the finding, joined by ``or``; empty for none."""
        return str(self.numbers.get("diagnosis") or "")

    def with_diagnosis(self, diagnosis: str | None) -> SearchFinding:
        """Return the finding with the readings that also fit another problem; unchanged if no reading fits both.

        The reduced problem has few numbers, which often fit no reading, or many. The problems that were drawn have
        more.
        """
        other = (diagnosis or "").split(NAME_SEPARATOR)
        names = [name for name in self.diagnosis.split(NAME_SEPARATOR) if name in other] if self.diagnosis else other
        return replace(self, numbers={**self.numbers, "diagnosis": NAME_SEPARATOR.join(names)}) if any(names) else self

    @property
    def title(self) -> str:
        """The finding in a line."""
        asked = f" with {', '.join(self.asked)}" if self.asked else ""
        shapes = ", ".join(f"{name} {format_shape(shape)}" for name, shape in self.shapes.items())
        return f"{self.symptom.verdict} {self.symptom.stage or self.symptom.error}: {self.operation}{asked}, {shapes}"


def case_title(symptom: Symptom, problem: Problem, implementation: str) -> str:
    """Return the name of a case: a sentence."""
    asked = ", ".join(sorted(required_features(problem)))
    what = f"{operation_and_score(problem)}{f' with {asked}' if asked else ''}"
    where = f" at {symptom.stage}" if symptom.stage else f" ({symptom.error})" if symptom.error else ""
    return f"{implementation} was {symptom.verdict}{where}: {what} in {problem.dtype}"[:200]


def case_file_name(symptom: Symptom, problem: Problem, identity: str) -> str:
    """Return the name of a file: features of the problem, its symptom, and a hash."""
    asked = sorted(required_features(problem))[:4]
    mark = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return f"{slug(' '.join([operation_and_score(problem), *asked, str(symptom)]))[:80].strip('-')}-{mark}.yaml"


@dataclass
class SearchFolder:
    """The state of searches of one implementation: findings, drawn features, and the next number of each seed."""

    path: Path
    implementation: str
    next_numbers: dict[str, int] = field(default_factory=dict)
    problem_count: int = 0
    feature_counts: FeatureCounts = field(default_factory=FeatureCounts)
    findings: list[SearchFinding] = field(default_factory=list)
    source_location: str = ""
    """The file or module of a user's implementation, since two may have one name."""

    @classmethod
    def open(cls, path: Path, implementation: str, source_location: str = "") -> SearchFolder:
        """Open a folder, with the state of earlier searches of the implementation. Raises ``UsageError``."""
        state = path / SEARCH_STATE
        if not state.exists():
            return cls(path, implementation, source_location=source_location)
        try:
            record = json.loads(state.read_text(encoding="utf-8"))
            seen = TypeAdapter(FeatureCounts).validate_python(record["seen"])
            findings = TypeAdapter(list[SearchFinding]).validate_python(record["findings"])
            before = record.get("place", "")
            folder = cls(
                path,
                record["implementation"],
                record["next"],
                record["asked"],
                seen,
                findings,
                before or source_location,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{state}: cannot be read ({error}); name another --output, or remove it") from None
        if (folder.implementation, folder.source_location) != (
            implementation,
            source_location or folder.source_location,
        ):
            of = folder.source_location or folder.implementation
            raise UsageError(f"{path} holds a search of {of}; name another --output, or remove it")
        return folder

    def write(self) -> None:
        """Write the state; it replaces the old file when it is complete. Raises ``OutputError``."""
        record: dict[str, Any] = {
            "format": _FORMAT_VERSION,
            "implementation": self.implementation,
            "place": self.source_location,
            "next": self.next_numbers,
            "asked": self.problem_count,
            "findings": [asdict(finding) for finding in self.findings],
            "seen": self.feature_counts.as_record(),
        }
        path = self.path / SEARCH_STATE
        partial = path.with_suffix(".partial")
        with OutputError.convert_os_errors(path):
            self.path.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
            partial.replace(path)


MAX_ELEMENTS_IN_YAML = 2048
"""Largest number of elements of all inputs in a case file; more are written to an .npz file next to it.

A choice: a user reads a few hundred numbers at most; a longer file is only slower to load.
"""


def write_case(problem: Problem, path: Path, name: str, found_by: str) -> Case:
    """Write a problem as a file with one case, and return the case as it is read back.

    Raises ``OutputError`` if it cannot be written.
    """
    with OutputError.convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if count_elements(problem) <= MAX_ELEMENTS_IN_YAML:
            inputs = {input_name: _input_yaml(problem, input_name) for input_name in problem.inputs}
        else:
            content, checksum = pack_npz(problem.inputs)
            arrays = path.with_suffix(".npz")
            arrays.write_bytes(content)
            inputs = {key: {"file": arrays.name, "name": key, "sha256": checksum} for key in problem.inputs}
        path.write_text(format_case_file(case_file_content(problem, inputs, name, found_by)), encoding="utf-8")
    return read_written_case(path)


def read_written_case(path: Path) -> Case:
    """Read a written case back. Its id does not contain the folder, so that two searches can be compared.

    Raises ``CaseError`` if it is gone or cannot be read.
    """
    [case] = load_case_file(path, path.name, path.stem, ())
    return replace(case, path=str(path))


def read_written_problem(path: Path) -> Problem:
    """Read back the problem of a written case; raises the errors of ``read_written_case``."""
    case = read_written_case(path)
    return concrete_problem(case, case.dtypes[0])


def has_same_numbers(case: Case, problem: Problem, folder: Path) -> bool:
    """Return whether a written case passes exactly the numbers of a problem to an implementation."""
    drawn = case_of_problem(problem, folder, "search/again")
    first, second = (make_inputs(source, problem.dtype).arrays for source in (case, drawn))
    return first.keys() == second.keys() and all(_is_bitwise_equal(first[name], second[name]) for name in first)


def _is_bitwise_equal(first: Array, second: Array) -> bool:
    """Return whether two arrays are equal bit by bit, except for the bits of NaN."""
    alike = first.dtype == second.dtype and first.shape == second.shape
    first_wide, second_wide = (array.astype(np.float64) for array in (first, second))
    is_equal = (first_wide == second_wide) & (np.signbit(first_wide) == np.signbit(second_wide))
    return alike and bool((is_equal | (np.isnan(first_wide) & np.isnan(second_wide))).all())


def _input_yaml(problem: Problem, name: str) -> dict[str, Any]:
    array, spec = problem.inputs[name], problem.input_specs[name]
    first = array.ravel()[:1]
    if not array.size or (
        array.size > 4 and not spec.is_count and array.tobytes() == np.full_like(array, first).tobytes()
    ):
        constant = _shortest_number(problem, name, float(first[0])) if array.size else 0
        return {"constant": constant, "shape": list(array.shape)}
    return {"values": _nested_lists(problem, name, array)}


def _nested_lists(problem: Problem, name: str, array: Array) -> Any:
    if array.ndim:
        return [_nested_lists(problem, name, part) for part in array]
    return array.item() if array.dtype.kind in "biu" else _shortest_number(problem, name, float(array))


def _shortest_number(problem: Problem, name: str, value: float) -> float | int:
    """Return the number with the fewest digits that rounds to this one in its dtype."""
    spec = problem.input_specs[name]
    if not math.isfinite(value) or spec.is_boolean or spec.is_count or spec.is_narrow:
        return _integer_if_whole(value)
    dtype = statistics_dtype(problem.dtype) if spec.is_row_statistic else problem.dtype
    for digits in range(1, 17):
        short = float(f"{value:.{digits}g}")
        if abs(short) <= largest_number(dtype) and float(round_to(np.array(short), dtype)) == value:
            value = short
            break
    return _integer_if_whole(value)


def _integer_if_whole(value: float) -> float | int:
    """Return a whole number as an integer, which is written without a point; -0.0 stays a float."""
    is_whole = math.isfinite(value) and value == int(value) and abs(value) < 1e6
    return int(value) if is_whole and (value or math.copysign(1, value) > 0) else value
