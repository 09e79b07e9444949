"""Questions: the calls that implementations run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs, make_inputs, make_problem_of_case
from attncheck.reading.problem import Problem


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
    def inputs(self) -> RoundedInputs:
        """The arrays that are passed, drawn once."""
        return make_inputs(self.case, self.dtype)

    @property
    def problem(self) -> Problem:
        """The call as a worker gets it."""
        return make_problem_of_case(self.case, self.inputs).as_call()
