"""The exact stages of one problem, and exact steps from stages that an implementation returned.

The oracle evaluates a problem in canonical form: one mask, and finite numbers. All implementations share the values,
and all that return the same stages before a step, bit by bit, share that step. If no implementation returned a stage
with an axis of keys, the oracle takes the keys of large shapes in blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

from numpy.typing import NDArray

from attncheck.attention.bounds import prepare_for_bounds
from attncheck.attention.exact_array import Enclosure
from attncheck.attention.oracle import (
    PrecisionExhausted,
    enclose_exact_stages,
    evaluate_by_key_blocks,
    evaluate_from_returned_stages,
    nearest_returned_stages,
    needs_key_blocks,
)
from attncheck.attention.problem import Computation, OutsideDomain
from attncheck.attention.sampling import OPERATIONS_SUMMING_QUERIES, RowIndices, must_judge_all_rows
from attncheck.common.store import Store
from attncheck.judging.remembered import enclosures_from_bytes, enclosures_to_bytes, make_store_key
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.spec import computed_stages

Array = NDArray[Any]
Stages = Mapping[str, Array]

MAX_SCORES_OF_ALL_ROWS = 1 << 22
"""Elements of a score matrix of which all rows are judged, because gradients add them up or their numbers are known.
The exact answer of so many takes half a minute and gigabytes."""

_JOINTLY_EVALUATED_STAGES = (("raw_scores", "scores"), ("weights", "log_sum_exp"))
"""Stages that follow from the same product, or from the same exponentials."""


@dataclass(frozen=True, eq=False)
class ExactStep:
    """The exact ``exact_values`` of ``stages``, given the returned stages that come ``earlier_stages``.

    ``cache_key`` begins with the names of the stages, and goes on with the name, dtype and digest of every stage that
    they follow from. Steps with the same key have the same values.
    """

    stages: tuple[str, ...]
    earlier_stages: Stages
    cache_key: tuple[Any, ...]
    exact_values: Mapping[str, Enclosure]


@dataclass(frozen=True, eq=False)
class ExactStages:
    """The exact stages of a ``canonical_problem`` problem.

    ``enclosures`` are those of the oracle, before any is withdrawn as undefined. ``inner_stages`` are the stages
    between, in float64, if the oracle took keys in blocks.
    """

    canonical_problem: Problem
    enclosures: Mapping[str, Enclosure] = field(default_factory=dict)
    inner_stages: Stages = field(default_factory=dict)
    _steps: dict[tuple[Any, ...], Mapping[str, Enclosure] | None] = field(default_factory=dict, init=False)

    @cached_property
    def computation(self) -> Computation:
        """The computation that the oracle evaluates."""
        return Computation.from_problem(self.canonical_problem)

    @cached_property
    def float64_computation(self) -> Computation:
        """The same for bounds."""
        return prepare_for_bounds(self.computation)

    @cached_property
    def float64_values(self) -> dict[str, Array]:
        """The values, rounded to float64."""
        return {stage: enclosure.high for stage, enclosure in self.enclosures.items()}

    def evaluate_step(self, stage: str, returned: Stages) -> ExactStep | None:
        """Return the exact values of a stage, and of those evaluated with it, given the returned stages before it.

        ``returned`` are the rows of the canonical problem. None if a stage before it is not finite, or missing.
        """
        if self.inner_stages and stage in self.enclosures:  # no returned stage comes before it
            return ExactStep((stage,), returned, (stage,), self.enclosures)
        if self.canonical_problem.operation in OPERATIONS_SUMMING_QUERIES:
            return None  # no gradient follows from another
        together = next((names for names in _JOINTLY_EVALUATED_STAGES if stage in names), (stage,))
        stages = tuple(name for name in together if name == stage or (name in self.enclosures and name in returned))
        earlier = {name: array for name, array in returned.items() if name not in stages}
        needed = sorted(nearest_returned_stages(self.computation, earlier, stages[0]))
        key = (*stages, *((name, earlier[name].dtype.name, digest_array(earlier[name])) for name in needed))
        if not needed and self.enclosures.keys() >= {*stages}:
            return ExactStep(stages, earlier, key, self.enclosures)
        if key not in self._steps:
            try:
                self._steps[key] = evaluate_from_returned_stages(self.computation, earlier, stages)
            except (OutsideDomain, PrecisionExhausted):
                self._steps[key] = None
        values = self._steps[key]
        return None if values is None else ExactStep(stages, earlier, key, values)


def digest_array(array: Array) -> bytes:
    """Return a hash of every bit of an array's numbers."""
    return blake2b(array.tobytes(), digest_size=16).digest()


def evaluate_exact_stages(
    canonical: Problem, query_rows: RowIndices | None, returned: Collection[str] | None, store: Store
) -> ExactStages:
    """Evaluate all stages of a problem with some query rows, or with all.

    ``returned`` are the stages that any implementation returned, None for all: without any, no stage is evaluated, and
    on large shapes no other, if that saves the score matrix. Earlier results come out of the ``store``. Raises
    ``OutsideDomain`` and ``PrecisionExhausted``.
    """
    if returned is not None and not returned:
        return ExactStages(canonical)
    operation, options, inputs = canonical.operation, canonical.options, canonical.inputs
    scores = count_scores(operation, options, inputs)
    if must_judge_all_rows(canonical, query_rows) and scores > MAX_SCORES_OF_ALL_ROWS:
        reason = f"has {scores:,} scores; at most {MAX_SCORES_OF_ALL_ROWS:,} are judged where every row counts"
        raise OutsideDomain(operation, reason)
    asked = [stage for stage in computed_stages(operation, options, inputs) if stage in (returned or ())]
    blocked = asked if asked and needs_key_blocks(canonical, asked) else []
    exact, inner = store.get_or_compute(
        lambda: make_store_key("exact", operation, options, inputs, blocked or None),
        lambda: _evaluate_enclosures(canonical, blocked),
        lambda exact_and_inner: enclosures_to_bytes(*exact_and_inner),
        enclosures_from_bytes,
    )
    return ExactStages(canonical, exact, inner)


def _evaluate_enclosures(canonical: Problem, blocked: Sequence[str]) -> tuple[Mapping[str, Enclosure], Stages]:
    """Return stages that are ``blocked`` with keys in blocks, if possible, and the inner ones; else all stages."""
    if blocked and (results := evaluate_by_key_blocks(canonical, blocked)):
        return _round_enclosures(results.exact_stages), results.inner_stages
    return _round_enclosures(enclose_exact_stages(canonical)), {}


def _round_enclosures(exact: Mapping[str, Enclosure]) -> dict[str, Enclosure]:
    """Return enclosures of a third of the size, even if they are not stored: a store must not change any verdict."""
    return {stage: enclosure.round_for_storage() for stage, enclosure in exact.items()}
