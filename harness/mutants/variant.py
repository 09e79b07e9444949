"""A backend made of replaceable steps; with none replaced it is the NumPy reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Stages
from attncheck.harness.mutants import steps
from attncheck.harness.mutants.rounding import Array
from attncheck.harness.mutants.steps import MaskRequest


@dataclass(frozen=True)
class Variant:
    """One implementation: the reference with some of its steps replaced.

    ``inputs`` rearranges query, key and value before they are scored, ``arguments`` those of multi-head attention.
    ``after_softmax(weights, allowed)`` sees the weights before the values do. ``hidden`` stages are not returned, as a
    kernel does not return what it never has.
    """

    inputs: Callable[[Array, Array, Array], tuple[Array, Array, Array]] = lambda query, key, value: (query, key, value)
    scale_of: Callable[[Array, float | None], float] = steps.scale_of
    score: Callable[[Array, Array, float], Stages] = steps.DOT_SCORE
    bilinear: Callable[[Array, Array, Array], Array] = steps.bilinear
    additive: Callable[[Array, Array, Array, Array, Array, Array | None], Array] = steps.ADDITIVE_SCORE
    add_bias: Callable[[MaskRequest], Array] = steps.add_bias
    allowed: Callable[[MaskRequest], Array] = steps.ALLOWED
    fill: Callable[[Array, Array, MaskRequest], Array] = steps.fill
    normalise: Callable[[Array, Array], Stages] = steps.SOFTMAX
    after_softmax: Callable[[Array, Array], Array] = lambda weights, allowed: weights
    average: Callable[[Array, Array, Array], Array] = steps.average
    arguments: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given
    split: Callable[[Array, int], Array] = steps.split_heads
    merge: Callable[[Array], Array] = steps.merge_heads
    project: Callable[[Array, Array, Array | None], Array] = steps.project
    project_output: Callable[[Array, Array, Array, Array | None], Array] = steps.project_output
    hidden: frozenset[str] = frozenset()

    def prepare(self, dtype: str, threads: int) -> None:
        """Do what the reference does."""
        numpy_backend.prepare(dtype, threads)

    def describe(self) -> dict[str, str]:
        """Return what the reference says of itself."""
        return numpy_backend.describe()

    def from_numpy(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def to_numpy(self, tensor: Array) -> Array:
        """Return the array itself."""
        return tensor

    def dot_scores(self, query: Array, key: Array, *, scale: float | None = None) -> Stages:
        """Score by scaled dot product."""
        return self._visible(self.score(query, key, self.scale_of(query, scale)))

    def general_scores(self, query: Array, key: Array, weight: Array) -> Stages:
        """Score by a bilinear form."""
        return {"scores": self.bilinear(query, key, weight)}

    def additive_scores(
        self,
        query: Array,
        key: Array,
        query_weight: Array,
        key_weight: Array,
        score_vector: Array,
        *,
        score_bias: Array | None = None,
    ) -> Stages:
        """Score by a small feed-forward network."""
        return {"scores": self.additive(query, key, query_weight, key_weight, score_vector, score_bias)}

    def mask_scores(
        self, scores: Array, *, mask: Array | None = None, bias: Array | None = None, is_causal: bool = False
    ) -> Stages:
        """Add the bias, then set what may not be attended to -inf."""
        return self._visible(self._mask(MaskRequest(scores, mask, bias, is_causal)))

    def softmax(self, scores: Array) -> Stages:
        """Normalise each row over the keys."""
        return self._visible(self.normalise(scores, scores))

    def attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Stages:
        """Score, mask, normalise and average the values."""
        return self._visible(self._attend(query, key, value, mask=mask, bias=bias, is_causal=is_causal, scale=scale))

    def multi_head_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        heads: int,
        query_weight: Array,
        key_weight: Array,
        value_weight: Array,
        output_weight: Array | None = None,
        query_bias: Array | None = None,
        key_bias: Array | None = None,
        value_bias: Array | None = None,
        output_bias: Array | None = None,
        mask: Array | None = None,
        bias: Array | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Stages:
        """Project, attend in every head, merge the heads and project once more."""
        if output_weight is None and output_bias is not None:
            raise ValueError("output_bias needs output_weight")
        given = self.arguments(
            {
                "query": (query, query_weight, query_bias),
                "key": (key, key_weight, key_bias),
                "value": (value, value_weight, value_bias),
                "output": (output_weight, output_bias),
            }
        )
        stages: Stages = {name: self.split(self.project(*given[name]), heads) for name in ("query", "key", "value")}
        stages |= self._attend(**stages, mask=mask, bias=bias, is_causal=is_causal, scale=scale)
        context = stages["context"] = stages.pop("output")
        weight, last_bias = given["output"]
        merged = self.merge(context)
        stages["output"] = merged if weight is None else self.project_output(context, merged, weight, last_bias)
        return self._visible(stages)

    def _attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: Array | None,
        bias: Array | None,
        is_causal: bool,
        scale: float | None,
    ) -> Stages:
        query, key, value = self.inputs(query, key, value)
        factor = self.scale_of(query, scale)
        stages = self.score(query, key, factor)
        request = MaskRequest(stages["scores"], mask, bias, is_causal, factor)
        stages |= self._mask(request)
        unmasked: Array = stages["scores"] if bias is None else stages["biased"]
        logits: Array = unmasked if mask is None and not is_causal else stages["masked"]
        stages |= self.normalise(logits, unmasked)
        stages["weights"] = self.after_softmax(stages["weights"], self.allowed(request))
        stages["output"] = self.average(logits, stages["weights"], value)
        return stages

    def _mask(self, request: MaskRequest) -> Stages:
        stages: Stages = {}
        biased = request.scores
        if request.bias is not None:
            biased = stages["biased"] = self.add_bias(request)
        if request.is_causal or request.mask is not None:
            stages["masked"] = self.fill(biased, self.allowed(request), request)
        return stages

    def _visible(self, stages: Stages) -> Stages:
        return {name: stage for name, stage in stages.items() if name not in self.hidden}
