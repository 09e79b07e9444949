"""One right kernel, and kernels that repeat faults of public reports: each class replaces one step of the right one.

attncheck check --implementation benchmarks/reported_kernels.py:BiasDropsCausality.attention

The classes are kernels of the operations that they have a function for. Options that a kernel lacks are unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import CallOptions, Stages, pass_as_options

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

    def with_changes(self, **options: Any) -> Call:
        """Return the call with other options."""
        return replace(self, options=replace(self.options, **options))

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
    @pass_as_options(*_ALL)
    def attention(cls, query: Array, key: Array, value: Array, options: CallOptions) -> Stages:
        """Attend: query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv) -> output (B, H, Lq, Dv)."""
        return {"output": cls.output(query, key, value, options)}

    @classmethod
    @pass_as_options(*_ALL)
    def gated_attention(cls, query: Array, key: Array, value: Array, gate: Array, options: CallOptions) -> Stages:
        """Attend, and multiply the output with the sigmoid of the gate (B, H, Lq, Dv)."""
        return {"output": cls.gated(cls.output(query, key, value, options), gate, key.shape[-2])}

    @classmethod
    @pass_as_options(*_MASKS)
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
        """Yield splits; the workspace of those that nothing is written to has an output and a log-sum-exp of zero."""
        for part in super().parts(logits, call):
            is_skipped = call.queries == 1 and call.options.window is not None and np.isneginf(part[0]).all()
            yield (np.zeros_like(part[0]), np.ones_like(part[1]), np.zeros_like(part[2])) if is_skipped else part


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


class MaskDropsCausality(Right):
    """Causality is dropped where a mask is given. keras-team/keras#23040."""

    @classmethod
    def causal(cls, call: Call) -> Array:
        """Allow all keys beside a mask."""
        return super().causal(call) if call.options.mask is None else np.ones(1, bool)


class CausalityDropsLengths(Right):
    """The lengths of keys are dropped where causality is asked. microsoft/onnxruntime#14363."""

    @classmethod
    def allowed(cls, call: Call) -> Array:
        """Let causality stand for all."""
        return super().allowed(call.with_changes(key_lengths=None) if call.options.is_causal else call)


class WindowNeedsAMask(Right):
    """The window is ignored where no mask is given. jax-ml/jax#32300."""

    @classmethod
    def allowed(cls, call: Call) -> Array:
        """Return early without a mask."""
        return super().allowed(call.with_changes(window=None) if call.options.mask is None else call)


class WindowOnBothSides(Right):
    """The window reaches as far to the right as to the left. ModelTC/LightLLM#1311."""

    @classmethod
    def allowed(cls, call: Call) -> Array:
        """Take the left end for both."""
        window = call.options.window
        return super().allowed(call if window is None else call.with_changes(window=(window[0], window[0])))


class LongKeysLoseTheMiddle(Right):
    """From some length on, a decode step sees the first tile and the last keys. entrius/gittensor#1764."""

    @classmethod
    def allowed(cls, call: Call) -> Array:
        """Hide the middle of long sequences of keys."""
        is_seen = (call.column < cls.tile) | (call.column >= call.keys - 128)
        allowed = super().allowed(call)
        return allowed & is_seen if call.queries == 1 and call.keys > 256 else allowed


class DecodeDropsTheOldestKey(Right):
    """A decode step drops the oldest key of its window. sgl-project/sglang#32087."""

    @classmethod
    def allowed(cls, call: Call) -> Array:
        """Hide the first key of the window."""
        window = call.options.window
        if call.queries > 1 or window is None or not window[0]:
            return super().allowed(call)
        return super().allowed(call.with_changes(window=(window[0] - 1, window[1])))


class LongestLengthForAll(Right):
    """The length of the longest batch entry is taken for all. microsoft/onnxruntime#28695."""

    @classmethod
    def allowed(cls, call: Call) -> Array:
        """Take the largest length."""
        lengths = call.options.key_lengths
        return super().allowed(
            call if lengths is None else call.with_changes(key_lengths=np.full_like(lengths, lengths.max()))
        )


class CausalityByGroupsOfFour(Right):
    """Causality is that of the last one of four queries. pytorch/pytorch#195910."""

    @classmethod
    def causal(cls, call: Call) -> Array:
        """Round rows up."""
        return call.column <= call.row // 4 * 4 + 3


class FirstEntryIsRotated(Right):
    """With one position, the rotation writes the first batch entry, and others are zero. ml-explore/mlx#3949."""

    @classmethod
    def rotated(cls, array: Array, positions: Array, options: CallOptions) -> Array:
        """Leave the other batch entries unwritten."""
        rotated = super().rotated(array, positions, options)
        if array.shape[-2] == 1:
            rotated[1:] = 0
        return rotated


