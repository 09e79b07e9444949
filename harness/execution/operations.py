"""Which function of a backend an operation calls, whether it takes what is asked, and what its result is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from attncheck.backends.contract import Backend, Stages
from attncheck.spec import CONVENTIONS, OPERATIONS, score_of


class LackingError(NotImplementedError):
    """An implementation has not what a case asks for; ``lacks`` names it: parameters, functions, capabilities."""

    def __init__(self, message: str, lacks: tuple[str, ...]) -> None:
        super().__init__(message)
        self.lacks = lacks


def run_operation(
    backend: Backend, operation: str, inputs: Mapping[str, NDArray[Any]], options: Mapping[str, Any]
) -> Stages:
    """Call the backend's function for an operation, inputs turned into the framework's own arrays.

    Conventions that the function does not take are left out (``not_asked``). Raises ``LackingError`` where the
    backend has no such function, or the function has not every other parameter that the case needs.
    """
    name, keywords = call_of(operation, options)
    function = getattr(backend, name, None)
    if function is None:
        raise LackingError(f"has no {name}", (f"{name}()",))
    keywords = {each: value for each, value in keywords.items() if each not in not_asked(backend, operation, options)}
    check_parameters(function, {**inputs, **keywords})
    tensors = {name: backend.from_numpy(array) for name, array in inputs.items()}
    stages: Stages = function(**tensors, **keywords)
    return stages


def not_asked(backend: Backend, operation: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the conventions among the options that the backend's function has no parameter for."""
    conventions = sorted(CONVENTIONS & options.keys())
    if not conventions:
        return ()
    name, _ = call_of(operation, options)
    function = getattr(backend, name, None)
    if function is None:
        return ()
    # Somebody's own function is called by a wrapper that takes anything.
    kinds = _kinds_of(getattr(function, "user_function", function))
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    return () if takes_all else tuple(each for each in conventions if each not in kinds)


def check_parameters(function: Callable[..., Any], asked: Mapping[str, Any]) -> None:
    """Raise ``LackingError`` where a function lacks a parameter: a capability is a parameter."""
    kinds = _kinds_of(function)
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return
    missing = [name for name in asked if name not in kinds]
    if missing:
        raise LackingError(f"takes no {', '.join(missing)}", tuple(missing))


def accepted_of(function: Callable[..., Any], names: Iterable[str]) -> frozenset[str]:
    """Return which of these names a function has a parameter for."""
    kinds = _kinds_of(function)
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    return frozenset(name for name in names if takes_all or name in kinds)


def _kinds_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the kind of each parameter: of what a function wraps, which hundreds of variants have in common."""
    function = getattr(function, "__func__", function)
    return _kinds_of_wrapped(inspect.unwrap(function, stop=lambda each: hasattr(each, "__signature__")))


@lru_cache(maxsize=256)
def _kinds_of_wrapped(function: Callable[..., Any]) -> Mapping[str, Any]:
    return {name: each.kind for name, each in inspect.signature(function).parameters.items()}


def call_of(operation: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the contract's function of an operation, and the keywords that it is called with besides inputs."""
    keywords = {name: value for name, value in options.items() if name != "score"}
    assert operation in OPERATIONS, f"an operation that no backend has: {operation}"
    if operation != "scoring":
        return OPERATIONS[operation].function, keywords
    score = score_of(options)
    return score.function, keywords if score.scale is None else {"scale": score.scale, **keywords}
