"""One computation of attention, as every part of attncheck passes it on.

A ``Problem`` holds all that an exact answer and a call follow from. Cases, searches, properties and conventions make
problems; workers evaluate them, and the oracle solves them. A problem has three forms:

* ``as_call`` is what an implementation gets: an input or a position that no signature has becomes part of the mask.
* ``without_layout`` has keys and values in one array per batch entry, where they were packed, in pages or in codes.
* ``canonical`` is what the oracle evaluates: one mask, one set of keys and values, no position to count from.

``reading/lowering.py`` does the work on options and inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from attncheck.reading.lowering import (
    Array,
    Factor,
    Inputs,
    Options,
    Rows,
    call_options_and_inputs,
    canonical_options_and_inputs,
    options_and_inputs_without_layout,
)
from attncheck.reading.shapes import find_axis_lengths
from attncheck.spec import HEADS, OPERATIONS, InputSpec, input_specs, score_kind


@dataclass(frozen=True, eq=False)
class Problem:
    """One computation: an operation with its options and inputs.

    Attributes:
        operation: The name of the operation.
        options: Its options by name.
        inputs: Its arrays by name, rounded to the working dtype. A search keeps them widened to float64.
        dtype: The working dtype; empty for a problem of which no error bound is asked.
        memory_layout: The inputs that do not lie row by row in memory, with a name of ``MEMORY_LAYOUTS`` each.
        stages: The stages that are judged; None for all.
        supports_statistics: Whether the inputs are continuous and unstructured, so that rounding errors look random.
        drawing_regime: How a search drew the inputs; empty for any other problem.
        special_value: The odd value that a search put into an input, as ``nan in key``.
    """

    operation: str
    options: Options
    inputs: Inputs
    dtype: str = ""
    memory_layout: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[str, ...] | None = None
    supports_statistics: bool = False
    drawing_regime: str = ""
    special_value: str = ""

    @property
    def input_specs(self) -> Mapping[str, InputSpec]:
        """The specification of each input of the operation."""
        return input_specs(self.operation, self.options.get("score"))

    @cached_property
    def axis_lengths(self) -> Mapping[str, int]:
        """The length of every axis by its letter. Raises ``ShapeFault`` if two inputs disagree."""
        shapes = {name: array.shape for name, array in self.inputs.items()}
        return find_axis_lengths(self.input_specs, shapes, *(self.options.get(name) for name in HEADS))

    def with_options(self, **options: Any) -> Self:
        """Return the problem with other options."""
        return replace(self, options={**self.options, **options})

    def with_inputs(self, **inputs: Array) -> Self:
        """Return the problem with other inputs."""
        return replace(self, inputs={**self.inputs, **inputs})

    def without_input(self, name: str) -> Self:
        """Return the problem without an input, if it has it."""
        return replace(self, inputs={kept: array for kept, array in self.inputs.items() if kept != name})

    def with_changes(self, options: Options | None = None, /, **inputs: Array | None) -> Self:
        """Return the problem with other options and inputs; None leaves one out."""
        chosen = {name: value for name, value in {**self.options, **(options or {})}.items() if value is not None}
        present = {name: array for name, array in {**self.inputs, **inputs}.items() if array is not None}
        return replace(self, options=chosen, inputs=present)

    def score_scale(self, head_width: Callable[[], int]) -> Factor:
        """Return the factor of the scores: that given, else 1/sqrt(D), and 1 for the kinds that have none."""
        if "head_scale" in self.inputs:
            return self.inputs["head_scale"].astype(np.float64)[:, np.newaxis, np.newaxis]
        if self.options.get("scale") is not None:
            return float(self.options["scale"])
        is_scaled = score_kind(self.operation, self.options) == "scaled_dot"
        return 1 / math.sqrt(head_width()) if is_scaled else 1.0

    def as_call(self) -> Self:
        """Return the call that an implementation gets.

        Causality and windows count from positions that a function knows. If it cannot know them, because a past is
        passed apart or an alignment is a convention, they become part of the mask.

        >>> cached = {"past_key": np.ones((1, 1, 2, 4)), "past_value": np.ones((1, 1, 2, 4))}
        >>> ones = {name: np.ones((1, 1, 1, 4)) for name in ("query", "key", "value")}
        >>> call = Problem("attention", {"is_causal": True}, {**ones, **cached}).as_call()
        >>> call.options, call.inputs["mask"].tolist()
        ({}, [[[[True, True, True]]]])
        """
        options, inputs = call_options_and_inputs(self.operation, self.options, self.inputs)
        return replace(self, options=options, inputs=inputs)

    def canonical(self, rows: Rows | None = None) -> Self:
        """Return the same computation with one mask and one set of keys and values.

        Args:
            rows: The query rows to keep, (R,); None for all. With rows, no array of the shape (Lq, Lk) is made, and
                causality is part of the mask: a row that moved up would otherwise be taken for an earlier one.

        >>> ones = {name: np.ones((1, 1, 3, 4)) for name in ("query", "key", "value")}
        >>> problem = Problem("attention", {"window": (1, 0)}, {**ones, "key_lengths": np.array([2])})
        >>> problem.canonical().inputs["mask"][0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 0]]
        >>> problem.canonical(np.array([2])).inputs["mask"][0, 0].astype(int).tolist()
        [[0, 1, 0]]
        """
        options, inputs = canonical_options_and_inputs(self.operation, self.options, self.inputs, rows)
        return replace(self, options=options, inputs=inputs)

    def without_layout(self) -> Self:
        """Return the operation that this one is once its keys and values are in one array per batch entry.

        A problem whose operation is no other one's layout comes back itself. With the option ``alignment``, which no
        case has, positions count as it says: top_left from the first key of a sequence.

        >>> tokens = {name: np.ones((1, 1, 3, 4)) for name in ("query", "key", "value")}
        >>> limits = {"cu_seqlens_q": np.array([0, 1, 3]), "cu_seqlens_k": np.array([0, 1, 3])}
        >>> plain = Problem("packed_attention", {}, {**tokens, **limits}).without_layout()
        >>> plain.operation, plain.inputs["mask"][0, 0].astype(int).tolist()
        ('attention', [[1, 0, 0], [0, 1, 1], [0, 1, 1]])
        """
        lowers_to = OPERATIONS[self.operation].lowers_to
        if lowers_to is None:
            return self
        options, inputs = options_and_inputs_without_layout(self.operation, self.options, self.inputs)
        return replace(self, operation=lowers_to, options=options, inputs=inputs)
