"""Every mutant, control and equivalent variant, by name.

The faults stand for defects met in public code, each named with its thread (owner/name#number) where there is one. They
were chosen before the cases were tuned to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from attncheck.backends.contract import Backend
from attncheck.mutation.mutant import Control, Equivalent, Mutant, Subject, is_generated, subjects_of_module

TOPICS: tuple[ModuleType, ...] = tuple(
    import_module(f"attncheck.mutation.{name}")
    for name in (
        "controls",
        "scores",
        "logits",
        "masks",
        "windows",
        "caches",
        "blocks",
        "heads",
        "gradients",
        "sizes",
        "narrow",
        "latents",
        "generated",
    )
)
"""The modules that register subjects: subjects are listed in their order, and in that of their lines."""

_ALL: tuple[Subject, ...] = tuple(subject for topic in TOPICS for subject in subjects_of_module(topic.__name__))
MUTANTS: tuple[Mutant, ...] = tuple(each for each in _ALL if isinstance(each, Mutant))
BY_HAND: tuple[Mutant, ...] = tuple(each for each in MUTANTS if not is_generated(each))
"""The faults that do not follow from the specification, and those that people are known to have made."""
CONTROLS: tuple[Control, ...] = tuple(each for each in _ALL if isinstance(each, Control))
EQUIVALENT: tuple[Equivalent, ...] = tuple(each for each in _ALL if isinstance(each, Equivalent))
_IN_ORDER: tuple[Subject, ...] = (*MUTANTS, *CONTROLS, *EQUIVALENT)
SUBJECTS: Mapping[str, Subject] = {subject.name: subject for subject in _IN_ORDER}


def variant_named(name: str) -> Backend:
    """Return the implementation of a subject. Raises ``KeyError``."""
    return SUBJECTS[name].backend
