"""Attention made of replaceable steps: what every operation of a variant has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from attncheck.backends.contract import EmptyRows, Stages, Window
from attncheck.mutants import mask_steps, steps
from attncheck.mutants.backward import BACKWARD, Saved
from attncheck.mutants.mask_steps import MaskRequest
from attncheck.mutants.rounding import Array


class Masks(TypedDict):
    """What says who may attend to whom, and the bias."""

    mask: Array | None
    bias: Array | None
    is_causal: bool
    window: Window | None
    key_lengths: Array | None


@dataclass(frozen=True)
class Forward:
    """One implementation's steps, those of ``numpy_backend`` unless replaced.

    ``receive`` takes every input as it lies in memory. ``inputs`` rearranges query, key and value before they are
    scored, ``arguments`` those of multi-head attention; ``join`` puts keys and values behind a past, ``repeat_key`` and
    ``repeat_value`` give query heads the heads that they share. ``without_a_key(logits, request)`` sees the logits
    before the softmax and puts something in the place of rows that are all -inf; ``after_softmax(weights, allowed)``
    sees the weights before the values do. ``hidden`` stages are not returned, as a kernel does not return what it never
    has.
    """

    receive: Callable[[Array], Array] = lambda array: array
    inputs: Callable[[Array, Array, Array], tuple[Array, Array, Array]] = lambda query, key, value: (query, key, value)
    join: Callable[[Array, Array, Array, Array], tuple[Array, Array]] = steps.join_both
    window_after: Callable[[Window | None, int], Window | None] = mask_steps.window_after
    repeat_key: Callable[[Array, int], Array] = steps.repeat_heads
    repeat_value: Callable[[Array, int], Array] = steps.repeat_heads
    scale_of: Callable[[Array, float | None], float] = steps.scale_of
    score: Callable[[Array, Array, float], Stages] = steps.DOT_SCORE
    cap: Callable[[Stages, float, float], Array] = steps.cap
    cosine: Callable[[Array, Array, float | None], Array] = steps.COSINE_SCORE
    bilinear: Callable[[Array, Array, Array], Array] = steps.bilinear
    additive: Callable[[Array, Array, Array, Array, Array, Array | None], Array] = steps.ADDITIVE_SCORE
    add_bias: Callable[[MaskRequest], Array] = mask_steps.add_bias
    allowed: Callable[[MaskRequest], Array] = mask_steps.ALLOWED
    fill: Callable[[Array, Array, MaskRequest], Array] = mask_steps.fill
    without_a_key: Callable[[Array, MaskRequest], Array] = mask_steps.without_a_key
    normalise: Callable[[Array, Array], Stages] = steps.SOFTMAX
    after_softmax: Callable[[Array, Array], Array] = lambda weights, allowed: weights
    average: Callable[[Array, Array, Array], Array] = steps.average
    backward: Callable[[Saved, Array], Stages] = BACKWARD
    arguments: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given
    split: Callable[[Array, int], Array] = steps.split_heads
    merge: Callable[[Array], Array] = steps.merge_heads
    project: Callable[[Array, Array, Array | None], Array] = steps.project
    project_output: Callable[[Array, Array, Array, Array | None], Array] = steps.project_output
    hidden: frozenset[str] = frozenset()

    def _score(self, query: Array, key: Array, factor: float, softcap: float | None) -> Stages:
        stages = self.score(query, key, factor)
        if softcap is not None:
            stages["capped"] = self.cap(stages, softcap, factor)
        return stages

    def _attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        masks: Masks,
        *,
        scale: float | None,
        softcap: float | None = None,
        past: int = 0,
        empty_rows: EmptyRows = "zero",
    ) -> tuple[Stages, Saved]:
        """Return the stages and, for the way back, what they were made from."""
        query, key, value = self.inputs(query, key, value)
        kv_heads, heads = key.shape[1], query.shape[1]
        key, value = self.repeat_key(key, heads), self.repeat_value(value, heads)
        factor = self.scale_of(query, scale)
        stages = self._score(query, key, factor, softcap)
        *_, scores = stages.values()
        request = MaskRequest(
            scores,
            **masks,
            scale=factor,
            softcap=softcap,
            uncapped=stages["scores"],
            past=past,
            kv_heads=kv_heads,
            empty_rows=empty_rows,
        )
        allowed = self.allowed(request)
        stages |= self._mask(request, allowed)
        saved = Saved(query, key, value, stages, request, allowed, kv_heads)
        saved = replace(saved, seen=self.without_a_key(saved.logits, request))
        stages |= self.normalise(saved.logits, saved.unmasked)
        stages["weights"] = self.after_softmax(stages["weights"], allowed)
        stages["output"] = self.average(saved.logits, stages["weights"], value)
        return stages, saved

    def _mask(self, request: MaskRequest, allowed: Array) -> Stages:
        stages: Stages = {}
        biased = request.scores
        if request.bias is not None:
            biased = stages["biased"] = self.add_bias(request)
        if request.forbids:
            stages["masked"] = self.fill(biased, allowed, request)
        return stages

    def _visible(self, stages: Stages) -> Stages:
        return {name: stage for name, stage in stages.items() if name not in self.hidden}
