"""Backends made of others: with each function compiled, the output alone, gradients, or projections absorbed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from types import SimpleNamespace
from typing import Any, Unpack

from attncheck.backends.composed import Operation
from attncheck.backends.contract import Backend, Latent, Stages, Tensor, show_keywords_of

SERVICES = ("prepare", "describe", "from_numpy", "to_numpy")
MODEL_FUNCTIONS = ("attention", "multi_head_attention")
FUNCTIONS = tuple(name for name in vars(Backend) if not name.startswith("_") and name not in SERVICES)
"""The functions of the contract that compute something."""
_WITHOUT_GRADIENTS = frozenset({"past_key", "past_value", "query_offsets"})
_OFFSET_INPUTS = frozenset({"cu_seqlens_q", "cu_seqlens_k"})
"""Inputs with the positions at which others begin."""


def with_functions(backend: Any, functions: Mapping[str, Operation], **services: Any) -> SimpleNamespace:
    """Return a backend with these functions and services; missing services are those of ``backend``."""
    shared = {name: getattr(backend, name) for name in SERVICES}
    return SimpleNamespace(**{**shared, **services, **functions})


def compile_backend(
    backend: Any, compile_function: Callable[..., Any], *without: str, **services: Any
) -> SimpleNamespace:
    """Return a backend with all of its functions compiled except those named in ``without``."""
    names = (name for name in FUNCTIONS if name not in without and hasattr(backend, name))
    functions = {name: compile_function(getattr(backend, name)) for name in names}
    return with_functions(backend, functions, **services)


def compile_output_only(backend: Any, compile_function: Callable[..., Any], **services: Any) -> SimpleNamespace:
    """Return a backend whose attention is compiled and returns only the output, as in models."""
    names = (name for name in MODEL_FUNCTIONS if hasattr(backend, name))
    functions = {name: compile_function(output_only(getattr(backend, name))) for name in names}
    return with_functions(backend, functions, **services)


def output_only(function: Operation) -> Operation:
    """Return a function that returns only its output, as in models."""

    @wraps(function)
    def without_stages(*inputs: object, **options: object) -> Stages:
        return {"output": function(*inputs, **options)["output"]}

    return without_stages


def make_gradients(
    operation: Operation,
    gradients: Callable[[Callable[..., Tensor], Sequence[Tensor], Tensor, Mapping[str, Any]], Sequence[Tensor]],
) -> Operation:
    """Return the operation of the gradients by its inputs, and by a bias and sinks if given, with the framework's rule.

    A differentiated operation has no past and no query offsets.
    """
    parameters = signature(operation).parameters.values()
    inputs = [parameter for parameter in parameters if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD]
    grad_output = Parameter("grad_output", Parameter.POSITIONAL_OR_KEYWORD)
    options = [
        parameter for parameter in parameters if parameter not in inputs and parameter.name not in _WITHOUT_GRADIENTS
    ]
    names = [parameter.name for parameter in (*inputs, grad_output)]
    differentiable = [name for name in names[:-1] if name not in _OFFSET_INPUTS]

    @wraps(operation)
    def differentiated(*tensors: Tensor, **named: Any) -> Stages:
        arguments = {**dict(zip(names, tensors, strict=False)), **named}
        by = [*differentiable, *(name for name in ("bias", "sinks") if arguments.get(name) is not None)]
        leaves, delta = [arguments.pop(name) for name in by], arguments.pop("grad_output")

        def output_of(*leaves: Tensor, **others: Any) -> Tensor:
            return operation(**dict(zip(by, leaves, strict=True)), **others)["output"]

        results = gradients(output_of, leaves, delta, arguments)
        return {f"grad_{name}": gradient for name, gradient in zip(by, results, strict=True)}

    differentiated.__name__ = f"{operation.__name__}_gradients"
    differentiated.__signature__ = Signature([*inputs, grad_output, *options])  # type: ignore[attr-defined]
    return differentiated


def with_gradients(backend: Any, **functions: Operation) -> SimpleNamespace:
    """Return a backend with these functions and the gradients of each, by the framework's rule."""

    def gradients(*arguments: Any, **more: Any) -> Any:  # looked up late: a backend in a script has no gradients
        return backend.gradients(*arguments, **more)

    differentiated = {f"{name}_gradients": make_gradients(function, gradients) for name, function in functions.items()}
    return with_functions(backend, functions | differentiated)


def make_absorbed_backend(
    attention: Operation,
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
        """Attend to latent vectors, and project their mean."""
        if options.get("scale") is None:
            width = query.shape[-1] + (0 if query_rotary is None else query_rotary.shape[-1])
            options = {**options, "scale": 1 / math.sqrt(width)}
        query, key = times_transposed(query, key_projection), latent  # (B, H, Lq, C), (B, Lk, C)
        if query_rotary is not None and key_rotary is not None:
            query, key = (concatenate(pair, axis=-1) for pair in ((query, query_rotary), (key, key_rotary)))
        stages = attention(query, key[:, None], latent[:, None], **options)
        return stages | {"output": stages["output"] @ value_projection}

    return with_functions(services, {"latent_attention": compile_function(latent_attention)})
