"""A case in one dtype with all of its numbers at hand, so that a search can draw it, change it, and write it as a file.

Whatever a case file says in other words (a draw, a pattern, a merged layout, linear projections) is here what it comes
to: arrays as the operation takes them, rounded once to the dtype. The case that the harness judges is read from that by
the ordinary loader, which refuses what cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.loader import case_of_data
from attncheck.reading.shapes import bind_axes
from attncheck.spec import HEADS, OPERATIONS, InputSpec, inputs_of

Array = NDArray[Any]

MAX_SPELLED = 128
"""Numbers of an array that are handed to the loader one by one; larger ones go by way of a file, which is quicker."""
_FOR_FILES = ("projections", "poison")
"""Options that say how a file writes its arrays: here they are as they come to be."""


@dataclass(frozen=True, eq=False)
class ConcreteCase:
    """One computation in one dtype.

    ``inputs`` have the operation's own ranks: numbers in float64, masks boolean, counts whole. ``regime`` and
    ``special`` say how they were drawn. ``stages`` alone are judged; None is all of them.
    """

    operation: str
    options: Mapping[str, Any]
    inputs: Mapping[str, Array]
    dtype: str
    memory_layout: Mapping[str, str] = field(default_factory=dict)
    supports_statistics: bool = False
    stages: tuple[str, ...] | None = None
    regime: str = ""
    special: str = ""

    @property
    def specs(self) -> Mapping[str, InputSpec]:
        """What the operation expects of each input."""
        return inputs_of(self.operation, self.options.get("score"))

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """The inputs that may be left out."""
        return tuple(name for name in self.inputs if not self.specs[name].required)

    @property
    def elements(self) -> int:
        """How many numbers there are in all inputs."""
        return sum(array.size for array in self.inputs.values())

    @property
    def has_nonfinite(self) -> bool:
        """Whether NaN or infinity is in the inputs, except for minus infinity in those that forbid by it."""
        for name, array in self.inputs.items():
            allowed = self.specs[name].may_be_infinite
            if array.dtype.kind == "f" and not (np.isfinite(array) | (allowed & np.isneginf(array))).all():
                return True
        return False

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The length of every axis, by its letter. Raises ``ShapeFault`` where two inputs disagree."""
        shapes = {name: array.shape for name, array in self.inputs.items()}
        return bind_axes(self.specs, shapes, *(self.options.get(name) for name in HEADS))

    def changed(self, **changes: Any) -> ConcreteCase:
        """Return the same with other fields."""
        return replace(self, **changes)


def concrete_case(case: Case, dtype: str) -> ConcreteCase:
    """Return any case as it is in a dtype; the numbers that it expects of a result are left out."""
    inputs = convert_inputs(case, make_exact_inputs(case), dtype).arrays
    specs = case.input_specs
    options = {name: value for name, value in case.options.items() if name not in _FOR_FILES and value is not False}
    if not OPERATIONS[case.operation].has_projections:  # of a merged layout: here are axes of heads
        options = {name: value for name, value in options.items() if name not in HEADS}
    return ConcreteCase(
        case.operation,
        options,
        {name: array.astype(np.float64) if specs[name].is_number else array for name, array in inputs.items()},
        dtype,
        {name: layout for name, layout in case.memory_layout.items() if name in inputs},
        case.supports_statistics,
        case.judged_stages,
    )


def case_data(problem: ConcreteCase, inputs: Mapping[str, Any], name: str, found_by: str) -> dict[str, Any]:
    """Return what stands in a case file, with its ``inputs`` as they are to be written."""
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in problem.options.items()}
    numbers = (array for array in problem.inputs.values() if array.dtype.kind == "f")
    odd = {"allow_nonfinite": True} if any(not np.isfinite(array).all() for array in numbers) else {}
    entry = {
        "name": name,
        "dtypes": [problem.dtype],
        "inputs": dict(inputs),
        **({"options": options} if options else {}),
        **({"memory_layout": dict(problem.memory_layout)} if problem.memory_layout else {}),
        **({"stages": list(problem.stages)} if problem.stages else {}),
        **({"supports_statistics": True} if problem.supports_statistics else {}),
        **odd,
    }
    source = {"kind": "derivation", "title": found_by}
    return {"title": "Found by a search", "source": source, "operation": problem.operation, "cases": [entry]}


def read_concrete(problem: ConcreteCase, folder: Path, identity: str, max_spelled: int = MAX_SPELLED) -> Case:
    """Return the case that the harness judges. Raises ``CaseError`` where there is no such case.

    Arrays of more than ``max_spelled`` numbers are put into ``folder``, where they have to stay as long as the case is
    used.
    """
    inputs = {}
    for name, array in problem.inputs.items():
        if not array.size:
            inputs[name] = {"constant": 0, "shape": list(array.shape)}
        elif array.size <= max_spelled:
            inputs[name] = {"values": array.tolist()}
        else:
            file = f"{identity.rpartition('/')[2]}-{name}.npy"
            np.save(folder / file, array)
            inputs[name] = {"file": file}
    return case_of_data(case_data(problem, inputs, "A drawn problem", "drawn"), folder, identity)
