"""Emulated kernels for the soundness campaign: what the hardware at hand does not do, done in NumPy.

    python benchmarks/soundness.py --implementation benchmarks/soundness_kernels.py:tf32_products --dtype float32

Every control of the mutants' catalogue is one, by its name, and is judged by the rounding model that it claims.
``xla_bfloat16_products`` is none: XLA's own product of bfloat16 matrices, with sums in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attncheck.backends import EAGER
from attncheck.mutation.catalogue import CONTROLS
from attncheck.mutation.kernel import Array
from attncheck.mutation.mutant import Control
from attncheck.mutation.narrow import variant_with_product

_HONEST = {subject.name: subject for subject in CONTROLS}


@dataclass(frozen=True)
class Kernel:
    """A variant under the contract's names, with what it declares of itself."""

    subject: Control
    classes: dict[str, str] = field(default_factory=dict)
    capabilities: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (name == "softmax" and "weights" in self.subject.backend.hidden_stages):
            raise AttributeError(name)  # what a blocked kernel never holds, it does not offer
        return getattr(self.subject.backend, name)


def kernel_of(subject: Control) -> Kernel:
    """Return a subject as the campaign can call it."""
    classes = {dtype: subject.rounding_models.get(dtype, EAGER[dtype]) for dtype in subject.dtypes}
    return Kernel(subject, classes, {"dtypes": list(subject.dtypes)})


def _by_xla(left: Array, right: Array) -> Array:
    import jax.numpy as jnp
    import numpy as np

    narrow = (jnp.asarray(factor, jnp.bfloat16) for factor in (left, right))
    return np.asarray(jnp.matmul(*narrow, preferred_element_type=jnp.float32))


def __getattr__(name: str) -> Kernel:
    if name == "xla_bfloat16_products":
        classes = {"float32": "bf16_products"}
        return kernel_of(Control(name, "a real product", variant_with_product(_by_xla), ("float32",), classes))
    if name not in _HONEST:
        raise AttributeError(f"no kernel {name}; expected one of {', '.join(_HONEST)}")
    return kernel_of(_HONEST[name])
