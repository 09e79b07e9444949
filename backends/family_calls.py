"""A function of a signature family, as functions of the contract: calls and layouts of one expressed in the other's.

The contract states window edges and mask for a library call by options, a window, a mask and a past; a family may have
parameters for some of it, and a mask for all. So everything is turned into edges that count from the last query and
key, and a mask for what is no edge. These become the family's own parameters where those mean just that, else a mask. A
mask that is nothing but edges becomes a parameter, too: there is no other way to ask a FlashAttention for it.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper, wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import DEFAULTS, UnsupportedError
from attncheck.backends.families import FUNCTIONS, Family, Layout


@dataclass(frozen=True)
class Reach:
    """Window edges for a library call: keys from ``left`` before to ``right`` behind their own, counted from the end.

    The last query stands at the last key. None is no edge. ``mask``, if there is one, forbids further keys.
    """

    left: int | None = None
    right: int | None = None
    mask: NDArray[np.bool_] | None = None

    @property
    def has_edges(self) -> bool:
        """Return whether anything is forbidden by an edge."""
        return self.left is not None or self.right is not None

    def allowed(self, queries: int, keys: int) -> NDArray[np.bool_] | None:
        """Return all of it as a mask that broadcasts to (B, H, Lq, T); None where nothing is forbidden."""
        if not self.has_edges:
            return self.mask
        band = _band(self.left, self.right, queries, keys)[np.newaxis, np.newaxis]
        return band if self.mask is None else band & self.mask


def _band(left: int | None, right: int | None, queries: int, keys: int) -> NDArray[np.bool_]:
    distance = np.arange(keys) - (np.arange(queries)[:, np.newaxis] + keys - queries)
    allowed = np.ones((queries, keys), np.bool_)
    allowed &= True if left is None else distance >= -left
    allowed &= True if right is None else distance <= right
    return allowed


def as_edges(reach: Reach, queries: int, keys: int) -> Reach | None:
    """Return what a mask says as edges alone; None where it says more."""
    allowed = reach.allowed(queries, keys)
    if reach.mask is None or allowed is None:
        return reach
    if 0 in allowed.shape[:2]:
        return replace(reach, mask=None)
    first = np.broadcast_to(allowed, (*allowed.shape[:2], queries, keys))[0, 0]
    if not (allowed == first).all() or not first.any():
        return None
    rows, columns = np.nonzero(first)
    distance = columns - (rows + keys - queries)
    left, right = -int(distance.min()), int(distance.max())
    candidates: tuple[tuple[int | None, int | None], ...] = ((None, right), (left, right), (left, None))
    for edge, other in candidates:
        if np.array_equal(_band(edge, other, queries, keys), first):
            return Reach(edge, other)
    return None


def least(*edges: int | None) -> int | None:
    """Return the nearest of several edges; None where none is one."""
    return min((each for each in edges if each is not None), default=None)


def reach_of(given: Mapping[str, Any], queries: int, keys: int, past: int) -> Reach:
    """Return whom queries may attend to, by all that a call of the contract says of it."""
    left, right = given.get("window") or (None, None)
    right = least(right, 0 if given.get("is_causal") else None)
    mask = given.get("mask")
    lengths, offsets = given.get("key_lengths"), given.get("query_offsets")
    if lengths is not None:
        used = np.arange(keys) < lengths.reshape(-1, 1, 1, 1)
        mask = used if mask is None else mask & used
    start = past
    if offsets is not None and offsets.size and (left, right) != (None, None):
        start = int(offsets.flat[0])
        if not (offsets == start).all():
            bands = [_reach_at(left, right, int(each), queries, keys).allowed(queries, keys) for each in offsets.flat]
            of_each = np.concatenate([band for band in bands if band is not None])
            return Reach(mask=of_each if mask is None else mask & of_each)
    return replace(_reach_at(left, right, start, queries, keys), mask=mask)


def _reach_at(left: int | None, right: int | None, start: int, queries: int, keys: int) -> Reach:
    """Return edges that count from queries of which the first stands at ``start``, counted from the end."""
    shift = keys - queries - start
    return Reach(None if left is None else left + shift, None if right is None else right - shift)


Array = NDArray[Any]
Stages = dict[str, Any]
Guard = Callable[[Mapping[str, Any], Callable[[Any], Array]], AbstractContextManager[None]]
"""Surrounds a call, and is handed its arrays."""
_FOLDED = ("mask", "is_causal", "window", "key_lengths", "past_key", "past_value", "query_offsets")
_WITHOUT_GRADIENTS = {"past_key", "past_value", "query_offsets"}
_ATTENTION = ("query", "key", "value")
_INPUTS: Mapping[str, tuple[str, ...]] = {
    "attention": _ATTENTION,
    "attention_gradients": (*_ATTENTION, "grad_output"),
    "quantized_attention": (*_ATTENTION, "key_scale", "value_scale"),
    "packed_attention": (*_ATTENTION, "cu_seqlens_q", "cu_seqlens_k"),
    "paged_attention": ("query", "key_pages", "value_pages", "block_table", "key_lengths"),
}
_SCALES = ("query_scale", "key_scale", "value_scale")
_PACKED = ("cu_seqlens_q", "cu_seqlens_k")
_PAGED = ("block_table", "cache_seqlens")
_LONGEST = ("max_seqlen_q", "max_seqlen_k")


class UnfitFunctionError(TypeError):
    """A function cannot be called as those of a family; ``strange`` is what it requires and the family never gives."""

    def __init__(self, family: Family, strange: Sequence[str]) -> None:
        super().__init__(f"cannot be called as {family.name} is: {family.call}")
        self.family, self.strange = family, strange


class Arrays(Protocol):
    """A framework's conversions."""

    def from_numpy(self, array: Array) -> Any:
        """Turn a NumPy array into the framework's own."""

    def to_numpy(self, tensor: Any) -> Array:
        """Turn the framework's array into NumPy's."""


