"""Right kernels that do what fast ones do: parts, padding, other orders, weights made again, scales at other places.

None of them may be flagged, in any case that it takes. They compute in float32 or float64 between their ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from combinations import NARROW, Array, Call, Stages, widened

from attncheck.backends import numpy_backend as backend
from attncheck.spec import LOGITS, OPERATIONS

FUSED: Mapping[str, str] = {"float64": "native", "float32": "native", "bfloat16": "fused", "float16": "fused"}
MERGED = {dtype: f"{name}_lse" for dtype, name in FUSED.items()}
"""Of kernels that weigh parts by their log_sum_exp."""
INPUTS = OPERATIONS["attention"].inputs


@dataclass(frozen=True)
class Kernel:
    """A right kernel: the stages ``of`` a call, or None of one that it does not take, and the classes that it is of."""

    of: Callable[[Call], Stages | None]
    operations: tuple[str, ...] = ("attention",)
    classes: Mapping[str, str] = field(default_factory=lambda: FUSED)
    dtypes: tuple[str, ...] = tuple(FUSED)

    def __call__(self, call: Call) -> Stages | None:
        """Return what the kernel returns; None where it does not take the call."""
        if call.problem.operation not in self.operations or call.dtype not in self.dtypes:
            return None
        with np.errstate(all="ignore"):
            stages = self.of(call)
        return None if stages is None else call.results(stages)


@dataclass(frozen=True)
class Rows:
    """What the softmax of attention is handed: logits (B, H, Lq, T), values (B, H, T, Dv), sinks of each head."""

    logits: Array
    value: Array
    sinks: Array | None

    @classmethod
    def of(cls, call: Call) -> Rows | None:
        """Return them of scaled dot products with keys; None where a row without one is asked to be something else."""
        if call.empty_rows not in (None, "zero") or call.score not in (None, "scaled_dot") or not call.keys:
            return None
        logits = next(call.right[name] for name in LOGITS[::-1] if name in call.right)
        value = widened(call.value)
        if call.past_value is not None:
            value = np.concatenate([widened(call.past_value), value], axis=-2)
        value = np.repeat(value, call.query_heads // value.shape[1], axis=1)
        sinks = None if call.sinks is None else widened(call.sinks)[:, np.newaxis, np.newaxis]
        return cls(logits, value, sinks)


def of_rows(change: Callable[[Rows], Array | None]) -> Callable[[Call], Stages | None]:
    """Return a kernel that makes its output of what the softmax is handed."""

    def kernel(call: Call) -> Stages | None:
        rows = Rows.of(call)
        output = None if rows is None else change(rows)
        return None if output is None else {"output": output}

    return kernel


Part = tuple[Array, Array]
"""An output and its log_sum_exp, (B, H, Lq, Dv) and (B, H, Lq, 1)."""


def attended(logits: Array, value: Array) -> Part:
    """Attend to some keys."""
    stages = backend.softmax(logits)
    return stages["weights"] @ value, stages["log_sum_exp"][..., np.newaxis]


def merged(parts: Sequence[Part]) -> Part:
    """Merge parts by a softmax of their log_sum_exps."""
    largest = np.max(np.stack([statistic for _, statistic in parts]), axis=0)
    shift = np.where(np.isneginf(largest), 0, largest)
    shares = [np.exp(statistic - shift) for _, statistic in parts]
    total = sum(shares)
    divisor = np.where(total == 0, 1, total)
    output = sum(np.where(share == 0, 0, mean * share) for (mean, _), share in zip(parts, shares, strict=True))
    return output / divisor, np.where(total == 0, -np.inf, shift + np.log(divisor))


def split(rows: Rows, edges: Sequence[int]) -> list[Part]:
    """Attend to the keys between edges, a part each."""
    spans = [slice(*each) for each in pairwise(edges)]
    return [attended(rows.logits[..., span], rows.value[..., span, :]) for span in spans]


def sink_part(rows: Rows) -> list[Part]:
    """Return the sinks as a part that gives 0."""
    if rows.sinks is None:
        return []
    shape = rows.logits.shape[:-1]
    statistic = np.broadcast_to(rows.sinks, (*shape, 1))
    return [(np.zeros((*shape, rows.value.shape[-1]), rows.value.dtype), statistic)]


def evenly(keys: int, parts: int) -> list[int]:
    """Return the edges of so many parts of keys."""
    return [keys * part // parts for part in range(parts + 1)]


def in_a_tree(parts: list[Part]) -> Part:
    """Merge neighbours, then what comes of them."""
    while len(parts) > 1:
        parts = [merged(parts[number : number + 2]) for number in range(0, len(parts), 2)]
    return parts[0]


def one_after_the_other(parts: list[Part]) -> Part:
    """Merge each part with all that came before it."""
    found, *others = parts
    for part in others:
        found = merged([found, part])
    return found


def online(rows: Rows, tile: int, slack: float = 0.0, base: float = math.e) -> Array:
    """Take keys in tiles, sinks as what is there at first, and rescale where the maximum grows by more than a slack."""
    factor = math.log2(math.e) if base == 2 else 1.0
    power = np.exp2 if base == 2 else np.exp
    logits = rows.logits * np.asarray(factor, rows.logits.dtype)
    shape = (*logits.shape[:-1], 1)
    maximum = np.full(shape, -np.inf, logits.dtype)
    total = np.zeros(shape, logits.dtype)
    if rows.sinks is not None:
        maximum = np.broadcast_to(rows.sinks * np.asarray(factor, logits.dtype), shape).astype(logits.dtype)
        total = np.where(np.isneginf(maximum), 0, np.ones(shape, logits.dtype))
    output = np.zeros((*shape[:-1], rows.value.shape[-1]), logits.dtype)
    for start in range(0, logits.shape[-1], tile):
        span = logits[..., start : start + tile]
        largest = backend._row_maximum(span)
        grown = np.where(largest > maximum + slack, largest, maximum)
        shift = np.where(np.isneginf(grown), 0, grown)
        correction = np.where(np.isneginf(maximum), 0, power(maximum - shift))
        exponentials = power(span - shift)
        total = total * correction + backend._row_sum(exponentials)
        output = output * correction + exponentials @ rows.value[..., start : start + tile, :]
        maximum = grown
    return np.asarray(output / np.where(total == 0, 1, total))


def with_keys(rows: Rows, logits: Array, value: Array) -> Rows:
    """Return the same rows with other keys."""
    return Rows(logits, value, rows.sinks)


def plainly(rows: Rows) -> Array:
    """Attend as the reference does."""
    stages = backend._softmax_with_sinks(rows.logits, None if rows.sinks is None else rows.sinks[:, 0, 0], "zero")
    return np.asarray(stages["weights"] @ rows.value)


def with_dirty_padding(rows: Rows, multiple: int, dirt: float) -> Array:
    """Fill keys up with numbers that nobody wrote, which are masked."""
    more = -rows.logits.shape[-1] % multiple
    logits = np.pad(rows.logits, [(0, 0)] * 3 + [(0, more)], constant_values=-np.inf)
    value = np.pad(rows.value, [(0, 0)] * 2 + [(0, more), (0, 0)], constant_values=dirt)
    return plainly(with_keys(rows, logits, value))


def in_base_two(call: Call) -> Stages | None:
    """Take an online softmax in base two; what is added to scores, or put in their place, may leave the range there."""
    rows = Rows.of(call)
    return (
        None
        if rows is None or call.bias is not None or call.mask_fill is not None
        else {"output": online(rows, 128, base=2)}
    )


def in_another_order(rows: Rows, order: Array) -> Array:
    """Take keys in another order."""
    return plainly(with_keys(rows, rows.logits[..., order], rows.value[..., order, :]))


def sink_as_a_key(rows: Rows) -> Array:
    """Let the sink be the first key, with a value of 0."""
    if rows.sinks is None:
        return plainly(rows)
    column = np.broadcast_to(rows.sinks, (*rows.logits.shape[:-1], 1)).astype(rows.logits.dtype)
    value = np.concatenate(
        [
            np.zeros_like(rows.value[..., :1, :])
            if rows.value.shape[-2]
            else np.zeros((*rows.value.shape[:-2], 1, rows.value.shape[-1]), rows.value.dtype),
            rows.value,
        ],
        axis=-2,
    )
    return plainly(Rows(np.concatenate([column, rows.logits], axis=-1), value, None))


def sink_behind_the_sum(rows: Rows) -> Array:
    """Attend without sinks, and multiply with a sigmoid of log_sum_exp less the sink."""
    output, statistic = attended(rows.logits, rows.value)
    if rows.sinks is None:
        return output
    opened = 1 / (1 + np.exp(np.where(np.isneginf(statistic), 0, rows.sinks - statistic)))
    return np.where(np.isneginf(statistic), 0, output * opened)


def attended_rows_alone(rows: Rows) -> Array:
    """Read no more keys of a tile of 16 queries than those between its first and its last one."""
    output = np.zeros((*rows.logits.shape[:-1], rows.value.shape[-1]), rows.logits.dtype)
    for start in range(0, rows.logits.shape[-2], 16):
        logits = rows.logits[..., start : start + 16, :]
        seen = np.flatnonzero(~np.isneginf(logits).all(axis=(0, 1, 2)))
        span = slice(seen[0], seen[-1] + 1) if seen.size else slice(0, 0)
        part = with_keys(rows, logits[..., span], rows.value[..., span, :])
        output[..., start : start + 16, :] = plainly(part)
    return output


# Calls that are equal to another one.


def masked_by_lengths(call: Call) -> Stages | None:
    """Let a mask say what lengths do."""
    if call.key_lengths is None or call.problem.operation != "attention":
        return None
    lengths = call.column < call.key_lengths[:, np.newaxis, np.newaxis, np.newaxis]
    return call.stages_with(key_lengths=None, mask=lengths if call.mask is None else np.logical_and(call.mask, lengths))


def added_mask(call: Call) -> Stages | None:
    """Add a mask as 0 and -inf, with the bias."""
    if call.mask is None or call.mask_fill is not None:
        return None
    added = np.where(call.mask, 0.0, -np.inf).astype(widened(call.query).dtype)
    bias = added if call.bias is None else widened(call.bias) + added
    return call.stages_with(mask=None, bias=bias.reshape((1,) * (4 - bias.ndim) + bias.shape))


def each_entry(call: Call) -> Stages | None:
    """Call the kernel for each batch entry."""
    if call.batch < 2:
        return None
    parts = []
    for number in range(call.batch):
        own = {
            name: array[number : number + 1] for name, array in call.problem.inputs.items() if _has_entries(name, array)
        }
        parts.append(call.stages_with(**own)["output"])
    return {"output": np.concatenate(parts)}


def _has_entries(name: str, array: Array) -> bool:
    """Return whether an input of attention has several batch entries."""
    axes = INPUTS[name].axes
    return axes[0] == "B" and array.ndim == len(axes) and len(array) > 1


def each_head(call: Call) -> Stages | None:
    """Call the kernel for each head of keys, with its group."""
    if call.key_heads < 2:
        return None
    parts = []
    for number in range(call.key_heads):
        group = slice(number * call.group, (number + 1) * call.group)
        own: dict[str, Any] = {"query": call.query[:, group]}
        for name in ("key", "value", "past_key", "past_value"):
            if (array := getattr(call, name)) is not None:
                own[name] = array[:, number : number + 1]
        for name in ("mask", "bias"):
            array = getattr(call, name)
            if array is not None and array.ndim >= 3 and array.shape[-3] > 1:
                own[name] = array[..., group, :, :]
        for name in ("sinks", "head_scale"):
            if (array := getattr(call, name)) is not None:
                own[name] = array[group]
        parts.append(call.stages_with(**own)["output"])
    return {"output": np.concatenate(parts, axis=1)}


def permuted_groups(call: Call) -> Stages | None:
    """Lay the heads of groups side by side across keys, and back."""
    if call.group < 2:
        return None
    order = np.arange(call.query_heads).reshape(call.key_heads, call.group).T.reshape(-1)
    own: dict[str, Any] = {"query": call.query[:, order]}
    for name in ("key", "value", "past_key", "past_value"):
        if (array := getattr(call, name)) is not None:
            own[name] = np.tile(array, (1, call.group, 1, 1))
    for name in ("mask", "bias"):
        array = getattr(call, name)
        if array is not None and array.ndim >= 3 and array.shape[-3] > 1:
            own[name] = np.take(array, order, axis=-3)
    for name in ("sinks", "head_scale"):
        if (array := getattr(call, name)) is not None:
            own[name] = array[order]
    return {"output": call.stages_with(**own)["output"][:, np.argsort(order)]}


def copied_views(call: Call) -> Stages | None:
    """Copy every input that is a view, with its axes in reverse."""
    return call.stages_with(
        **{name: np.ascontiguousarray(array.T).T for name, array in call.problem.inputs.items() if array.ndim > 1}
    )


def output_as_a_view(call: Call) -> Stages | None:
    """Return the output as a view of (B, L, H, Dv)."""
    return {"output": np.ascontiguousarray(call.right["output"].swapaxes(1, 2)).swapaxes(1, 2)}


def queries_with_dirty_rows(call: Call) -> Stages | None:
    """Fill the queries up to a tile of 16, as decoding on tensor cores does, and drop what comes of them."""
    more = -call.queries % 16
    if (
        not more
        or call.rotary_cos is not None
        or call.query_mask is not None
        or not {*call.problem.options} <= {"scale", "softcap"}
    ):
        return None
    own: dict[str, Any] = {"query": np.pad(call.query, [(0, 0)] * 2 + [(0, more), (0, 0)], constant_values=7)}
    for name in ("mask", "bias"):
        array = getattr(call, name)
        if array is not None and array.ndim >= 2 and array.shape[-2] > 1:
            own[name] = np.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, more), (0, 0)], constant_values=True)
    return {"output": call.stages_with(**own)["output"][..., : call.queries, :]}


def smoothed_keys(call: Call) -> Stages | None:
    """Take the mean from the keys: all scores of a row lose the same."""
    names = {*call.problem.inputs} & {"sinks", "rotary_cos", "past_key"}
    if names or call.softcap is not None or call.mask_fill is not None or not call.keys:
        return None
    key = widened(call.key)
    return call.stages_with(key=key - key.mean(axis=-2, keepdims=True))


def chunks_of_queries(call: Call) -> Stages | None:
    """Attend for seven queries after the other."""
    rows = Rows.of(call)
    if rows is None or call.queries < 8:
        return None
    spans = [slice(start, start + 7) for start in range(0, call.queries, 7)]
    parts = [online(with_keys(rows, rows.logits[..., span, :], rows.value), 32) for span in spans]
    return {"output": np.concatenate(parts, axis=-2)}


# Gradients.


@dataclass(frozen=True)
class Backward:
    """What a backward pass has: the forward pass, and heads of keys and values as many as of queries."""

    call: Call
    forward: Stages
    key: Array
    value: Array
    grad: Array
    logits: Array

    @classmethod
    def of(cls, call: Call) -> Backward | None:
        """Return it of a call without rotation, fill, or other answers for rows without a key."""
        options = {*call.problem.options, *call.problem.inputs}
        if options & {"rotary_cos", "mask_fill", "empty_rows", "head_scale", "query_mask"}:
            return None
        names = call.problem.inputs.keys() - {"grad_output"}
        problem = type(call.problem)(
            "attention", call.problem.options, {name: call.problem.inputs[name] for name in names}
        )
        forward = Call(problem, call.dtype).right
        key, value = (np.repeat(widened(each), call.group, axis=1) for each in (call.key, call.value))
        logits = next(forward[name] for name in LOGITS[::-1] if name in forward)
        return cls(call, forward, key, value, widened(call.grad_output), logits)

    @property
    def statistic(self) -> Array:
        """The rows' log_sum_exp, (B, H, Lq, 1)."""
        return self.forward["log_sum_exp"][..., np.newaxis]

    @property
    def weights_again(self) -> Array:
        """The weights from logits and log_sum_exp."""
        exponentials = np.exp(self.logits - np.where(np.isinf(self.statistic), 0, self.statistic))
        return np.where(np.isneginf(self.statistic), 0, exponentials)

    @property
    def scale(self) -> float:
        """What products are multiplied by."""
        return float(self.call.width**-0.5 if self.call.scale is None else self.call.scale)

    def gradients(self, weights: Array, delta: Array, keys: int | None = None, queries: int | None = None) -> Stages:
        """Return the gradients by these weights and this sum of p dp, sums over keys and queries in tiles."""
        call = self.call
        grad_logits = weights * (self.grad @ self.value.swapaxes(-1, -2) - delta)
        grad_scores = grad_logits
        if call.softcap is not None:
            grad_scores = grad_logits * (1 - (self.forward["capped"] / call.softcap) ** 2)
        grad_scores = grad_scores * np.asarray(self.scale, grad_scores.dtype)
        query = widened(call.query)
        found = {
            "grad_query": summed(grad_scores, self.key, keys),
            "grad_key": in_groups(summed(grad_scores.swapaxes(-1, -2), query, queries), call.key_heads),
            "grad_value": in_groups(summed(weights.swapaxes(-1, -2), self.grad, queries), call.key_heads),
        }
        if call.bias is not None:
            axes = tuple(axis for axis, length in enumerate(call.bias.shape) if length == 1)
            found["grad_bias"] = grad_logits.sum(axis=axes, keepdims=True)
        if call.sinks is not None:
            sinks = widened(call.sinks)[:, np.newaxis, np.newaxis]
            share = np.where(np.isneginf(sinks), 0, np.exp(sinks - self.statistic))
            found["grad_sinks"] = -(share * delta).sum(axis=(0, 2, 3))
        return found


