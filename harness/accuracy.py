"""The accuracy of an implementation: which rounding models hold for what it computes, and how much of each it uses.

Every case is computed once, and held to each class that its dtype has, the presets among them. What holds is measured;
nothing is chosen by it. A class that is declared says what may be given up, and a looser one finds less.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from attncheck.config import expected_failures_of
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import Group, GroupRunner, task_of
from attncheck.execution.worker import Computed
from attncheck.judging.judge_implementation import JudgedStages, judge_and_diagnose
from attncheck.judging.truth import truth_of_case
from attncheck.judging.units import own_empty_rows
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.spec import CONVENTIONS, ROUNDING_MODELS
from attncheck.spec.rounding import PRESETS
from attncheck.wording import counted

_MAX_ELEMENTS = 1 << 14
"""Of the inputs of a case that is small."""


@dataclass(frozen=True)
class ClassUse:
    """A rounding model, held against what an implementation computed.

    Attributes:
        name: The class.
        wrong: The ids of the cases that are wrong by it.
        used: The largest error over what the class permits there: 1 is all of it.
    """

    name: str
    wrong: Sequence[str]
    used: float


@dataclass(frozen=True)
class MeasuredAccuracy:
    """An implementation in a dtype, with every class of it: those that hold first, the tightest of them in front.

    ``wrong_anyhow`` are the cases that no class permits, which no accuracy explains; they count for none.
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
        """True if any case was computed that some class permits."""
        return self.computed > len(self.wrong_anyhow)

    @property
    def holds_declared(self) -> bool:
        """True if the class that is declared holds in every case that was computed."""
        return not self.wrong_anyhow and not any(each.wrong for each in self.classes if each.name == self.declared)

    @property
    def answer(self) -> str:
        """It in a line."""
        beside = (
            f", but in {counted(len(self.wrong_anyhow), 'case')} that no class permits" if self.wrong_anyhow else ""
        )
        return (
            f"{self.dtype}: {self.tightest or 'no class'} holds{beside}"
            if self.is_measured
            else f"{self.dtype}: none measured"
        )

    @property
    def tightest(self) -> str:
        """The tightest class that holds; empty where none does."""
        return next((each.name for each in self.classes if not each.wrong), "")


def classes_of(dtype: str) -> list[str]:
    """Return the rounding models of a dtype by name, those with names of their own first."""
    own = [name for name, dtypes in ROUNDING_MODELS.items() if dtype in dtypes]
    return own + [name for name, preset in PRESETS.items() if preset.parts.split()[0] in own]


def small_cases(cases: Sequence[Case]) -> list[Case]:
    """Return the cases that are quickly computed and judged, and that ask for no convention of their own."""
    sizes = {case.id: sum(map(math.prod, case.input_shapes.values())) for case in cases}
    return [case for case in cases if sizes[case.id] <= _MAX_ELEMENTS and not CONVENTIONS & case.options.keys()]


def measure_accuracy(
    implementation: Implementation, cases: Sequence[Case], dtype: str, limits: Limits
) -> MeasuredAccuracy:
    """Compute the cases that have the dtype, and hold the results to each of its classes.

    Raises ``ValueError`` for a dtype that the implementation does not declare.
    """
    declared = implementation.rounding_model(dtype)
    if declared is None:
        raise ValueError(f"{implementation.name} declares no {dtype}")
    chosen = [case for case in cases if dtype in case.dtypes]
    names = list(dict.fromkeys([declared, *classes_of(dtype)]))
    wrong: Mapping[str, list[str]] = {name: [] for name in names}
    used, computed, wrong_anyhow = dict.fromkeys(names, 0.0), 0, []
    for case, found in _judged(implementation, chosen, dtype, limits, names):
        computed += 1
        failing = [name for name, judged in found.items() if any(each.verdict.exit_code for each in judged.judgements)]
        if len(failing) == len(names):
            wrong_anyhow.append(case.id)
            continue
        for name in failing:
            wrong[name].append(case.id)
        for name, judged in found.items():
            used[name] = max([used[name], *_uses(judged)])
    uses = [ClassUse(name, wrong[name], used[name]) for name in names]
    uses.sort(key=lambda use: (len(use.wrong), -use.used if not use.wrong else use.used))
    return MeasuredAccuracy(implementation.name, dtype, declared, computed, len(chosen), wrong_anyhow, uses)


def _judged(
    implementation: Implementation, cases: Sequence[Case], dtype: str, limits: Limits, names: Sequence[str]
) -> Iterator[tuple[Case, Mapping[str, JudgedStages]]]:
    expected = expected_failures_of([implementation.entry.name])
    with tempfile.TemporaryDirectory() as folder:
        group = Group(implementation, (dtype,))
        with closing(GroupRunner[str](group, limits, Path(folder))) as runner:
            for case in cases:
                inputs = convert_inputs(case, make_exact_inputs(case), dtype)
                outcome = runner.evaluate(task_of(case, inputs))
                if not isinstance(outcome, Computed):
                    continue
                truth = truth_of_case(case, dtype, inputs, outcome.stages)
                own = own_empty_rows(implementation, expected, case.id, dtype)
                yield (
                    case,
                    {
                        name: judge_and_diagnose(truth, outcome.stages, case.stage_shapes, name, own, diagnoses=False)
                        for name in names
                    },
                )


def _uses(judged: JudgedStages) -> Iterator[float]:
    for each in judged.judgements:
        for measured in (each.accumulated, each.introduced):
            if measured is not None:
                yield measured.ratio


def lines_of(accuracy: MeasuredAccuracy) -> Iterator[str]:
    """Yield what was measured, for people: a line for each class, and the line that would declare the tightest."""
    of = f"{accuracy.computed:,} of {counted(accuracy.asked, 'case')}"
    yield f"{accuracy.implementation} in {accuracy.dtype}, {of} computed. Used: largest error / what the class permits."
    if accuracy.wrong_anyhow:
        number = counted(len(accuracy.wrong_anyhow), "case")
        yield f"  {number} wrong by every class, and left out: the first {accuracy.wrong_anyhow[0]}"
    if not accuracy.is_measured:
        return
    width = max(len(each.name) for each in accuracy.classes)
    for each in accuracy.classes:
        verdict = f"wrong in {len(each.wrong):,}, the first {each.wrong[0]}" if each.wrong else "holds"
        declared = " (declared)" if each.name == accuracy.declared else ""
        yield f"  {each.name:{width}}  used {each.used:8.3g}  {verdict}{declared}"
    if accuracy.tightest not in ("", accuracy.declared):
        parts = f" ({PRESETS[accuracy.tightest].parts})" if accuracy.tightest in PRESETS else ""
        yield f"The tightest class that holds is {accuracy.tightest}{parts}. If the kernel means to be right to that:"
        yield f'  attention.classes = {{"{accuracy.dtype}": "{accuracy.tightest}"}}'
