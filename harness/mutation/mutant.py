"""Variants of the NumPy backend with some of its steps replaced, and the faults and right variants that they represent.

A step is a function of ``numpy_backend``, also a private one. A variant has all of the backend's functions, rebuilt in
a namespace in which the step's name is another function. So only the backend defines attention, and every variant has
each new option of the backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from inspect import Signature, isfunction, signature
from types import FunctionType, SimpleNamespace
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import Array
from attncheck.reading.case import Case
from attncheck.spec import LOGITS

StepFunction: TypeAlias = Callable[..., Any]
StepReplacements: TypeAlias = dict[str, Any]
"""Replacements by step: ``_dot`` wherever it is used, ``dot_scores._dot`` only in ``dot_scores``.

A value is a function, or ``StepsPerCall`` for a function of the backend. Under a name such as ``_cap.np``, it is the
library.
"""

_BACKEND_FUNCTIONS: Mapping[str, FunctionType] = {
    name: value
    for name, value in vars(numpy_backend).items()
    if isfunction(value) and value.__module__ == numpy_backend.__name__
}
_CONTRACT_SIGNATURES: Mapping[str, Signature] = {
    name: signature(function) for name, function in _BACKEND_FUNCTIONS.items() if not name.startswith("_")
}
_CONVERSION_FUNCTIONS = ("prepare", "describe", "from_numpy", "to_numpy")
OPERATION_FUNCTIONS = tuple(name for name in _CONTRACT_SIGNATURES if name not in _CONVERSION_FUNCTIONS)
"""The functions of the contract that return stages."""


@dataclass(frozen=True)
class StepsPerCall:
    """Steps of a function of the backend, made for each of its calls from the arguments."""

    make_steps: Callable[[AttentionCall], StepReplacements]


class AttentionCall:
    """The arguments of ``attention`` or ``attention_gradients``, by name, and values that follow from them.

    ``stages`` are all stages of the variant's forward pass, computed on request.
    """

    def __init__(self, namespace: Mapping[str, Any], attention: StepFunction, arguments: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._attention = attention
        self._arguments = arguments

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._arguments:
            raise AttributeError(name)
        return self._arguments[name]

    def step_function(self, name: str) -> StepFunction:
        """Return the variant's own step."""
        return cast(StepFunction, self._namespace[name])

    @property
    def scale_factor(self) -> float:
        """The factor of the raw scores, before the factor of each head."""
        return numpy_backend._scale_of(self.query, self.scale if self.head_scale is None else 1.0)

    @property
    def past_length(self) -> int:
        """The number of keys from a cache."""
        past_key = self._arguments.get("past_key")
        return 0 if past_key is None else int(past_key.shape[-2])

    @property
    def query_offsets(self) -> Array | None:
        """The position of the first query of each batch entry, if given; never for gradients."""
        return self._arguments.get("query_offsets")

    @property
    def has_shared_heads(self) -> bool:
        """True if query heads share heads of keys and values."""
        return bool(self.query.shape[1] != self.key.shape[1])

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """The shape of the scores, (B, H, Lq, T)."""
        return (*self.query.shape[:3], self.past_length + self.key.shape[-2])

    @cached_property
    def stages(self) -> Stages:
        """The stages of the forward pass."""
        taken = _CONTRACT_SIGNATURES["attention"].parameters
        return cast(
            Stages, self._attention(**{name: value for name, value in self._arguments.items() if name in taken})
        )

    @property
    def scores(self) -> Array:
        """The scores to which bias and mask are applied, (B, H, Lq, T)."""
        return cast(Array, self.stages.get("capped", self.stages["scores"]))

    @property
    def weights(self) -> Array:
        """The weights, (B, H, Lq, T)."""
        return cast(Array, self.stages["weights"])

    @property
    def unmasked_logits(self) -> Array:
        """The logits before anything was forbidden."""
        return cast(Array, next(self.stages[name] for name in LOGITS[-2::-1] if name in self.stages))

    @property
    def masked_logits(self) -> Array:
        """The logits with -inf for forbidden keys, also in rows without a key."""
        return cast(Array, self.stages.get("masked", self.unmasked_logits))

    @property
    def logits(self) -> Array:
        """The input of the softmax."""
        return numpy_backend._fill_empty_rows(self.masked_logits, self.sinks, self.empty_rows)

    @property
    def log_sum_exp(self) -> Array:
        """The rows' log_sum_exp, an axis for the keys kept: (B, H, Lq, 1)."""
        return cast(Array, self.stages["log_sum_exp"][..., np.newaxis])