class HeadsArePositions(Right):
    """With one position, head h is rotated as if it stood h positions later. elixir-nx/emlx#121."""

    @classmethod
    def rotated(cls, array: Array, positions: Array, options: CallOptions) -> Array:
        """Take heads for positions, as far as the tables reach."""
        if array.shape[-2] == 1:
            last = options.rotary_cos.shape[0] - 1
            positions = np.minimum(positions + np.arange(array.shape[1])[:, np.newaxis], last)
        return super().rotated(array, positions, options)


class KeysOfZerosFillTheTile(Right):
    """Where 64 does not divide the keys, keys of zeros up to a tile take part. flashinfer-ai/flashinfer#5090."""

    @classmethod
    def sink(cls, call: Call) -> Part:
        """Add keys of score 0 and value 0."""
        sink = super().sink(call)
        missing = -call.keys % 64
        more = np.zeros_like(sink[0])
        highest = np.maximum(sink[0], more)
        total = sink[1] * np.exp(sink[0] - highest) + missing * np.exp(more - highest)
        return (highest, total, sink[2]) if missing else sink


class MaskedAtAFiniteNumber(Right):
    """A forbidden score is -1e4. ohdearquant/lattice#373."""

    @classmethod
    def logits(cls, call: Call) -> Array:
        """Replace minus infinity."""
        return np.maximum(super().logits(call), call.query.dtype.type(-1e4))


class LowRowsAreTakenForEmpty(Right):
    """A row whose scores are all below -5e4 is taken for one without a key. flashinfer-ai/flashinfer#4267."""

    @classmethod
    def logits(cls, call: Call) -> Array:
        """Hide what is too low."""
        logits = super().logits(call)
        return np.where(logits < -5e4, logits.dtype.type(-np.inf), logits)


class ValueTilesOverwriteTheFirst(Right):
    """Every tile of 64 value columns is written to the place of the first. fla-org/flash-linear-attention#1031."""

    @classmethod
    def attended(cls, call: Call) -> Array:
        """Write the last tile over the first, and no other."""
        output, width = super().attended(call), 64
        if output.shape[-1] > width:
            last = output[..., (output.shape[-1] - 1) // width * width :].copy()
            output[..., : last.shape[-1]] = last
            output[..., width:] = 0
        return output


class WideHeadsAreTruncated(Right):
    """Columns from 32 on are never written. mni-ml/framework#38."""

    @classmethod
    def attended(cls, call: Call) -> Array:
        """Write the first 32 columns."""
        output = super().attended(call)
        output[..., 32:] = 0
        return output


class WidthOfSixtyFour(Right):
    """Only the first 64 columns of queries and keys are read. triton-lang/triton#621."""

    @classmethod
    def logits(cls, call: Call) -> Array:
        """Leave the other columns out."""
        query = call.query.copy()
        query[..., 64:] = 0
        return super().logits(replace(call, query=query))


class PrefillDropsTheSoftcap(Right):
    """Several queries are attended without the softcap. kekzl/imp#688."""

    @classmethod
    def logits(cls, call: Call) -> Array:
        """Cap decode steps alone."""
        return super().logits(call.with_changes(softcap=None) if call.queries > 1 else call)


class WindowDropsTheSinks(Right):
    """Sinks are dropped beside a window. sgl-project/sglang#30050."""

    @classmethod
    def sink(cls, call: Call) -> Part:
        """Leave the sinks out beside a window."""
        return super().sink(call if call.options.window is None else call.with_changes(sinks=None))


class HiddenTilesCountTheSinkTwice(Right):
    """The sink counts twice where the first tile is wholly hidden. ROCm/rocm-libraries#12229."""

    @classmethod
    def attended(cls, call: Call) -> Array:
        """Merge the sink with a wholly hidden first tile, too."""
        logits, sink = cls.logits(call), cls.sink(call)
        is_hidden = np.isneginf(logits[..., : cls.tile]).all(axis=-1, keepdims=True)
        again = np.where(is_hidden, sink[0], -np.inf), np.where(is_hidden, sink[1], 0), sink[2]
        return cls.merged([*cls.parts(logits, call), sink, again], call)


class FurtherEntriesAreZero(Right):
    """Batch entries behind the first are not written where keys fit into one tile. pytorch/pytorch#139462."""

    @classmethod
    def attended(cls, call: Call) -> Array:
        """Write the first batch entry."""
        output = super().attended(call)
        if call.keys < 128:
            output[1:] = 0
        return output
