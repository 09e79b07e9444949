"""Operations that are composed of others in the same way whatever the framework, which gives what they are made of.

Each function here returns one of the contract, whose shapes and meanings stand in ``contract.py``. NumPy's backend,
which others are copied from, spells all of them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from types import SimpleNamespace
from typing import Any, Unpack

from attncheck.backends.contract import (
    Attended,
    Backend,
    Latent,
    MaskedRows,
    Norm,
    Normalized,
    NormOver,
    Projected,
    Scored,
    Stages,
    Tensor,
    Window,
    takes,
)

SERVICES = ("prepare", "describe", "from_numpy", "to_numpy")
OF_MODELS = ("attention", "multi_head_attention")
FUNCTIONS = tuple(name for name in vars(Backend) if not name.startswith("_") and name not in SERVICES)
"""The functions of the contract that compute something."""
_WITHOUT_GRADIENTS = frozenset({"past_key", "past_value", "query_offsets"})
_PLACES = frozenset({"cu_seqlens_q", "cu_seqlens_k"})
"""Inputs that say where others begin."""


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


def seen_from_the_first_key(window: Window | None, past: int) -> Window | None:
    """Return the window for queries that are counted from 0, though they stand behind a past."""
    if window is None:
        return None
    left, right = window
    return (None if left is None else left - past, None if right is None else right + past)


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


def make_attention_by(scores: Callable[..., Stages], attend: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return attention with a score of query, key and further inputs; the value comes behind the key."""
    query, key, *rest = signature(scores).parameters.values()

    names = [each.name for each in rest]

    @wraps(scores)
    def attention(query: Tensor, key: Tensor, value: Tensor, *weights: Tensor, **options: Any) -> Stages:
        own = {name: options.pop(name) for name in names if name in options}
        return attend(scores(query, key, *weights, **own), value, **options)

    value, masks = Parameter("value", Parameter.POSITIONAL_OR_KEYWORD), Parameter("masks", Parameter.VAR_KEYWORD)
    attention.__name__ = scores.__name__.replace("scores", "attention")
    attention.__signature__ = Signature([query, key, value, *rest, masks])  # type: ignore[attr-defined]
    return takes(MaskedRows)(attention)


def make_gated_attention(attention: Callable[..., Stages], sigmoid: Callable[..., Tensor]) -> Callable[..., Stages]:
    """Return attention whose output is multiplied with the sigmoid of its gate."""

    @takes(Attended)
    def gated_attention(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, **options: Unpack[Attended]) -> Stages:
        """Attend, and multiply the output with the sigmoid of its gate."""
        stages = attention(query, key, value, **options)
        stages["context"] = stages.pop("output")
        stages["output"] = stages["context"] * sigmoid(gate)
        return stages

    return gated_attention


def make_quantized_attention(attention: Callable[..., Stages], cast: Callable[..., Tensor]) -> Callable[..., Stages]:
    """Return attention to keys and values of 8 bits, which ``cast`` takes to another dtype."""

    @takes(Scored)
    def quantized_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_scale: Tensor,
        value_scale: Tensor,
        *,
        mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        **options: Unpack[Scored],
    ) -> Stages:
        """Widen keys and values, multiply them with their scales, and attend."""
        key, value = (
            cast(each, query.dtype) * factor[..., None] for each, factor in ((key, key_scale), (value, value_scale))
        )
        return attention(query, key, value, mask=mask, key_lengths=key_lengths, **options)

    return quantized_attention


def make_gradients(
    operation: Callable[..., Stages],
    differentiate: Callable[[Callable[..., Stages], Stages, Tensor, Mapping[str, Any]], Stages],
) -> Callable[..., Stages]:
    """Return the gradients of an operation: ``differentiate`` takes them by inputs, and by a bias and sinks if given.

    A past, and where queries begin, are no part of an operation that is differentiated.
    """
    parameters = signature(operation).parameters.values()
    inputs = [each for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    grad_output = Parameter("grad_output", Parameter.POSITIONAL_OR_KEYWORD)
    options = [each for each in parameters if each not in inputs and each.name not in _WITHOUT_GRADIENTS]
    names = [each.name for each in (*inputs, grad_output)]
    differentiated = [name for name in names[:-1] if name not in _PLACES]

    @wraps(operation)
    def gradients(*tensors: Tensor, **named: Any) -> Stages:
        given = {**dict(zip(names, tensors, strict=False)), **named}
        own = {name: given.pop(name) for name in differentiated}
        return differentiate(operation, own, given.pop("grad_output"), given)

    gradients.__name__ = f"{operation.__name__}_gradients"
    gradients.__signature__ = Signature([*inputs, grad_output, *options])  # type: ignore[attr-defined]
    return gradients


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
    services: Any,
    compile_function: Callable[..., Any] = lambda function: function,
) -> SimpleNamespace:
    """Return a backend of latent attention with its projections absorbed, made of attention, of what joins
    arrays, and of a @ b^T; its services are those of another backend.

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

    return with_functions(services, {"latent_attention": compile_function(latent_attention)})
