"""Adapts a function of a signature family to the contract: its call, its layout and its results.

The contract has four ways to forbid keys: options, a window, a mask and a past. A family may have parameters for some
of them, and a mask for all. So each call is turned into window edges that count from the last query and key, and a mask
for the rest. Edges become the family's parameters if these mean exactly the same, else a mask. A mask that consists
only of edges becomes a parameter, too, because a FlashAttention has no other way to forbid keys.
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
from attncheck.backends.families import ATTENTION_FUNCTIONS, Family, Layout


@dataclass(frozen=True)
class AllowedKeys:
    """Window edges for a library call: keys from ``left`` before to ``right`` after a query's position.

    The last query is at the position of the last key. None is no edge. ``mask``, if there is one, forbids further keys.
    """

    left: int | None = None
    right: int | None = None
    mask: NDArray[np.bool_] | None = None

    @property
    def has_edges(self) -> bool:
        """Return whether an edge forbids any key."""
        return self.left is not None or self.right is not None

    def as_mask(self, queries: int, keys: int) -> NDArray[np.bool_] | None:
        """Return edges and mask as one mask that broadcasts to (B, H, Lq, T); None if all keys are allowed."""
        if not self.has_edges:
            return self.mask
        band = _window_mask(self.left, self.right, queries, keys)[np.newaxis, np.newaxis]
        return band if self.mask is None else band & self.mask


def _window_mask(left: int | None, right: int | None, queries: int, keys: int) -> NDArray[np.bool_]:
    distance = np.arange(keys) - (np.arange(queries)[:, np.newaxis] + keys - queries)
    allowed = np.ones((queries, keys), np.bool_)
    allowed &= True if left is None else distance >= -left
    allowed &= True if right is None else distance <= right
    return allowed


def mask_to_edges(reach: AllowedKeys, queries: int, keys: int) -> AllowedKeys | None:
    """Return a mask as edges only; None if edges cannot express it."""
    allowed = reach.as_mask(queries, keys)
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
    for left_edge, right_edge in candidates:
        if np.array_equal(_window_mask(left_edge, right_edge, queries, keys), first):
            return AllowedKeys(left_edge, right_edge)
    return None


def nearest_edge(*edges: int | None) -> int | None:
    """Return the nearest of several edges; None if all are None."""
    return min((edge for edge in edges if edge is not None), default=None)


def allowed_keys_of_options(options: Mapping[str, Any], queries: int, keys: int, past: int) -> AllowedKeys:
    """Return the keys that queries may attend to, from all options of a call of the contract."""
    left, right = options.get("window") or (None, None)
    right = nearest_edge(right, 0 if options.get("is_causal") else None)
    mask = options.get("mask")
    lengths, offsets = options.get("key_lengths"), options.get("query_offsets")
    if lengths is not None:
        used = np.arange(keys) < lengths.reshape(-1, 1, 1, 1)
        mask = used if mask is None else mask & used
    start = past
    if offsets is not None and offsets.size and (left, right) != (None, None):
        start = int(offsets.flat[0])
        if not (offsets == start).all():
            bands = [
                _count_edges_from_last_query(left, right, int(offset), queries, keys).as_mask(queries, keys)
                for offset in offsets.flat
            ]
            banded = np.concatenate([band for band in bands if band is not None])
            return AllowedKeys(mask=banded if mask is None else mask & banded)
    return replace(_count_edges_from_last_query(left, right, start, queries, keys), mask=mask)


def _count_edges_from_last_query(
    left: int | None, right: int | None, start: int, queries: int, keys: int
) -> AllowedKeys:
    """Convert edges for queries whose first position is ``start`` to edges that count from the last query and key."""
    shift = keys - queries - start
    return AllowedKeys(None if left is None else left + shift, None if right is None else right - shift)


Array = NDArray[Any]
Stages = dict[str, Any]
Guard = Callable[[Mapping[str, Any], Callable[[Any], Array]], AbstractContextManager[None]]
"""Returns a context manager around a call, from the call's arrays and their conversion to NumPy."""
_MASK_OPTIONS = ("mask", "is_causal", "window", "key_lengths", "past_key", "past_value", "query_offsets")
_WITHOUT_GRADIENTS = {"past_key", "past_value", "query_offsets"}
_ATTENTION = ("query", "key", "value")
_INPUTS: Mapping[str, tuple[str, ...]] = {
    "attention": _ATTENTION,
    "attention_gradients": (*_ATTENTION, "grad_output"),
    "quantized_attention": (*_ATTENTION, "key_scale", "value_scale"),
    "packed_attention": (*_ATTENTION, "cu_seqlens_q", "cu_seqlens_k"),
    "paged_attention": ("query", "key_pages", "value_pages", "block_table", "key_lengths"),
    "ragged_paged_attention": ("query", "key_pages", "value_pages", "cu_seqlens_q", "block_table", "key_lengths"),
}
_SCALES = ("query_scale", "key_scale", "value_scale")
_PACKED_LIMITS = ("cu_seqlens_q", "cu_seqlens_k")
_PAGE_TABLES = ("block_table", "cache_seqlens")
_RAGGED_TABLES = ("cu_seqlens_q", "block_table")
_LONGEST_SEQUENCES = ("max_seqlen_q", "max_seqlen_k")


