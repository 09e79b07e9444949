"""Which function of a backend an operation calls, whether it takes what is asked, and what its result is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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

    @classmethod
    def of_function(cls, name: str) -> LackingError:
        """Say that there is no function of the contract of this name."""
        return cls(f"has no {name}", (f"{name}()",))


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
        raise LackingError.of_function(name)
    keywords = {each: value for each, value in keywords.items() if each not in not_asked(backend, operation, options)}
    check_parameters(parameters_of(function), {**inputs, **keywords})
    tensors = {name: backend.from_numpy(array) for name, array in inputs.items()}
    stages: Stages = function(**tensors, **keywords)
    return stages


@dataclass(frozen=True)
class Parameters:
    """What a function can be called with: the ``names`` of its parameters, or any, where it ``takes_all``."""

    names: frozenset[str]
    takes_all: bool = False

    def accepted(self, names: Iterable[str]) -> frozenset[str]:
        """Return which of these names there is a parameter for."""
        return frozenset(name for name in names if self.takes_all or name in self.names)

    def lacking(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return, in order, the names that there is no parameter for."""
        return () if self.takes_all else tuple(name for name in names if name not in self.names)


def not_asked(backend: Backend, operation: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the conventions among the options that the backend's function has no parameter for."""
    if CONVENTIONS.isdisjoint(options):
        return ()
    name, _ = call_of(operation, options)
    function = getattr(backend, name, None)
    if function is None:
        return ()
    # Somebody's own function is called by a wrapper that takes anything.
    return conventions_lacking(parameters_of(getattr(function, "user_function", function)), options)


def conventions_lacking(parameters: Parameters, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the conventions among the options that there is no parameter for."""
    return parameters.lacking(sorted(CONVENTIONS & options.keys()))


def check_parameters(parameters: Parameters, asked: Iterable[str]) -> None:
    """Raise ``LackingError`` for what there is no parameter for: a capability is a parameter."""
    if missing := parameters.lacking(asked):
        raise LackingError(f"takes no {', '.join(missing)}", missing)


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a function: of what it wraps, which hundreds of variants have in common."""
    function = getattr(function, "__func__", function)
    return _parameters_of_wrapped(inspect.unwrap(function, stop=lambda each: hasattr(each, "__signature__")))


@lru_cache(maxsize=256)
def _parameters_of_wrapped(function: Callable[..., Any]) -> Parameters:
    kinds = {name: each.kind for name, each in inspect.signature(function).parameters.items()}
    return Parameters(frozenset(kinds), inspect.Parameter.VAR_KEYWORD in kinds.values())


def call_of(operation: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the contract's function of an operation, and the keywords that it is called with besides inputs."""
    keywords = {name: value for name, value in options.items() if name != "score"}
    assert operation in OPERATIONS, f"an operation that no backend has: {operation}"
    if operation != "scoring":
        return OPERATIONS[operation].function, keywords
    score = score_of(options)
    return score.function, keywords if score.scale is None else {"scale": score.scale, **keywords}
