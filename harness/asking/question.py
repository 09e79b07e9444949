"""Questions: what an implementation is asked to compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from attncheck.execution.operations import Task
from attncheck.execution.runner import task_of
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs


@dataclass(frozen=True, eq=False)
class Question:
    """One call: a case in one of its dtypes."""

    case: Case
    dtype: str

    @property
    def key(self) -> tuple[str, str]:
        """The id of the case, and the dtype."""
        return self.case.id, self.dtype

    @cached_property
    def inputs(self) -> Inputs:
        """The arrays that are handed over, drawn once."""
        return convert_inputs(self.case, make_exact_inputs(self.case), self.dtype)

    @property
    def task(self) -> Task:
        """The call as a worker gets it."""
        return task_of(self.case, self.inputs)