class UnfitFunctionError(TypeError):
    """A function cannot be called like its family.

    ``strange`` are required parameters that no call passes; if there are none, ``reason`` is what is wrong.
    ``expected`` is what could be called.
    """

    def __init__(self, family: Family, strange: Sequence[str], expected: str = "", reason: str = "") -> None:
        super().__init__(f"cannot be called as {family.name} is: {family.call}")
        self.strange, self.expected = strange, expected or family.call
        self.reason = reason or "it does not take these inputs by position"


class Arrays(Protocol):
    """A framework's conversions."""

    def from_numpy(self, array: Array) -> Any:
        """Convert a NumPy array to the framework's array."""

    def to_numpy(self, tensor: Any) -> Array:
        """Convert the framework's array to a NumPy array."""


def contract_functions(
    function: Callable[..., Any], family: Family, arrays: Arrays, guard: Guard = lambda *_: nullcontext()
) -> dict[str, Callable[..., Any]]:
    """Return the contract's functions that a function of a family can compute, by name.

    A function with ``cu_seqlens_q`` and ``cu_seqlens_k`` computes packed sequences, one with ``block_table`` and
    ``cache_seqlens`` paged caches, one with ``cu_seqlens_q`` and ``block_table`` packed sequences over pages. Any other
    computes attention, also to codes if it has parameters for their scales. Raises ``UnfitFunctionError`` if the
    family's call does not fit the function.
    """
    adapter = FamilyFunction.from_function(function, family, arrays, guard=guard)
    if adapter.parameter_names.issuperset(_PAGE_TABLES):
        return {"paged_attention": adapter.as_contract("paged_attention", adapter.paged_attention)}
    names = ["attention", "quantized_attention"] if adapter.takes_codes else ["attention"]
    if "cu_seqlens_q" in adapter.parameter_names:
        needed = {"packed_attention": _PACKED_LIMITS, "ragged_paged_attention": _RAGGED_TABLES}
        if "block_table" in adapter.required:  # packed keys have none
            del needed["packed_attention"]
        names = [name for name, words in needed.items() if adapter.parameter_names.issuperset(words)] or names
    return {name: adapter.as_contract(name, getattr(adapter, name)) for name in names}


def library_functions(
    call: str, family: Family, arrays: Any, fixed: Mapping[str, Any], *, has_gradients: bool
) -> dict[str, Callable[..., Stages]]:
    """Return the contract's functions for a library's function, ``module:function``, with ``fixed`` arguments."""
    owner, name = import_owner(call)

    @wraps(getattr(owner, name))
    def called(*tensors: Any, **words: Any) -> Any:
        return getattr(owner, name)(*tensors, **words)

    adapter = FamilyFunction.from_function(called, family, arrays, copies_inputs=False)
    program = arrays.compile_program(called, adapter.scalar_parameters | fixed.keys())
    adapter = replace(adapter, function=partial(program, **fixed), differentiated=partial(called, **fixed))
    names = ATTENTION_FUNCTIONS[: 1 + has_gradients]
    return {operation: adapter.as_contract(operation, getattr(adapter, operation)) for operation in names}


def import_owner(call: str) -> tuple[Any, str]:
    """Return the module of a library's function, or its class there, and its name.

    ``module:Class().method`` is a method of an object that is made without arguments.
    """
    module, _, path = call.partition(":")
    holder, _, name = path.rpartition(".")
    owner: Any = import_module(module)
    if holder:
        owner = getattr(owner, holder.removesuffix("()"))
    return (owner() if holder.endswith("()") else owner), name


def unused_parameters(function: Callable[..., Any], family: Family) -> list[str]:
    """Return a function's optional parameters that no call of the family passes."""
    optional = [
        parameter
        for parameter in _function_parameters(function, family)
        if parameter.default is not inspect.Parameter.empty
    ]
    return [parameter.name for parameter in optional if parameter.name not in _parameter_names(family)]


def _function_parameters(function: Callable[..., Any], family: Family) -> list[inspect.Parameter]:
    """Return the parameters of a function, or those of the family for a builtin without a signature."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        return [
            parameter for parameter in inspect.signature(function).parameters.values() if parameter.kind not in variable
        ]
    except (TypeError, ValueError):
        return list(parameters_of_call(family))


def parameters_of_call(family: Family) -> Iterator[inspect.Parameter]:
    """Yield the parameters in the text of a family's call."""
    (defined,) = ast.parse(f"def {family.call}: ...").body
    assert isinstance(defined, ast.FunctionDef), "the text of a call"
    arguments = defined.args
    blank = inspect.Parameter.empty
    defaults = [blank] * (len(arguments.args) - len(arguments.defaults)) + [
        ast.literal_eval(node) for node in arguments.defaults
    ]
    for argument, default in zip(arguments.args, defaults, strict=True):
        yield inspect.Parameter(argument.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
    for argument, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = blank if node is None else ast.literal_eval(node)
        yield inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=default)


