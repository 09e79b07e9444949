"""What the catalogue is a list of, and the decorators that put it there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from attncheck.mutation.variant import Steps, Variant

WIDE = ("float64", "float32")
"""A fault of precision: what is one in these may be the declared storage of a 16-bit implementation."""
EVERY = (*WIDE, "float16")
"""A fault of meaning, in whatever dtype. NumPy's matmul of bfloat16 widens, so the reference does not keep that one."""
KERNELS = ("float32", "float16")
"""A fault of a fast path: there are none in float64, and cases of their sizes leave it out."""

REFERENCE = "reference"
"""The control that is the reference itself."""

ACCURACY_OF_16_BITS = ("accuracy-of-16-bits",)
"""The diagnosis of a fault that rounds an intermediate to a 16-bit format, or to TF32."""


@dataclass(frozen=True)
class Mutant:
    """A faulty implementation.

    ``defect`` says which defect in the wild it stands for; ``first_wrong_stage`` is the first stage, in the order of
    computation, that it gets wrong (``context`` is the output where there are no projections); ``dtypes`` are those in
    which it is a fault. ``diagnosis`` is what may rightly be said of it (docs/diagnoses.md), nothing where no such name
    is its cause. ``classes`` are the rounding models that it claims to be of, where not the reference's. ``without``
    is the same implementation without the fault, where that is not the reference.
    """

    name: str
    topic: str
    defect: str
    backend: Variant
    first_wrong_stage: str
    dtypes: tuple[str, ...] = EVERY
    diagnosis: tuple[str, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)
    without: Variant | None = None


@dataclass(frozen=True)
class Control:
    """A right implementation that computes in another way, and ``why`` it is right.

    ``classes`` are its rounding models per dtype, where they are not the reference's.
    """

    name: str
    why: str
    backend: Variant
    dtypes: tuple[str, ...] = EVERY
    classes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Equivalent:
    """A fault by intention that no input can show in these dtypes, with its ``proof``; it is not counted."""

    name: str
    defect: str
    proof: str
    backend: Variant
    dtypes: tuple[str, ...]

    @property
    def classes(self) -> Mapping[str, str]:
        """None but the reference's: it gives the reference's very bits."""
        return {}


Subject: TypeAlias = Mutant | Control | Equivalent
Form: TypeAlias = str | Callable[[Any], Steps | Variant] | None
"""How a variant is made of what is decorated.

The name of the step whose place it takes, or a function that makes steps of it; None where it is steps already.
"""
Decorated = TypeVar("Decorated")

_REGISTERED: list[tuple[str, Subject]] = []


def subjects_of_module(module: str) -> tuple[Subject, ...]:
    """Return what a module has registered, in the order of its lines."""
    return tuple(subject for name, subject in _REGISTERED if name == module)


def mutant(
    topic: str,
    form: Form = None,
    name: str | None = None,
    defect: str = "",
    change: Any = None,
    *,
    at: str,
    dtypes: tuple[str, ...] = EVERY,
    diagnosis: str | tuple[str, ...] = (),
    classes: Mapping[str, str] | None = None,
    without: Variant | None = None,
    hidden: frozenset[str] = frozenset(),
) -> Callable[[Decorated], Decorated]:
    """Register a fault; ``at`` is the first stage that it gets wrong.

    A row has all of it, what it does as its ``change``. What takes statements is decorated, and has its own name.
    """
    module, names = _caller(), (diagnosis,) if isinstance(diagnosis, str) else diagnosis

    def register(step: Decorated) -> Decorated:
        backend = _variant(form, step, hidden)
        fault = Mutant(name or _name(step), topic, defect, backend, at, dtypes, names, classes or {}, without)
        _REGISTERED.append((module, fault))
        return step

    if change is not None:
        register(change)
    return register


def control(
    form: Form = None,
    *,
    why: str,
    dtypes: tuple[str, ...] = EVERY,
    classes: Mapping[str, str] | None = None,
    hidden: frozenset[str] = frozenset(),
    name: str | None = None,
) -> Callable[[Decorated], Decorated]:
    """Register what is decorated as right, and ``why`` it is."""
    module = _caller()

    def register(step: Decorated) -> Decorated:
        right = Control(name or _name(step), why, _variant(form, step, hidden), dtypes, classes or {})
        _REGISTERED.append((module, right))
        return step

    return register


def equivalent(
    form: Form = None, *, defect: str, proof: str, dtypes: tuple[str, ...] = EVERY, name: str | None = None
) -> Callable[[Decorated], Decorated]:
    """Register what is decorated as a fault that no input can show."""
    module = _caller()

    def register(step: Decorated) -> Decorated:
        backend = _variant(form, step, frozenset())
        same = Equivalent(name or _name(step), defect, proof, backend, dtypes)
        _REGISTERED.append((module, same))
        return step

    return register


def _variant(form: Form, step: Any, hidden: frozenset[str]) -> Variant:
    made = {form: step} if isinstance(form, str) else step if form is None else form(step)
    return made if isinstance(made, Variant) else Variant(made, hidden=hidden)


def _name(step: Any) -> str:
    name: str = step.__name__
    return name


def _caller() -> str:
    """Return the name of the module that calls a decorator: the catalogue is in its order, whoever imports it first."""
    return str(sys._getframe(2).f_globals.get("__name__"))
