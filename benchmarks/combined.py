"""Faults where an option meets a size or a shape, and right kernels that look odd: what does the corpus say of each?

    python benchmarks/combined.py [PATTERNS]

Each kernel is put to every case that meets its condition, in each dtype, and judged by its results alone. Prints in how
many cases each fault is red, how many are red in any and in two, and in how many cases right kernels are flagged. Ends
with 0 if every fault is red and no right kernel is flagged.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from combinations import Array, Call, Fault, Stages
from combined_faults import FAULTS_OF_ATTENTION
from combined_kernels import FUSED, KERNELS
from combined_operations import FAULTS_OF_OPERATIONS, STATE
from measuring import on_one_thread

from attncheck.execution.operations import apply_memory_layout
from attncheck.execution.state_probe import StateProbe
from attncheck.execution.worker import Computed
from attncheck.judging.judge_stages import judge_stages
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs, convert_inputs, make_exact_inputs, make_problem_of_case
from attncheck.reading.problem import Problem
from attncheck.reading.selection import select_cases
from attncheck.reading.shapes import count_scores
from attncheck.spec import QUERY_KEY_VALUE, result_stages

FAULTS: Mapping[str, Fault] = {**FAULTS_OF_ATTENTION, **FAULTS_OF_OPERATIONS}
"""Each by what it does and the thread that reports it; structure is how kernels are built."""

_MAX_SCORES = 1 << 24
"""Scores of a case beyond which it is left out: these kernels hold them all."""
_OF_BLOCKS = {"stored_as", "query_scale", "key_zero", "value_zero"}
_OF_BLOCKS |= {f"{name}_block_scale" for name in QUERY_KEY_VALUE}
"""What these kernels do not know of codes: they have a scale for each tensor, head or key, and none in pages."""


@dataclass
class Counts:
    """Of each kernel, the cases that meet its condition, those in which it differs, and those in which it is red."""

    met: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    shown: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    red: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


class Fresh:
    """Calls of a kernel with a state, with the changed calls that a run makes around them."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._memory = fault, dict[Any, Any]()
        self._state_probe = StateProbe(self._evaluate, self._in_fresh_process)

    def computed(self, problem: Problem, dtype: str) -> Computed:
        """Evaluate a call with the changed calls around it."""
        self._dtype = dtype
        found = self._state_probe.evaluate_with_changed_calls(problem, lambda: self._evaluate(problem))
        assert isinstance(found, Computed)
        return found

    def _evaluate(self, problem: Problem) -> Computed:
        call = Call(problem, self._dtype, self._memory)
        return Computed(self._fault(call) or call.results(call.right))

    @contextmanager
    def _in_fresh_process(self) -> Iterator[None]:
        kept, self._memory = self._memory, {}
        yield
        self._memory = kept


def units(patterns: Sequence[str]) -> Iterator[tuple[Case, str, RoundedInputs, Call]]:
    """Yield each case in its dtypes, as a kernel is called with it."""
    for case in select_cases(patterns).cases:
        exact = make_exact_inputs(case)
        for dtype in case.dtypes:
            inputs = convert_inputs(case, exact, dtype)
            problem = make_problem_of_case(
                case, replace(inputs, arrays=apply_memory_layout(inputs.arrays, case.memory_layout))
            )
            unknown = _OF_BLOCKS | ({"key_scale", "value_scale"} if case.operation == "paged_attention" else set())
            is_known = unknown.isdisjoint({*case.options, *case.inputs})
            if is_known and count_scores(case.operation, case.options, inputs.arrays) <= _MAX_SCORES:
                yield case, dtype, inputs, Call(problem, dtype)


def count(patterns: Sequence[str]) -> tuple[Counts, Counts]:
    """Put all faults and right kernels to all cases; return what is found of either."""
    faults, kernels = Counts(), Counts()
    fresh = {name: Fresh(fault) for name, fault in STATE.items()}
    for case, dtype, inputs, call in units(patterns):
        results = result_stages(case.operation, case.options, case.inputs)
        if case.judged_stages is not None and not set(results) <= set(case.judged_stages):
            continue
        judge = Judge(case, dtype, inputs, results)
        is_twice = dtype == "float64" and "float32" in case.dtypes
        for name, fault in FAULTS.items():
            if is_twice or fault.operation != case.operation or not fault.where.holds(call):
                continue
            if name in fresh:
                problem = make_problem_of_case(case, inputs).as_call()
                judge.note(faults, name, fresh[name].computed(problem, dtype), call, FUSED)
            else:
                judge.note(faults, name, Computed(fault.wrong(call)), call, FUSED)
        for name, kernel in KERNELS.items():
            stages = kernel(call)
            if stages is not None:
                judge.note(kernels, name, Computed(stages), call, kernel.classes)
    return faults, kernels


@dataclass(frozen=True, eq=False)
class Judge:
    """Judges what kernels return of one case in one dtype."""

    case: Case
    dtype: str
    inputs: RoundedInputs
    results: tuple[str, ...]

    @cached_property
    def truth(self) -> Truth:
        """The exact answer."""
        return truth_of_case(self.case, self.inputs, self.results)

    def note(self, counts: Counts, name: str, computed: Computed, call: Call, classes: Mapping[str, str]) -> None:
        """Take note of what a kernel returned."""
        counts.met[name].add(self.case.id)
        stages = {stage: computed.stages[stage] for stage in self.results}
        right = call.results(call.right)
        if not computed.faults and all(_has_the_bits_of(stages[stage], right[stage]) for stage in self.results):
            return
        counts.shown[name].add(self.case.id)
        if computed.faults or self.is_red(stages, classes[self.dtype]):
            counts.red[name].add(self.case.id)

    def is_red(self, stages: Stages, rounding_model: str) -> bool:
        """Return whether a result is wrong."""
        truth = self.truth.for_returned_dtypes(stages)
        judged = judge_stages(truth, stages, self.case.stage_shapes, rounding_model)
        return any(each.verdict.exit_code for each in judged)


def _has_the_bits_of(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is red of each kernel; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="*", help="cases by their ids (default: all)")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", RuntimeWarning)
    begun = time.monotonic()
    faults, kernels = count(options.patterns)
    for name in FAULTS:
        print(f"{len(faults.red[name]):5} red of {len(faults.met[name]):4} cases that meet it: {name}")
    red = Counter(min(len(faults.red[name]), 2) for name in FAULTS)
    cases = set().union(*faults.red.values())
    print(f"{len(FAULTS)} faults: {red[1] + red[2]} are red, {red[2]} in two cases or more, in {len(cases)} cases")
    for name in KERNELS:
        said = f"{len(kernels.shown[name]):4} of {len(kernels.met[name]):4} cases in which it gives other bits"
        print(f"{len(kernels.red[name]):5} flagged of {said}: {name} {sorted(kernels.red[name])[:3] or ''}")
    flagged = sum(bool(kernels.red[name]) for name in KERNELS)
    print(f"{len(KERNELS)} right kernels: {flagged} are flagged; {time.monotonic() - begun:.0f} s")
    return int(flagged > 0 or red[0] > 0)


if __name__ == "__main__":
    on_one_thread()
    sys.exit(main())
