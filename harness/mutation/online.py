"""The online softmax: keys come in blocks, sum and average are rescaled when the running maximum grows.

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _row_maximum, _row_sum, _softmax_with_sinks
from attncheck.mutation.arithmetic import Array, Store, exactly
from attncheck.mutation.forward_forms import Product, averaged, normalised
from attncheck.mutation.variant import Steps, within

NEVER_HELD = frozenset({"weights"})
"""No weights are returned: the output was not made from them, and would be compared with them."""


def _always(block: int) -> bool:
    return True


@dataclass(frozen=True)
class Online:
    """Softmax and average in blocks of keys.

    ``product`` multiplies exponentials and values; ``rescales_sum`` and ``rescales_output`` say whether a block
    remembers to; ``store`` is how the running average is kept between blocks.
    """

    block: int
    product: Product = np.matmul
    rescales_sum: Callable[[int], bool] = _always
    rescales_output: Callable[[int], bool] = _always
    store: Store = exactly

    @property
    def steps(self) -> Steps:
        """The steps that run over blocks."""
        return {**normalised(self.normalise), **averaged(self.average)}

    def normalise(self, logits: Array) -> Stages:
        """Return log_sum_exp, and weights made in a second pass."""
        maximum, total, _ = self._run(logits, None)
        stages: Stages = within(_softmax_with_sinks, _row_maximum=lambda scores: maximum, _row_sum=lambda terms: total)(
            logits, None, "zero"
        )
        return stages

    def average(self, logits: Array, weights: Array, value: Array) -> Array:
        """Average the values in one pass over the logits."""
        maximum, total, output = self._run(logits, value)
        empty = maximum == -np.inf
        return np.where(empty, 0, output / np.where(empty, 1, total))

    def _run(self, logits: Array, value: Array | None) -> tuple[Array, Array, Array]:
        maximum = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
        total = np.zeros_like(maximum)
        output = np.zeros((*logits.shape[:-1], 1 if value is None else value.shape[-1]), logits.dtype)
        for number, start in enumerate(range(0, logits.shape[-1], self.block)):
            tile = logits[..., start : start + self.block]
            grown = np.maximum(maximum, _row_maximum(tile))
            shift = np.where(grown == -np.inf, 0, grown)
            correction = np.exp(maximum - shift)
            exponentials = np.exp(tile - shift)
            total = total * (correction if self.rescales_sum(number) else 1)
            total = total + _row_sum(exponentials)
            if value is not None:
                output = output * (correction if self.rescales_output(number) else 1)
                output = self.store(output + self.product(exponentials, value[..., start : start + self.block, :]))
            maximum = grown
        return maximum, total, output
