"""One right kernel, and kernels that repeat faults of public reports: each class replaces one step of the right one.

attncheck check --implementation benchmarks/reported_kernels.py:BiasDropsCausality.attention

The classes are kernels of the operations that they have a function for. Options that a kernel lacks are unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import CallOptions, Stages, takes_only

Array = NDArray[Any]
Part = tuple[Array, Array, Array]
"""The maximum and sum of exponentials of some keys, (B, H, Lq, 1), and the values weighed by these, (B, H, Lq, Dv)."""
_MASKS = ("mask", "is_causal", "scale", "softcap", "window", "key_lengths", "sinks")
_ALL = (*_MASKS, "bias", "rotary_cos", "rotary_sin", "rotary_interleaved", "past_key", "past_value", "query_offsets")


@dataclass(frozen=True)
class Call:
    """A call of attention with heads of keys and values as many as those of queries, a past included."""

    query: Array
    key: Array
    value: Array
    options: CallOptions
    past: int
    group: int
    """The number of query heads that share a head of keys."""

    @property
    def queries(self) -> int:
        """Lq."""
        return int(self.query.shape[-2])

    @property
    def keys(self) -> int:
        """P + Lk."""
        return int(self.key.shape[-2])

    @property
    def row(self) -> Array:
        """The position of each query, (B, 1, Lq, 1) or (Lq, 1)."""
        return Right.positions(self.queries, self.past, self.options.query_offsets)[..., np.newaxis]

    @property
    def column(self) -> Array:
        """The position of each key, (T,)."""
        return np.arange(self.keys)


class Right:
    """A right kernel, which takes keys in tiles."""

    tile = 16

    @classmethod
    @takes_only(*_ALL)
    def attention(cls, query: Array, key: Array, value: Array, options: CallOptions) -> Stages:
        """Attend: query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv) -> output (B, H, Lq, Dv)."""
        return {"output": cls.output(query, key, value, options)}

    @classmethod
    @takes_only(*_ALL)
    def gated_attention(cls, query: Array, key: Array, value: Array, gate: Array, options: CallOptions) -> Stages:
        """Attend, and multiply the output with the sigmoid of the gate (B, H, Lq, Dv)."""
        return {"output": cls.gated(cls.output(query, key, value, options), gate, key.shape[-2])}

    @classmethod
    @takes_only(*_MASKS)
    def quantized_attention(
        cls, query: Array, key: Array, value: Array, key_scale: Array, value_scale: Array, options: CallOptions
    ) -> Stages:
        """Attend to codes times their scales, which broadcast to (B, Hkv, Lk)."""
        key, value = (
            codes.astype(query.dtype) * np.broadcast_to(scales, codes.shape[:3])[..., np.newaxis]
            for codes, scales in ((key, key_scale), (value, value_scale))
        )
        return {"output": cls.written(cls.output(query, key, value, options), query)}

    @classmethod
    def output(cls, query: Array, key: Array, value: Array, options: CallOptions) -> Array:
        """Return the output of attention."""
        past = 0 if options.past_key is None else options.past_key.shape[-2]
        if options.rotary_cos is not None:
            query = cls.rotated(query, cls.positions(query.shape[-2], past, options.query_offsets), options)
            key = cls.rotated(key, cls.positions(key.shape[-2], past, None), options)
        key, value, _ = options.with_past(key, value, lambda arrays, axis: np.concatenate(arrays, axis))
        group = query.shape[1] // key.shape[1]
        key, value = (np.repeat(array, group, axis=1) for array in (key, value))
        call = Call(query, key, value, options, past, group)
        with np.errstate(all="ignore"):
            return cls.attended(call).astype(query.dtype)

    @classmethod
    def positions(cls, length: int, past: int, offsets: Array | None) -> Array:
        """Return the positions of vectors, (L,), or with offsets (B, 1, L)."""
        first = past if offsets is None else offsets[:, np.newaxis, np.newaxis]
        return np.asarray(first + np.arange(length))

    @classmethod
    def rotated(cls, array: Array, positions: Array, options: CallOptions) -> Array:
        """Rotate the vectors (B, H, L, D) by their positions."""
        cos, sin, rotated = options.rotary_cos[positions], options.rotary_sin[positions], array.copy()
        pairs = cos.shape[-1]
        is_interleaved = options.rotary_interleaved
        first = slice(0, 2 * pairs, 2) if is_interleaved else slice(0, pairs)
        second = slice(1, 2 * pairs, 2) if is_interleaved else slice(pairs, 2 * pairs)
        rotated[..., first] = array[..., first] * cos - array[..., second] * sin
        rotated[..., second] = array[..., first] * sin + array[..., second] * cos
        return rotated

    @classmethod
    def attended(cls, call: Call) -> Array:
        """Return the output of a call with rotated heads."""
        return cls.merged([*cls.parts(cls.logits(call), call), cls.sink(call)], call)

    @classmethod
    def logits(cls, call: Call) -> Array:
        """Return the masked scores, (B, H, Lq, T)."""
        options, dtype = call.options, call.query.dtype
        scale = call.query.shape[-1] ** -0.5 if options.scale is None else options.scale
        scores = call.query @ call.key.swapaxes(-1, -2) * dtype.type(scale)
        if options.softcap is not None:
            scores = dtype.type(options.softcap) * np.tanh(scores / dtype.type(options.softcap))
        if options.bias is not None:
            scores = scores + options.bias.astype(dtype)
        return np.where(cls.allowed(call), scores, dtype.type(-np.inf))

    @classmethod
    def allowed(cls, call: Call) -> Array:
        """Return the keys that a query may attend to; broadcasts to (B, H, Lq, T)."""
        options = call.options
        allowed = np.ones((1, 1, call.queries, call.keys), bool)
        if options.mask is not None:
            allowed = allowed & options.mask
        if options.is_causal:
            allowed = allowed & cls.causal(call)
        if options.window is not None:
            left, right = options.window
            allowed = allowed if left is None else allowed & (call.column >= call.row - left)
            allowed = allowed if right is None else allowed & (call.column <= call.row + right)
        if options.key_lengths is not None:
            allowed = allowed & (call.column < options.key_lengths[:, np.newaxis, np.newaxis, np.newaxis])
        return allowed

    @classmethod
    def causal(cls, call: Call) -> Array:
        """Return the keys that causality allows, (Lq, T)."""
        return call.column <= call.row

    @classmethod
    def parts(cls, logits: Array, call: Call) -> Iterator[Part]:
        """Yield the parts of all tiles of keys."""
        for start in range(0, call.keys, cls.tile):
            tile = slice(start, start + cls.tile)
            yield cls.part(logits[..., tile], call.value[..., tile, :])

    @classmethod
    def part(cls, logits: Array, value: Array) -> Part:
        """Attend to the keys of a tile."""
        maximum = logits.max(axis=-1, keepdims=True)
        powers = np.exp(logits - np.where(np.isneginf(maximum), 0, maximum))
        return maximum, powers.sum(axis=-1, keepdims=True), powers @ value

    @classmethod
    def sink(cls, call: Call) -> Part:
        """Return the part of the sinks, which have a value of 0; without sinks that of no key."""
        rows = (*call.query.shape[:3], 1)
        sinks = call.options.sinks
        maximum = np.full(rows, -np.inf) if sinks is None else np.broadcast_to(sinks[:, np.newaxis, np.newaxis], rows)
        maximum = maximum.astype(call.query.dtype)
        total = np.where(np.isneginf(maximum), 0, np.ones_like(maximum))
        return maximum, total, np.zeros((*rows[:3], call.value.shape[-1]), maximum.dtype)

    @classmethod
    def merged(cls, parts: list[Part], call: Call) -> Array:
        """Merge parts, and divide by the sum; a row without a key is zero."""
        highest = np.max([maximum for maximum, _, _ in parts], axis=0)
        highest = np.where(np.isneginf(highest), 0, highest)
        factors = [np.exp(maximum - highest) for maximum, _, _ in parts]
        total = sum(factor * part[1] for factor, part in zip(factors, parts, strict=True))
        output = sum(factor * part[2] for factor, part in zip(factors, parts, strict=True))
        return np.asarray(output / np.where(total == 0, 1, total))

    @classmethod
    def gated(cls, context: Array, gate: Array, keys: int) -> Array:
        """Apply the gate."""
        with np.errstate(over="ignore"):
            return np.asarray(context / (1 + np.exp(-gate)))

    @classmethod
    def written(cls, output: Array, query: Array) -> Array:
        """Return what is written of the output of attention to codes."""
        return output


class MaximumOfZeroIsKept(Right):
    """The running maximum of a wholly masked tile becomes 0 and is kept; tiles come last first.

    Dao-AILab/flash-attention#2082.
    """

    tile = 128

    @classmethod
    def parts(cls, logits: Array, call: Call) -> Iterator[Part]:
        """Yield tiles from the last to the first with the running maximum of all so far."""
        running = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
        for start in range((call.keys - 1) // cls.tile * cls.tile, -1, -cls.tile):
            tile = slice(start, start + cls.tile)
            running = np.maximum(running, logits[..., tile].max(axis=-1, keepdims=True))
            running = np.where(np.isneginf(running), 0, running)
            powers = np.exp(logits[..., tile] - running)
            yield running, powers.sum(axis=-1, keepdims=True), powers @ call.value[..., tile, :]


class BiasDropsCausality(Right):
    """Where 32 divides both lengths, causality is dropped beside a bias. bledden/triton-msl#7."""

    @classmethod
    def causal(cls, call: Call) -> Array:
        """Allow all keys beside a bias where tiles are whole."""
        is_whole = call.queries % 32 == 0 and call.keys % 32 == 0
        return np.ones(1, bool) if is_whole and call.options.bias is not None else super().causal(call)