def _mask_to_key_mask(allowed: Array, batch: int, keys: int) -> Array:
    """Return a mask as a mask of keys, (B, Lk).

    Raises ``UnsupportedError`` if heads or queries have different masks.
    """
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    first = allowed[:, :1, :1]
    if not (allowed == first).all():
        raise UnsupportedError("takes a mask of keys alone", ("mask of queries",))
    return np.broadcast_to(first[:, 0, 0], (batch, keys))


def _scale_per_head(scale: Array, batch: int, heads: int) -> Array:
    """Return the scale of codes of each entry and head, (B, heads), from one that broadcasts to (B, H, L).

    Raises ``UnsupportedError`` if tokens, or query heads of the same keys, have different scales, or if float32 cannot
    hold them.
    """
    scale = scale.reshape((1,) * (3 - scale.ndim) + scale.shape)
    groups = scale.reshape(scale.shape[0], min(heads, scale.shape[1]), -1)
    if not (groups == groups[..., :1]).all():
        raise UnsupportedError("takes one scale of codes for each head", ("scales of tokens",))
    by_head = np.broadcast_to(groups[..., 0], (batch, heads))
    if not (by_head == by_head.astype(np.float32)).all():
        raise UnsupportedError("holds scales of codes in float32, and these are none", ("scales in float64",))
    return by_head.astype(np.float32)


def _parameter_names(family: Family) -> set[str]:
    several = (*family.scale, *family.window, *family.softcap, *family.sinks, *family.log_sum_exp, *family.neutral)
    several += family.descales
    single = (family.causal, family.window_left, family.mask, family.bias, family.key_lengths, family.grouped)
    return {*filter(None, single), *several, *_PACKED_LIMITS, *_PAGE_TABLES, *_LONGEST_SEQUENCES, "seqused_k", "out"}


@dataclass(frozen=True)
class SequencesOverPages:
    """The inputs of the contract's packed sequences over pages, as NumPy arrays."""

    query: Array
    key_pages: Array
    value_pages: Array
    cu_seqlens_q: Array
    block_table: Array
    key_lengths: Array


