"""The one walk over a graph of steps, which serves every analysis. Analyses differ in the start and in the rule.

    exact_walk     exact numbers: from the inputs, or from the stages that an implementation returned, taken as exact
    value_walk     float64
    error_walk     largest errors and their scales: from the inputs (accumulated), or from returned stages (introduced)
    radius_walk    the movement of every stage if every input moves by its radius
    flag_walk      flags of the elements that follow from flagged inputs

A walk over some query rows, or over a block of keys, is a walk of the problem that ``Computation.select_rows`` or
``Computation.select_keys`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from attncheck.attention.balls import Balls, Float64Array, Magnitudes
from attncheck.attention.errors import Ball, Operand, Real, logits_from_values
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import FlagContext, Flags
from attncheck.attention.graph import Graph, graph_of
from attncheck.attention.problem import LOGITS, Computation
from attncheck.attention.step import ErrorContext, GraphNode, RadiusContext
from attncheck.reading.problem import Problem
from attncheck.spec import computed_stages
from attncheck.spec.rounding import RoundingModel


@dataclass(frozen=True, eq=False)
class Walk:
    """The nodes of a graph by one rule, each evaluated once and when it is asked for."""

    graph: Graph
    evaluate_input: Callable[[str], Any]
    evaluate_node: Callable[[str, GraphNode, tuple[Any, ...]], Any]
    cached_nodes: dict[str, Any]

    def evaluate(self, name: str) -> Any:
        """Evaluate a node by the rule, or an input by the leaf rule; results are cached."""
        if name not in self.cached_nodes:
            node = self.graph.get(name)
            if node is None:
                self.cached_nodes[name] = self.evaluate_input(name)
            else:
                operands = tuple(map(self.evaluate, node.operands))
                self.cached_nodes[name] = self.evaluate_node(name, node, operands)
        return self.cached_nodes[name]


def exact_walk(problem: Computation, known: Mapping[str, Any] | None = None) -> Walk:
    """Evaluate in the problem's exact arithmetic from the inputs and the problem's ``returned`` stages."""
    nodes = {name: problem.to_exact_array(array) for name, array in problem.returned_stages.items()}
    return Walk(
        graph_of(problem),
        lambda name: problem.to_exact_array(problem.input_array(name)),
        lambda _, node, operands: node.step.evaluate_exactly(problem, *operands),
        nodes | dict(known or {}),
    )


def magnitude_walk(problem: Computation, arithmetic: type[ExactArray]) -> Walk:
    """Evaluate the sums of the absolute terms of stages: as balls, or as ``Magnitudes`` only their size."""
    return exact_walk(replace(problem, uses_magnitudes=True, arithmetic=arithmetic))


def stage_magnitude(sums: Walk, walk: Walk, name: str, *, in_balls: bool) -> ExactArray:
    """Return the sum of the absolute terms of a stage that a walk evaluated, or its step's ``exact_magnitude``.

    Unless ``in_balls``, ``sums`` are in float64, and balls count as the least number in them.
    """
    for stage, node in walk.graph.items():
        if node.step.exact_magnitude is not None and stage in walk.cached_nodes and stage not in sums.cached_nodes:
            size = node.step.exact_magnitude(walk.cached_nodes[stage])
            if not in_balls and isinstance(size, Balls):
                least = [float(ball.abs_lower()) for ball in size.numbers.ravel().tolist()]
                size = Magnitudes((np.array(least).reshape(size.shape),), size.attended)
            elif not in_balls:
                size = Magnitudes((size.high_low_radius()[0],), size.attended)
            sums.cached_nodes[stage] = size
    total: ExactArray = sums.evaluate(name)
    return total


def value_walk(problem: Computation, known: Mapping[str, Any] | None = None) -> Walk:
    """Evaluate in float64; ``problem`` is ``in_float64``."""
    return Walk(
        graph_of(problem),
        problem.input_array,
        lambda _, node, operands: node.step.value_of(problem.with_arithmetic(Float64Array), *operands),
        dict(known or {}),
    )


def approximate_stages(plain: Problem) -> dict[str, Any]:
    """Return the stages of a problem in canonical form, evaluated in float64."""
    inputs = {name: array if array.dtype == bool else array.astype(np.float64) for name, array in plain.inputs.items()}
    options = {name: value for name, value in plain.options.items() if value is not None}
    problem = Computation.from_problem(Problem(plain.operation, options, inputs))
    walk = value_walk(problem)
    with np.errstate(all="ignore"):
        return {
            stage: problem.without_added_key(stage, walk.evaluate(stage))
            for stage in computed_stages(problem.operation, problem.options, problem.inputs)
        }


def error_walk(
    problem: Computation,
    rounding: RoundingModel,
    values: Walk,
    returned: Mapping[str, Real] | None = None,
    states: Mapping[str, Any] | None = None,
) -> Walk:
    """Follow errors: from exact inputs, from returned stages, each with its storage error, and from given states.

    ``values`` are those of the stages: exact ones as far as they are known. Raises ``NotFiniteError`` if a returned
    stage has no value to follow another one from.
    """

    def walk_with_rounding(other_rounding: RoundingModel) -> Walk:
        return error_walk(problem, other_rounding, values)

    def at(name: str) -> ErrorContext:
        return ErrorContext(problem, rounding, partial(values.evaluate, name), walk_with_rounding)

    known = {name: values.graph[name].step.from_returned(at(name), array) for name, array in (returned or {}).items()}
    return Walk(
        values.graph,
        lambda name: (
            logits_from_values(problem.input_array(name)) if name in LOGITS else Operand(problem.input_array(name))
        ),
        lambda name, node, operands: node.step.propagate_error(at(name), *operands),
        {**known, **(states or {})},
    )


def radius_walk(problem: Computation, radii: Mapping[str, Real]) -> Walk:
    """Follow the radii of the inputs, in balls of float64; ``problem`` is ``in_float64``."""
    around, values = RadiusContext(problem, radii), value_walk(problem)

    def rule(name: str, node: GraphNode, operands: tuple[Any, ...]) -> Ball:
        value = values.evaluate(name)
        return Ball(value, node.step.propagate_radius(around, value, *operands))

    return Walk(values.graph, around.input_ball, rule, {})


def flag_walk(
    problem: Computation, flags: Mapping[str, Flags], attended: Flags | None, known: Mapping[str, Flags] | None = None
) -> Walk:
    """Follow flags of the inputs; with ``attended``, (B, H, Lq, T), only through keys that are attended."""
    reach = FlagContext(problem, flags, attended)
    return Walk(
        graph_of(problem),
        lambda name: flags[name],
        lambda _, node, operands: node.step.propagate_flags(reach, *operands),
        dict(known or {}),
    )


def flag_walk_from_nodes(problem: Computation, known: Mapping[str, Flags]) -> Walk:
    """Follow flags of some nodes, regardless of the mask and of the inputs."""
    none = {name: np.zeros(array.shape, np.bool_) for name, array in problem.inputs.items() if array.dtype != np.bool_}
    return flag_walk(problem, none, None, known)
