"""Faults of positions behind a past: from where window, mask, lengths and bias count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.mutants.mask_steps import ALLOWED, MaskRequest, add_bias, causal_mask
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.variant import Variant


def _with_mask(change: Callable[[Array, MaskRequest], Array]) -> Variant:
    """Read the mask in another way behind a past; a mask that is spread over all keys has no places to confuse."""

    def allowed(request: MaskRequest) -> Array:
        mask = request.mask
        if mask is None or not request.past or mask.shape[-1] == 1:
            return ALLOWED(request)
        return ALLOWED(replace(request, mask=change(mask, request)))

    return Variant(allowed=allowed)


def _past_always_allowed(mask: Array, request: MaskRequest) -> Array:
    return mask | (np.arange(mask.shape[-1]) < request.past)


def _past_columns_for_new_keys(mask: Array, request: MaskRequest) -> Array:
    return np.roll(mask, request.past, axis=-1)


def _recognised_as_causal(mask: Array, request: MaskRequest) -> Array:
    """Take a mask that is causal behind the past for is_causal, which is aligned top left."""
    queries, keys = request.scores.shape[-2:]
    behind = np.tri(queries, keys, request.past, dtype=bool)
    is_causal = bool((np.broadcast_to(mask, np.broadcast_shapes(mask.shape, behind.shape)) == behind).all())
    return causal_mask(queries, keys) if is_causal else mask


def _lengths_of_new_keys(request: MaskRequest) -> Array:
    lengths = request.key_lengths
    return ALLOWED(request if lengths is None else replace(request, key_lengths=lengths + request.past))


def _bias_from_the_first_new_key(request: MaskRequest) -> Array:
    bias = request.bias
    if bias is None or not request.past or bias.shape[-1] == 1:
        return add_bias(request)
    return add_bias(replace(request, bias=np.roll(bias, request.past, axis=-1)))


MUTANTS = (
    Mutant(
        "window_counted_from_the_first_key_behind_a_past",
        "caches",
        "positions start at 0 in every step: transformers#39408's kind",
        Variant(window_after=lambda window, past: window),
        "masked",
        diagnosis=("aligned-top-left",),
    ),
    Mutant(
        "window_moved_one_too_far_behind_a_past",
        "caches",
        "positions start at P + 1: mlx-lm#390",
        Variant(
            window_after=lambda window, past: (
                None
                if window is None
                else (
                    None if window[0] is None else window[0] - past - 1,
                    None if window[1] is None else window[1] + past + 1,
                )
            )
        ),
        "masked",
    ),
    Mutant(
        "mask_does_not_reach_the_past",
        "caches",
        "only new keys are masked, the past is always attended: onnxruntime#28379's kind",
        _with_mask(_past_always_allowed),
        "masked",
    ),
    Mutant(
        "mask_shifted_by_the_past",
        "caches",
        "the mask's first column meets the first new key",
        _with_mask(_past_columns_for_new_keys),
        "masked",
    ),
    Mutant(
        "causal_mask_behind_a_past_aligned_top_left",
        "caches",
        "a mask recognised as causal becomes is_causal, which knows no past: transformers#30437, pytorch#108108",
        _with_mask(_recognised_as_causal),
        "masked",
        diagnosis=("aligned-top-left",),
    ),
    Mutant(
        "key_lengths_counted_from_the_first_new_key",
        "caches",
        "lengths of the new keys read where those of all keys are given: jax#23349's kind",
        Variant(allowed=_lengths_of_new_keys),
        "masked",
    ),
    Mutant(
        "bias_shifted_by_the_past",
        "caches",
        "ALiBi's distances start at the first new key: vllm#945's kind",
        Variant(add_bias=_bias_from_the_first_new_key),
        "biased",
    ),
)