class UnwrittenSplitsAreMerged(Right):
    """A windowed decode step skips splits of keys in front of the window, and merges them. vllm-project/vllm#47188."""

    @classmethod
    def parts(cls, logits: Array, call: Call) -> Iterator[Part]:
        """Yield splits; those that nothing is written to are as the workspace was, which is zero."""
        for part in super().parts(logits, call):
            is_skipped = call.queries == 1 and call.options.window is not None and np.isneginf(part[0]).all()
            _, total, output = part
            yield (0 * total, 0 * total, 0 * output) if is_skipped else part


class FirstHeadIsRotated(Right):
    """With one position, only the first head of the first batch entry is rotated. oxiglade/mlx-rs#357."""

    @classmethod
    def rotated(cls, array: Array, positions: Array, options: CallOptions) -> Array:
        """Leave the other heads as they are."""
        rotated = super().rotated(array, positions, options)
        if array.shape[-2] == 1:
            first, rotated = rotated[0, 0], array.copy()
            rotated[0, 0] = first
        return rotated


class LongKeysForgetTheGate(Right):
    """From 300 keys on, another path forgets the output gate. gittensor-ai-lab/sparkinfer#393."""

    @classmethod
    def gated(cls, context: Array, gate: Array, keys: int) -> Array:
        """Apply the gate to short sequences."""
        return context if keys >= 300 else super().gated(context, gate, keys)


class HalfOfTheColumnsIsWritten(Right):
    """Of codes of width 256, columns from 128 on are never written. gittensor-ai-lab/sparkinfer#425."""

    @classmethod
    def written(cls, output: Array, query: Array) -> Array:
        """Write the first 128 columns."""
        if query.shape[-1] == 256:
            output[..., 128:] = 0
        return output


class RowsAreDividedByTheGroup(Right):
    """Causality divides the row by the group size though no heads were packed. Dao-AILab/flash-attention#2528."""

    @classmethod
    def causal(cls, call: Call) -> Array:
        """Take rows for packed ones."""
        return call.column <= call.row // call.group
