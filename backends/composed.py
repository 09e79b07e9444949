"""Operations that are composed of others in the same way whatever the framework, which gives what they are made of.

Each function here returns one of the contract, whose shapes and meanings stand in ``contract.py``. NumPy's backend,
which others are copied from, spells all of them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attncheck.backends.contract import EmptyRows, Norm, NormOver, Stages, Tensor, Window


def make_attend(mask_scores: Callable[..., Stages], softmax: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return what masks scores, normalises them and averages the values."""

    def attend(stages: Stages, value: Tensor, masks: dict[str, Any], empty_rows: EmptyRows) -> Stages:
        stages |= mask_scores(stages["scores"], **masks)
        *_, logits = stages.values()  # the last stage that was asked for
        stages |= softmax(logits, empty_rows=empty_rows)
        stages["output"] = stages["weights"] @ value
        return stages

    return attend


def make_general_attention(
    general_scores: Callable[..., Stages],
    attend: Callable[..., Stages],
) -> Callable[..., Stages]:
    """Return attention with a bilinear score."""

    def general_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        *,
        score_bias: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        mask_fill: float | None = None,
        empty_rows: EmptyRows = "zero",
    ) -> Stages:
        """Attend with a bilinear score."""
        masks: dict[str, Any] = {
            "mask": mask,
            "bias": bias,
            "is_causal": is_causal,
            "window": window,
            "key_lengths": key_lengths,
            "mask_fill": mask_fill,
        }
        scores = general_scores(query, key, weight, score_bias=score_bias)
        return attend(scores, value, masks, empty_rows)

    return general_attention


def make_additive_attention(
    additive_scores: Callable[..., Stages],
    attend: Callable[..., Stages],
) -> Callable[..., Stages]:
    """Return attention with an additive score."""

    def additive_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        score_vector: Tensor,
        *,
        score_bias: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        mask_fill: float | None = None,
        empty_rows: EmptyRows = "zero",
    ) -> Stages:
        """Attend with an additive score."""
        masks: dict[str, Any] = {
            "mask": mask,
            "bias": bias,
            "is_causal": is_causal,
            "window": window,
            "key_lengths": key_lengths,
            "mask_fill": mask_fill,
        }
        scores = additive_scores(query, key, query_weight, key_weight, score_vector, score_bias=score_bias)
        return attend(scores, value, masks, empty_rows)

    return additive_attention


def make_cosine_attention(
    cosine_scores: Callable[..., Stages],
    attend: Callable[..., Stages],
) -> Callable[..., Stages]:
    """Return attention with the cosine as score."""

    def cosine_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        mask_fill: float | None = None,
        empty_rows: EmptyRows = "zero",
    ) -> Stages:
        """Attend with the cosine as score."""
        masks: dict[str, Any] = {
            "mask": mask,
            "bias": bias,
            "is_causal": is_causal,
            "window": window,
            "key_lengths": key_lengths,
            "mask_fill": mask_fill,
        }
        scores = cosine_scores(query, key, scale=scale)
        return attend(scores, value, masks, empty_rows)

    return cosine_attention


def make_normalized_attention(
    attention: Callable[..., Stages],
    normalize: Callable[..., Tensor],
    rotate: Callable[..., Tensor],
) -> Callable[..., Stages]:
    """Return attention of queries and keys that are normalised, before or after their rotation."""

    def normalized_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        norm: Norm = "rms",
        norm_over: NormOver = "head",
        epsilon: float = 1e-6,
        norm_after_rotation: bool = False,
        query_norm_weight: Tensor | None = None,
        key_norm_weight: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = False,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
    ) -> Stages:
        """Normalise queries and keys, rotate them, and attend; or rotate them first."""
        options: dict[str, Any] = {"mask": mask, "bias": bias, "sinks": sinks, "is_causal": is_causal, "scale": scale}
        options |= {"softcap": softcap, "window": window, "key_lengths": key_lengths}
        tables: dict[str, Any] = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
        tables["rotary_interleaved"] = rotary_interleaved
        stages: Stages = {}
        if norm_after_rotation and rotary_cos is not None and rotary_sin is not None:
            stages["rotated_query"] = query = rotate(query, rotary_cos, rotary_sin, rotary_interleaved)
            stages["rotated_key"] = key = rotate(key, rotary_cos, rotary_sin, rotary_interleaved)
            tables = {}
        is_full = norm_over == "full"
        stages["normalized_query"] = normalize(query, query_norm_weight, norm, epsilon, is_full)
        stages["normalized_key"] = normalize(key, key_norm_weight, norm, epsilon, is_full)
        return stages | attention(stages["normalized_query"], stages["normalized_key"], value, **options, **tables)

    return normalized_attention