def contract_functions(
    function: Callable[..., Any], family: Family, arrays: Arrays, guard: Guard = lambda *_: nullcontext()
) -> dict[str, Callable[..., Any]]:
    """Return a function of a family as those of the contract that it can be asked for, by name.

    A function that takes ``cu_seqlens_q`` is asked for packed sequences, one that takes ``block_table`` and
    ``cache_seqlens`` for paged caches, and any other for attention, to codes too if it takes their scales. Raises
    ``UnfitFunctionError`` where it cannot be called.
    """
    own = FamilyFunction.of(function, family, arrays, guard=guard)
    if own.names.issuperset(_PAGED):
        return {"paged_attention": own.as_contract("paged_attention", own.paged_attention)}
    if own.names.issuperset(_PACKED):
        return {"packed_attention": own.as_contract("packed_attention", own.packed_attention)}
    names = ["attention", "quantized_attention"] if own.takes_codes else ["attention"]
    return {name: own.as_contract(name, getattr(own, name)) for name in names}


def library_functions(
    call: str, family: Family, arrays: Any, given: Mapping[str, Any], *, has_gradients: bool
) -> dict[str, Callable[..., Stages]]:
    """Return a library's function, ``module:function``, as those of the contract; it is always ``given`` some words."""
    owner, name = owner_of(call)

    @wraps(getattr(owner, name))
    def called(*tensors: Any, **words: Any) -> Any:
        return getattr(owner, name)(*tensors, **words)

    own = FamilyFunction.of(called, family, arrays, copies=False)
    program = arrays.program(called, own.numbers | given.keys())
    own = replace(own, function=partial(program, **given), differentiated=partial(called, **given))
    return {each: own.as_contract(each, getattr(own, each)) for each in FUNCTIONS[: 1 + has_gradients]}


def owner_of(call: str) -> tuple[Any, str]:
    """Return the module of a library's function, or its class there, and its name.

    ``module:Class().method`` is a method of an object that is made without arguments.
    """
    module, _, path = call.partition(":")
    holder, _, name = path.rpartition(".")
    owner: Any = import_module(module)
    if holder:
        owner = getattr(owner, holder.removesuffix("()"))
    return (owner() if holder.endswith("()") else owner), name


def never_given(function: Callable[..., Any], family: Family) -> list[str]:
    """Return a function's optional parameters for which no call of the family gives anything."""
    found = [each for each in _parameters(function, family) if each.default is not inspect.Parameter.empty]
    return [each.name for each in found if each.name not in _words(family)]


