"""Kernels that are wrong where several things meet, and right ones that look odd: calls, conditions and changes.

A fault is a condition on a call (an option together with a size or a shape) and what a kernel does there instead; it is
right everywhere else. Such a kernel computes in float32 or float64 between its ends and returns its results alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.execution.operations import function_and_keywords
from attncheck.reading.lowering import query_positions
from attncheck.reading.problem import Problem
from attncheck.spec import result_stages
from attncheck.spec.dtypes import numpy_dtype

Array = NDArray[Any]
Stages = Mapping[str, Array]
NARROW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Call:
    """A problem as a kernel is called with it, its inputs as they lie in memory."""

    problem: Problem
    dtype: str
    memory: dict[Any, Any] = field(default_factory=dict)
    """What the kernel keeps between calls."""

    def __getattr__(self, name: str) -> Any:
        """Return an input or an option; None where it is not given."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self.problem.inputs.get(name, self.problem.options.get(name))

    @property
    def batch(self) -> int:
        """How many batch entries there are, or sequences."""
        return int(self.query.shape[0] if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1)

    @property
    def query_heads(self) -> int:
        """How many heads the queries have."""
        return int(self.query.shape[1] if self.query.ndim == 4 else self.heads)

    @property
    def key_heads(self) -> int:
        """How many heads keys and values have."""
        if self.key_pages is not None:
            return int(self.key_pages.shape[2])
        if self.query.ndim == 3:
            return int(self.kv_heads or self.heads)
        return self.query_heads if self.key is None else int(self.key.shape[1])

    @property
    def group(self) -> int:
        """How many query heads share a head of keys."""
        return self.query_heads // self.key_heads

    @property
    def queries(self) -> int:
        """How many queries there are, of all sequences."""
        return int(self.query.shape[-2])

    @property
    def past(self) -> int:
        """How many keys come from a cache."""
        return 0 if self.past_key is None else int(self.past_key.shape[-2])

    @property
    def keys(self) -> int:
        """How many keys there are with those of a cache; of pages, as many as the longest entry has."""
        if self.key_pages is not None:
            return int(self.key_lengths.max())
        return self.past + int((self.latent if self.key is None else self.key).shape[-2])

    @property
    def width(self) -> int:
        """The width of a query."""
        return int(self.query.shape[-1])

    @property
    def value_width(self) -> int:
        """The width of a value."""
        value = self.value_pages if self.value is None else self.value
        return self.width if value is None else int(value.shape[-1])

    @property
    def positions(self) -> Array:
        """Where each query stands among the keys, (Lq, 1) or (B, 1, Lq, 1)."""
        asked = self.problem
        return np.asarray(query_positions(asked.options, asked.inputs, np.arange(self.queries)))

    @property
    def row(self) -> Array:
        """The number of each query, (Lq, 1)."""
        return np.arange(self.queries)[:, np.newaxis]

    @property
    def column(self) -> Array:
        """The number of each key, (T,)."""
        return np.arange(self.keys)

    @property
    def head(self) -> Array:
        """The number of each query head, (H, 1, 1)."""
        return np.arange(self.query_heads)[:, np.newaxis, np.newaxis]

    @property
    def entry(self) -> Array:
        """The number of each batch entry, (B, 1, 1, 1)."""
        return np.arange(self.batch)[:, np.newaxis, np.newaxis, np.newaxis]

    def full(self, name: str) -> Array:
        """Return a mask or bias of all scores, (B, H, Lq, T)."""
        shape = (self.batch, self.query_heads, self.queries, self.keys)
        return np.broadcast_to(getattr(self, name), shape)

    @cached_property
    def right(self) -> Stages:
        """All stages of a right kernel, as wide as it computes."""
        return self.stages_with()

    def stages_with(self, **changes: Any) -> Stages:
        """Return all stages of the call with other inputs or options, not yet narrowed; None leaves one out."""
        own = self.problem
        names = {*own.options, *changes} - own.input_specs.keys()
        changed = {**own.options, **own.inputs, **changes}
        given = {name: value for name, value in changed.items() if value is not None}
        options = {name: value for name, value in given.items() if name in names}
        inputs = {name: value for name, value in given.items() if name not in names}
        called = replace(own, options=options, inputs=inputs).as_call()
        function, keywords = function_and_keywords(called.operation, called.options)
        wide = {name: widened(array) for name, array in called.inputs.items()}
        with np.errstate(all="ignore"):
            stages: Stages = getattr(numpy_backend, function)(**wide, **keywords)
        return stages

    def again(self, **changes: Any) -> Stages:
        """Return the results of the call with other inputs or options."""
        return self.results(self.stages_with(**changes))

    def results(self, stages: Stages) -> Stages:
        """Return what a kernel returns of these stages."""
        asked = self.problem
        names = result_stages(asked.operation, asked.options, asked.inputs)
        ends = numpy_dtype(self.dtype)
        with np.errstate(all="ignore"):  # what is not read has no gradient
            return {name: np.asarray(stages[name], ends) for name in names if name in stages}

    def hiding(self, allowed: Array, **changes: Any) -> Stages:
        """Return the results with a mask more: what each query may attend to, (.., Lq, T)."""
        mask = self.mask if "mask" not in changes else changes.pop("mask")
        return self.again(**changes, mask=_as_mask(allowed if mask is None else np.logical_and(mask, allowed)))


def _as_mask(allowed: Array) -> Array:
    return allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)


def widened(array: Array) -> Array:
    """Return an array of 16 bits in float32, and any other as it is."""
    return array.astype(np.float32) if array.dtype.name in NARROW else array