def make_multi_head_attention(
    attention: Callable[..., Stages],
    project: Callable[..., Tensor],
    split_heads: Callable[..., Tensor],
    merge_heads: Callable[..., Tensor],
) -> Callable[..., Stages]:
    """Return attention in heads, between projections."""

    def multi_head_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        heads: int,
        kv_heads: int | None = None,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        output_weight: Tensor | None = None,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = False,
        is_causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        mask_fill: float | None = None,
        empty_rows: EmptyRows = "zero",
    ) -> Stages:
        """Project, attend in every head, merge the heads and project once more."""
        if output_weight is None and output_bias is not None:
            raise ValueError("output_bias needs output_weight")
        kv_heads = heads if kv_heads is None else kv_heads
        stages: Stages = {
            "query": split_heads(project(query, query_weight, query_bias), heads),
            "key": split_heads(project(key, key_weight, key_bias), kv_heads),
            "value": split_heads(project(value, value_weight, value_bias), kv_heads),
        }
        masks: dict[str, Any] = {"mask": mask, "bias": bias, "sinks": sinks, "is_causal": is_causal}
        masks |= {
            "past_key": past_key,
            "past_value": past_value,
            "window": window,
            "key_lengths": key_lengths,
            "empty_rows": empty_rows,
        }
        masks |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved}
        masks["mask_fill"] = mask_fill
        stages |= attention(**stages, **masks, scale=scale)
        stages["context"] = stages.pop("output")
        merged = merge_heads(stages["context"])
        stages["output"] = merged if output_weight is None else project(merged, output_weight, output_bias)
        return stages

    return multi_head_attention


def make_absorbed(
    attention: Callable[..., Stages],
    concatenate: Callable[..., Tensor],
    times_transposed: Callable[[Tensor, Tensor], Tensor],
) -> Callable[..., Stages]:
    """Return latent attention whose projections are absorbed, made of what joins arrays, and of a @ b^T.

    As servers decode, no key and no value is made: behind the query's own projection this is attention to one head of
    keys, the latent vectors, which are its values, too. DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section
    2.1.2.
    """

    def latent_attention(
        query: Tensor,
        latent: Tensor,
        key_projection: Tensor,
        value_projection: Tensor,
        *,
        query_rotary: Tensor | None = None,
        key_rotary: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        query_offsets: Tensor | None = None,
    ) -> Stages:
        """Attend to latent vectors, and project their mean."""
        options: dict[str, Any] = {"mask": mask, "bias": bias, "is_causal": is_causal, "softcap": softcap}
        options |= {"window": window, "key_lengths": key_lengths, "query_offsets": query_offsets}
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1] + (0 if query_rotary is None else query_rotary.shape[-1]))
        query, key = times_transposed(query, key_projection), latent  # (B, H, Lq, C), (B, Lk, C)
        if query_rotary is not None and key_rotary is not None:
            query, key = (concatenate(each, axis=-1) for each in ((query, query_rotary), (key, key_rotary)))
        stages = attention(query, key[:, None], latent[:, None], scale=scale, **options)
        return stages | {"output": stages["output"] @ value_projection}

    return latent_attention
