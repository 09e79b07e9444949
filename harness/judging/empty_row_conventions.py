"""What a query that may attend to no key may give instead of what its case expects, each as a change of the problem."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.problem import Problem
from attncheck.judging.alternatives import Alternative, with_options
from attncheck.judging.special_rows import MAX_AT_A_TIME, empty_rows, scores_shape
from attncheck.reading.canonical import AttentionProblem, canonical_form
from attncheck.reading.shapes import score_elements
from attncheck.spec import DEFAULT_EMPTY_ROWS, EMPTY_ROWS, without_a_key


def empty_row_conventions(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield the other conventions for rows that may attend to no key; nothing where there is no such row."""
    own = str(posed.options.get("empty_rows") or DEFAULT_EMPTY_ROWS)
    rows = empty_rows(operation, posed)
    if not rows.any():
        return
    for value in EMPTY_ROWS:
        if value != own:
            description, option = without_a_key(value, own), ("empty_rows", value)
            yield Alternative(
                f"empty-rows-{value}", description, "weights", with_options(posed, empty_rows=value), option=option
            )
    if score_elements(operation, posed.options, posed.inputs) > MAX_AT_A_TIME:
        return  # as a mask, the next one would be of the size of the score matrix
    allowed = allowed_keys(operation, posed)
    if allowed is not None:
        plain = canonical_form(operation, posed.options, posed.inputs)
        description = f"a query without a key attends to all keys, as if nothing were masked; the case expects {own}"
        unmasked = {**plain.inputs, "mask": allowed | rows[..., np.newaxis]}
        yield Alternative(
            "empty-rows-unmasked",
            description,
            "weights",
            AttentionProblem({**plain.options, "is_causal": False}, unmasked),
        )


def allowed_keys(operation: str, posed: AttentionProblem) -> NDArray[np.bool_] | None:
    """Return who may attend to whom, of the scores' shape; None where nothing is forbidden."""
    plain = canonical_form(operation, posed.options, posed.inputs)
    shape = scores_shape(operation, plain.options, plain.inputs)
    return Problem.as_given(operation, plain.options, plain.inputs).allowed(shape)
