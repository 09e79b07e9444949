"""Measurement of declarations of an implementation: the class of its accuracy, and the shapes that it requires.

Every case runs once, and is judged by each class of its dtype, with the presets. The measurement does not change the
declaration: a declared class says how much accuracy may be lost, and a looser one finds fewer faults.

A function that refuses most shapes agrees in few cases. The requirements of such a function are found by calls: the
cases that it refuses are padded to the strictest shapes, and then each requirement is halved, and dropped, as long as
all cases still run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from attncheck.asking.answer import known_conventions
from attncheck.asking.engine import Engine, Workers
from attncheck.asking.question import Question
from attncheck.common.store import NO_STORE, Store
from attncheck.common.wording import counted
from attncheck.diagnosis.declared import truth_for
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.padding import padded_call
from attncheck.execution.runner import GroupRunner
from attncheck.execution.user_code import declaration
from attncheck.execution.worker import Computed, Failure
from attncheck.judging.judge_implementation import judge_implementation, with_faults
from attncheck.judging.judge_stages import StageJudgement
from attncheck.reading.case import Case
from attncheck.reading.problem import Problem
from attncheck.spec import CONVENTIONS, ROUNDING_MODELS
from attncheck.spec.classes import PRESETS
from attncheck.spec.verdicts import Verdict

_MAX_ELEMENTS = 1 << 14
"""Largest inputs of a small case."""


@dataclass(frozen=True)
class ClassUse:
    """A rounding model compared with the results of an implementation.

    Attributes:
        name: The class.
        wrong: The ids of the cases that are wrong by it.
        used: The largest error over its bound by the class: at 1, the class is used up.
    """

    name: str
    wrong: Sequence[str]
    used: float


@dataclass(frozen=True)
class MeasuredAccuracy:
    """The measured classes of an implementation in a dtype: first those that hold, the tightest first.

    ``wrong_anyhow`` are the cases that are wrong by every class, and count for none: accuracy is not their cause.
    """

    implementation: str
    dtype: str
    declared: str
    computed: int
    asked: int
    wrong_anyhow: Sequence[str]
    classes: Sequence[ClassUse]

    @property
    def is_measured(self) -> bool:
        """True if some case is right by some class."""
        return self.computed > len(self.wrong_anyhow)

    @property
    def holds_declared(self) -> bool:
        """True if all computed cases are right by the declared class."""
        return not self.wrong_anyhow and not any(use.wrong for use in self.classes if use.name == self.declared)

    @property
    def answer(self) -> str:
        """The result in a line."""
        if not self.is_measured:
            return f"{self.dtype}: none measured"
        wrong = counted(len(self.wrong_anyhow), "case")
        exception = f", but in {wrong} that no class permits" if self.wrong_anyhow else ""
        return f"{self.dtype}: {self.tightest or 'no class'} holds{exception}"

    @property
    def tightest(self) -> str:
        """The tightest class that holds; empty if none does."""
        return next((use.name for use in self.classes if not use.wrong), "")


def classes_of(dtype: str) -> list[str]:
    """Return the names of the rounding models of a dtype, and then those of presets."""
    with_parts = [name for name, dtypes in ROUNDING_MODELS.items() if dtype in dtypes]
    return with_parts + [name for name, preset in PRESETS.items() if preset.parts.split()[0] in with_parts]


def small_cases(cases: Sequence[Case]) -> list[Case]:
    """Return the cases that run and are judged quickly, and that set no convention."""
    sizes = {case.id: sum(map(math.prod, case.input_shapes.values())) for case in cases}
    return [case for case in cases if sizes[case.id] <= _MAX_ELEMENTS and not CONVENTIONS & case.options.keys()]


def measure_accuracy(
    implementation: Implementation, cases: Sequence[Case], dtype: str, limits: Limits, store: Store = NO_STORE
) -> MeasuredAccuracy:
    """Run the cases that have the dtype, and judge the results by each of its classes.

    Exact answers come from the ``store``. Calls are made as in a check, with the state probe, so
    that a result that fails a check in any class fails here.

    Raises ``ValueError`` for a dtype that the implementation does not declare.
    """
    declared = implementation.rounding_model(dtype)
    if declared is None:
        raise ValueError(f"{implementation.name} declares no {dtype}")
    chosen = [case for case in cases if dtype in case.dtypes]
    names = list(dict.fromkeys([declared, *classes_of(dtype)]))
    wrong: Mapping[str, list[str]] = {name: [] for name in names}
    used, computed, wrong_anyhow = dict.fromkeys(names, 0.0), 0, []
    for case, by_class in _judge_by_class(implementation, chosen, dtype, limits, names, store):
        computed += 1
        failing = [name for name, judged in by_class.items() if any(stage.verdict.exit_code for stage in judged)]
        if len(failing) == len(names):
            wrong_anyhow.append(case.id)
            continue
        for name in failing:
            wrong[name].append(case.id)
        for name, judged in by_class.items():
            errors = [error for stage in judged for error in (stage.accumulated, stage.introduced)]
            used[name] = max([used[name], *(error.ratio for error in errors if error is not None)])
    uses = [ClassUse(name, wrong[name], used[name]) for name in names]
    uses.sort(key=lambda use: (len(use.wrong), -use.used if not use.wrong else use.used))
    return MeasuredAccuracy(implementation.name, dtype, declared, computed, len(chosen), wrong_anyhow, uses)


def _judge_by_class(
    implementation: Implementation,
    cases: Sequence[Case],
    dtype: str,
    limits: Limits,
    names: Sequence[str],
    store: Store,
) -> Iterator[tuple[Case, Mapping[str, Sequence[StageJudgement]]]]:
    """Yield the computed cases, with their judged stages by class.

    Stages that are right only by another convention are left out: their errors are relative to that of the case.
    """
    with Engine(limits, store) as engine:
        expected = engine.expected_failures_of(implementation)
        for case in cases:
            question = Question(case, dtype)
            outcome = engine.compute(implementation, question)
            if not isinstance(outcome, Computed):
                continue
            truth = truth_for(implementation, case, question.inputs, outcome.stages, store)
            known = known_conventions(implementation, outcome, expected, question)
            by_class: dict[str, list[StageJudgement]] = {}
            for name in names:
                judged = judge_implementation(truth, outcome.stages, case.stage_shapes, name, known)
                judged = with_faults(judged, outcome.faults)
                by_class[name] = [stage for stage in judged.judgements if stage.verdict is not Verdict.SEMANTIC]
            yield case, by_class


def lines_of(accuracy: MeasuredAccuracy) -> Iterator[str]:
    """Yield the result for people: a line for each class, and the line that would declare the tightest."""
    of = f"{accuracy.computed:,} of {counted(accuracy.asked, 'case')}"
    yield f"{accuracy.implementation} in {accuracy.dtype}, {of} computed. Used: largest error / what the class permits."
    if accuracy.wrong_anyhow:
        number = counted(len(accuracy.wrong_anyhow), "case")
        yield f"  {number} wrong by every class, and left out: the first {accuracy.wrong_anyhow[0]}"
    if not accuracy.is_measured:
        return
    width = max(len(use.name) for use in accuracy.classes)
    for use in accuracy.classes:
        verdict = f"wrong in {len(use.wrong):,}, the first {use.wrong[0]}" if use.wrong else "holds"
        declared = " (declared)" if use.name == accuracy.declared else ""
        yield f"  {use.name:{width}}  used {use.used:8.3g}  {verdict}{declared}"
    if accuracy.tightest not in ("", accuracy.declared):
        parts = f" ({PRESETS[accuracy.tightest].parts})" if accuracy.tightest in PRESETS else ""
        yield f"The tightest class that holds is {accuracy.tightest}{parts}. If the kernel means to be right to that:"
        yield f'  attention.classes = {{"{accuracy.dtype}": "{accuracy.tightest}"}}'


Requirements = Mapping[str, int | str]
_STRICTEST: Requirements = {
    "lengths": "equal",
    "value_width": "equal",
    "width_multiple": 64,
    "query_length_multiple": 64,
    "key_length_multiple": 64,
}
_STARTS: tuple[Requirements, ...] = (
    _STRICTEST,
    {"lengths": "equal", "value_width": "equal"},
    {"lengths": "equal"},
    {"value_width": "equal"},
)
"""The first requirements to try: not every function has the scale that a larger width needs, or a mask."""
_LEAST_MULTIPLE = 8
_MOST_TRIED, _MOST_COUNTED = 60, 600
"""Cases on which requirements are tried, and cases on which the remaining ones are then counted."""
_MOST_ELEMENTS = 1 << 16
_MOST_SECONDS = 60.0
"""If the trials of a function take longer, they end without a result."""


@dataclass(frozen=True)
class Widening:
    """Requirements that a function may declare, and the number of tried cases that it then computes."""

    requires: Requirements
    computed: int
    tried: int

    def words(self, item: Implementation) -> str:
        """Return the advice, with the line or option to paste."""
        line = declaration(item.entry.module, item.mode, "requires", dict(self.requires))
        return (
            f"of {self.tried:,} cases that it refuses or fails in, it computes {self.computed:,} padded: "
            f"{f'give {line}' if line.startswith('-') else f'declare {line} below it'} (docs/how-to/kernel.md)"
        )


def find_widening(implementation: Implementation, refused: Sequence[Case], limits: Limits) -> Widening | None:
    """Return the loosest requirements by which a user's function computes cases that it refuses without padding.

    None if no padding helps, if the function declares requirements, or if the trials take too long. The number of tried
    cases is limited, not their time, so that the result is the same on every machine.
    """
    entry = implementation.entry
    if not isinstance(entry, UserImplementation) or any(entry.requirements.values()):
        return None
    small = [case for case in refused if sum(map(math.prod, case.input_shapes.values())) <= _MOST_ELEMENTS]
    dtype = next(iter(implementation.declared.classes))
    small = [case for case in small if dtype in case.dtypes]
    with closing(Workers(limits, probes_state=False)) as workers, suppress(_TooSlowError):
        trial = _Trial(implementation, entry, dtype, workers.worker_for(implementation, dtype))
        if (requires := _loosest_requirements(trial, _evenly_spaced(small, _MOST_TRIED))) is not None:
            tried = [trial.computes(case, requires) for case in _evenly_spaced(small, _MOST_COUNTED)]
            return Widening(requires, sum(tried), len(tried))
    return None


def _evenly_spaced(cases: Sequence[Case], most: int) -> Sequence[Case]:
    """Return at most so many cases, evenly spaced."""
    return cases[:: max(1, math.ceil(len(cases) / most))]


def _loosest_requirements(trial: _Trial, sample: Sequence[Case]) -> Requirements | None:
    """Start with the requirements by which most cases run; halve and drop them as long as all of these run."""
    by_start = [[case for case in sample if trial.computes(case, start)] for start in _STARTS]
    computed, requires = max(zip(by_start, _STARTS, strict=True), key=lambda pair: len(pair[0]))
    if not computed:
        return None

    def is_enough(looser: Requirements) -> bool:
        return all(trial.computes(case, looser) for case in computed)

    start = requires
    for name, value in start.items():
        while isinstance(value, int) and value > _LEAST_MULTIPLE:
            value //= 2
            if not is_enough({**requires, name: value}):
                break
            requires = {**requires, name: value}
    for name in start:
        without = {key: value for key, value in requires.items() if key != name}
        requires = without if is_enough(without) else requires
    return requires


class _TooSlowError(Exception):
    """The trials take too long."""


class _Trial:
    """A worker in which a function is called as if it had declared other requirements."""

    def __init__(
        self, implementation: Implementation, entry: UserImplementation, dtype: str, runner: GroupRunner[Any]
    ) -> None:
        self._implementation, self._entry, self._dtype, self._runner = implementation, entry, dtype, runner
        self._problems: dict[str, Problem] = {}
        self._computed: dict[tuple[str, str], bool] = {}
        self._until = monotonic() + _MOST_SECONDS

    def computes(self, case: Case, requires: Requirements) -> bool:
        """Return whether the function computes a case that is padded to these requirements.

        Raises ``_TooSlowError`` if the trials take too long.
        """
        if monotonic() > self._until:
            raise _TooSlowError
        if case.id not in self._problems:
            self._problems[case.id] = Question(case, self._dtype).problem
        problem, description = self._problems[case.id], ""
        if requires:
            requirements = {parameter: dict(requires) for parameter in self._entry.parameters}
            entry = replace(self._entry, requirements=requirements)
            padding = padded_call(replace(self._implementation, entry=entry), problem)
            if isinstance(padding, Failure):
                return False
            problem, description = (padding.problem, padding.description) if padding else (problem, description)
        key = case.id, description  # the description contains the growth of every length
        if key not in self._computed:
            self._computed[key] = isinstance(self._runner.evaluate(problem), Computed)
        return self._computed[key]
