"""Operations that are composed of others in the same way whatever the framework, which gives what they are made of.

Each function here returns one of the contract, whose shapes and meanings stand in ``contract.py``. NumPy's backend,
which others are copied from, spells all of them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from types import SimpleNamespace
from typing import Any, Unpack

from attncheck.backends.contract import (
    Backend,
    Latent,
    MaskedRows,
    Norm,
    Normalized,
    NormOver,
    Projected,
    Stages,
    Tensor,
    takes,
)

SERVICES = ("prepare", "describe", "from_numpy", "to_numpy")
OF_MODELS = ("attention", "multi_head_attention")
FUNCTIONS = tuple(name for name in vars(Backend) if not name.startswith("_") and name not in SERVICES)
"""The functions of the contract that compute something."""


def with_functions(backend: Any, functions: Mapping[str, Callable[..., Stages]], **services: Any) -> SimpleNamespace:
    """Return a backend that has these functions, and of another one the services that are not given."""
    shared = {name: getattr(backend, name) for name in SERVICES}
    return SimpleNamespace(**{**shared, **services, **functions})


def compiled(backend: Any, compile_function: Callable[..., Any], *without: str, **services: Any) -> SimpleNamespace:
    """Return a backend with each of its functions compiled, but for those that are named."""
    names = (name for name in FUNCTIONS if name not in without and hasattr(backend, name))
    functions = {name: compile_function(getattr(backend, name)) for name in names}
    return with_functions(backend, functions, **services)


def compiled_output(backend: Any, compile_function: Callable[..., Any], **services: Any) -> SimpleNamespace:
    """Return a backend whose attention is compiled, of which only the output is returned, as models call it."""
    names = (name for name in OF_MODELS if hasattr(backend, name))
    functions = {name: compile_function(output_alone(getattr(backend, name))) for name in names}
    return with_functions(backend, functions, **services)


def output_alone(function: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return a function that returns its output alone, as models call it."""

    @wraps(function)
    def without_stages(*inputs: object, **options: object) -> Stages:
        return {"output": function(*inputs, **options)["output"]}

    return without_stages


def make_attend(mask_scores: Callable[..., Stages], softmax: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return what masks scores, normalises them and averages the values."""

    def attend(stages: Stages, value: Tensor, **masks: Unpack[MaskedRows]) -> Stages:
        empty_rows = masks.pop("empty_rows", "zero")
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

    @takes(MaskedRows)
    def general_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        *,
        score_bias: Tensor | None = None,
        **masks: Unpack[MaskedRows],
    ) -> Stages:
        """Attend with a bilinear score."""
        return attend(general_scores(query, key, weight, score_bias=score_bias), value, **masks)

    return general_attention


def make_additive_attention(
    additive_scores: Callable[..., Stages],
    attend: Callable[..., Stages],
) -> Callable[..., Stages]:
    """Return attention with an additive score."""

    @takes(MaskedRows)
    def additive_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        score_vector: Tensor,
        *,
        score_bias: Tensor | None = None,
        **masks: Unpack[MaskedRows],
    ) -> Stages:
        """Attend with an additive score."""
        scores = additive_scores(query, key, query_weight, key_weight, score_vector, score_bias=score_bias)
        return attend(scores, value, **masks)

    return additive_attention


def make_cosine_attention(
    cosine_scores: Callable[..., Stages],
    attend: Callable[..., Stages],
) -> Callable[..., Stages]:
    """Return attention with the cosine as score."""

    @takes(MaskedRows)
    def cosine_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        **masks: Unpack[MaskedRows],
    ) -> Stages:
        """Attend with the cosine as score."""
        return attend(cosine_scores(query, key, scale=scale), value, **masks)

    return cosine_attention


def make_normalized_attention(
    attention: Callable[..., Stages],
    normalize: Callable[..., Tensor],
    rotate: Callable[..., Tensor],
) -> Callable[..., Stages]:
    """Return attention of queries and keys that are normalised, before or after their rotation."""

    @takes(Normalized)
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
            stages["rotated_query"] = query = rotate(query, cos, sin, interleaved)
            stages["rotated_key"] = key = rotate(key, cos, sin, interleaved)
            options = {**options, "rotary_cos": None, "rotary_sin": None}
        is_full = norm_over == "full"
        stages["normalized_query"] = normalize(query, query_norm_weight, norm, epsilon, is_full)
        stages["normalized_key"] = normalize(key, key_norm_weight, norm, epsilon, is_full)
        return stages | attention(stages["normalized_query"], stages["normalized_key"], value, **options)

    return normalized_attention


def make_multi_head_attention(
    attention: Callable[..., Stages],
    project: Callable[..., Tensor],
    split_heads: Callable[..., Tensor],
    merge_heads: Callable[..., Tensor],
) -> Callable[..., Stages]:
    """Return attention in heads, between projections."""

    @takes(Projected)
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
            "query": split_heads(project(query, query_weight, query_bias), heads),
            "key": split_heads(project(key, key_weight, key_bias), kv_heads),
            "value": split_heads(project(value, value_weight, value_bias), kv_heads),
        }
        stages |= attention(**stages, **options, scale=scale)
        stages["context"] = stages.pop("output")
        merged = merge_heads(stages["context"])
        stages["output"] = merged if output_weight is None else project(merged, output_weight, output_bias)
        return stages

    return multi_head_attention


def absorbed(
    attention: Callable[..., Stages],
    concatenate: Callable[..., Tensor],
    times_transposed: Callable[[Tensor, Tensor], Tensor],
    services: Mapping[str, Any],
    compile_function: Callable[..., Any] = lambda function: function,
) -> SimpleNamespace:
    """Return a backend of latent attention with its projections absorbed, made of attention, of what joins
    arrays, and of a @ b^T.

    As servers decode, no key and no value is made: behind the query's own projection this is attention to one head of
    keys, the latent vectors, which are its values, too. DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section
    2.1.2.
    """

    @takes(Latent)
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
        """Attend to latent vectors, and project their mean."""
        if options.get("scale") is None:
            width = query.shape[-1] + (0 if query_rotary is None else query_rotary.shape[-1])
            options = {**options, "scale": 1 / math.sqrt(width)}
        query, key = times_transposed(query, key_projection), latent  # (B, H, Lq, C), (B, Lk, C)
        if query_rotary is not None and key_rotary is not None:
            query, key = (concatenate(each, axis=-1) for each in ((query, query_rotary), (key, key_rotary)))
        stages = attention(query, key[:, None], latent[:, None], **options)
        return stages | {"output": stages["output"] @ value_projection}

    return SimpleNamespace(**services, latent_attention=compile_function(latent_attention))
