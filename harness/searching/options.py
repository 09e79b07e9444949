"""What a random problem asks besides the product: masks, biases, windows, caches, scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.searching.shapes import Dimensions, Random
from attncheck.spec import BY_SCORE

Inputs = dict[str, NDArray[Any]]

MASKS = ("none", "causal", "padding", "random", "bias", "bias with -inf")

_SELDOM = 0.08
_SCALED = 0.15
_ATTENDANCE = frozenset({"masking", "attention", "attention_gradients", "multi_head_attention", *BY_SCORE})
_NORMALIZED, _LATENT = "normalized_attention", "latent_attention"
_SEQUENCES = frozenset({"packed_attention", "packed_attention_gradients", "paged_attention", "quantized_attention"})
_ROTATED = frozenset({"attention", "attention_gradients", "multi_head_attention", _NORMALIZED})
_OFFSETS = frozenset({"masking", "attention", _LATENT})
FILLS = (-1e9, -1e6, -1e4, -60.0, -4.0, -0.5, -1e-9, 0.0, 2.0)
_WITH_SINKS = _ROTATED | _SEQUENCES
_SCALABLE = _WITH_SINKS | {_LATENT}
_CAPPABLE = frozenset({"attention", "attention_gradients", "scaled_dot", "dot", _NORMALIZED, _LATENT, *_SEQUENCES})


@dataclass
class Asked:
    """Options and inputs besides the operands, and what to call them."""

    options: dict[str, Any] = field(default_factory=dict)
    inputs: Inputs = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def draw_asked(kind: str, random: Random, dims: Dimensions) -> Asked:
    """Draw what a problem of a kind asks; masking always asks something, most others often nothing."""
    asked = Asked()
    if kind in _ATTENDANCE:
        _add_mask(asked, str(random.choice(MASKS[1:] if kind == "masking" else MASKS)), random, dims)
        _add_attendance(asked, random, dims)
    if kind in (_NORMALIZED, _LATENT):
        _add_mask(asked, str(random.choice(MASKS)), random, dims)
    if kind in {*_SCALABLE, "cosine_attention"} and random.rand() < _SCALED:
        scale = float(np.float32(random.uniform(-1, 2)))
        asked.options["scale"] = scale
        asked.names.append("scale" if scale >= 0 else "negative scale")
    if kind in _CAPPABLE and random.rand() < _SELDOM:
        asked.options["softcap"] = float(np.float32(10 ** random.uniform(-1, 2)))
        asked.names.append("softcap")
    if kind in _WITH_SINKS and random.rand() < _SCALED:
        sinks = random.randn(dims.H) * 10 ** random.uniform(-1, 1.3)
        asked.inputs["sinks"] = np.where(random.rand(dims.H) < _SELDOM, -np.inf, sinks)
        asked.names.append("sinks")
    if kind in _ROTATED and random.rand() < _SCALED:
        _add_rotation(asked, random, dims)
    if kind in _ATTENDANCE and _forbids(asked) and random.rand() < 2 * _SCALED:
        asked.options["mask_fill"] = float(random.choice(FILLS))
        asked.names.append("fill")
    is_positioned = asked.options.keys() & {"is_causal", "window"} or "rotary_cos" in asked.inputs
    if kind in _OFFSETS and is_positioned and "alignment" not in asked.options and random.rand() < _SCALED:
        asked.inputs["query_offsets"] = random.randint(0, dims.Lk + 1, dims.B)
        asked.names.append("query offsets")
    return asked


def _forbids(asked: Asked) -> bool:
    return bool(asked.options.keys() & {"is_causal", "window"} or asked.inputs.keys() & {"mask", "key_lengths"})


def _add_rotation(asked: Asked, random: Random, dims: Dimensions) -> None:
    """Add the cosines and sines of angles, for some of the pairs or all; none where there is no pair."""
    if dims.D < 2:
        return
    pairs = int(random.randint(1, dims.D // 2 + 1))
    angles = random.uniform(-np.pi, np.pi, (dims.Lq + dims.Lk, pairs))
    asked.inputs |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    asked.names.append("rotary")
    if random.rand() < 1 / 2:
        asked.options["rotary_interleaved"] = True


def _add_mask(asked: Asked, mask: str, random: Random, dims: Dimensions) -> None:
    if mask == "none":
        return
    asked.names.append(mask)
    asked.inputs |= draw_mask(mask, random, dims)
    if mask == "causal":
        asked.options["is_causal"] = True


def _add_attendance(asked: Asked, random: Random, dims: Dimensions) -> None:
    """Add, each seldom, a window, key lengths, a mask of queries, and another alignment."""
    window, lengths, queries, alignment = random.rand(4) < (_SELDOM, _SELDOM, _SELDOM / 2, 2 * _SELDOM)
    if window:
        sides = [None if unbounded else int(random.randint(0, 9)) for unbounded in random.rand(2) < 0.3]
        asked.options["window"] = tuple(sides) if any(side is not None for side in sides) else (4, None)
        asked.names.append("window")
    if lengths:
        asked.inputs["key_lengths"] = random.randint(0, dims.Lk + 1, dims.B)
        asked.names.append("key lengths")
    if queries:
        asked.inputs["query_mask"] = random.rand(dims.B, dims.Lq) < 0.8
        asked.names.append("query mask")
    if alignment and asked.options:
        asked.options["alignment"] = "bottom_right"
        asked.names.append("bottom right")


def draw_mask(kind: str, random: Random, dims: Dimensions) -> Inputs:
    """Draw the mask or bias of a kind; causality is an option and no input."""
    match kind:
        case "padding":
            lengths = random.randint(1, dims.Lk + 1, (dims.B, 1, 1, 1))
            return {"mask": np.arange(dims.Lk) < lengths}
        case "random":
            mask = random.rand(*dims.scores) < random.choice([0.5, 0.9])
            mask[..., random.rand(dims.Lq) < 0.1, :] = False  # rows in which nothing may be attended to
            return {"mask": mask}
        case "bias":
            return {"bias": random.randn(*_bias_shape(random, dims)) * 10 ** random.uniform(-2, 1)}
        case "bias with -inf":
            bias = random.randn(1, dims.H, dims.Lq, dims.Lk)
            bias[random.rand(*bias.shape) < 0.2] = -np.inf
            return {"bias": bias}
    return {}


def _bias_shape(random: Random, dims: Dimensions) -> tuple[int, ...]:
    """Draw the shape of a bias: whole, or the same for some axes."""
    whole = dims.scores
    kept = [(True,) * 4, (True,) * 4, (False, True, True, True), (False, False, True, True), (True, False, False, True)]
    kept.append((False, True, True, False))
    chosen = kept[random.randint(len(kept))]
    return tuple(length if keep else 1 for length, keep in zip(whole, chosen, strict=True))


def split_past(inputs: Mapping[str, NDArray[Any]], random: Random) -> tuple[Inputs, bool]:
    """Make, seldom, the first half of the keys and values a past."""
    keys = inputs["key"].shape[-2]
    if keys < 2 or random.rand() >= _SELDOM:
        return dict(inputs), False
    parts = dict(inputs)
    for name in ("key", "value"):
        parts[f"past_{name}"], parts[name] = np.split(inputs[name], [keys // 2], axis=-2)
    return parts, True
