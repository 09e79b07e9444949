"""Operations that are composed of others in the same way whatever the framework, which gives what they are made of.

Each function here returns a function of the contract, or a step of one; ``contract.py`` has the shapes and meanings. A
framework passes its ``ArrayFunctions``, and its implementations of some steps. NumPy's backend, the template for
others, has all of them in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce, wraps
from inspect import Parameter, Signature, signature
from operator import and_
from typing import Any, TypeAlias, Unpack

from attncheck.backends.contract import (
    Attended,
    Chosen,
    EmptyRows,
    Latent,
    LseBase,
    MaskedRows,
    Norm,
    Normalized,
    NormOver,
    Projected,
    Scored,
    Stages,
    Tensor,
    Window,
    show_keywords_of,
)

Operation: TypeAlias = Callable[..., Stages]
"""A function of the contract, or what gives some of its stages."""


def window_from_first_key(window: Window | None, past: int) -> Window | None:
    """Return the window for queries that are counted from 0, although they come after a past."""
    if window is None:
        return None
    left, right = window
    return (None if left is None else left - past, None if right is None else right + past)


@dataclass(frozen=True)
class ArrayFunctions:
    """A framework's functions of arrays, by the names of the array API standard where that has them.

    ``arange(length, like)`` gives positions where another array lies, ``take(rows, at)`` those of the first axis,
    ``norm`` the length of each vector, whose axis stays. ``transposed_product(a, b)`` is a @ b^T, ``linear(a, matrix)``
    the product of each vector with one matrix or vector. ``to_index_dtype`` takes integers to what ``arange`` gives.
    """

    arange: Callable[[int, Tensor], Tensor]
    astype: Callable[[Tensor, Any], Tensor]
    broadcast_to: Callable[..., Tensor]
    concat: Callable[..., Tensor]
    linear: Callable[[Tensor, Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    permute: Callable[..., Tensor]
    repeat: Callable[[Tensor, int, int], Tensor]
    reshape: Callable[..., Tensor]
    stack: Callable[..., Tensor]
    take: Callable[[Tensor, Tensor], Tensor]
    tanh: Callable[[Tensor], Tensor]
    transposed_product: Callable[[Tensor, Tensor], Tensor]
    where: Callable[..., Tensor]
    to_index_dtype: Callable[[Tensor], Tensor] = lambda integers: integers


# Scores and masks.


def make_dot_scores(arrays: ArrayFunctions) -> Operation:
    """Return scores by scaled dot product."""

    def dot_scores(
        query: Tensor, key: Tensor, *, scale: float | Tensor | None = None, softcap: float | None = None
    ) -> Stages:
        """Score by scaled dot product."""
        raw_scores = arrays.transposed_product(query, key)
        # A Python float takes the dtype of what it multiplies.
        scores = raw_scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        stages = {"raw_scores": raw_scores, "scores": scores}
        if softcap is not None:
            stages["capped"] = softcap * arrays.tanh(scores / softcap)
        return stages

    return dot_scores


def make_cosine_scores(arrays: ArrayFunctions) -> Operation:
    """Return scores by the cosine, without a least length: functions that normalise have one, and such vectors, too."""

    def cosine_scores(query: Tensor, key: Tensor, *, scale: float | None = None) -> Stages:
        """Score by the cosine of the angle between query and key."""
        cosine = arrays.transposed_product(query / arrays.norm(query), key / arrays.norm(key))
        return {"scores": cosine if scale is None else cosine * scale}

    return cosine_scores


def make_general_scores(arrays: ArrayFunctions) -> Operation:
    """Return scores by a bilinear form."""

    def general_scores(query: Tensor, key: Tensor, weight: Tensor, *, score_bias: Tensor | None = None) -> Stages:
        """Score by a bilinear form."""
        scores = arrays.transposed_product(arrays.linear(query, weight), key)
        return {"scores": scores if score_bias is None else scores + score_bias[:, None, None]}

    return general_scores


def make_additive_scores(arrays: ArrayFunctions) -> Operation:
    """Return scores by a small feed-forward network."""

    def additive_scores(
        query: Tensor,
        key: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        score_vector: Tensor,
        *,
        score_bias: Tensor | None = None,
    ) -> Stages:
        """Score by a small feed-forward network."""
        query_part = arrays.linear(query, query_weight)[..., :, None, :]  # (B, H, Lq, 1, A)
        key_part = arrays.linear(key, key_weight)[..., None, :, :]  # (B, H, 1, Lk, A)
        hidden = query_part + key_part
        if score_bias is not None:
            hidden = hidden + score_bias
        return {"scores": arrays.linear(arrays.tanh(hidden), score_vector)}

    return additive_scores


def causal_and_window_conditions(behind: Tensor, is_causal: bool, window: Window | None) -> list[Tensor]:
    """Return the conditions of causality and a window, from the distances of keys after queries."""
    left, right = window or (None, None)
    rules = [behind <= 0] if is_causal else []
    if left is not None:
        rules.append(behind >= -left)
    if right is not None:
        rules.append(behind <= right)
    return rules


def allowed_keys(
    arrays: ArrayFunctions,
    scores: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    query_offsets: Tensor | None = None,
) -> Tensor | None:
    """Return who may attend to whom, broadcasting to the scores; None where nothing is forbidden."""
    queries, keys = (arrays.arange(length, scores) for length in scores.shape[-2:])
    behind = keys - queries[:, None]
    if query_offsets is not None:
        behind = behind - arrays.to_index_dtype(query_offsets)[:, None, None, None]  # (B, 1, Lq, T)
    rules = [*([] if mask is None else [mask]), *causal_and_window_conditions(behind, is_causal, window)]
    if key_lengths is not None:
        rules.append(keys < arrays.to_index_dtype(key_lengths)[:, None, None, None])  # (B, 1, 1, T)
    return reduce(and_, rules) if rules else None


def make_mask_scores(arrays: ArrayFunctions) -> Operation:
    """Return what adds a bias and masks scores."""

    def mask_scores(
        scores: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        query_offsets: Tensor | None = None,
        mask_fill: float | None = None,
    ) -> Stages:
        """Add the bias, then set what may not be attended to -inf, or to ``mask_fill``."""
        rules: dict[str, Any] = {"is_causal": is_causal, "window": window, "key_lengths": key_lengths}
        allowed = allowed_keys(arrays, scores, mask=mask, query_offsets=query_offsets, **rules)
        stages: Stages = {}
        if bias is not None:
            scores = stages["biased"] = scores + bias
        if allowed is not None:
            stages["masked"] = arrays.where(allowed, scores, -math.inf if mask_fill is None else mask_fill)
        return stages

    return mask_scores


# Attention by dot products.


def make_attention(
    arrays: ArrayFunctions, dot_scores: Operation, mask_scores: Operation, softmax: Operation
) -> Operation:
    """Return attention by scaled dot products."""

    def softmax_with_sinks(logits: Tensor, sinks: Tensor, empty_rows: EmptyRows) -> Stages:
        # Over the keys and the sink of each head, whose own weight is not returned.
        column = arrays.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))  # (B, H, Lq, 1)
        joined = arrays.concat([logits, column], axis=-1)
        stages = softmax(joined)
        weights = stages["weights"][..., :-1]
        if empty_rows != "zero":
            fill = 1 / max(logits.shape[-1], 1) if empty_rows == "uniform" else math.nan
            is_empty = (stages["log_sum_exp"] == -math.inf)[..., None]
            weights = arrays.where(is_empty, fill, weights)
        return stages | {"weights": weights}

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        head_scale: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = False,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        query_offsets: Tensor | None = None,
        mask_fill: float | None = None,
        empty_rows: EmptyRows = "zero",
    ) -> Stages:
        """Rotate, score, mask, normalise and average the values."""
        stages: Stages = {}
        past = 0 if past_key is None else past_key.shape[-2]
        if rotary_cos is not None and rotary_sin is not None:
            cos, sin = rotary_cos[past:], rotary_sin[past:]
            key = rotate(arrays, key, cos, sin, rotary_interleaved)
            if query_offsets is not None:
                rows = arrays.to_index_dtype(query_offsets)[:, None, None] + arrays.arange(
                    query.shape[-2], query
                )  # (B, 1, Lq)
                cos, sin = arrays.take(rotary_cos, rows), arrays.take(rotary_sin, rows)
            query = stages["rotated_query"] = rotate(arrays, query, cos, sin, rotary_interleaved)
        if past_key is not None and past_value is not None:
            key, value = (arrays.concat(pair, axis=-2) for pair in ([past_key, key], [past_value, value]))
            window = window if query_offsets is not None else window_from_first_key(window, past)
        if rotary_cos is not None:
            stages["rotated_key"] = key  # the past comes rotated
        group = query.shape[1] // key.shape[1]  # query heads that share a key and value head
        if group > 1:
            key, value = arrays.repeat(key, group, 1), arrays.repeat(value, group, 1)
        factor = scale if head_scale is None else head_scale[:, None, None]
        stages |= dot_scores(query, key, scale=factor, softcap=softcap)
        *_, scores = stages.values()  # capped or not
        rules: dict[str, Any] = {"is_causal": is_causal, "window": window, "key_lengths": key_lengths}
        rules |= {"query_offsets": query_offsets, "mask_fill": mask_fill}
        stages |= mask_scores(scores, mask=mask, bias=bias, **rules)
        *_, logits = stages.values()  # the last stage that was asked for
        if sinks is None:
            stages |= softmax(logits, empty_rows=empty_rows)
        else:
            stages |= softmax_with_sinks(logits, sinks, empty_rows)
        stages["output"] = stages["weights"] @ value
        return stages

    return attention


def rotate(arrays: ArrayFunctions, inputs: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of elements of (B, H, L, D) by the first L rows of cos and sin, (L, R) or (B, 1, L, R)."""
    length, pairs = inputs.shape[-2], cos.shape[-1]
    cos, sin = cos[..., :length, :], sin[..., :length, :]
    rotated, rest = inputs[..., : 2 * pairs], inputs[..., 2 * pairs :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = arrays.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = arrays.reshape(turned, rotated.shape)
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
        turned = arrays.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return arrays.concat([turned, rest], axis=-1)


def split_heads(arrays: ArrayFunctions, inputs: Tensor, heads: int) -> Tensor:
    """Give heads an axis of their own: (B, L, H D) -> (B, H, L, D)."""
    batch, length, width = inputs.shape
    return arrays.permute(arrays.reshape(inputs, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def merge_heads(arrays: ArrayFunctions, context: Tensor) -> Tensor:
    """Put the heads of a position side by side: (B, H, L, D) -> (B, L, H D)."""
    batch, heads, length, width = context.shape
    return arrays.reshape(arrays.permute(context, (0, 2, 1, 3)), (batch, length, heads * width))


# Attention by other scores, and operations around attention.


def make_attend(mask_scores: Operation, softmax: Operation) -> Operation:
    """Return what masks scores, normalises them and averages the values."""

    def attend(stages: Stages, value: Tensor, **masks: Unpack[MaskedRows]) -> Stages:
        empty_rows = masks.pop("empty_rows", "zero")
        stages |= mask_scores(stages["scores"], **masks)
        *_, logits = stages.values()  # the last stage that was asked for
        stages |= softmax(logits, empty_rows=empty_rows)
        stages["output"] = stages["weights"] @ value
        return stages

    return attend


def make_attention_with_scores(scores: Operation, attend: Operation) -> Operation:
    """Return attention with a score of query, key and further inputs; the value comes behind the key."""
    query, key, *rest = signature(scores).parameters.values()

    names = [parameter.name for parameter in rest]

    @wraps(scores)
    def attention(query: Tensor, key: Tensor, value: Tensor, *weights: Tensor, **options: Any) -> Stages:
        score_options = {name: options.pop(name) for name in names if name in options}
        return attend(scores(query, key, *weights, **score_options), value, **options)

    value, masks = Parameter("value", Parameter.POSITIONAL_OR_KEYWORD), Parameter("masks", Parameter.VAR_KEYWORD)
    attention.__name__ = scores.__name__.replace("scores", "attention")
    attention.__signature__ = Signature([query, key, value, *rest, masks])  # type: ignore[attr-defined]
    return show_keywords_of(MaskedRows)(attention)


def make_gated_attention(attention: Operation, sigmoid: Callable[..., Tensor]) -> Operation:
    """Return attention whose output is multiplied with the sigmoid of its gate."""

    @show_keywords_of(Attended)
    def gated_attention(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, **options: Unpack[Attended]) -> Stages:
        """Attend, and multiply the output with the sigmoid of its gate."""
        stages = attention(query, key, value, **options)
        stages["context"] = stages.pop("output")
        stages["output"] = stages["context"] * sigmoid(gate)
        return stages

    return gated_attention


def make_packed_attention(
    arrays: ArrayFunctions, attention: Operation, searchsorted: Callable[..., Tensor]
) -> Operation:
    """Return attention within sequences; ``searchsorted`` is NumPy's."""

    @show_keywords_of(Scored)
    def packed_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        key_lengths: Tensor | None = None,
        **options: Unpack[Scored],
    ) -> Stages:
        """Attend under one mask for all sequences."""
        edges = options.pop("is_causal", False), options.pop("window", None)
        limits = [arrays.to_index_dtype(cu_seqlens) for cu_seqlens in (cu_seqlens_q, cu_seqlens_k)]
        positions = [arrays.arange(tensor.shape[2], tensor) for tensor in (query, key)]
        queries, keys = (searchsorted(*pair, side="right") - 1 for pair in zip(limits, positions, strict=True))
        lengths = [limit[1:] - limit[:-1] for limit in limits]
        used = lengths[1] if key_lengths is None else arrays.to_index_dtype(key_lengths)
        key_positions = positions[1] - arrays.take(limits[1], keys)
        behind_last = arrays.take(used - lengths[0], queries)
        query_positions = positions[0] - arrays.take(limits[0], queries) + behind_last
        is_used = key_positions < arrays.take(used, keys)
        rules = causal_and_window_conditions(key_positions - query_positions[:, None], *edges)
        mask = reduce(and_, [queries[:, None] == keys, is_used, *rules])
        # A weight of 0 times NaN is NaN.
        key, value = (arrays.where(is_used[:, None], tensor, 0) for tensor in (key, value))
        return attention(query, key, value, mask=mask[None, None], **options)

    return packed_attention


def make_paged_attention(
    arrays: ArrayFunctions, attention: Operation, clip: Callable[[Tensor, int, int], Tensor]
) -> Operation:
    """Return attention to pages of a cache; ``clip`` takes integers to the range that they may have."""

    @show_keywords_of(Scored)
    def paged_attention(
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        block_table: Tensor,
        key_lengths: Tensor,
        **options: Unpack[Scored],
    ) -> Stages:
        """Gather the pages of every batch entry, and attend to the keys that are used."""
        edges = options.pop("is_causal", False), options.pop("window", None)
        # Entries of the table after the last used page may be no pages.
        pages = clip(block_table, 0, key_pages.shape[0] - 1)
        key, value = (_join_pages(arrays, arrays.take(cache, pages)) for cache in (key_pages, value_pages))
        used, positions = arrays.to_index_dtype(key_lengths)[:, None], arrays.arange(key.shape[2], key)
        is_used = positions < used  # (B, T)
        # A weight of 0 times NaN is NaN.
        key, value = (arrays.where(is_used[:, None, :, None], tensor, 0) for tensor in (key, value))
        query_positions = arrays.arange(query.shape[2], query) + used - query.shape[2]  # (B, Lq)
        rules = causal_and_window_conditions(positions - query_positions[..., None], *edges)
        mask = reduce(and_, [is_used[:, None], *rules])
        return attention(query, key, value, mask=mask[:, None], **options)

    return paged_attention


def make_ragged_paged_attention(
    arrays: ArrayFunctions, packed_attention: Operation, clip: Callable[[Tensor, int, int], Tensor]
) -> Operation:
    """Return attention of packed queries to pages of a cache; ``packed_attention`` attends to keys that are packed."""

    @show_keywords_of(Scored)
    def ragged_paged_attention(
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        cu_seqlens_q: Tensor,
        block_table: Tensor,
        key_lengths: Tensor,
        *,
        tree_mask: Tensor | None = None,
        **options: Unpack[Scored],
    ) -> Stages:
        """Gather the pages of all sequences one after the other, and attend within each sequence."""
        sequences, width = block_table.shape
        pages = arrays.reshape(clip(block_table, 0, key_pages.shape[0] - 1), (1, sequences * width))
        key, value = (_join_pages(arrays, arrays.take(cache, pages)) for cache in (key_pages, value_pages))
        cu_seqlens_k = arrays.arange(sequences + 1, query) * width * key_pages.shape[1]
        keywords: dict[str, Any] = {**options}
        if tree_mask is not None:
            queries, keys = tree_mask.shape
            of_every_sequence = arrays.broadcast_to(tree_mask[:, None], (queries, sequences, keys))
            allowed = arrays.reshape(of_every_sequence, (1, 1, queries, sequences * keys))
            keywords["bias"] = arrays.where(allowed, 0 * arrays.astype(allowed, query.dtype), -math.inf)
        stages = packed_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, key_lengths=key_lengths, **keywords)
        return {name: stage for name, stage in stages.items() if name != "biased"}  # it is a part of the mask

    return ragged_paged_attention


def _join_pages(arrays: ArrayFunctions, pages: Tensor) -> Tensor:
    """Put the pages of every batch entry one after the other: (B, W, Lp, Hkv, D) -> (B, Hkv, W Lp, D)."""
    batch, count, keys, *rest = pages.shape
    return arrays.permute(arrays.reshape(pages, (batch, count * keys, *rest)), (0, 2, 1, 3))


def make_latent_attention(
    arrays: ArrayFunctions, attention: Operation, of_latents: Callable[[Tensor, Tensor], Tensor]
) -> Operation:
    """Return attention to latent vectors, which ``of_latents`` projects: (B, L, C), (H, C, W) -> (B, H, L, W)."""

    @show_keywords_of(Latent)
    def latent_attention(
        query: Tensor,
        latent: Tensor,
        key_projection: Tensor,
        value_projection: Tensor,
        *,
        query_rotary: Tensor | None = None,
        key_rotary: Tensor | None = None,
        **options: Unpack[Latent],
    ) -> Stages:
        """Make the keys and values of every head, and attend to them."""
        key, value = (of_latents(latent, projection) for projection in (key_projection, value_projection))
        if query_rotary is not None and key_rotary is not None:
            shared = arrays.broadcast_to(key_rotary[:, None], (*key.shape[:-1], key_rotary.shape[-1]))
            query, key = (arrays.concat(pair, axis=-1) for pair in ([query, query_rotary], [key, shared]))
        return attention(query, key, value, **options)

    return latent_attention


def make_sparse_attention(
    arrays: ArrayFunctions, attention: Operation, any_along: Callable[[Tensor, int], Tensor]
) -> Operation:
    """Return attention to keys by their indices; ``any_along(flags, axis)`` is where any flag along an axis is set."""

    @show_keywords_of(Chosen)
    def sparse_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_indices: Tensor,
        *,
        block_size: int = 1,
        **options: Unpack[Chosen],
    ) -> Stages:
        """Attend under a mask of the keys that are named, as models do in training."""
        block_of_key = arrays.arange(key.shape[2], key) // block_size
        mask = any_along(arrays.to_index_dtype(key_indices)[..., None] == block_of_key, -2)  # (B, Hkv, Lq, Lk)
        if mask.shape[1] > 1:
            mask = arrays.repeat(mask, query.shape[1] // mask.shape[1], 1)
        return attention(query, key, value, mask=mask, **options)

    return sparse_attention


def make_merge_states(
    arrays: ArrayFunctions, softmax: Operation, add_up: Callable[[Tensor, Tensor], Tensor]
) -> Operation:
    """Return what merges parts, which ``add_up`` adds up: (B, H, Lq, N), (N, B, H, Lq, Dv) -> (B, H, Lq, Dv)."""

    def merge_states(outputs: Tensor, log_sum_exps: Tensor, *, lse_base: LseBase = "e") -> Stages:
        """Merge what attention gave for parts of the keys."""
        scores = arrays.permute(log_sum_exps, (1, 2, 3, 0))  # (B, H, Lq, N)
        stages = softmax(scores if lse_base == "e" else scores * math.log(2))
        if lse_base == "2":
            stages["log_sum_exp"] = stages["log_sum_exp"] / math.log(2)
        is_empty = (log_sum_exps == -math.inf)[..., None]
        parts = arrays.where(is_empty, 0, outputs)  # 0 times NaN would be NaN
        merged = add_up(stages["weights"], arrays.astype(parts, scores.dtype))  # in float32 at least
        stages["output"] = arrays.astype(merged, outputs.dtype)
        return stages

    return merge_states


def make_normalized_attention(
    arrays: ArrayFunctions, attention: Operation, normalize: Callable[[Tensor, Tensor | None, Norm, float], Tensor]
) -> Operation:
    """Return attention of queries and keys that are normalised, before or after their rotation.

    ``normalize`` takes vectors along the last axis, with their weight.
    """

    def normalized(inputs: Tensor, weight: Tensor | None, norm: Norm, epsilon: float, is_full: bool) -> Tensor:
        if not is_full:
            return normalize(inputs, weight, norm, epsilon)
        return split_heads(arrays, normalize(merge_heads(arrays, inputs), weight, norm, epsilon), inputs.shape[1])

    @show_keywords_of(Normalized)
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
        **options: Unpack[Normalized],
    ) -> Stages:
        """Normalise queries and keys, rotate them, and attend; or rotate them first."""
        stages: Stages = {}
        cos, sin = options.get("rotary_cos"), options.get("rotary_sin")
        if norm_after_rotation and cos is not None and sin is not None:
            interleaved = options.get("rotary_interleaved", False)
            stages["rotated_query"] = query = rotate(arrays, query, cos, sin, interleaved)
            stages["rotated_key"] = key = rotate(arrays, key, cos, sin, interleaved)
            options = {**options, "rotary_cos": None, "rotary_sin": None}
        is_full = norm_over == "full"
        stages["normalized_query"] = normalized(query, query_norm_weight, norm, epsilon, is_full)
        stages["normalized_key"] = normalized(key, key_norm_weight, norm, epsilon, is_full)
        return stages | attention(stages["normalized_query"], stages["normalized_key"], value, **options)

    return normalized_attention


def make_multi_head_attention(
    arrays: ArrayFunctions, attention: Operation, project: Callable[..., Tensor]
) -> Operation:
    """Return attention in heads, between projections."""

    @show_keywords_of(Projected)
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
        scale: float | None = None,
        **options: Unpack[Projected],
    ) -> Stages:
        """Project, attend in every head, merge the heads and project once more."""
        if output_weight is None and output_bias is not None:
            raise ValueError("output_bias needs output_weight")
        kv_heads = heads if kv_heads is None else kv_heads
        stages: Stages = {
            "query": split_heads(arrays, project(query, query_weight, query_bias), heads),
            "key": split_heads(arrays, project(key, key_weight, key_bias), kv_heads),
            "value": split_heads(arrays, project(value, value_weight, value_bias), kv_heads),
        }
        stages |= attention(**stages, **options, scale=scale)
        stages["context"] = stages.pop("output")
        merged = merge_heads(arrays, stages["context"])
        stages["output"] = merged if output_weight is None else project(merged, output_weight, output_bias)
        return stages

    return multi_head_attention
