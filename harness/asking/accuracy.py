"""Measurement of the class of accuracy that an implementation has.

Every case runs once, and is judged by each class of its dtype, with the presets. The measurement does not change the
declaration: a declared class says how much accuracy may be lost, and a looser one finds fewer faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attncheck.asking.answer import known_conventions_of_empty_rows
from attncheck.asking.engine import Engine
from attncheck.asking.question import Question
from attncheck.common.store import NO_STORE, Store
from attncheck.common.wording import count_noun
from attncheck.diagnosis.declared import truth_for_implementation
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.execution.worker import Computed
from attncheck.judging.judge_implementation import judge_implementation, mark_faulty_stages
from attncheck.judging.judge_stages import StageJudgement
from attncheck.reading.case import Case
from attncheck.spec import CONVENTIONS, ROUNDING_MODELS
from attncheck.spec.classes import ROUNDING_PRESETS
from attncheck.spec.verdicts import Verdict

_MAX_INPUT_ELEMENTS = 1 << 14
"""Largest inputs of a small case. A choice: every case is judged by every class of a dtype, so larger cases make a
measurement take minutes; smaller ones leave out cases with long sums."""


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
        wrong = count_noun(len(self.wrong_anyhow), "case")
        exception = f", but in {wrong} that no class permits" if self.wrong_anyhow else ""
        return f"{self.dtype}: {self.tightest or 'no class'} holds{exception}"

    @property
    def tightest(self) -> str:
        """The tightest class that holds; empty if none does."""
        return next((use.name for use in self.classes if not use.wrong), "")


def class_names(dtype: str) -> list[str]:
    """Return the names of the rounding models of a dtype, and then those of presets."""
    with_parts = [name for name, dtypes in ROUNDING_MODELS.items() if dtype in dtypes]
    return with_parts + [name for name, preset in ROUNDING_PRESETS.items() if preset.parts.split()[0] in with_parts]


def small_cases(cases: Sequence[Case]) -> list[Case]:
    """Return the cases that run and are judged quickly, and that set no convention."""
    sizes = {case.id: sum(map(math.prod, case.input_shapes.values())) for case in cases}
    return [case for case in cases if sizes[case.id] <= _MAX_INPUT_ELEMENTS and not CONVENTIONS & case.options.keys()]


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
    names = list(dict.fromkeys([declared, *class_names(dtype)]))
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
            truth = truth_for_implementation(implementation, case, question.inputs, outcome.stages, store)
            known = known_conventions_of_empty_rows(implementation, outcome, expected, question)
            by_class: dict[str, list[StageJudgement]] = {}
            for name in names:
                judged = judge_implementation(truth, outcome.stages, case.stage_shapes, name, known)
                judged = mark_faulty_stages(judged, outcome.faults)
                by_class[name] = [stage for stage in judged.judgements if stage.verdict is not Verdict.SEMANTIC]
            yield case, by_class


def format_accuracy(accuracy: MeasuredAccuracy) -> Iterator[str]:
    """Yield the result for people: a line for each class, and the line that would declare the tightest."""
    of = f"{accuracy.computed:,} of {count_noun(accuracy.asked, 'case')}"
    yield f"{accuracy.implementation} in {accuracy.dtype}, {of} computed. Used: largest error / what the class permits."
    if accuracy.wrong_anyhow:
        number = count_noun(len(accuracy.wrong_anyhow), "case")
        yield f"  {number} wrong by every class, and left out: the first {accuracy.wrong_anyhow[0]}"
    if not accuracy.is_measured:
        return
    width = max(len(use.name) for use in accuracy.classes)
    for use in accuracy.classes:
        verdict = f"wrong in {len(use.wrong):,}, the first {use.wrong[0]}" if use.wrong else "holds"
        declared = " (declared)" if use.name == accuracy.declared else ""
        yield f"  {use.name:{width}}  used {use.used:8.3g}  {verdict}{declared}"
    if accuracy.tightest not in ("", accuracy.declared):
        parts = f" ({ROUNDING_PRESETS[accuracy.tightest].parts})" if accuracy.tightest in ROUNDING_PRESETS else ""
        yield f"The tightest class that holds is {accuracy.tightest}{parts}. If the kernel means to be right to that:"
        yield f'  attention.classes = {{"{accuracy.dtype}": "{accuracy.tightest}"}}'