@dataclass(frozen=True)
class FamilyFunction:
    """A function of a family, and the names of its parameters.

    ``copies_inputs`` is false if the function gets arrays with their strides. ``differentiated`` is the function for
    gradients, if it differs. ``scales`` are those of codes, (B, heads), by their names. If it ``decodes_one_query`` for
    each request, which is the last one, causality forbids nothing.
    """

    function: Callable[..., Any]
    family: Family
    arrays: Arrays
    parameter_names: frozenset[str]
    required: frozenset[str] = frozenset()
    guard: Guard = lambda *_: nullcontext()
    copies_inputs: bool = True
    differentiated: Callable[..., Any] | None = None
    scales: Mapping[str, Array] = field(default_factory=dict)
    decodes_one_query: bool = False

    @classmethod
    def from_function(cls, function: Callable[..., Any], family: Family, arrays: Arrays, **more: Any) -> FamilyFunction:
        """Inspect the parameters. Raises ``UnfitFunctionError`` if a required one is not in the family's call."""
        parameters = _function_parameters(function, family)
        positional = [parameter for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
        inputs = positional[: 3 + family.module]
        rest = [parameter for parameter in parameters if parameter not in inputs]
        required = [parameter.name for parameter in rest if parameter.default is inspect.Parameter.empty]
        strange = [parameter for parameter in required if parameter not in _parameter_names(family)]
        if len(inputs) < 3 + family.module or strange:
            raise UnfitFunctionError(family, strange)
        return cls(
            function, family, arrays, frozenset(parameter.name for parameter in rest), frozenset(required), **more
        )

    @property
    def scalar_parameters(self) -> frozenset[str]:
        """The names of the parameters that are not arrays."""
        family = self.family
        return (self.parameter_names & _parameter_names(family)) - {
            family.mask,
            family.bias,
            family.key_lengths,
            *family.sinks,
        }

    def first_parameter_among(self, names: tuple[str, ...]) -> str:
        """Return the first of these names that the function has; empty if it has none."""
        return next((name for name in names if name in self.parameter_names), "")

    def has_parameter(self, name: str) -> bool:
        """Return whether the name is not empty and the function has a parameter of this name."""
        return bool(name) and name in self.parameter_names

    @property
    def takes_codes(self) -> bool:
        """Return whether the function has parameters for the scales of codes."""
        return bool(self.family.descales) and self.parameter_names.issuperset(self.family.descales)

    def as_contract(self, name: str, call: Callable[..., Stages]) -> Callable[..., Stages]:
        """Return a call as one of the contract's functions, whose signature has only the supported options."""
        inputs = [
            inspect.Parameter(input_name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for input_name in _INPUTS[name]
        ]
        accepted = {*self._accepted_keywords(name)} - (_WITHOUT_GRADIENTS if name == "attention_gradients" else set())
        in_order = (*(keyword for keyword in DEFAULTS if keyword in accepted), *sorted(accepted - DEFAULTS.keys()))
        options = [inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=None) for keyword in in_order]
        call = self._with_tiled_heads(call) if self.family.heads == "tiled" else call

        def of_contract(*positional: Any, **asked: Any) -> Stages:
            named = [asked.pop(input_name) for input_name in _INPUTS[name][len(positional) :]]
            return call(*positional, *named, **asked)

        update_wrapper(of_contract, self.function)
        of_contract.__signature__ = inspect.Signature([*inputs, *options])  # type: ignore[attr-defined]
        return of_contract

    def _with_tiled_heads(self, call: Callable[..., Stages]) -> Callable[..., Stages]:
        """Reorder query heads so that heads of different keys alternate, and restore the order in the results."""

        def in_order(tensor: Any, order: NDArray[np.intp]) -> Any:
            if np.ndim(tensor) < 2 or tensor.shape[1] != len(order):
                return tensor
            return self.arrays.from_numpy(np.ascontiguousarray(self.arrays.to_numpy(tensor)[:, order]))

        def called(query: Any, key: Any, *inputs: Any, **asked: Any) -> Stages:
            order = np.arange(query.shape[1]).reshape(key.shape[1], -1).T.ravel()
            ordered = [in_order(query, order), key, *(in_order(tensor, order) for tensor in inputs)]
            stages = call(*ordered, **{name: in_order(value, order) for name, value in asked.items()})
            return {name: in_order(value, np.argsort(order)) for name, value in stages.items()}

        return called

    def _accepted_keywords(self, name: str) -> Iterator[str]:
        """Yield the keywords of one of the contract's functions that the function supports."""
        family = self.family
        words = {"scale": family.scale, "softcap": family.softcap, "sinks": family.sinks}
        yield from (keyword for keyword, names in words.items() if self.first_parameter_among(names))
        is_causal = self.has_parameter(family.causal) or (self.has_parameter(family.mask) and bool(family.causal_mask))
        has_window = bool(self.first_parameter_among(family.window)) or self.has_parameter(family.window_left)
        if name == "quantized_attention" or (name == "paged_attention" and self.takes_codes):
            yield from ("stored_as", *(scale_name for scale_name in _SCALES if scale_name not in _INPUTS[name]))
        if name == "quantized_attention":
            yield from ("mask", "key_lengths") if self.has_parameter(family.mask) else ()
        if name.startswith("attention"):
            is_masked = self.has_parameter(family.mask)
            yield from _MASK_OPTIONS if is_masked or is_causal or has_window else ("past_key", "past_value")
            if self.has_parameter(family.bias) or (is_masked and "added" in family.mask_kinds):
                yield "bias"
        else:
            is_causal |= self.decodes_one_query
            yield from ["is_causal"] * is_causal + ["window"] * (is_causal or has_window)
            yield from ["key_lengths"] * (name == "packed_attention" and "seqused_k" in self.parameter_names)

    def attention(self, *inputs: Any, **asked: Any) -> Stages:
        """Call the function for the contract's attention."""
        options = self._to_numpy_options(asked)
        query, key, value = map(self.arrays.to_numpy, inputs)
        if options.get("past_key") is not None:
            key, value = (
                np.concatenate([options[f"past_{name}"], array], axis=-2)
                for name, array in (("key", key), ("value", value))
            )
        past = key.shape[-2] - inputs[1].shape[-2]
        words: dict[str, Any] = self._option_arguments(query, key, options)
        words |= self._mask_arguments(query, key, past, options)
        if self.family.layout != "LHD":
            return self._as_stages(
                self._call_in_layout([query, key, value] if past else self._as_arrays(inputs), words)
            )
        if not query.shape[0]:
            raise UnsupportedError("is called for one batch entry at a time, and there is none", ("empty batches",))
        rows = [self._call_for_entry(entry, [query, key, value], words) for entry in range(query.shape[0])]
        return {name: self.arrays.from_numpy(np.concatenate([row[name] for row in rows])) for name in rows[0]}

    def attention_gradients(self, query: Any, key: Any, value: Any, grad_output: Any, **asked: Any) -> Stages:
        """Differentiate the function by the framework, for the contract's gradients of attention.

        If the bias is part of the mask, its gradient is the mask's gradient at allowed keys, summed to the bias' shape.
        """
        family, options = self.family, self._to_numpy_options(asked)
        inputs = [self.arrays.to_numpy(tensor) for tensor in (query, key, value)]
        words = self._option_arguments(inputs[0], inputs[1], options) | self._mask_arguments(
            inputs[0], inputs[1], 0, options
        )
        for switch in family.log_sum_exp:
            words.pop(switch, None)
        places = {
            "bias": family.bias if self.has_parameter(family.bias) else family.mask,
            "sinks": self.first_parameter_among(family.sinks),
        }
        more = {name: words.pop(word) for name, word in places.items() if name in options}
        laid_out = [_to_family_layout(tensor, family.layout) for tensor in self._as_arrays((query, key, value))]
        grad = _to_family_layout(self.arrays.to_numpy(grad_output), family.output_layout or family.layout)
        tensors = [self._as_tensor(array) for array in (*laid_out, *more.values())]
        rest = {name: self._as_tensor(value) for name, value in words.items()}
        results = self._gradients(tensors, self._as_tensor(grad), [places[name] for name in more], rest)
        gradients = [_from_family_layout(self.arrays.to_numpy(result), family.layout) for result in results[:3]]
        stages = dict(zip(("grad_query", "grad_key", "grad_value"), gradients, strict=True))
        for name, result in zip(more, results[3:], strict=True):
            stages[f"grad_{name}"] = self.arrays.to_numpy(result)
        if "bias" in more and not self.has_parameter(family.bias):
            allowed = allowed_keys_of_options(options, inputs[0].shape[-2], inputs[1].shape[-2], 0).as_mask(
                *more["bias"].shape[-2:]
            )
            stages["grad_bias"] = _bias_gradient(stages["grad_bias"], allowed, options["bias"].shape)
        return {name: self.arrays.from_numpy(array) for name, array in stages.items()}

    def quantized_attention(
        self, query: Any, key: Any, value: Any, key_scale: Any, value_scale: Any, **asked: Any
    ) -> Stages:
        """Call the function for the contract's attention to codes, with one scale for each entry and head."""
        with_scales = self._with_scales(
            {"key_scale": key_scale, "value_scale": value_scale}, asked, query, key.shape[1]
        )
        return with_scales.attention(query, key, value, **asked)

    def _with_scales(
        self, scales: Mapping[str, Any], asked: dict[str, Any], query: Any, key_heads: int
    ) -> FamilyFunction:
        """Return the function with scales of codes, (B, H, L); the query's scale is taken out of ``asked``."""
        asked.pop("stored_as", None)  # the dtype of the arrays implies it
        scale_by_name = {"query_scale": asked.pop("query_scale", None), **scales}
        words = {}
        for (name, scale), word in zip(scale_by_name.items(), self.family.descales, strict=True):
            is_of_queries = name == "query_scale" and self.family.query_heads_scaled
            heads = query.shape[1] if is_of_queries else key_heads
            if scale is not None:
                words[word] = _scale_per_head(self.arrays.to_numpy(scale), query.shape[0], heads)
        return replace(self, scales=words)

    def _as_arrays(self, inputs: Sequence[Any]) -> list[Any]:
        """Return inputs as arrays, or unchanged if the function accepts them: on a device, they keep their strides."""
        is_given = self.family.layout == "BHLD" and not self.copies_inputs
        return [tensor if is_given else self.arrays.to_numpy(tensor) for tensor in inputs]

    def _gradients(
        self, tensors: Sequence[Any], grad_output: Any, names: Sequence[str], others: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Return the gradients of the first three tensors, and of the further ones, passed as ``names``."""
        function = self.differentiated or self.function

        def output_of(query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
            returned = function(query, key, value, **dict(zip(names, more, strict=False)), **options)
            return returned[0] if isinstance(returned, tuple | list) else returned

        results: Sequence[Any] = self.arrays.gradients(output_of, tensors, grad_output, others)  # type: ignore[attr-defined]
        return results

    def _as_tensor(self, value: Any) -> Any:
        """Convert an array to the framework's; return anything else unchanged."""
        if not isinstance(value, np.ndarray):
            return value
        return self.arrays.from_numpy(np.ascontiguousarray(value) if self.copies_inputs else value)

    def _call_for_entry(self, entry: int, inputs: Sequence[Array], words: Mapping[str, Any]) -> dict[str, Array]:
        """Call the function for one batch entry; return stages with a batch axis."""
        of_entry = [array[entry : entry + 1] for array in inputs]
        mask = words.get(self.family.mask)
        if mask is not None:
            entry_mask = mask[min(entry, mask.shape[0] - 1)]
            if entry_mask.shape[0] > 1 and not (entry_mask == entry_mask[:1]).all():
                raise UnsupportedError("takes no mask of each head", ("mask",))
            words = {**words, self.family.mask: entry_mask[0]}
        words = {**words, **{name: scale[entry] for name, scale in self.scales.items()}}
        stages = self._as_stages(self._call_in_layout(of_entry, words))
        return {name: self.arrays.to_numpy(tensor) for name, tensor in stages.items()}

    def packed_attention(self, query: Any, key: Any, value: Any, first: Any, second: Any, **asked: Any) -> Stages:
        """Call the function for the contract's packed sequences."""
        options = self._to_numpy_options(asked)
        arrays = [self.arrays.to_numpy(tensor) for tensor in (query, key, value)]
        words = self._option_arguments(arrays[0], arrays[1], options)
        words |= self._edges_from_the_end(options)
        for name, longest, tensor in zip(_PACKED_LIMITS, _LONGEST_SEQUENCES, (first, second), strict=True):
            limits = self.arrays.to_numpy(tensor)
            words[name] = limits.astype(np.int32)
            words |= {longest: int(np.diff(limits).max(initial=0))} if longest in self.parameter_names else {}
        if options.get("key_lengths") is not None:
            words["seqused_k"] = options["key_lengths"].astype(np.int32)
        packed = replace(self, family=replace(self.family, layout="LHD"))
        return packed._as_stages(packed._call_in_layout(arrays, words))

    def paged_attention(
        self, query: Any, key_pages: Any, value_pages: Any, table: Any, lengths: Any, **asked: Any
    ) -> Stages:
        """Call the function for the contract's paged caches."""
        pages = [self.arrays.to_numpy(tensor) for tensor in (key_pages, value_pages)]
        if "key_scale" in asked:
            page_scales = {name: self.arrays.to_numpy(asked.pop(name)) for name in _SCALES[1:]}
            # Scales of pages, which broadcast to (Np, Lp, Hkv), as those of the keys of one entry, (1, Hkv, n).
            scales = {name: array.reshape(-1, array.shape[-1]).T[np.newaxis] for name, array in page_scales.items()}
            return self._with_scales(scales, asked, query, pages[0].shape[2]).paged_attention(
                query, key_pages, value_pages, table, lengths, **asked
            )
        options = self._to_numpy_options(asked)
        query_array = self.arrays.to_numpy(query)
        words = self._option_arguments(query_array, query_array, options)
        words |= self._edges_from_the_end(options)
        words["block_table"] = self.arrays.to_numpy(table).astype(np.int32)
        words["cache_seqlens"] = self.arrays.to_numpy(lengths).astype(np.int32)
        return self._as_stages(self._call([_to_family_layout(query_array, self.family.layout), *pages], words))

    def ragged_paged_attention(
        self, query: Any, key_pages: Any, value_pages: Any, limits: Any, table: Any, lengths: Any, **asked: Any
    ) -> Stages:
        """Call the function for the contract's packed sequences over pages; it may write its result into ``out``."""
        options, tensors = self._to_numpy_options(asked), (query, key_pages, value_pages, limits, table, lengths)
        batch = SequencesOverPages(*map(self.arrays.to_numpy, tensors))
        words = self._option_arguments(batch.query, batch.key_pages.swapaxes(1, 2), options)
        arguments = self.batch_arguments(batch, options)
        words |= {name: value for name, value in arguments.items() if name in self.parameter_names}
        packed, inputs = replace(self, family=replace(self.family, layout="LHD")), (batch.key_pages, batch.value_pages)
        return packed._as_stages(packed._call([_to_family_layout(batch.query, "LHD"), *inputs], words))

    def batch_arguments(self, batch: SequencesOverPages, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of sequences and pages, and those of causality and a window."""
        used, (_, heads, rows, _) = batch.key_lengths, batch.query.shape
        of_keys = {"cu_seqlens_k": np.append(0, np.cumsum(used)).astype(np.int32)}
        if "seqused_k" in self.parameter_names and "cu_seqlens_k" not in self.required:
            of_keys = {"seqused_k": used.astype(np.int32)}  # vLLM refuses both
        return {
            **self._edges_from_the_end(options),
            **of_keys,
            "cu_seqlens_q": batch.cu_seqlens_q.astype(np.int32),
            "max_seqlen_q": int(np.diff(batch.cu_seqlens_q).max(initial=0)),
            "max_seqlen_k": int(used.max(initial=0)),
            "block_table": batch.block_table.astype(np.int32),
            "out": np.full((rows, heads, batch.value_pages.shape[-1]), np.nan, batch.query.dtype),
        }

    def _to_numpy_options(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self.arrays.to_numpy(value) if hasattr(value, "shape") else value
            for name, value in asked.items()
            if value is not None
        }

    def _option_arguments(self, query: Array, key: Array, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of scale, softcap, sinks, grouped heads and the log-sum-exp, and neutral ones."""
        family = self.family
        words: dict[str, Any] = dict.fromkeys(self.required) | dict.fromkeys({family.causal} & self.required, False)
        words |= {name: value for name, value in family.neutral.items() if name in self.parameter_names}
        words |= self.scales
        words |= {name: (family.no_edge, family.no_edge) for name in family.window if name in self.required}
        words |= dict.fromkeys({family.window_left} & self.required, family.no_edge)
        gives_scale = family.gives_scale or self.first_parameter_among(family.scale) in self.required
        scale = options.get("scale", _default_scale(query) if gives_scale else None)
        for name, number in (("scale", scale), ("softcap", options.get("softcap"))):
            is_checked = family.numbers_in_float32 and query.dtype == np.float64 and number is not None
            if is_checked and number != float(np.float32(number)):
                raise UnsupportedError(f"holds its {name} in float32, and this one is none", (name,))
        for names, value in (
            (family.scale, scale),
            (family.softcap, options.get("softcap", family.no_softcap)),
            (family.sinks, options.get("sinks")),
        ):
            words |= {name: value} if (name := self.first_parameter_among(names)) and value is not None else {}
        if self.has_parameter(family.grouped) and query.shape[1] != key.shape[1]:
            words[family.grouped] = True
        if switch := self.first_parameter_among(family.log_sum_exp):
            words[switch] = True
        return words

    def reach_from_the_end(self, options: Mapping[str, Any]) -> AllowedKeys:
        """Return the edges of causality and a window for sequences and pages, which count from the end."""
        left, right = options.get("window") or (None, None)
        right = nearest_edge(right, 0 if options.get("is_causal") else None)
        return AllowedKeys(left, None if self.decodes_one_query else right)

    def _edges_from_the_end(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of causality and a window for sequences and pages, which count from the end."""
        words = self._edge_arguments(self.reach_from_the_end(options), 0)
        if words is None:
            raise UnsupportedError("takes no window", ("window",))
        return words

    def _mask_arguments(self, query: Array, key: Array, past: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of window edges, mask and bias. Raises ``UnsupportedError`` if two are exclusive."""
        words = self._all_mask_arguments(query, key, past, options)
        if not self.family.bias_beside_mask and {self.family.bias, self.family.mask} <= words.keys():
            raise UnsupportedError("takes one of a bias and a mask, and lengths become a mask", ("mask beside bias",))
        return words

    def _all_mask_arguments(self, query: Array, key: Array, past: int, options: Mapping[str, Any]) -> dict[str, Any]:
        family, (queries, keys) = self.family, (query.shape[-2], key.shape[-2])
        apart = {"key_lengths": family.key_lengths, "bias": family.bias}
        words = {word: options[name] for name, word in apart.items() if name in options and self.has_parameter(word)}
        if family.key_lengths in words:
            words[family.key_lengths] = words[family.key_lengths].astype(family.lengths_dtype)
        rest = {
            name: value for name, value in options.items() if not (name in apart and self.has_parameter(apart[name]))
        }
        reach, bias = allowed_keys_of_options(rest, queries, keys, past), rest.get("bias")
        if bias is None and (edges := self._edge_arguments_without_mask(reach, queries, keys)) is not None:
            return words | edges
        if not self.has_parameter(family.mask):
            raise UnsupportedError("takes no mask, and has no other word for whom queries may attend to", ("mask",))
        is_told = family.causal_beside_mask and self.has_parameter(family.causal)
        is_told = is_told and not past and "query_offsets" not in rest
        if is_told and rest.pop("is_causal", False):
            reach, words[family.causal] = allowed_keys_of_options(rest, queries, keys, past), True
        return words | self._merged_mask(reach, bias, query, key)

    def _edge_arguments_without_mask(self, reach: AllowedKeys, queries: int, keys: int) -> dict[str, Any] | None:
        """Return the arguments for window edges without a mask; None if there are none, or if a mask is possible, too.

        A case's mask becomes edges only if the function has no other way to get these edges: causality that counts from
        the end is a mask in the contract.
        """
        beyond = keys - queries if self.family.corner == "top left" else 0
        if reach.mask is None:
            return self._edge_arguments(reach, beyond)
        if self.has_parameter(self.family.mask) and self.family.corner == "top left":
            return None
        edges = mask_to_edges(reach, queries, keys)
        return None if edges is None else self._edge_arguments(edges, beyond)

    def _edge_arguments(self, reach: AllowedKeys, beyond: int) -> dict[str, Any] | None:
        """Return the arguments for edges, shifted to the right by ``beyond``; None if there are no such parameters."""
        family = self.family
        left = None if reach.left is None else reach.left - beyond
        right = None if reach.right is None else reach.right + beyond
        if left is None and right is None:
            return {}
        causal: dict[str, bool | str] = {family.causal: True} if self.has_parameter(family.causal) else {}
        if family.causal_mask and self.has_parameter(family.mask):
            causal = {family.mask: family.causal_mask}
        if left is None and right == 0 and causal:
            return causal
        if any(edge is not None and edge < 0 for edge in (left, right)):
            return None
        if window := self.first_parameter_among(family.window):
            edges = tuple(family.no_edge if edge is None else edge for edge in (left, right))
            return {window: edges, **(causal if right == 0 else {})}
        if self.has_parameter(family.window_left) and right in (0, None):
            return {family.window_left: left, **(causal if right == 0 else {})} if causal or right is None else None
        return None

    def _merged_mask(self, reach: AllowedKeys, bias: Array | None, query: Array, key: Array) -> dict[str, Any]:
        """Return window edges, mask and bias as one mask: boolean if possible, else numbers that are added."""
        family, shape = self.family, (*query.shape[:2], query.shape[-2], key.shape[-2])
        allowed = reach.as_mask(*shape[-2:])
        if allowed is None and bias is None:
            return {}
        if bias is None and "boolean" in family.mask_kinds:
            mask: Array = np.asarray(allowed)
            mask = _mask_to_key_mask(mask, query.shape[0], key.shape[-2]) if family.mask_of_keys else mask
        elif family.mask_of_keys:
            raise UnsupportedError("takes a mask of keys alone, and no bias", ("bias",))
        else:
            lowest = -np.inf if not family.finite_mask else float(ml_dtypes.finfo(query.dtype).min)
            added = np.zeros((1, 1, 1, 1), query.dtype) if bias is None else bias
            mask = added if allowed is None else np.where(allowed, added, np.asarray(lowest, query.dtype))
            if family.finite_mask and allowed is not None:
                largest = np.where(allowed, added.astype(np.float64), -np.inf).max(-1)
                if (largest == lowest).any():  # no allowed key of a row has more than the number that forbids others
                    raise UnsupportedError(
                        "forbids keys by the number that the bias has on all that are left", ("bias",)
                    )
        return {family.mask: np.broadcast_to(mask, shape) if family.full_mask else mask}

    def _call_in_layout(self, inputs: Sequence[Array], words: Mapping[str, Any]) -> Any:
        return self._call([_to_family_layout(array, self.family.layout) for array in inputs], words)

    def _call(self, inputs: Sequence[Array], words: Mapping[str, Any]) -> Any:
        """Call the function on the framework's arrays. Raises ``Misbehaved`` if it changes one of them."""
        tensors = [self._as_tensor(array) for array in inputs]
        options = {name: self._as_tensor(value) for name, value in words.items()}
        arguments = {**dict(zip(_INPUTS["attention"], tensors, strict=True)), **options}
        module = []
        if self.family.module:  # the attributes of a model's layer that the function reads
            query, key = inputs[:2]
            groups, scale = query.shape[1] // key.shape[1], _default_scale(query)
            module = [SimpleNamespace(num_key_value_groups=groups, scaling=scale, is_causal=False, training=False)]
        inputs_by_name = {name: value for name, value in arguments.items() if hasattr(value, "shape") and name != "out"}
        with self.guard(inputs_by_name, self.arrays.to_numpy):
            returned = self.function(*module, *tensors, **options)
        return options.get("out") if returned is None else returned

    def _as_stages(self, returned: Any) -> Stages:
        """Convert the returned values to the contract's stages."""
        family = self.family
        if isinstance(returned, Mapping):
            raise TypeError("returned a dict; expected an array, or a tuple that begins with one")
        parts = returned if isinstance(returned, tuple | list) else (returned,)
        stages = {"output": _from_family_layout(self.arrays.to_numpy(parts[0]), family.output_layout or family.layout)}
        returns_two = family.weights or self.first_parameter_among(family.log_sum_exp)
        second = self.arrays.to_numpy(parts[1]) if returns_two and len(parts) > 1 and parts[1] is not None else None
        if second is not None and family.weights:
            # flex_attention_forward of transformers returns the log-sum-exp of each row in the place of weights.
            stages["log_sum_exp" if second.ndim == 3 else "weights"] = second
        elif second is not None and self.first_parameter_among(family.log_sum_exp):
            stages["log_sum_exp"] = _log_sum_exp(second, family)
        return {name: self.arrays.from_numpy(np.ascontiguousarray(array)) for name, array in stages.items()}


def _to_family_layout(array: Array, layout: Layout) -> Array:
    """Convert (B, H, L, D) to a layout; LHD has one entry."""
    swapped = array if layout == "BHLD" else array.swapaxes(1, 2)
    return swapped[0] if layout == "LHD" else swapped


def _from_family_layout(array: Array, layout: Layout) -> Array:
    entry = array[np.newaxis] if layout == "LHD" else array
    return entry if layout == "BHLD" else entry.swapaxes(1, 2)


def _bias_gradient(gradient: Array, allowed: NDArray[np.bool_] | None, shape: tuple[int, ...]) -> Array:
    """Return a bias' gradient, of ``shape``, from the gradient of the mask that contains it."""
    of_mask = gradient if allowed is None else np.where(allowed, gradient, np.zeros((), gradient.dtype))
    axes = tuple(axis for axis, length in enumerate(shape) if length == 1 and of_mask.shape[axis] != 1)
    return of_mask.sum(axis=axes, keepdims=True, dtype=np.float64).astype(gradient.dtype) if axes else of_mask


def _log_sum_exp(array: Array, family: Family) -> Array:
    """Return logarithms to base e as (B, H, Lq)."""
    array = array[np.newaxis] if family.layout == "LHD" else array
    array = array.swapaxes(-1, -2) if family.lse_heads_last else array
    if family.lse_base == "2":
        return (array.astype(np.float64) * math.log(2)).astype(array.dtype)
    return array


def _default_scale(query: Array) -> float:
    """Return 1/sqrt(D); 1 without features, because every score is then 0 for any scale."""
    return float(max(query.shape[-1], 1) ** -0.5)