class BackendVariant:
    """One implementation under the contract's names: the NumPy backend with some of its steps replaced.

    ``hidden_stages`` are not returned, as a kernel does not return stages that it never has. ``steps`` are the replaced
    ones; None if they are unknown. Of thousands of variants, few functions are ever called: they are made when first
    used.
    """

    def __init__(self, steps: StepReplacements | None = None, *, hidden_stages: frozenset[str] = frozenset()) -> None:
        self.hidden_stages = hidden_stages
        self.steps: StepReplacements | None = steps or {}
        self._namespace = _namespace_with_replacements(self.steps)

    def __getattr__(self, name: str) -> StepFunction:
        """Return a function of the contract. Raises ``AttributeError`` for any other name."""
        if name not in _CONTRACT_SIGNATURES:
            raise AttributeError(f"a variant of numpy_backend has no {name}")
        self._set_contract_function(name, self._namespace[name])
        return cast(StepFunction, vars(self)[name])

    def function_named(self, name: str) -> StepFunction:
        """Return this variant's version of a function of the backend."""
        return cast(StepFunction, self._namespace[name])

    @cached_property
    def replaced_functions(self) -> Mapping[tuple[str | None, str], StepFunction]:
        """The functions that replace functions of the backend, for one caller or for any (None).

        If a step is not a function of the backend, such as its library, the function that uses it counts as replaced.
        """
        functions: dict[tuple[str | None, str], StepFunction] = {}
        for key, step in (self.steps or {}).items():
            function, _, name = key.rpartition(".")
            if function and name in _BACKEND_FUNCTIONS:
                functions[function, name] = step
            elif function:
                functions[None, function] = self._namespace[
                    function
                ].__call__  # as a whole, also where it is made per call
            else:
                functions.setdefault((None, name), self._namespace[name])
        return functions

    def _set_contract_function(self, name: str, function: StepFunction) -> None:
        """Set a function under the contract's name and parameters, without the hidden stages."""

        @wraps(_BACKEND_FUNCTIONS[name])
        def run_without_hidden_stages(*arrays: Any, **keywords: Any) -> Any:
            returned = function(*arrays, **keywords)
            if name in _CONVERSION_FUNCTIONS:
                return returned
            return {stage: array for stage, array in returned.items() if stage not in self.hidden_stages}

        setattr(self, name, run_without_hidden_stages)


def wrap_backend_functions(wrap: Callable[[str, StepFunction], StepFunction]) -> dict[str, StepFunction]:
    """Pass each function of the backend with its name to ``wrap``; return the results, which call each other."""
    namespace = dict(vars(numpy_backend))
    recorded = {
        name: wrap(name, _copy_into_namespace(function, namespace)) for name, function in _BACKEND_FUNCTIONS.items()
    }
    namespace |= recorded
    return recorded


def rebind_globals(function: StepFunction, **new_globals: Any) -> StepFunction:
    """Return a function in which some global names mean something else. Raises ``KeyError`` for one that it lacks."""
    assert isinstance(function, FunctionType)
    _check_names_are_used(function, new_globals)
    return _copy_into_namespace(function, {**function.__globals__, **new_globals})


def numpy_with(**replacements: Any) -> SimpleNamespace:
    """Return NumPy with some functions replaced, like a library with approximations."""
    return SimpleNamespace(**{**vars(np), **replacements})


def _copy_into_namespace(function: FunctionType, namespace: dict[str, Any]) -> FunctionType:
    again = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    again.__kwdefaults__ = function.__kwdefaults__
    return again


def _check_names_are_used(function: FunctionType, names: Iterable[str]) -> None:
    """Raise ``KeyError`` for a name whose replacement would change nothing."""
    for name in names:
        if name not in function.__code__.co_names or name not in vars(numpy_backend):
            raise KeyError(f"{function.__name__} of numpy_backend uses no {name}")


