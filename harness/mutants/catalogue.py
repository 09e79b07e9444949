"""Every faulty, honest and equivalent variant, by name.

The faults stand for defects met in public code, each named with its thread (owner/name#number) where there is one. They
were chosen before the cases were tuned to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from attncheck.backends.contract import Backend
from attncheck.harness.mutants import (
    bias,
    blocks,
    causal,
    denominator,
    fills,
    heads,
    masks,
    other_scores,
    precision,
    projections,
    scale,
    scores,
    softmax,
)
from attncheck.harness.mutants.honest import HONEST as HONEST
from attncheck.harness.mutants.mutant import Equivalent, Mutant, Subject

_TOPICS = (
    scale,
    scores,
    other_scores,
    bias,
    softmax,
    denominator,
    precision,
    masks,
    fills,
    causal,
    blocks,
    heads,
    projections,
)

MUTANTS: tuple[Mutant, ...] = tuple(chain.from_iterable(topic.MUTANTS for topic in _TOPICS))
EQUIVALENT: tuple[Equivalent, ...] = denominator.EQUIVALENT
_ALL: tuple[Subject, ...] = (*MUTANTS, *HONEST, *EQUIVALENT)
SUBJECTS: Mapping[str, Subject] = {subject.name: subject for subject in _ALL}


def variant_named(name: str) -> Backend:
    """Return the implementation of a subject. Raises ``KeyError``."""
    return SUBJECTS[name].backend