@dataclass(frozen=True)
class When:
    """A condition on a call."""

    holds: Callable[[Call], Any]

    def __and__(self, other: When) -> When:
        """Return the condition that both hold."""
        return When(lambda call: self.holds(call) and other.holds(call))


def given(*names: str) -> When:
    """Hold where all of these inputs and options are given."""
    return When(
        lambda call: all(getattr(call, name) is not None and getattr(call, name) is not False for name in names)
    )


def at_least(**sizes: int) -> When:
    """Hold where these sizes are at least so large."""
    return When(lambda call: all(getattr(call, name) >= size for name, size in sizes.items()))


def exactly(**sizes: int) -> When:
    """Hold where these sizes are so large."""
    return When(lambda call: all(getattr(call, name) == size for name, size in sizes.items()))


ONE_QUERY, SEVERAL, BATCH, GROUPS = exactly(queries=1), at_least(queries=2), at_least(batch=2), at_least(group=2)
FEW = SEVERAL & When(lambda call: call.queries <= 16)
DECODING = ONE_QUERY & at_least(keys=1024)
WINDOW_LEFT = When(lambda call: call.window is not None and call.window[0] is not None)
Wrong = Callable[[Call], Stages]


def lost(*names: str) -> Wrong:
    """Leave inputs or options out."""
    return lambda call: call.again(**dict.fromkeys(names))


def read(name: str, change: Callable[[Call, Array], Any]) -> Wrong:
    """Take an input or an option for another one: ``change(call, value)``."""
    return lambda call: call.again(**{name: change(call, getattr(call, name))})


def hidden(seen: Callable[[Call], Array], *lost_names: str) -> Wrong:
    """Attend to no key but those that are ``seen(call)``, and forget some rules."""
    return lambda call: call.hiding(np.asarray(seen(call)), **dict.fromkeys(lost_names))


def written(change: Callable[[Call, Array], Array], stage: str = "output") -> Wrong:
    """Write another result: ``change(call, result)``."""

    def wrong(call: Call) -> Stages:
        results = call.results(call.right)
        return {**results, stage: change(call, results[stage])}

    return wrong


def partly(where: Callable[[Call], Array], wrong: Wrong) -> Wrong:
    """Be wrong in the rows that ``where(call)`` marks, (.., Lq, 1)."""

    def found(call: Call) -> Stages:
        right, other = call.results(call.right), wrong(call)
        return {name: np.where(where(call), other[name], right[name]) for name in right}

    return found


def alone(stage: str, wrong: Wrong) -> Wrong:
    """Take one result from a wrong kernel, and the others from a right one."""
    return lambda call: {**call.results(call.right), stage: wrong(call)[stage]}


def _root(array: Array) -> tuple[Array, int, list[int]]:
    """Return the memory that an array is a view of, where it begins there, and its strides, all in elements."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    memory = np.lib.stride_tricks.as_strided(base, (base.nbytes // base.itemsize,), (base.itemsize,))
    first = (array.ctypes.data - base.ctypes.data) // array.itemsize
    return memory, first, [stride // array.itemsize for stride in array.strides]


def gathered(array: Array, strides: list[int], limit: int | None = None) -> Array:
    """Read the memory of an array by these strides, where an offset is cut to less than a limit."""
    memory, first, _ = _root(array)
    offsets = np.zeros(array.shape, np.int64)
    for axis, stride in enumerate(strides):
        offsets += stride * np.arange(array.shape[axis]).reshape([-1] + [1] * (array.ndim - axis - 1))
    offsets = offsets if limit is None else offsets % limit
    return np.asarray(memory[(first + offsets) % memory.size])


def packed_strides(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of an array that lies row by row."""
    return [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]


def as_if_packed(call: Call, array: Array) -> Array:
    """Read an array as if it lay row by row."""
    return gathered(array, packed_strides(array.shape))


def with_offsets_of(bits: int) -> Callable[[Call, Array], Array]:
    """Read an array with offsets of so many bits."""
    return lambda call, array: gathered(array, _root(array)[2], 1 << bits)


def strides_of(array: Array) -> list[int]:
    """Return the strides of an array in elements."""
    return _root(array)[2]


def not_packed(name: str) -> When:
    """Hold where an array does not lie row by row."""
    return given(name) & When(lambda call: strides_of(getattr(call, name)) != packed_strides(getattr(call, name).shape))


def beyond(name: str, bits: int) -> When:
    """Hold where an offset into an array needs more bits."""

    def holds(call: Call) -> bool:
        array = getattr(call, name)
        steps = zip(strides_of(array), array.shape, strict=True)
        return bool(sum(stride * (length - 1) for stride, length in steps) >= 1 << bits)

    return given(name) & When(holds)


def of_entry_0(*names: str) -> Wrong:
    """Read the first batch entry of these inputs for all."""

    def wrong(call: Call) -> Stages:
        arrays = {name: array for name in names if (array := getattr(call, name)) is not None}
        return call.again(**{name: np.broadcast_to(array[:1], array.shape) for name, array in arrays.items()})

    return wrong


@dataclass(frozen=True)
class Fault:
    """A kernel that is wrong ``where`` a call meets a condition, of one operation."""

    where: When
    wrong: Wrong
    operation: str = "attention"

    def __call__(self, call: Call) -> Stages | None:
        """Return what the kernel returns where that may be wrong; None where the condition does not hold."""
        return self.wrong(call) if self.where.holds(call) else None