def _namespace_with_replacements(steps: StepReplacements) -> dict[str, Any]:
    """Return the backend's namespace with other steps. Raises ``KeyError`` for a step that it does not have."""
    namespace = dict(vars(numpy_backend))
    namespace |= {name: _copy_into_namespace(function, namespace) for name, function in _BACKEND_FUNCTIONS.items()}
    local: dict[str, dict[str, Any]] = {}
    for key, step in steps.items():
        function, _, name = key.rpartition(".")
        if (function or name) not in _BACKEND_FUNCTIONS:
            raise KeyError(f"numpy_backend has no function {function or name}")
        if function:
            local.setdefault(function, {})[name] = step
            _check_names_are_used(_BACKEND_FUNCTIONS[function], [name])
        elif not isinstance(step, StepsPerCall):
            namespace[name] = step
    scopes: dict[str, dict[str, Any]] = {function: {} for function in local}
    namespace |= {
        function: _copy_into_namespace(_BACKEND_FUNCTIONS[function], scope) for function, scope in scopes.items()
    }
    per_call = {name: step for name, step in steps.items() if isinstance(step, StepsPerCall)}
    namespace |= {name: FunctionPerCall(name, step, namespace[name], namespace) for name, step in per_call.items()}
    for function, scope in scopes.items():
        scope.update(namespace | local[function])
    return namespace


