"""Which function of a backend an operation calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from attncheck.backends.contract import Backend, Stages


def run_operation(
    backend: Backend, operation: str, inputs: Mapping[str, NDArray[Any]], options: Mapping[str, Any]
) -> Stages:
    """Call the backend's function for an operation, inputs turned into the framework's own arrays."""
    tensors = {name: backend.from_numpy(array) for name, array in inputs.items()}
    match operation:
        case "scoring":
            return _score(backend, tensors, dict(options))
        case "masking":
            return backend.mask_scores(**tensors, **options)
        case "softmax":
            return backend.softmax(**tensors)
        case "attention":
            return backend.attention(**tensors, **options)
        case "multi_head_attention":
            return backend.multi_head_attention(**tensors, **options)
    raise AssertionError(f"an operation that no backend has: {operation}")


def _score(backend: Backend, tensors: dict[str, Any], options: dict[str, Any]) -> Stages:
    match options.pop("score", "scaled_dot"):
        case "general":
            return backend.general_scores(**tensors)
        case "additive":
            return backend.additive_scores(**tensors)
        case "dot":
            return backend.dot_scores(**tensors, scale=options.get("scale", 1.0))
    return backend.dot_scores(**tensors, **options)