def summed(left: Array, right: Array, tile: int | None) -> Array:
    """Multiply matrices by tiles of the inner axis, one after the other."""
    if tile is None:
        return np.asarray(left @ right)
    total = np.zeros((*left.shape[:-1], right.shape[-1]), right.dtype)
    for start in range(0, left.shape[-1], tile):
        total = total + left[..., start : start + tile] @ right[..., start : start + tile, :]
    return total


def in_groups(gradient: Array, heads: int) -> Array:
    """Add up what the heads of a group have, the last one first."""
    batch, of_queries, *rest = gradient.shape
    return np.asarray(gradient.reshape(batch, heads, of_queries // heads, *rest)[:, :, ::-1].sum(axis=2))


def going_back(gradients: Callable[[Backward], Stages]) -> Callable[[Call], Stages | None]:
    """Return a kernel of gradients."""

    def kernel(call: Call) -> Stages | None:
        backward = Backward.of(call)
        return None if backward is None else gradients(backward)

    return kernel


def delta_of(backward: Backward, weights: Array) -> Array:
    """Sum p dp over the keys."""
    return np.asarray(backend._row_sum(weights * (backward.grad @ backward.value.swapaxes(-1, -2))))


def delta_from_output(backward: Backward) -> Array:
    """Return sum p dp as g o."""
    return np.asarray(backend._row_sum(backward.grad * backward.forward["output"]))


def delta_in_tiles(backward: Backward, weights: Array) -> Array:
    """Sum p dp over tiles of 32 keys."""
    terms = weights * (backward.grad @ backward.value.swapaxes(-1, -2))
    parts = [backend._row_sum(terms[..., start : start + 32]) for start in range(0, terms.shape[-1], 32)]
    return np.asarray(sum(parts, np.zeros((*terms.shape[:-1], 1), terms.dtype)))


# Other operations.


def scales_on_scores(call: Call) -> Stages | None:
    """Multiply scores of codes with the scales of keys, and weights with those of values."""
    options = {*call.problem.options, *call.problem.inputs}
    if options & {"sinks", "empty_rows", "softcap", "rotary_cos", "mask_fill", "head_scale"}:
        return None
    query = widened(call.query)
    key, value = (np.repeat(each.astype(query.dtype), call.group, axis=1) for each in (call.key, call.value))
    of_keys, of_values = (
        np.repeat(np.broadcast_to(each, call.key.shape[:3]), call.group, axis=1)[..., np.newaxis, :]
        for each in map(widened, (call.key_scale, call.value_scale))
    )
    scale = np.asarray(call.width**-0.5 if call.scale is None else call.scale, query.dtype)
    scores = query @ key.swapaxes(-1, -2) * of_keys * scale
    scores = scores if call.bias is None else scores + widened(call.bias)
    allowed = ~np.isneginf(next(call.right[name] for name in LOGITS[::-1] if name in call.right))
    weights = backend.softmax(np.where(allowed, scores, -np.inf).astype(query.dtype))["weights"]
    return {"output": (weights * of_values) @ value}


def scales_on_the_output(call: Call) -> Stages | None:
    """Multiply the output with the scale of its head, where values have one for each head."""
    if call.value_scale.shape[-1] != 1 and np.ptp(widened(call.value_scale), axis=-1).any():
        return None
    ones = np.ones_like(call.value_scale)
    scale = np.repeat(np.broadcast_to(widened(call.value_scale)[..., :1], (*call.key.shape[:2], 1)), call.group, axis=1)
    return {"output": call.stages_with(value_scale=ones)["output"] * scale[..., np.newaxis]}


def merged_in_another_way(
    merge: Callable[[list[Part]], Part], *, reverse: bool = False
) -> Callable[[Call], Stages | None]:
    """Return a kernel of ``merge_states``."""

    def kernel(call: Call) -> Stages | None:
        factor = math.log(2) if call.lse_base == "2" else 1.0
        outputs, statistics = call.outputs, widened(call.log_sum_exps)
        parts = [
            (
                np.where(np.isneginf(each)[..., None], 0, widened(output)),
                (each * np.asarray(factor, each.dtype))[..., None],
            )
            for output, each in zip(outputs, statistics, strict=True)
        ]
        if not parts:
            return None
        return {"output": merge(parts[::-1] if reverse else parts)[0]}

    return kernel


def pages_in_another_order(call: Call) -> Stages | None:
    """Move pages, and say so in the table."""
    order = np.argsort(np.arange(len(call.key_pages)) % 3, kind="stable")
    places = np.argsort(order)
    table = np.where((call.block_table >= 0) & (call.block_table < len(order)), call.block_table, 0)
    return call.stages_with(
        key_pages=call.key_pages[order], value_pages=call.value_pages[order], block_table=places[table]
    )


def pages_of_one_key(call: Call) -> Stages | None:
    """Cut pages into such of one key."""
    length = call.key_pages.shape[1]
    pages = {
        name: getattr(call, name).reshape(-1, 1, *getattr(call, name).shape[2:])
        for name in ("key_pages", "value_pages")
    }
    table = (call.block_table[..., np.newaxis] * length + np.arange(length)).reshape(len(call.block_table), -1)
    return call.stages_with(**pages, block_table=table)


def pages_gathered(call: Call) -> Stages | None:
    """Copy the pages of an entry side by side, and what is behind its last key with them."""
    used = -(-int(call.key_lengths.max()) // call.key_pages.shape[1])
    table = np.where((call.block_table >= 0) & (call.block_table < len(call.key_pages)), call.block_table, 0)[:, :used]
    pages = {name: getattr(call, name)[table.reshape(-1)] for name in ("key_pages", "value_pages")}
    return call.stages_with(**pages, block_table=np.arange(table.size).reshape(table.shape))


def sequences_in_reverse(call: Call) -> Stages | None:
    """Pack sequences in the other order."""
    spans = [[slice(*map(int, each)) for each in pairwise(ends)] for ends in (call.cu_seqlens_q, call.cu_seqlens_k)]
    if call.batch < 2:
        return None
    order = [np.concatenate([np.arange(span.start, span.stop) for span in each[::-1]]) for each in spans]
    ends = [np.cumsum([0, *np.diff(each)[::-1]]) for each in (call.cu_seqlens_q, call.cu_seqlens_k)]
    lengths = None if call.key_lengths is None else call.key_lengths[::-1]
    found = call.stages_with(
        query=call.query[:, :, order[0]], key=call.key[:, :, order[1]], value=call.value[:, :, order[1]],
        cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], key_lengths=lengths,
    )  # fmt: skip
    return {"output": found["output"][:, :, np.argsort(order[0])]}


def latent_by_the_reference(call: Call) -> Stages | None:
    """Absorb the projections into queries and output."""
    called = call.problem.as_call()
    inputs = {name: widened(array) for name, array in called.inputs.items()}
    stages: Stages = backend.ABSORBED.latent_attention(**inputs, **called.options)
    return stages


def projected_together(call: Call) -> Stages | None:
    """Project queries, keys and values by one product, where they are made of the same."""
    if call.query.shape != call.key.shape or call.key.shape != call.value.shape:
        return None
    if not (np.array_equal(call.query, call.key) and np.array_equal(call.key, call.value)):
        return None
    weights = [widened(getattr(call, f"{name}_weight")) for name in ("query", "key", "value")]
    together = widened(call.query) @ np.concatenate(weights, axis=1)
    parts = np.split(together, np.cumsum([each.shape[1] for each in weights])[:-1], axis=-1)
    changed = {
        f"{name}_weight": np.eye(part.shape[-1], dtype=part.dtype)
        for name, part in zip(("query", "key", "value"), parts, strict=True)
    }
    return call.stages_with(**dict(zip(("query", "key", "value"), parts, strict=True)), **changed)


_GRADIENTS, _LATENT, _PACKED, _PAGED, _CODES = (
    ("attention_gradients",),
    ("latent_attention",),
    ("packed_attention",),
    ("paged_attention",),
    ("quantized_attention",),
)
_MERGING, _PROJECTED = ("merge_states",), ("multi_head_attention",)
KERNELS: Mapping[str, Kernel] = {
    "three parts of the keys, and sinks as a fourth": Kernel(
        of_rows(lambda rows: merged([*split(rows, evenly(rows.logits.shape[-1], 3)), *sink_part(rows)])[0]),
        classes=MERGED,
    ),
    "parts of 64 keys, sinks first, merged one after the other": Kernel(
        of_rows(lambda rows: one_after_the_other([*sink_part(rows), *split(rows, _tiles(rows, 64))])[0]), classes=MERGED
    ),
    "parts of 16 keys, merged in a tree with sinks": Kernel(
        of_rows(lambda rows: in_a_tree([*split(rows, _tiles(rows, 16)), *sink_part(rows)])[0]), classes=MERGED
    ),
    "parts of very unequal lengths, and one without a key": Kernel(
        of_rows(
            lambda rows: merged(
                [*split(rows, [0, 0, min(1, rows.logits.shape[-1]), rows.logits.shape[-1]]), *sink_part(rows)]
            )[0]
        ),
        classes=MERGED,
    ),
    "the sink is what an online softmax begins with": Kernel(of_rows(lambda rows: online(rows, 64))),
    "an online softmax rescales where the maximum grows by more than 8": Kernel(
        of_rows(lambda rows: online(rows, 32, 8.0))
    ),
    "an online softmax in base two": Kernel(in_base_two),
    "an online softmax of one key after the other": Kernel(
        of_rows(lambda rows: online(rows, 1) if rows.logits.shape[-1] <= 256 else None)
    ),
    "the sink is a key with a value of 0": Kernel(of_rows(sink_as_a_key)),
    "the sink is a sigmoid behind the output": Kernel(of_rows(sink_behind_the_sum), classes=MERGED),
    "keys are filled up to 64 with 7": Kernel(of_rows(lambda rows: with_dirty_padding(rows, 64, 7.0))),
    "keys are filled up to 128 with large numbers": Kernel(of_rows(lambda rows: with_dirty_padding(rows, 128, -1e30))),
    "keys in reverse": Kernel(of_rows(lambda rows: in_another_order(rows, np.arange(rows.logits.shape[-1])[::-1]))),
    "every second key, then the others": Kernel(
        of_rows(lambda rows: in_another_order(rows, np.argsort(np.arange(rows.logits.shape[-1]) % 2, kind="stable")))
    ),
    "tiles of queries read the keys between their first and last one": Kernel(of_rows(attended_rows_alone)),
    "seven queries at a time": Kernel(chunks_of_queries),
    "queries are filled up to 16 with 7": Kernel(queries_with_dirty_rows),
    "lengths are a mask": Kernel(masked_by_lengths),
    "a mask is added": Kernel(added_mask),
    "one batch entry at a time": Kernel(each_entry),
    "one head of keys at a time": Kernel(each_head),
    "heads of groups across keys": Kernel(permuted_groups),
    "inputs are copied in the order of Fortran": Kernel(copied_views),
    "the output is a view": Kernel(output_as_a_view),
    "keys less their mean, between ends of 16 bits": Kernel(smoothed_keys, dtypes=NARROW),
    "p dp from weights made again": Kernel(
        going_back(lambda each: each.gradients(each.weights_again, delta_of(each, each.weights_again))), _GRADIENTS
    ),
    "p dp from weights made again, in tiles of 32 keys": Kernel(
        going_back(lambda each: each.gradients(each.weights_again, delta_in_tiles(each, each.weights_again), 32)),
        _GRADIENTS,
    ),
    "p dp from weights made again, and the others from the forward pass": Kernel(
        going_back(lambda each: each.gradients(each.forward["weights"], delta_of(each, each.weights_again))), _GRADIENTS
    ),
    "weights made again, g o for p dp": Kernel(
        going_back(lambda each: each.gradients(each.weights_again, delta_from_output(each))), _GRADIENTS
    ),
    "weights made again, g o for p dp, sums in tiles of 64": Kernel(
        going_back(lambda each: each.gradients(each.weights_again, delta_from_output(each), 64, 64)), _GRADIENTS
    ),
    "weights of the forward pass, sums in tiles of 16": Kernel(
        going_back(
            lambda each: each.gradients(each.forward["weights"], delta_of(each, each.forward["weights"]), 16, 16)
        ),
        _GRADIENTS,
    ),
    "scales on scores and weights instead of keys and values": Kernel(scales_on_scores, _CODES),
    "scales of heads on the output": Kernel(scales_on_the_output, _CODES),
    "parts merged in a tree": Kernel(merged_in_another_way(in_a_tree), _MERGING, MERGED),
    "parts merged one after the other": Kernel(merged_in_another_way(one_after_the_other), _MERGING, MERGED),
    "parts merged from the last to the first": Kernel(merged_in_another_way(merged, reverse=True), _MERGING, MERGED),
    "pages in another order": Kernel(pages_in_another_order, _PAGED),
    "pages of one key": Kernel(pages_of_one_key, _PAGED),
    "pages gathered, with what lies behind the last key": Kernel(pages_gathered, _PAGED),
    "sequences in reverse": Kernel(sequences_in_reverse, _PACKED),
    "latent vectors absorbed": Kernel(latent_by_the_reference, _LATENT),
    "queries, keys and values projected together": Kernel(projected_together, _PROJECTED),
}
"""Each by what it does."""


def _tiles(rows: Rows, tile: int) -> list[int]:
    keys = rows.logits.shape[-1]
    return [*range(0, keys, tile), keys]
