"""What the catalogue is a list of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from attncheck.mutants.variant import Variant

WIDE = ("float64", "float32")
"""A fault of precision: what is one in these may be the declared storage of a 16-bit implementation."""
EVERY = (*WIDE, "float16")
"""A fault of meaning, in whatever dtype. NumPy's matmul of bfloat16 widens, so the reference does not keep that one."""
KERNELS = ("float32", "float16")
"""A fault of a fast path: there are none in float64, and cases of their sizes leave it out."""


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