@dataclass(frozen=True, eq=False)
class FunctionPerCall:
    """A function of the backend whose steps are made for each call."""

    name: str
    per_call_steps: StepsPerCall
    original_function: FunctionType
    namespace: Mapping[str, Any]

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        """Call the function with the steps of this call."""
        return _copy_into_namespace(
            self.original_function,
            {**self.original_function.__globals__, **self.replacements_in_call(arrays, keywords)},
        )(*arrays, **keywords)

    def replacements_in_call(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> StepReplacements:
        """Return the replacements by name in one call. Raises ``KeyError`` for a name that is not used."""
        bound = _CONTRACT_SIGNATURES[self.name].bind(*arrays, **keywords)
        bound.apply_defaults()
        attention = self.original_function if self.name == "attention" else self.namespace["attention"]
        steps = self.per_call_steps.make_steps(AttentionCall(self.namespace, attention, bound.arguments))
        _check_names_are_used(_BACKEND_FUNCTIONS[self.name], steps)
        return steps


WIDE_DTYPES = ("float64", "float32")
"""A fault of precision: what is one in these may be the declared storage of a 16-bit implementation."""
ALL_BUT_BFLOAT16 = (*WIDE_DTYPES, "float16")
"""A fault of meaning, in whatever dtype. NumPy's matmul of bfloat16 widens, so the reference does not keep that one."""
FAST_PATH_DTYPES = ("float32", "float16")
"""A fault of a fast path: there are none in float64, and cases of their sizes leave it out."""

REFERENCE_NAME = "reference"
"""The control that is the reference itself."""

ROUNDING_DIAGNOSIS = ("accuracy-of-16-bits",)
"""The diagnosis of a fault that rounds an intermediate to a 16-bit format, or to TF32."""
ROUNDING_FIELDS: Mapping[str, Any] = {"dtypes": WIDE_DTYPES, "diagnosis": ROUNDING_DIAGNOSIS}
"""The fields that such faults have in common."""


@dataclass(frozen=True)
class Subject:
    """A variant, with the ``description`` of its defect, or of the reason why it is right.

    It runs in ``dtypes``. ``rounding_models`` are those that it declares by dtype, if they are not the reference's.
    """

    name: str
    description: str
    backend: BackendVariant
    dtypes: tuple[str, ...] = ALL_BUT_BFLOAT16
    rounding_models: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Mutant, control or equivalent."""
        return type(self).__name__.lower()

    def can_be_shown_by(self, case: Case) -> bool:
        """Return whether a case may show the effect of the variant."""
        return True


class Control(Subject):
    """A right implementation that computes in another way."""


@dataclass(frozen=True)
class Equivalent(Subject):
    """A fault by intention that no input can show in its dtypes, with the ``proof``; it is not counted."""

    proof: str = ""


@dataclass(frozen=True)
class Mutant(Subject):
    """A faulty implementation; the description says which defect in the wild it stands for.

    ``first_wrong_stage`` is the first stage, in the order of computation, that it gets wrong (``context`` is the output
    where there are no projections). ``diagnosis`` is what may rightly be said of it (docs/diagnoses.md), nothing where
    no such name is its cause. ``without_fault`` is the same implementation without the fault, if that is
    not the reference. ``operation_and_argument`` names the only operation that has the fault, and the argument without
    which it does nothing, if there is one: such a fault runs on cases until one catches it, and is not diagnosed,
    unless it ``occurred_in_practice``. Any other may have a ``needed_argument``.
    """

    topic: str = ""
    first_wrong_stage: str = ""
    diagnosis: tuple[str, ...] = ()
    without_fault: BackendVariant | None = None
    operation_and_argument: tuple[str, str] | None = None
    occurred_in_practice: bool = False
    needed_argument: str = ""

    @property
    def is_generated(self) -> bool:
        """True if it is derived from the specification, and is not known to have occurred."""
        return self.operation_and_argument is not None and not self.occurred_in_practice

    def can_be_shown_by(self, case: Case) -> bool:
        """Return whether a case has the fault's operation and argument, if it is limited to any."""
        operation, argument = self.operation_and_argument or (case.operation, self.needed_argument)
        return case.operation == operation and (not argument or argument in case.inputs or argument in case.options)


FaultForm: TypeAlias = str | Callable[[Any], StepReplacements | BackendVariant] | None
"""How a decorated object becomes a variant.

The name of the step that it replaces, or a function that makes steps of it; None if it is steps already.
"""
Decorated = TypeVar("Decorated", bound=Any)

_REGISTERED_SUBJECTS: list[tuple[str, Subject]] = []


def subjects_of_module(module: str) -> tuple[Subject, ...]:
    """Return the subjects that a module has registered, in the order of its lines."""
    return tuple(subject for name, subject in _REGISTERED_SUBJECTS if name == module)


def _registering_decorator(
    make_subject: Callable[[str, str, BackendVariant], Subject],
    form: FaultForm,
    name: str | None,
    description: str,
    hidden_stages: frozenset[str],
    change: Any,
) -> Callable[[Decorated], Decorated]:
    """Register a subject from a name, a text and an implementation: a row's ``change``, or the decorated object."""
    module = sys._getframe(2).f_globals.get("__name__", "")  # the catalogue is in its order, whoever imports it first

    def register(step: Decorated) -> Decorated:
        made: Any = {form: step} if isinstance(form, str) else step if form is None else form(step)
        backend = made if isinstance(made, BackendVariant) else BackendVariant(made, hidden_stages=hidden_stages)
        _REGISTERED_SUBJECTS.append(
            (module, make_subject(name or step.__name__, description or step.__doc__ or "", backend))
        )
        return step

    if change is not None:
        register(change)
    return register


def register_fault(
    topic: str,
    form: FaultForm = None,
    name: str | None = None,
    defect: str = "",
    change: Any = None,
    *,
    stage: str,
    diagnosis: str | tuple[str, ...] = (),
    hidden_stages: frozenset[str] = frozenset(),
    **fields: Any,
) -> Callable[[Decorated], Decorated]:
    """Register a fault; ``stage`` is the first stage that it gets wrong, and ``fields`` are other fields of ``Mutant``.

    A row has all of it, with its effect as ``change``. A decorated function has its own name, and its defect may be its
    docstring.
    """
    names = (diagnosis,) if isinstance(diagnosis, str) else diagnosis
    make_subject = partial(Mutant, topic=topic, first_wrong_stage=stage, diagnosis=names, **fields)
    return _registering_decorator(make_subject, form, name, defect, hidden_stages, change)


def register_control(
    form: FaultForm = None,
    name: str | None = None,
    why: str = "",
    change: Any = None,
    *,
    hidden_stages: frozenset[str] = frozenset(),
    **fields: Any,
) -> Callable[[Decorated], Decorated]:
    """Register a right variant, and ``why`` it is right: as a row or a decorator, like faults."""
    return _registering_decorator(partial(Control, **fields), form, name, why, hidden_stages, change)


def register_equivalent(
    form: FaultForm = None, *, defect: str, name: str | None = None, **fields: Any
) -> Callable[[Decorated], Decorated]:
    """Register the decorated object as a fault that no input can show, by its ``proof``."""
    return _registering_decorator(partial(Equivalent, **fields), form, name, defect, frozenset(), None)
