"""A backend made of replaceable steps; with none replaced it is the NumPy reference, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncheck.backends import numpy_backend
from attncheck.backends.contract import EmptyRows, Stages, Window
from attncheck.mutants.backward import Backward
from attncheck.mutants.forward import Forward, Masks
from attncheck.mutants.mask_steps import MaskRequest
from attncheck.mutants.rounding import Array


@dataclass(frozen=True)
class Variant(Forward):
    """One implementation: the reference with some of its steps replaced, under the contract's names."""

    def prepare(self, dtype: str, threads: int) -> None:
        """Do what the reference does."""
        numpy_backend.prepare(dtype, threads)

    def describe(self) -> dict[str, str]:
        """Return what the reference says of itself."""
        return numpy_backend.describe()

    def from_numpy(self, array: Array) -> Array:
        """Read the array."""
        return self.receive(array)

    def to_numpy(self, tensor: Array) -> Array:
        """Return the array itself."""
        return tensor

    def dot_scores(
        self, query: Array, key: Array, *, scale: float | None = None, softcap: float | None = None
    ) -> Stages:
        """Score by scaled dot product."""
        return self._visible(self._score(query, key, self.scale_of(query, scale), softcap))

    def cosine_scores(self, query: Array, key: Array, *, scale: float | None = None) -> Stages:
        """Score by the cosine of the angle between query and key."""
        return {"scores": self.cosine(query, key, scale)}

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
        self,
        scores: Array,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        is_causal: bool = False,
        window: Window | None = None,
        key_lengths: Array | None = None,
    ) -> Stages:
        """Add the bias, then set what may not be attended to -inf."""
        request = MaskRequest(scores, mask, bias, is_causal, window=window, key_lengths=key_lengths)
        return self._visible(self._mask(request, self.allowed(request)))

    def softmax(self, scores: Array, *, empty_rows: EmptyRows = "zero") -> Stages:
        """Normalise each row over the keys."""
        logits = self.without_a_key(scores, MaskRequest(scores, empty_rows=empty_rows))
        return self._visible(self.normalise(logits, scores))

    def attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        sinks: Array | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        key_lengths: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
        empty_rows: EmptyRows = "zero",
    ) -> Stages:
        """Score, mask, normalise and average the values."""
        _refuse(sinks)
        past = 0
        if past_key is not None and past_value is not None:
            past = past_key.shape[-2]
            key, value = self.join(past_key, past_value, key, value)
            window = self.window_after(window, past)
        masks = Masks(mask=mask, bias=bias, is_causal=is_causal, window=window, key_lengths=key_lengths)
        more: dict[str, Any] = {"scale": scale, "softcap": softcap, "past": past, "empty_rows": empty_rows}
        stages, _ = self._attend(query, key, value, masks, **more)
        return self._visible(stages)

    def attention_gradients(
        self,
        query: Array,
        key: Array,
        value: Array,
        grad_output: Array,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        sinks: Array | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        key_lengths: Array | None = None,
        empty_rows: EmptyRows = "zero",
    ) -> Stages:
        """Differentiate by hand, from the last stage to the first."""
        _refuse(sinks)
        masks = Masks(mask=mask, bias=bias, is_causal=is_causal, window=window, key_lengths=key_lengths)
        _, saved = self._attend(query, key, value, masks, scale=scale, softcap=softcap, empty_rows=empty_rows)
        return self._visible(self.backward(saved, grad_output))

    def multi_head_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        heads: int,
        kv_heads: int | None = None,
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
        sinks: Array | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        key_lengths: Array | None = None,
        empty_rows: EmptyRows = "zero",
    ) -> Stages:
        """Project, attend in every head, merge the heads and project once more."""
        _refuse(sinks)
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
        shared = heads if kv_heads is None else kv_heads
        counts = {"query": heads, "key": shared, "value": shared}
        stages: Stages = {name: self.split(self.project(*given[name]), count) for name, count in counts.items()}
        masks = Masks(mask=mask, bias=bias, is_causal=is_causal, window=window, key_lengths=key_lengths)
        attended, _ = self._attend(**stages, masks=masks, scale=scale, empty_rows=empty_rows)
        context = attended.pop("output")
        merged, (weight, last_bias) = self.merge(context), given["output"]
        output = merged if weight is None else self.project_output(context, merged, weight, last_bias)
        return self._visible(stages | attended | {"context": context, "output": output})


def _refuse(sinks: Array | None) -> None:
    if sinks is not None:
        raise NotImplementedError("the variants have no step for sinks")


def with_backward(**steps: Any) -> Variant:
    """Replace steps of the backward pass."""
    return Variant(backward=Backward(**steps))
