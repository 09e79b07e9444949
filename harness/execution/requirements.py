"""The requirements on shapes that a restricted function declares.

    attention.requires = {"width_multiple": 8, "value_width": "equal", "max_width": 256}

The harness pads what does not meet a requirement (``padding.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.problem import Problem
from attncheck.spec import OPERATIONS, PROJECTIONS


@dataclass(frozen=True)
class Requirements:
    """The shapes that a function takes.

    Widths are D and Dv (and Dk, the width of the key of a bilinear or additive score): each is a multiple of
    ``width_multiple``, one of ``widths`` if these are given, and between ``min_width`` and ``max_width``. With
    ``value_width``, Dv is D. Lq is a multiple of ``query_length_multiple``, and T, the number of all keys with those of
    the past, of ``key_length_multiple``. With ``lengths``, Lq is T.
    """

    width_multiple: int = 1
    widths: tuple[int, ...] = ()
    min_width: int = 1
    max_width: int | None = None
    value_width: str | None = None
    query_length_multiple: int = 1
    key_length_multiple: int = 1
    lengths: str | None = None

    @classmethod
    def from_declaration(cls, declared: Any) -> Requirements:
        """Check what a function declares. Raises ``ValueError``, which says what was expected."""
        if not isinstance(declared, Mapping):
            raise ValueError(f"requires: expected {_DECLARATION_EXAMPLE}; got {declared!r}")
        for name, value in declared.items():
            _check_declaration(name, value)
        values: dict[str, Any] = {name: tuple(value) if name == "widths" else value for name, value in declared.items()}
        requirements = cls(**values)
        if requirements.smallest_accepted_width(1) is None:
            raise ValueError(f"requires: no width meets all of {dict(declared)!r}; expected one that does")
        return requirements

    def smallest_accepted_width(self, least: int) -> int | None:
        """Return the smallest width that is taken and is at least ``least``; None if there is none.

        Example:
            >>> requirements = Requirements(width_multiple=8, max_width=64)
            >>> requirements.smallest_accepted_width(9), requirements.smallest_accepted_width(65)
            (16, None)
        """
        least = max(least, self.min_width)
        offered = (width for width in sorted(self.widths) or [_round_up(least, self.width_multiple)] if width >= least)
        fitting = (
            width for width in offered if width % self.width_multiple == 0 and width <= (self.max_width or width)
        )
        return next(fitting, None)

    def smallest_accepted_lengths(self, queries: int, keys: int) -> tuple[int, int]:
        """Return the smallest numbers of queries and of keys that are taken and are at least these.

        Example:
            >>> Requirements(lengths="equal", key_length_multiple=8).smallest_accepted_lengths(3, 9)
            (16, 16)
        """
        if self.lengths is None:
            return _round_up(queries, self.query_length_multiple), _round_up(keys, self.key_length_multiple)
        both = math.lcm(self.query_length_multiple, self.key_length_multiple)
        return (_round_up(max(queries, keys), both),) * 2

    @property
    def width_limits_text(self) -> str:
        """Return, in words, the limits on widths that padding cannot meet."""
        if self.widths:
            return f"widths of {', '.join(map(str, sorted(self.widths)))}"
        return f"widths of at most {self.max_width}"


_DECLARATION_EXAMPLE = 'a dict such as {"width_multiple": 8, "value_width": "equal"}'
_ONLY_EQUAL = frozenset({"value_width", "lengths"})


def _check_declaration(name: Any, value: Any) -> None:
    """Raise ``ValueError`` for a key that nothing knows, or a value that it cannot have."""
    known = [field.name for field in fields(Requirements)]
    if name not in known:
        meant = get_close_matches(str(name), known, 1)
        guess = f"; {meant[0]} is meant?" if meant else ""
        raise ValueError(f"requires: unknown key {name!r}; expected {', '.join(known)}{guess}")
    if name in _ONLY_EQUAL:
        if value != "equal":
            raise ValueError(f'requires: {name}: expected "equal"; got {value!r}')
    elif name == "widths":
        if not isinstance(value, list | tuple | set | frozenset) or not value or not all(map(_is_count, value)):
            raise ValueError(f"requires: widths: expected a list of whole numbers of at least 1; got {value!r}")
    elif not _is_count(value):
        raise ValueError(f"requires: {name}: expected a whole number of at least 1; got {value!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


Array = NDArray[Any]
_MAX_MASK_ELEMENTS = 1 << 24
"""Elements of the mask that are looked at together."""
_MIN_LOGIT = -1000.0
"""If every score of a query is below this, a kernel's replacement of masked scores (-1e4 in 16 bits, -1e9, the most
negative number of a dtype) may be no smaller."""


class InexactError(Exception):
    """A call cannot be padded so that it means the same; says why. ``lacks`` are parameters that would allow it."""

    def __init__(self, message: str, lacks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.lacks = lacks


def require_exact_padding(problem: Problem, longer: Mapping[str, int], padded: Problem | None = None) -> None:
    """Raise ``InexactError`` if padding these axes changes the result of a call.

    Without ``padded``, the numbers of the inputs are checked; with it, the keys that added queries may attend to.
    """
    operation = OPERATIONS[problem.operation]
    if operation.has_score_option:  # scores of the padding are dropped, and no other score depends on them
        return
    if padded is None:
        _require_finite_inputs(problem, longer)
        if "T" in longer:
            _require_keys_in_every_row(problem)
    elif "Lq" in longer and operation.computes_gradients:
        queries = problem.inputs["query"].shape[-2]
        for rows, allowed, _ in _masks_by_rows(padded):
            # A kernel may return NaN for a query without a key, and the NaN would reach every gradient.
            if not bool(allowed[..., rows >= queries, :].any(axis=-1).all()):
                raise InexactError("cannot be padded with queries: an added query would have no key to attend to")


def attends_to_added_keys(padded: Problem, lengths: Mapping[str, int]) -> bool:
    """Return whether any query of the case may attend to a key that was added."""
    return any(
        bool(allowed[..., rows < lengths["Lq"], lengths["T"] :].any()) for rows, allowed, _ in _masks_by_rows(padded)
    )


def _require_finite_inputs(problem: Problem, longer: Mapping[str, int]) -> None:
    """Refuse 0 * inf: NaN or infinity in the inputs that added zeros are multiplied by."""
    operation = OPERATIONS[problem.operation]
    grows_queries = "Lq" in longer and operation.computes_gradients
    names = {*PROJECTIONS} if operation.has_projections else set()  # a column of zeros of a projection meets its inputs
    names |= ({"query", "grad_output"} if "T" in longer else set()) | ({"key", "value"} if grows_queries else set())
    for name in sorted(names & problem.inputs.keys()):
        if not np.isfinite(problem.inputs[name].astype(np.float64)).all():
            raise InexactError(
                f"cannot be padded: {name} has NaN or infinity, by which the added zeros would be multiplied"
            )
    bias = problem.inputs.get("bias")
    if bias is not None and grows_queries:
        numbers = bias.astype(np.float64)
        if bool((np.isnan(numbers) | np.isposinf(numbers)).any()):
            raise InexactError("cannot be padded: bias has NaN or infinity, which the added queries would use")


def _require_keys_in_every_row(problem: Problem) -> None:
    """Refuse queries whose keys are all masked, or nearly: some kernels return the mean over all keys for them."""
    least = -_score_bound(problem)
    for _, allowed, bias in _masks_by_rows(problem):
        best = np.where(allowed, 0.0 if bias is None else bias, -np.inf).max(axis=-1, initial=-np.inf)
        if bool(np.isneginf(best).any()):
            raise InexactError("cannot be padded with masked keys: a query may attend to no key")
        if bool((best + least < _MIN_LOGIT).any()):
            raise InexactError(
                "cannot be padded with masked keys: a query's scores may be as low as those of masked keys"
            )


def _masks_by_rows(problem: Problem) -> Iterator[tuple[NDArray[np.intp], NDArray[np.bool_], Array | None]]:
    """Yield some query rows at a time, which keys they may attend to, (B, H, rows, T), and the bias."""
    queries = problem.inputs["query"].shape[-2]
    keys = sum(problem.inputs[name].shape[-2] for name in ("key", "past_key") if name in problem.inputs)
    heads = max((problem.inputs[name].shape[1] for name in ("mask", "bias") if name in problem.inputs), default=1)
    batch = problem.inputs["query"].shape[0]  # key_lengths differ between its entries
    size = max(1, _MAX_MASK_ELEMENTS // max(keys * heads * batch, 1))
    for start in range(0, queries, size):
        rows = np.arange(start, min(start + size, queries))
        plain = problem.canonical(rows)
        mask = plain.inputs.get("mask", np.ones((1, 1, 1, 1), dtype=np.bool_))
        bias = plain.inputs["bias"].astype(np.float64) if "bias" in plain.inputs else None
        yield rows, np.broadcast_to(mask, (*mask.shape[:2], len(rows), keys)), bias


def _score_bound(problem: Problem) -> float:
    """Return a bound on the size of every scaled score, by the lengths of queries and keys."""
    query, key = _projected_vectors(problem, "query"), _projected_vectors(problem, "key")
    past = problem.inputs.get("past_key", key[..., :0, :]).astype(np.float64)
    longest = max(_max_norm(key), _max_norm(past))
    width = query.shape[-1] // int(problem.options["heads"]) if "heads" in problem.options else query.shape[-1]
    largest = float(np.max(np.abs(problem.score_scale(lambda: width)), initial=0.0)) * _max_norm(query) * longest
    softcap = problem.options.get("softcap")
    return largest if softcap is None else min(largest, abs(float(softcap)))


def _projected_vectors(problem: Problem, name: str) -> Array:
    vectors = problem.inputs[name].astype(np.float64)
    if OPERATIONS[problem.operation].has_projections:
        vectors = vectors @ problem.inputs[f"{name}_weight"].astype(np.float64)
        vectors = vectors + problem.inputs.get(f"{name}_bias", np.zeros(1)).astype(np.float64)
    return vectors


def _max_norm(vectors: Array) -> float:
    """Return the length of the longest vector; a key that holds NaN has no score to be compared."""
    lengths = np.linalg.norm(np.nan_to_num(vectors, nan=0.0, posinf=np.inf, neginf=-np.inf), axis=-1)
    return float(lengths.max(initial=0.0))
