"""Whom queries may attend to, as edges that count from the end and a mask for what is no edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Reach:
    """Whom queries may attend to: keys from ``left`` before to ``right`` behind their own, counted from the end.

    The last query stands at the last key. None is no edge. ``mask``, if there is one, forbids further keys.
    """

    left: int | None = None
    right: int | None = None
    mask: NDArray[np.bool_] | None = None

    @property
    def has_edges(self) -> bool:
        """Whether anything is forbidden by an edge."""
        return self.left is not None or self.right is not None

    def allowed(self, queries: int, keys: int) -> NDArray[np.bool_] | None:
        """Return all of it as a mask that broadcasts to (B, H, Lq, T); None where nothing is forbidden."""
        if not self.has_edges:
            return self.mask
        band = _band(self.left, self.right, queries, keys)[np.newaxis, np.newaxis]
        return band if self.mask is None else band & self.mask


def _band(left: int | None, right: int | None, queries: int, keys: int) -> NDArray[np.bool_]:
    distance = np.arange(keys) - (np.arange(queries)[:, np.newaxis] + keys - queries)
    allowed = np.ones((queries, keys), np.bool_)
    allowed &= True if left is None else distance >= -left
    allowed &= True if right is None else distance <= right
    return allowed


def as_edges(reach: Reach, queries: int, keys: int) -> Reach | None:
    """Return what a mask says as edges alone; None where it says more."""
    allowed = reach.allowed(queries, keys)
    if reach.mask is None or allowed is None:
        return reach
    first = np.broadcast_to(allowed, (*allowed.shape[:2], queries, keys))[0, 0]
    if not (allowed == first).all() or not first.any():
        return None
    rows, columns = np.nonzero(first)
    distance = columns - (rows + keys - queries)
    left, right = -int(distance.min()), int(distance.max())
    candidates: tuple[tuple[int | None, int | None], ...] = ((None, right), (left, right), (left, None))
    for edge, other in candidates:
        if np.array_equal(_band(edge, other, queries, keys), first):
            return Reach(edge, other)
    return None


def least(*edges: int | None) -> int | None:
    """Return the nearest of several edges; None where none is one."""
    return min((each for each in edges if each is not None), default=None)


def reach_of(given: Mapping[str, Any], queries: int, keys: int, past: int) -> Reach:
    """Return whom queries may attend to, by all that a call of the contract says of it."""
    left, right = given.get("window") or (None, None)
    right = least(right, 0 if given.get("is_causal") else None)
    mask = given.get("mask")
    lengths, offsets = given.get("key_lengths"), given.get("query_offsets")
    if lengths is not None:
        used = np.arange(keys) < lengths.reshape(-1, 1, 1, 1)
        mask = used if mask is None else mask & used
    start = past
    if offsets is not None and (left, right) != (None, None):
        start = int(offsets.flat[0])
        if not (offsets == start).all():
            bands = [_reach_at(left, right, int(each), queries, keys).allowed(queries, keys) for each in offsets.flat]
            of_each = np.concatenate([band for band in bands if band is not None])
            return Reach(mask=of_each if mask is None else mask & of_each)
    return replace(_reach_at(left, right, start, queries, keys), mask=mask)


def _reach_at(left: int | None, right: int | None, start: int, queries: int, keys: int) -> Reach:
    """Return edges that count from queries of which the first stands at ``start``, counted from the end."""
    shift = keys - queries - start
    return Reach(None if left is None else left + shift, None if right is None else right - shift)
