"""Backends made of others: with each function compiled, the output alone, gradients, or projections absorbed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from types import SimpleNamespace
from typing import Any, Unpack

from attncheck.backends.composed import Operation
from attncheck.backends.contract import Backend, Latent, Stages, Tensor, takes

SERVICES = ("prepare", "describe", "from_numpy", "to_numpy")
OF_MODELS = ("attention", "multi_head_attention")
FUNCTIONS = tuple(name for name in vars(Backend) if not name.startswith("_") and name not in SERVICES)
"""The functions of the contract that compute something."""
_WITHOUT_GRADIENTS = frozenset({"past_key", "past_value", "query_offsets"})
_PLACES = frozenset({"cu_seqlens_q", "cu_seqlens_k"})
"""Inputs that say where others begin."""


def with_functions(backend: Any, functions: Mapping[str, Operation], **services: Any) -> SimpleNamespace:
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


def output_alone(function: Operation) -> Operation:
    """Return a function that returns its output alone, as models call it."""

    @wraps(function)
    def without_stages(*inputs: object, **options: object) -> Stages:
        return {"output": function(*inputs, **options)["output"]}

    return without_stages


def make_gradients(
    operation: Operation,
    gradients: Callable[[Callable[..., Tensor], Sequence[Tensor], Tensor, Mapping[str, Any]], Sequence[Tensor]],
) -> Operation:
    """Return the gradients of an operation by its inputs, and by a bias and sinks if given, as a framework takes them.

    A past, and where queries begin, are no part of an operation that is differentiated.
    """
    parameters = signature(operation).parameters.values()
    inputs = [each for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    grad_output = Parameter("grad_output", Parameter.POSITIONAL_OR_KEYWORD)
    options = [each for each in parameters if each not in inputs and each.name not in _WITHOUT_GRADIENTS]
    names = [each.name for each in (*inputs, grad_output)]
    own = [name for name in names[:-1] if name not in _PLACES]

    @wraps(operation)
    def differentiated(*tensors: Tensor, **named: Any) -> Stages:
        given = {**dict(zip(names, tensors, strict=False)), **named}
        by = [*own, *(name for name in ("bias", "sinks") if given.get(name) is not None)]
        leaves, delta = [given.pop(name) for name in by], given.pop("grad_output")

        def output_of(*leaves: Tensor, **others: Any) -> Tensor:
            return operation(**dict(zip(by, leaves, strict=True)), **others)["output"]

        found = gradients(output_of, leaves, delta, given)
        return {f"grad_{name}": gradient for name, gradient in zip(by, found, strict=True)}

    differentiated.__name__ = f"{operation.__name__}_gradients"
    differentiated.__signature__ = Signature([*inputs, grad_output, *options])  # type: ignore[attr-defined]
    return differentiated


def with_gradients(backend: Any, **functions: Operation) -> SimpleNamespace:
    """Return a backend that has these functions, and the gradients of each, as its framework takes them."""

    def gradients(*given: Any, **more: Any) -> Any:  # of which a backend in a script for a bug report has none
        return backend.gradients(*given, **more)

    differentiated = {f"{name}_gradients": make_gradients(each, gradients) for name, each in functions.items()}
    return with_functions(backend, functions | differentiated)


def absorbed(
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
