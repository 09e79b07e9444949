"""A run: cases are planned, computed in workers side by side, judged as soon as they are complete, and written."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from attncheck.harness.errors import ExitCode, Fault, UsageError
from attncheck.harness.judging.judge import judge, worst_bounds
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import Exact, Inputs, convert_inputs, make_exact_inputs
from attncheck.harness.reading.record import case_record
from attncheck.harness.results.writer import ResultsWriter, Row, StoredArray, bound_name
from attncheck.harness.running.environment import describe_environment
from attncheck.harness.running.executor import Group, GroupRunner, Limits, group_by_process
from attncheck.harness.running.implementations import Chosen, Implementation
from attncheck.harness.running.worker import Computed, Outcome, Task
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import DTYPES


@dataclass(frozen=True)
class Unit:
    """One case in one dtype: what is judged at once."""

    case: Case
    dtype: str


@dataclass(frozen=True)
class Settings:
    """How to run: where to write, what to call this environment, what to keep, how long to wait."""

    output: Path
    label: str = "local"
    dtypes: tuple[str, ...] = ()
    keep_all_arrays: bool = False
    limits: Limits = field(default_factory=Limits)
    command: Sequence[str] = ()


@dataclass(frozen=True)
class RunSummary:
    """What a run came to."""

    exit_code: ExitCode
    cases: int
    evaluations: int
    verdicts: Mapping[str, int]
    failures: tuple[Row, ...]


@dataclass
class _Progress:
    """What the run has come to so far."""

    rows_seen: Counter[str] = field(default_factory=Counter)
    failures: list[Row] = field(default_factory=list)
    evaluations: int = 0


def run_cases(
    cases: Sequence[Case],
    chosen: Chosen,
    settings: Settings,
    faults: Sequence[Fault] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RunSummary:
    """Run every case in every dtype on every implementation and write the results directory.

    What is judged is on disk even if the run is interrupted. ``on_progress`` hears evaluations done and planned.
    Raises ``OutputError`` where the directory cannot be written.
    """
    units = plan_units(cases, settings.dtypes)
    writer = ResultsWriter(settings.output)
    groups = [
        group
        for implementation in chosen.implementations
        for group in group_by_process(implementation, sorted({unit.dtype for unit in units}))
    ]
    environment = _environment(chosen, settings, faults)
    writer.write_json("environment.json", environment)
    writer.write_json("cases.json", {"cases": [case_record(case) for case in cases]})
    runners: list[GroupRunner[Unit]] = [
        GroupRunner(group, settings.limits, settings.output / "logs") for group in groups
    ]
    progress = _Progress()
    try:
        _compute_and_judge(units, runners, writer, settings, progress, on_progress)
    finally:
        writer.flush()
        environment["backends"] = _descriptions(runners)
        writer.write_json("environment.json", environment)
    summary = _summarise(cases, chosen, faults, progress)
    writer.write_json("summary.json", _summary_record(summary, chosen, faults))
    return summary


def plan_units(cases: Sequence[Case], dtypes: Sequence[str]) -> list[Unit]:
    """Return every case in every dtype that it declares, and that is asked for. Raises ``UsageError`` for none."""
    units = [Unit(case, dtype) for case in cases for dtype in case.dtypes if not dtypes or dtype in dtypes]
    if cases and not units:
        raise UsageError(f"no case is declared for {', '.join(dtypes)}")
    return units


def _compute_and_judge(
    units: Sequence[Unit],
    runners: Sequence[GroupRunner[Unit]],
    writer: ResultsWriter,
    settings: Settings,
    progress: _Progress,
    on_progress: Callable[[int, int], None],
) -> None:
    """Let every runner work through its units; judge each unit when its last implementation has answered."""
    planned = [(runner, [unit for unit in units if unit.dtype in runner.group.dtypes]) for runner in runners]
    total = sum(len(own) for _, own in planned)
    answers: SimpleQueue[tuple[Unit, Group, Outcome] | BaseException] = SimpleQueue()
    inputs = _InputCache()
    implementations = {runner.group.implementation.name: runner.group.implementation for runner in runners}

    def drive(runner: GroupRunner[Unit], own: Sequence[Unit]) -> None:
        try:
            runner.run(own, inputs.task, lambda unit, outcome: answers.put((unit, runner.group, outcome)))
        except BaseException as error:  # must reach the main thread, or it would wait for ever
            answers.put(error)

    waiting = Counter(id(unit) for _, own in planned for unit in own)
    outcomes: dict[int, dict[str, Outcome]] = {}
    with ThreadPoolExecutor(max_workers=max(1, len(runners))) as threads:
        try:
            for runner, own in planned:
                threads.submit(drive, runner, own)
            on_progress(0, total)
            while progress.evaluations < total:
                answer = answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                unit, group, outcome = answer
                progress.evaluations += 1
                outcomes.setdefault(id(unit), {})[group.implementation.name] = outcome
                waiting[id(unit)] -= 1
                if not waiting[id(unit)]:
                    collected = outcomes.pop(id(unit))
                    answered = [(item, collected[name]) for name, item in implementations.items() if name in collected]
                    _judge_unit(unit, inputs.of(unit), answered, writer, settings, progress)
                on_progress(progress.evaluations, total)
        finally:
            for runner in runners:
                runner.stop()


class _InputCache:
    """Inputs of the cases that are being worked on, made once for all workers."""

    def __init__(self) -> None:
        self._exact: Callable[[int], dict[str, Exact]]
        self._cases: dict[int, Case] = {}
        self._exact = lru_cache(maxsize=64)(lambda key: make_exact_inputs(self._cases[key]))

    def of(self, unit: Unit) -> Inputs:
        """Return the inputs of a unit in its dtype."""
        self._cases[id(unit.case)] = unit.case
        return convert_inputs(unit.case, self._exact(id(unit.case)), unit.dtype)

    def task(self, unit: Unit) -> Task:
        """Return what a worker has to evaluate for a unit."""
        return Task(unit.case.operation, unit.case.options, self.of(unit).arrays)


def _judge_unit(
    unit: Unit,
    inputs: Inputs,
    answered: Sequence[tuple[Implementation, Outcome]],
    writer: ResultsWriter,
    settings: Settings,
    progress: _Progress,
) -> None:
    outcomes = {item.name: outcome for item, outcome in answered}
    classes = {item.name: item.numerical_class(unit.dtype) for item, _ in answered}
    judged = judge(unit.case, unit.dtype, inputs, outcomes, classes)
    writer.add_rows(judged.rows)
    for row in judged.rows:
        progress.rows_seen[row.verdict] += 1
        if not row.known and Verdict(row.verdict).exit_code is not ExitCode.AGREE:
            progress.failures.append(row)
    if judged.disagrees or settings.keep_all_arrays:
        kept = {name: outcome.stages for name, outcome in outcomes.items() if isinstance(outcome, Computed)}
        kept |= {bound_name(name): worst_bounds(judged.truth, name) for name in sorted(set(classes.values()))}
        writer.add_arrays(
            StoredArray(unit.case.id, unit.dtype, name, stage, array)
            for name, stages in kept.items()
            for stage, array in stages.items()
        )


def _environment(chosen: Chosen, settings: Settings, faults: Sequence[Fault]) -> dict[str, Any]:
    entries = [implementation.entry for implementation in chosen.implementations]
    return {
        "label": settings.label,
        "command": shlex.join(settings.command),
        **describe_environment(entries, settings.limits.threads),
        "implementations": {item.name: item.entry.packages[0] for item in chosen.implementations},
        "classes": {
            item.name: {dtype: item.numerical_class(dtype) for dtype in DTYPES} for item in chosen.implementations
        },
        "left_out": dict.fromkeys(chosen.left_out, "not installed"),
        "missing": dict.fromkeys(chosen.missing, "asked for by name, not installed"),
        "faults": [str(fault) for fault in faults],
    }


def _descriptions(runners: Sequence[GroupRunner[Unit]]) -> dict[str, Mapping[str, str]]:
    return {runner.group.name: runner.description for runner in runners}


def _summarise(cases: Sequence[Case], chosen: Chosen, faults: Sequence[Fault], progress: _Progress) -> RunSummary:
    codes = {Verdict(row.verdict).exit_code for row in progress.failures}
    if faults:
        code = ExitCode.BAD_INPUT
    elif ExitCode.DISAGREE in codes:
        code = ExitCode.DISAGREE
    elif ExitCode.NOT_RUN in codes or chosen.missing:
        code = ExitCode.NOT_RUN
    else:
        code = ExitCode.AGREE
    counts = {verdict.value: progress.rows_seen[verdict] for verdict in Verdict if progress.rows_seen[verdict]}
    return RunSummary(code, len(cases), progress.evaluations, counts, tuple(progress.failures))


def _summary_record(summary: RunSummary, chosen: Chosen, faults: Sequence[Fault]) -> dict[str, Any]:
    return {
        "exit_code": int(summary.exit_code),
        "cases": summary.cases,
        "implementations": [item.name for item in chosen.implementations],
        "evaluations": summary.evaluations,
        "verdicts": dict(summary.verdicts),
        "failures": len(summary.failures),
        "faults": len(faults),
    }
