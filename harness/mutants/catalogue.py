"""Every mutant, control and equivalent variant, by name.

The faults stand for defects met in public code, each named with its thread (owner/name#number) where there is one. They
were chosen before the cases were tuned to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from attncheck.backends.contract import Backend
from attncheck.mutants import (
    bias,
    blocks,
    cache_positions,
    caches,
    causal,
    chosen_products,
    cosine,
    decoding,
    denominator,
    empty_rows,
    equivalents,
    fills,
    gradient_sums,
    gradients,
    grouped,
    heads,
    layouts,
    lengths,
    masks,
    narrow,
    other_scores,
    pair_gradients,
    pairs,
    precision,
    projections,
    recomputation,
    reduced,
    scale,
    scores,
    softcap,
    softmax,
    special,
    stored_log_sum_exp,
    tiles,
    widths,
    windows,
)
from attncheck.mutants.control_kernels import CONTROLS as CONTROL_KERNELS
from attncheck.mutants.control_options import CONTROLS as CONTROL_OPTIONS
from attncheck.mutants.controls import CONTROLS as CONTROL_BASICS
from attncheck.mutants.mutant import Control, Equivalent, Mutant, Subject

_TOPICS = (
    scale,
    scores,
    other_scores,
    cosine,
    softcap,
    bias,
    softmax,
    denominator,
    precision,
    masks,
    fills,
    empty_rows,
    causal,
    windows,
    lengths,
    caches,
    cache_positions,
    blocks,
    heads,
    grouped,
    layouts,
    projections,
    gradients,
    gradient_sums,
    recomputation,
    reduced,
    stored_log_sum_exp,
    widths,
    tiles,
    decoding,
    pairs,
    pair_gradients,
    narrow,
    chosen_products,
    special,
)

MUTANTS: tuple[Mutant, ...] = tuple(chain.from_iterable(topic.MUTANTS for topic in _TOPICS))
CONTROLS: tuple[Control, ...] = (
    *CONTROL_BASICS,
    *CONTROL_OPTIONS,
    *CONTROL_KERNELS,
    *reduced.CONTROLS,
    *stored_log_sum_exp.CONTROLS,
)
EQUIVALENT: tuple[Equivalent, ...] = (*denominator.EQUIVALENT, *equivalents.EQUIVALENT)
_ALL: tuple[Subject, ...] = (*MUTANTS, *CONTROLS, *EQUIVALENT)
SUBJECTS: Mapping[str, Subject] = {subject.name: subject for subject in _ALL}


def variant_named(name: str) -> Backend:
    """Return the implementation of a subject. Raises ``KeyError``."""
    return SUBJECTS[name].backend