def _parameters(function: Callable[..., Any], family: Family) -> list[inspect.Parameter]:
    """Return the parameters of a function; of a builtin that does not tell them, those of the family."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        return [each for each in inspect.signature(function).parameters.values() if each.kind not in variable]
    except (TypeError, ValueError):
        return list(parameters_of_call(family))


def parameters_of_call(family: Family) -> Iterator[inspect.Parameter]:
    """Yield the parameters that a family's call shows."""
    (defined,) = ast.parse(f"def {family.call}: ...").body
    assert isinstance(defined, ast.FunctionDef), "the text of a call"
    given = defined.args
    blank = inspect.Parameter.empty
    defaults = [blank] * (len(given.args) - len(given.defaults)) + [ast.literal_eval(each) for each in given.defaults]
    for each, default in zip(given.args, defaults, strict=True):
        yield inspect.Parameter(each.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
    for each, of_name in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        default = blank if of_name is None else ast.literal_eval(of_name)
        yield inspect.Parameter(each.arg, inspect.Parameter.KEYWORD_ONLY, default=default)


def _of_keys(allowed: Array, batch: int, keys: int) -> Array:
    """Return a mask as one of keys alone, (B, Lk).

    Raises ``UnsupportedError`` where heads or queries have their own.
    """
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    first = allowed[:, :1, :1]
    if not (allowed == first).all():
        raise UnsupportedError("takes a mask of keys alone", ("mask of queries",))
    return np.broadcast_to(first[:, 0, 0], (batch, keys))


def _of_heads(scale: Array, batch: int, heads: int) -> Array:
    """Return the scale of codes of each entry and head, (B, heads), of one that broadcasts to (B, H, L).

    Raises ``UnsupportedError`` where tokens, or query heads of the same keys, have their own, or float32 has not them.
    """
    scale = scale.reshape((1,) * (3 - scale.ndim) + scale.shape)
    groups = scale.reshape(scale.shape[0], min(heads, scale.shape[1]), -1)
    if not (groups == groups[..., :1]).all():
        raise UnsupportedError("takes one scale of codes for each head", ("scales of tokens",))
    found = np.broadcast_to(groups[..., 0], (batch, heads))
    if not (found == found.astype(np.float32)).all():
        raise UnsupportedError("holds scales of codes in float32, and these are none", ("scales in float64",))
    return found.astype(np.float32)


def _of_slots(scale: Array) -> Array:
    """Return scales of pages, which broadcast to (Np, Lp, Hkv), as those of the keys of one entry, (1, Hkv, n)."""
    return scale.reshape(-1, scale.shape[-1]).T[np.newaxis]


def _words(family: Family) -> set[str]:
    several = (*family.scale, *family.window, *family.softcap, *family.sinks, *family.log_sum_exp, *family.neutral)
    several += family.descales
    single = (family.causal, family.window_left, family.mask, family.bias, family.key_lengths, family.grouped)
    return {*filter(None, single), *several, *_PACKED, *_PAGED, *_LONGEST, "seqused_k"}


@dataclass(frozen=True)
class FamilyFunction:
    """A function of a family, and the names of its parameters.

    ``copies`` is false where arrays are handed over with the strides that they have; ``differentiated`` is the function
    that gradients go through, where that is not the same; ``scales`` are those of codes, (B, heads), by their names.
    """

    function: Callable[..., Any]
    family: Family
    arrays: Arrays
    names: frozenset[str]
    required: frozenset[str] = frozenset()
    guard: Guard = lambda *_: nullcontext()
    copies: bool = True
    differentiated: Callable[..., Any] | None = None
    scales: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any], family: Family, arrays: Arrays, **more: Any) -> FamilyFunction:
        """Look at the parameters. Raises ``UnfitFunctionError`` where it requires what the family does not give."""
        parameters = _parameters(function, family)
        positional = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        inputs = positional[: 3 + family.module]
        rest = [each for each in parameters if each not in inputs]
        required = [each.name for each in rest if each.default is inspect.Parameter.empty]
        strange = [each for each in required if each not in _words(family)]
        if len(inputs) < 3 + family.module or strange:
            raise UnfitFunctionError(family, strange)
        return cls(function, family, arrays, frozenset(each.name for each in rest), frozenset(required), **more)

    @property
    def numbers(self) -> frozenset[str]:
        """The names of what it is given beside arrays."""
        family = self.family
        return (self.names & _words(family)) - {family.mask, family.bias, family.key_lengths, *family.sinks}

    def named(self, names: tuple[str, ...]) -> str:
        """Return the first of these names that the function has; empty if it has none."""
        return next((each for each in names if each in self.names), "")

    def has(self, name: str) -> bool:
        """Return whether there is such a word, and the function has it."""
        return bool(name) and name in self.names

    @property
    def takes_codes(self) -> bool:
        """True if it takes the scales of codes."""
        return bool(self.family.descales) and self.names.issuperset(self.family.descales)

    def as_contract(self, name: str, call: Callable[..., Stages]) -> Callable[..., Stages]:
        """Return a call as one of the contract's functions, whose signature says what it can be asked for."""
        inputs = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in _INPUTS[name]]
        taken = {*self._takes(name)} - (_WITHOUT_GRADIENTS if name == "attention_gradients" else set())
        in_order = (each for each in DEFAULTS if each in taken)
        options = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None) for each in in_order]
        call = self._tiled(call) if self.family.heads == "tiled" else call

        def of_contract(*given: Any, **asked: Any) -> Stages:
            named = [asked.pop(each) for each in _INPUTS[name][len(given) :]]
            return call(*given, *named, **asked)

        update_wrapper(of_contract, self.function)
        of_contract.__signature__ = inspect.Signature([*inputs, *options])  # type: ignore[attr-defined]
        return of_contract

    def _tiled(self, call: Callable[..., Stages]) -> Callable[..., Stages]:
        """Hand query heads over with those of different keys side by side, and put back what belongs to them."""

        def in_order(tensor: Any, order: NDArray[np.intp]) -> Any:
            if np.ndim(tensor) < 2 or tensor.shape[1] != len(order):
                return tensor
            return self.arrays.from_numpy(np.ascontiguousarray(self.arrays.to_numpy(tensor)[:, order]))

        def called(query: Any, key: Any, *inputs: Any, **asked: Any) -> Stages:
            order = np.arange(query.shape[1]).reshape(key.shape[1], -1).T.ravel()
            given = [in_order(query, order), key, *(in_order(each, order) for each in inputs)]
            stages = call(*given, **{name: in_order(each, order) for name, each in asked.items()})
            return {name: in_order(each, np.argsort(order)) for name, each in stages.items()}

        return called

    def _takes(self, name: str) -> Iterator[str]:
        """Yield the keywords of one of the contract's functions that can be said."""
        family = self.family
        words = {"scale": family.scale, "softcap": family.softcap, "sinks": family.sinks}
        yield from (each for each, names in words.items() if self.named(names))
        is_causal = self.has(family.causal) or (self.has(family.mask) and bool(family.causal_mask))
        has_window = bool(self.named(family.window)) or self.has(family.window_left)
        if name == "quantized_attention" or (name == "paged_attention" and self.takes_codes):
            yield from ("stored_as", *(each for each in _SCALES if each not in _INPUTS[name]))
        if name == "quantized_attention":
            yield from ("mask", "key_lengths") if self.has(family.mask) else ()
        if name.startswith("attention"):
            is_masked = self.has(family.mask)
            yield from _FOLDED if is_masked or is_causal or has_window else ("past_key", "past_value")
            if self.has(family.bias) or (is_masked and "added" in family.mask_kinds):
                yield "bias"
        else:
            yield from ["is_causal"] * is_causal + ["window"] * (is_causal or has_window)
            yield from ["key_lengths"] * (name == "packed_attention" and "seqused_k" in self.names)

    def attention(self, *inputs: Any, **asked: Any) -> Stages:
        """Call it for the contract's attention."""
        given = self._numbers(asked)
        query, key, value = map(self.arrays.to_numpy, inputs)
        if given.get("past_key") is not None:
            key, value = (
                np.concatenate([given[f"past_{name}"], array], axis=-2)
                for name, array in (("key", key), ("value", value))
            )
        past = key.shape[-2] - inputs[1].shape[-2]
        words: dict[str, Any] = self._options(query, key, given)
        words |= self._reached(query, key, past, given)
        if self.family.layout != "LHD":
            return self._stages(self._called([query, key, value] if past else self._as_they_lie(inputs), words))
        if not query.shape[0]:
            raise UnsupportedError("is called for one batch entry at a time, and there is none", ("empty batches",))
        rows = [self._one_entry(entry, [query, key, value], words) for entry in range(query.shape[0])]
        return {name: self.arrays.from_numpy(np.concatenate([row[name] for row in rows])) for name in rows[0]}

    def attention_gradients(self, query: Any, key: Any, value: Any, grad_output: Any, **asked: Any) -> Stages:
        """Differentiate it for the contract's gradients of attention, by the framework's own means.

        A bias that is part of a mask has that mask's gradient where a key may be attended, added up to its shape.
        """
        family, given = self.family, self._numbers(asked)
        inputs = [self.arrays.to_numpy(each) for each in (query, key, value)]
        words = self._options(inputs[0], inputs[1], given) | self._reached(inputs[0], inputs[1], 0, given)
        for switch in family.log_sum_exp:
            words.pop(switch, None)
        places = {"bias": family.bias if self.has(family.bias) else family.mask, "sinks": self.named(family.sinks)}
        more = {name: words.pop(word) for name, word in places.items() if name in given}
        laid_out = [_laid_out(each, family.layout) for each in self._as_they_lie((query, key, value))]
        grad = _laid_out(self.arrays.to_numpy(grad_output), family.output_layout or family.layout)
        tensors = [self._tensor(each) for each in (*laid_out, *more.values())]
        others = {name: self._tensor(each) for name, each in words.items()}
        found = self._gradients(tensors, self._tensor(grad), [places[name] for name in more], others)
        gradients = [_from_layout(self.arrays.to_numpy(each), family.layout) for each in found[:3]]
        stages = dict(zip(("grad_query", "grad_key", "grad_value"), gradients, strict=True))
        for name, each in zip(more, found[3:], strict=True):
            stages[f"grad_{name}"] = self.arrays.to_numpy(each)
        if "bias" in more and not self.has(family.bias):
            allowed = reach_of(given, inputs[0].shape[-2], inputs[1].shape[-2], 0).allowed(*more["bias"].shape[-2:])
            stages["grad_bias"] = _of_bias(stages["grad_bias"], allowed, given["bias"].shape)
        return {name: self.arrays.from_numpy(each) for name, each in stages.items()}

    def quantized_attention(
        self, query: Any, key: Any, value: Any, key_scale: Any, value_scale: Any, **asked: Any
    ) -> Stages:
        """Call it for the contract's attention to codes, which come with one scale for each entry and head."""
        own = self._with_scales({"key_scale": key_scale, "value_scale": value_scale}, asked, query, key.shape[1])
        return own.attention(query, key, value, **asked)

    def _with_scales(
        self, scales: Mapping[str, Any], asked: dict[str, Any], query: Any, key_heads: int
    ) -> FamilyFunction:
        """Return the function with scales of codes, (B, H, L), those of the query out of what is asked for."""
        asked.pop("stored_as", None)  # the arrays' dtype says it
        given = {"query_scale": asked.pop("query_scale", None), **scales}
        words = {}
        for (name, scale), word in zip(given.items(), self.family.descales, strict=True):
            is_of_queries = name == "query_scale" and self.family.query_heads_scaled
            heads = query.shape[1] if is_of_queries else key_heads
            if scale is not None:
                words[word] = _of_heads(self.arrays.to_numpy(scale), query.shape[0], heads)
        return replace(self, scales=words)

    def _as_they_lie(self, inputs: Sequence[Any]) -> list[Any]:
        """Return inputs as arrays, or as they are where the function takes them so: on a device they keep strides."""
        is_given = self.family.layout == "BHLD" and not self.copies
        return [each if is_given else self.arrays.to_numpy(each) for each in inputs]

    def _gradients(
        self, tensors: Sequence[Any], grad_output: Any, names: Sequence[str], others: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Return gradients of the first three tensors, and of those that are given under ``names``."""
        function = self.differentiated or self.function

        def output_of(query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
            returned = function(query, key, value, **dict(zip(names, more, strict=False)), **options)
            return returned[0] if isinstance(returned, tuple | list) else returned

        found: Sequence[Any] = self.arrays.gradients(output_of, tensors, grad_output, others)  # type: ignore[attr-defined]
        return found

    def _tensor(self, each: Any) -> Any:
        """Turn an array into the framework's; anything else is handed over as it is."""
        if not isinstance(each, np.ndarray):
            return each
        return self.arrays.from_numpy(np.ascontiguousarray(each) if self.copies else each)

    def _one_entry(self, entry: int, inputs: Sequence[Array], words: Mapping[str, Any]) -> dict[str, Array]:
        """Call it for one batch entry; return stages with a batch axis."""
        own = [each[entry : entry + 1] for each in inputs]
        mask = words.get(self.family.mask)
        if mask is not None:
            one = mask[min(entry, mask.shape[0] - 1)]
            if one.shape[0] > 1 and not (one == one[:1]).all():
                raise UnsupportedError("takes no mask of each head", ("mask",))
            words = {**words, self.family.mask: one[0]}
        words = {**words, **{name: scale[entry] for name, scale in self.scales.items()}}
        stages = self._stages(self._called(own, words))
        return {name: self.arrays.to_numpy(each) for name, each in stages.items()}

    def packed_attention(self, query: Any, key: Any, value: Any, first: Any, second: Any, **asked: Any) -> Stages:
        """Call it for the contract's packed sequences."""
        given = self._numbers(asked)
        arrays = [self.arrays.to_numpy(each) for each in (query, key, value)]
        words = self._options(arrays[0], arrays[1], given)
        words |= self._edges_from_the_end(given)
        for name, longest, limits in zip(_PACKED, _LONGEST, map(self.arrays.to_numpy, (first, second)), strict=True):
            words[name] = limits.astype(np.int32)
            words |= {longest: int(np.diff(limits).max(initial=0))} if longest in self.names else {}
        if given.get("key_lengths") is not None:
            words["seqused_k"] = given["key_lengths"].astype(np.int32)
        packed = replace(self, family=replace(self.family, layout="LHD"))
        return packed._stages(packed._called(arrays, words))

    def paged_attention(
        self, query: Any, key_pages: Any, value_pages: Any, table: Any, lengths: Any, **asked: Any
    ) -> Stages:
        """Call it for the contract's paged caches."""
        pages = [self.arrays.to_numpy(each) for each in (key_pages, value_pages)]
        if "key_scale" in asked:
            scales = {name: _of_slots(self.arrays.to_numpy(asked.pop(name))) for name in _SCALES[1:]}
            return self._with_scales(scales, asked, query, pages[0].shape[2]).paged_attention(
                query, key_pages, value_pages, table, lengths, **asked
            )
        given = self._numbers(asked)
        own = self.arrays.to_numpy(query)
        words = self._options(own, own, given)
        words |= self._edges_from_the_end(given)
        words["block_table"] = self.arrays.to_numpy(table).astype(np.int32)
        words["cache_seqlens"] = self.arrays.to_numpy(lengths).astype(np.int32)
        return self._stages(self._made([_laid_out(own, self.family.layout), *pages], words))

    def _numbers(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self.arrays.to_numpy(each) if hasattr(each, "shape") else each
            for name, each in asked.items()
            if each is not None
        }

    def _options(self, query: Array, key: Array, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is asked for in single words."""
        family = self.family
        words: dict[str, Any] = dict.fromkeys(self.required) | dict.fromkeys({family.causal} & self.required, False)
        words |= {name: value for name, value in family.neutral.items() if name in self.names}
        words |= self.scales
        words |= {name: (family.no_edge, family.no_edge) for name in family.window if name in self.required}
        gives_scale = family.gives_scale or self.named(family.scale) in self.required
        scale = given.get("scale", _usual_scale(query) if gives_scale else None)
        for name, number in (("scale", scale), ("softcap", given.get("softcap"))):
            if family.numbers_in_float32 and query.dtype == np.float64 and number is not None:
                _require_float32(name, number)
        for names, value in (
            (family.scale, scale),
            (family.softcap, given.get("softcap", family.no_softcap)),
            (family.sinks, given.get("sinks")),
        ):
            words |= {name: value} if (name := self.named(names)) and value is not None else {}
        if self.has(family.grouped) and query.shape[1] != key.shape[1]:
            words[family.grouped] = True
        if switch := self.named(family.log_sum_exp):
            words[switch] = True
        return words

    def _edges_from_the_end(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return causality and a window that count from a sequence's end, as those of sequences and pages do."""
        left, right = given.get("window") or (None, None)
        reach = Reach(left, least(right, 0 if given.get("is_causal") else None))
        words = self._said(reach, 0)
        if words is None:
            raise UnsupportedError("takes no window", ("window",))
        return words

    def _reached(self, query: Array, key: Array, past: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the call's window edges, mask and bias. Raises ``UnsupportedError`` where two exclude each other."""
        words = self._reached_by(query, key, past, given)
        if not self.family.bias_beside_mask and {self.family.bias, self.family.mask} <= words.keys():
            raise UnsupportedError("takes one of a bias and a mask, and lengths become a mask", ("mask beside bias",))
        return words

    def _reached_by(self, query: Array, key: Array, past: int, given: Mapping[str, Any]) -> dict[str, Any]:
        family, (queries, keys) = self.family, (query.shape[-2], key.shape[-2])
        apart = {"key_lengths": family.key_lengths, "bias": family.bias}
        words = {word: given[name] for name, word in apart.items() if name in given and self.has(word)}
        if family.key_lengths in words:
            words[family.key_lengths] = words[family.key_lengths].astype(family.lengths_dtype)
        left = {name: each for name, each in given.items() if not (name in apart and self.has(apart[name]))}
        reach, bias = reach_of(left, queries, keys, past), left.get("bias")
        if bias is None and (said := self._said_in_words(reach, queries, keys)) is not None:
            return words | said
        if not self.has(family.mask):
            raise UnsupportedError("takes no mask, and has no other word for whom queries may attend to", ("mask",))
        is_told = family.causal_beside_mask and self.has(family.causal) and not past and "query_offsets" not in left
        if is_told and left.pop("is_causal", False):
            reach, words[family.causal] = reach_of(left, queries, keys, past), True
        return words | self._masked(reach, bias, query, key)

    def _said_in_words(self, reach: Reach, queries: int, keys: int) -> dict[str, Any] | None:
        """Return the arguments for window edges without a mask; None where that cannot be, or a mask says it as well.

        A case's mask is said by words only where there is no other way to ask for what the words mean: causality that
        counts from the end is a mask to the contract.
        """
        beyond = keys - queries if self.family.corner == "top left" else 0
        if reach.mask is None:
            return self._said(reach, beyond)
        if self.has(self.family.mask) and self.family.corner == "top left":
            return None
        edges = as_edges(reach, queries, keys)
        return None if edges is None else self._said(edges, beyond)

    def _said(self, reach: Reach, beyond: int) -> dict[str, Any] | None:
        """Return edges by parameters that the function has, ``beyond`` further to the right; None where it has none."""
        family = self.family
        left = None if reach.left is None else reach.left - beyond
        right = None if reach.right is None else reach.right + beyond
        if left is None and right is None:
            return {}
        causal: dict[str, bool | str] = {family.causal: True} if self.has(family.causal) else {}
        if family.causal_mask and self.has(family.mask):
            causal = {family.mask: family.causal_mask}
        if left is None and right == 0 and causal:
            return causal
        if any(edge is not None and edge < 0 for edge in (left, right)):
            return None
        if window := self.named(family.window):
            edges = tuple(family.no_edge if edge is None else edge for edge in (left, right))
            return {window: edges, **(causal if right == 0 else {})}
        if self.has(family.window_left) and right in (0, None):
            return {family.window_left: left, **(causal if right == 0 else {})} if causal or right is None else None
        return None

    def _masked(self, reach: Reach, bias: Array | None, query: Array, key: Array) -> dict[str, Any]:
        """Return window edges, mask and bias as one mask: boolean if possible, else numbers that are added."""
        family, shape = self.family, (*query.shape[:2], query.shape[-2], key.shape[-2])
        allowed = reach.allowed(*shape[-2:])
        if allowed is None and bias is None:
            return {}
        if bias is None and "boolean" in family.mask_kinds:
            given: Array = np.asarray(allowed)
            given = _of_keys(given, query.shape[0], key.shape[-2]) if family.mask_of_keys else given
        elif family.mask_of_keys:
            raise UnsupportedError("takes a mask of keys alone, and no bias", ("bias",))
        else:
            lowest = -np.inf if not family.finite_mask else float(ml_dtypes.finfo(query.dtype).min)
            added = np.zeros((1, 1, 1, 1), query.dtype) if bias is None else bias
            given = added if allowed is None else np.where(allowed, added, np.asarray(lowest, query.dtype))
            if family.finite_mask and allowed is not None and not _is_told_apart(allowed, added, lowest):
                raise UnsupportedError("forbids keys by the number that the bias has on all that are left", ("bias",))
        return {family.mask: np.broadcast_to(given, shape) if family.full_mask else given}

    def _called(self, inputs: Sequence[Array], words: Mapping[str, Any]) -> Any:
        return self._made([_laid_out(each, self.family.layout) for each in inputs], words)

    def _made(self, inputs: Sequence[Array], words: Mapping[str, Any]) -> Any:
        """Make the call, on arrays of the framework's. Raises ``Misbehaved`` where it changes one of them."""
        tensors = [self._tensor(each) for each in inputs]
        options = {name: self._tensor(each) for name, each in words.items()}
        given = {**dict(zip(_INPUTS["attention"], tensors, strict=True)), **options}
        module = [_module(inputs)] if self.family.module else []
        with self.guard({name: each for name, each in given.items() if hasattr(each, "shape")}, self.arrays.to_numpy):
            return self.function(*module, *tensors, **options)

    def _stages(self, returned: Any) -> Stages:
        """Return what came back as the contract's stages."""
        family = self.family
        if isinstance(returned, Mapping):
            raise TypeError("returned a dict; expected an array, or a tuple that begins with one")
        parts = returned if isinstance(returned, tuple | list) else (returned,)
        stages = {"output": _from_layout(self.arrays.to_numpy(parts[0]), family.output_layout or family.layout)}
        returns_two = family.weights or self.named(family.log_sum_exp)
        second = self.arrays.to_numpy(parts[1]) if returns_two and len(parts) > 1 and parts[1] is not None else None
        if second is not None and family.weights:
            # flex_attention_forward of transformers returns the log-sum-exp of each row in the place of weights.
            stages["log_sum_exp" if second.ndim == 3 else "weights"] = second
        elif second is not None and self.named(family.log_sum_exp):
            stages["log_sum_exp"] = _log_sum_exp(second, family)
        return {name: self.arrays.from_numpy(np.ascontiguousarray(each)) for name, each in stages.items()}


def _laid_out(array: Array, layout: Layout) -> Array:
    """Turn (B, H, L, D) into a layout; LHD is that of one entry."""
    swapped = array if layout == "BHLD" else array.swapaxes(1, 2)
    return swapped[0] if layout == "LHD" else swapped


def _from_layout(array: Array, layout: Layout) -> Array:
    entry = array[np.newaxis] if layout == "LHD" else array
    return entry if layout == "BHLD" else entry.swapaxes(1, 2)


def _of_bias(gradient: Array, allowed: NDArray[np.bool_] | None, shape: tuple[int, ...]) -> Array:
    """Return a bias' gradient, of ``shape``, from that of the mask that it is part of."""
    own = gradient if allowed is None else np.where(allowed, gradient, np.zeros((), gradient.dtype))
    axes = tuple(axis for axis, length in enumerate(shape) if length == 1 and own.shape[axis] != 1)
    return own.sum(axis=axes, keepdims=True, dtype=np.float64).astype(gradient.dtype) if axes else own


def _require_float32(name: str, number: float) -> None:
    if number != float(np.float32(number)):
        raise UnsupportedError(f"holds its {name} in float32, and this one is none", (name,))


def _log_sum_exp(array: Array, family: Family) -> Array:
    """Return logarithms to base e as (B, H, Lq)."""
    array = array[np.newaxis] if family.layout == "LHD" else array
    array = array.swapaxes(-1, -2) if family.lse_heads_last else array
    if family.lse_base == "2":
        return (array.astype(np.float64) * math.log(2)).astype(array.dtype)
    return array


def _usual_scale(query: Array) -> float:
    """Return 1/sqrt(D); 1 where there are no features, of which every score is 0 whatever the scale."""
    return float(max(query.shape[-1], 1) ** -0.5)


def _module(inputs: Sequence[Array]) -> SimpleNamespace:
    """Return what a model's layer would be to the function: heads that share keys, and no dropout."""
    query, key = inputs[:2]
    return SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1],
        scaling=_usual_scale(query),
        is_causal=False,
        training=False,
    )


def _is_told_apart(allowed: Array, added: Array, lowest: float) -> bool:
    """Return whether in every row some key that is allowed has more than what forbids the others."""
    largest = np.where(allowed, added.astype(np.float64), -np.inf).max(-1)
    return not (largest == lowest).any()
