"""Every mutant, control and equivalent variant, by name, and the faults that follow from the specification.

Those of other modules stand for defects met in public code, each named with its thread (owner/name#number) where there
is one. They were chosen before the cases were tuned to them. Those here are of every input, option and stage of every
operation.

An input is left out, neutral, zero, taken twice, inverted, off by one, another entry's along each of its axes, or read
with two neighbouring axes exchanged. An option is left out, taken twice, negated, or another of its values; a window
has each edge off by one, or its sides exchanged. A stage is rounded to eight bits. What an option or an input is said
to be decides which families apply to it, so that a new one has its faults by its row of the specification. What the
products, sums and averages of attention are handed, and what they return, is stored in other formats, is another
entry's, or is lost behind the last whole tile. Some of these faults were found in public code
(``FAULTS_IN_THE_WILD``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Backend, Stages, Window
from attncheck.mutation import kernel
from attncheck.mutation.kernel import Array, Rounding, round_to_bfloat16
from attncheck.mutation.mutant import (
    ALL_BUT_BFLOAT16,
    ROUNDING_DIAGNOSIS,
    WIDE_DTYPES,
    Control,
    Equivalent,
    Mutant,
    StepReplacements,
    Subject,
    register_fault,
    subjects_of_module,
)
from attncheck.spec import OPERATIONS, OPTIONS, InputSpec, Operation, OptionSpec

TOPIC_MODULES: tuple[ModuleType, ...] = tuple(
    import_module(f"attncheck.mutation.{name}")
    for name in (
        *("controls", "scores", "masks", "blocks", "heads", "gradients", "narrow", "latents"),
        *("chosen_keys", "ragged_pages"),
    )
)
"""The modules beside this one that register subjects, which are listed in their order, and in that of their lines."""


GENERATED_FAULT_DTYPES = ("float32",)
"""What an input means does not depend on the dtype, and in this one kernels round."""
AXIS_NAMES: Mapping[str, str] = {
    **{"B": "batch_entry", "H": "head", "Hkv": "head", "Lq": "query", "Lk": "key", "T": "key", "N": "part"},
    **{"Np": "page", "Lp": "slot", "W": "page", "Ts": "key", "P": "past_key", "S": "sequence", "K": "index"},
    **{"D": "feature", "Dv": "feature"},
    **{"Lr": "position", "R": "pair", "Dr": "feature", "C": "latent", "A": "unit", "Dk": "key_feature"},
    **{"E": "input", "Ek": "input", "Ev": "input", "Eo": "output"},
}
"""What lies along an axis; of others, such as the width of a projection, an element."""


@dataclass(frozen=True)
class ArgumentFault:
    """A change of an argument, if it ``applies_to_spec``; a changed value of None leaves the argument out."""

    name: str
    defect: str
    change: Callable[[Any], Any]
    applies_to_spec: Callable[[Any], bool] = lambda spec: True


def _is_count_input(spec: InputSpec) -> bool:
    """Return whether an input is a number of keys or queries, and not a position."""
    return spec.is_count and spec.axes in (("B",), ("S",))


INPUT_FAULTS = (
    ArgumentFault(
        "left_out", "has no effect", lambda array: None, lambda spec: not spec.required and spec.required_input is None
    ),
    ArgumentFault("zero", "is never read", np.zeros_like, lambda spec: spec.required and spec.is_number),
    ArgumentFault("taken_twice", "is added twice", lambda array: array + array, lambda spec: spec.is_number),
    ArgumentFault("negated", "has the other sign", lambda array: -array, lambda spec: spec.is_number),
    ArgumentFault(
        "in_bfloat16", "is stored in bfloat16", round_to_bfloat16, lambda spec: spec.is_number and not spec.is_narrow
    ),
    ArgumentFault("inverted", "is read as its opposite", np.logical_not, lambda spec: spec.is_boolean),
    ArgumentFault("one_more", "is one more", lambda array: array + 1, _is_count_input),
    ArgumentFault("one_less", "is one less", lambda array: np.maximum(array - 1, 0), _is_count_input),
    ArgumentFault(
        "of_the_largest", "is the largest", lambda array: np.full_like(array, array.max(initial=0)), _is_count_input
    ),
)


def _move_window_edges(left: int, right: int) -> Callable[[Window], Window]:
    """Move the edges of a window that has them."""

    def moved_window(window: Window) -> Window:
        first, last = window
        return None if first is None else first + left, None if last is None else last + right

    return moved_window


def _is_window_option(spec: OptionSpec) -> bool:
    return bool(spec.type == Window)


OPTION_FAULTS = (
    ArgumentFault("left_out", "has no effect", lambda value: None, lambda spec: spec.name != "epsilon"),
    ArgumentFault(
        "taken_twice",
        "is applied twice as large",
        lambda value: 2 * value,
        lambda spec: spec.type is float and spec.name != "epsilon",  # epsilon matters only near zero
    ),
    ArgumentFault(
        "negated",
        "has the other sign",
        lambda value: -value,
        lambda spec: spec.type is float and not spec.must_be_positive,
    ),
    ArgumentFault("one_wider_before", "sees one key more before", _move_window_edges(1, 0), _is_window_option),
    ArgumentFault("one_narrower_before", "sees one key fewer before", _move_window_edges(-1, 0), _is_window_option),
    ArgumentFault("one_wider_after", "sees one key more after", _move_window_edges(0, 1), _is_window_option),
    ArgumentFault("one_narrower_after", "sees one key fewer after", _move_window_edges(0, -1), _is_window_option),
    ArgumentFault("turned_round", "has its sides exchanged", lambda window: window[::-1], _is_window_option),
)


def faults_of_input(spec: InputSpec) -> Iterator[ArgumentFault]:
    """Yield the faults of an input."""
    yield from (family for family in INPUT_FAULTS if family.applies_to_spec(spec))
    if spec.neutral_value is not None:
        neutral = spec.neutral_value
        yield ArgumentFault("neutral", "is what changes nothing", lambda array: np.full_like(array, neutral))
    names = [AXIS_NAMES.get(axis, "element") for axis in spec.axes]
    for axis, name in enumerate(names, -len(names)):
        # Limits between sequences have no next one, and the order of indices says nothing.
        if spec.axes[axis] != "S1" and not (spec.is_index and axis == -1):
            yield from _axis_faults(INDEX_CHANGES, name, axis, len(names))
    for first, second in pairwise(range(-len(names), 0)):
        both = f"{names[first]}_and_{names[second]}"
        defect, change = (
            f"is laid out with {_to_words(both)} exchanged",
            _change_axis_of_rank(_misread_axis_order, first, len(names)),
        )
        yield ArgumentFault(f"with_{both}_exchanged", defect, change)


def faults_of_option(spec: OptionSpec) -> Iterator[ArgumentFault]:
    """Yield the faults of an option; of values by name, the first is what is meant where none is given."""
    yield from (family for family in OPTION_FAULTS if family.applies_to_spec(spec))
    others = get_args(spec.type)[1:] if get_origin(spec.type) is Literal else ()
    if len(others) > 1:
        for word in others:
            yield ArgumentFault(f"taken_for_{word}", f"is read as {word}", partial(lambda word, _: word, word))


def _zero_beyond(array: Array, axis: int, end: int) -> Array:
    """Set all elements after the first ``end`` of an axis to zero."""
    kept = np.zeros_like(array)
    part = (slice(None),) * (axis % array.ndim) + (slice(end),)
    kept[part] = array[part]
    return kept


AxisChanges = Mapping[str, Callable[[Array, int], Array]]
"""By the name of a fault, with a place for what lies along the axis: ``change(array, axis)``."""
INDEX_CHANGES: AxisChanges = {
    "of_the_next_{}": lambda array, axis: np.roll(array, -1, axis),
    "of_the_{}_before": lambda array, axis: np.roll(array, 1, axis),
    "of_the_first_{}": lambda array, axis: np.broadcast_to(array.take([0][: array.shape[axis]], axis), array.shape),
    "with_each_{}_in_reverse": np.flip,
}
LOOP_CHANGES: AxisChanges = {
    "without_the_last_{}": lambda array, axis: _zero_beyond(array, axis, array.shape[axis] - 1),
    "without_each_{}_beyond_16": lambda array, axis: _zero_beyond(array, axis, 16),
    "without_each_{}_beyond_128": lambda array, axis: _zero_beyond(array, axis, 128),
    "without_each_{}_behind_tiles_of_64": lambda array, axis: _zero_beyond(
        array, axis, max(array.shape[axis] // 64, 1) * 64
    ),
}


def _axis_faults(changes: AxisChanges, axis_name: str, axis: int, rank: int) -> Iterator[ArgumentFault]:
    for name, change in changes.items():
        fault = name.format(axis_name)
        yield ArgumentFault(fault, f"is that {_to_words(fault)}", _change_axis_of_rank(change, axis, rank))


def _change_axis_of_rank(change: Callable[[Array, int], Array], axis: int, rank: int) -> Callable[[Array], Array]:
    """Return a change along an axis, for arrays with ``rank`` axes."""
    return lambda array: change(array, axis) if array.ndim == rank else array


def _misread_axis_order(array: Array, axis: int) -> Array:
    """Read the memory of an array as if an axis and the next one were exchanged."""
    shape = list(array.shape)
    shape[axis], shape[axis + 1] = shape[axis + 1], shape[axis]
    return array.reshape(shape).swapaxes(axis, axis + 1)


def _to_words(name: str) -> str:
    return name.replace("_", " ")


def round_stage(function: str, stage: str) -> StepReplacements:
    """Round a stage of a function of the contract to eight bits when it is returned."""
    right = getattr(numpy_backend, function)

    def run_and_round(*arrays: Any, **keywords: Any) -> Stages:
        stages = right(*arrays, **keywords)
        return {name: round_to_bfloat16(array) if name == stage else array for name, array in stages.items()}

    return {function: run_and_round}


@dataclass(frozen=True)
class StepArray:
    """An array that a step of an operation gets at an ``argument_index``, or returns, with the meaning of its axes."""

    step: str
    argument_index: int | None
    name: str
    axes: tuple[str, ...]
    operation: str
    stage: str

    def possible_faults(self) -> Iterator[ArgumentFault]:
        """Yield the faults that the array may have; another order of summed elements is none."""
        for name, store in _ROUNDINGS_BY_FORMAT.items():
            yield ArgumentFault(f"in_{name}", f"is stored in {_to_words(name)}", store)
        for axis, of in enumerate(self.axes, -len(self.axes)):
            if of and not (of == "key" and self.step.endswith("_row_sum")):
                yield from _axis_faults(INDEX_CHANGES, of, axis, len(self.axes))
            if of in ("query", "key", "feature"):
                yield from _axis_faults(LOOP_CHANGES, of, axis, len(self.axes))

    def steps_with_change(self, change: Callable[[Any], Any]) -> StepReplacements:
        """Return the replacement of the step in which the array is changed."""
        right, place = getattr(numpy_backend, self.step.rpartition(".")[2]), self.argument_index

        def run_with_change(*arrays: Any, **keywords: Any) -> Any:
            if place is None:
                return change(right(*arrays, **keywords))
            return right(*arrays[:place], change(arrays[place]), *arrays[place + 1 :], **keywords)

        return {self.step: run_with_change}


_ROUNDINGS_BY_FORMAT: Mapping[str, Rounding] = {
    **{"bfloat16": round_to_bfloat16, "float16": kernel.round_to_float16, "tf32": kernel.round_to_tf32},
    **{"bfloat16_cut_off": kernel.truncate_to_bfloat16, "tf32_cut_off": kernel.truncate_to_tf32},
}
_SCORE_AXES, _QUERY_AXES, _KEY_AXES, _ROW_AXES = (
    ("batch_entry", "head", *rest)
    for rest in (("query", "key"), ("query", "feature"), ("key", "feature"), ("query", ""))
)
# Rows, laid out by hand: the step, the operation and its stage, and below what the step is handed and returns.
# fmt: off
_STEP_ARRAY_ROWS: tuple[tuple[str, str, str, tuple[tuple[str, tuple[str, ...]] | None, ...]], ...] = (
    ("dot_scores._dot", "attention", "raw_scores", (("query", _QUERY_AXES), ("key", _KEY_AXES), ("product",
        _SCORE_AXES))),
    ("_softmax_with_sinks", "attention", "weights", (("logits", _SCORE_AXES), None)),
    ("_softmax_with_sinks._row_sum", "attention", "weights", (("exponentials", _SCORE_AXES), ("sum", _ROW_AXES))),
    ("attention._weighted_sum", "attention", "output", (("weights", _SCORE_AXES), ("value", _KEY_AXES), ("mean",
        _QUERY_AXES))),
    ("attention_gradients._dot", "attention_gradients", "grad_query",
        (("grad_output", _QUERY_AXES), ("value", _KEY_AXES), ("grad_weights", _SCORE_AXES))),
    ("attention_gradients._row_sum", "attention_gradients", "grad_query", (("products", _SCORE_AXES), ("delta",
        _ROW_AXES))),
    ("attention_gradients._weighted_sum", "attention_gradients", "grad_query",
        (("grad_scores", _SCORE_AXES), ("key", _KEY_AXES), ("mean", _QUERY_AXES))),
    ("_sum_over_queries", "attention_gradients", "grad_key",
        (("weights", _SCORE_AXES), ("rows", _QUERY_AXES), ("sum", _KEY_AXES))),
)
# fmt: on
STEP_ARRAYS = tuple(
    StepArray(step, None if place == len(arrays) - 1 else place, *array, operation, stage)
    for step, operation, stage, arrays in _STEP_ARRAY_ROWS
    for place, array in enumerate(arrays)
    if array is not None
)


def can_show_fault(operation: Operation, name: str, spec: InputSpec | OptionSpec, fault: ArgumentFault) -> bool:
    """Return whether an input of an operation can show a fault of an argument.

    An argument that an operation hands on, to attention or to an operation whose inputs it has too, may only get lost;
    any other fault is one of that operation.
    """
    attention = OPERATIONS["attention"]
    alike = [other for other in OPERATIONS.values() if other.lowers_to and other.lowers_to == operation.lowers_to]
    included = [other for other in alike if other.inputs.keys() < operation.inputs.keys()]
    is_handed_on = any(spec is other.inputs.get(name) for other in (attention, *included)) or (
        isinstance(spec, OptionSpec) and name in attention.options
    )
    lowered = OPERATIONS.get(operation.lowers_to or "")
    is_more = lowered is not None and lowered.inputs.keys() <= operation.inputs.keys()  # and nothing is laid out
    has_more = is_more or not operation.computes_gradients
    if is_handed_on and operation is not attention and has_more and fault.name != "left_out":
        return False
    if "batch_entry" in fault.name and "cu_seqlens_q" in operation.inputs:
        return False  # there is one
    is_normalised = operation.fixed_score == "cosine" or "normalized_query" in operation.stages
    return not (fault.name == "taken_twice" and is_normalised and name in ("query", "key"))


def arguments_of_operation(operation: Operation) -> Iterator[tuple[str, InputSpec | OptionSpec]]:
    """Yield the inputs and options of an operation that its function takes."""
    taken = signature(getattr(numpy_backend, operation.function_name)).parameters.keys()
    yield from ((name, spec) for name, spec in operation.inputs.items() if name in taken)
    yield from ((name, spec) for name, spec in OPTIONS.items() if name in taken and name in operation.options)


def faults_of_argument(operation: Operation, name: str, spec: InputSpec | OptionSpec) -> Iterator[ArgumentFault]:
    """Yield the faults of an argument of an operation."""
    of_argument = faults_of_input(spec) if isinstance(spec, InputSpec) else faults_of_option(spec)
    yield from (fault for fault in of_argument if can_show_fault(operation, name, spec, fault))


def returned_stages(operation: Operation) -> Iterator[str]:
    """Yield the stages that the NumPy backend returns of an operation; of gathered keys it has the last ones."""
    by_sequence = {"cu_seqlens_q", "key_pages", "key_indices"}
    is_by_sequence = not by_sequence.isdisjoint(operation.inputs) and not operation.computes_gradients
    stages = operation.stages[-2:] if is_by_sequence else operation.stages
    yield from (stage for stage in stages if stage not in operation.stages_if_lowered)


# Rows, laid out by hand: the fault, the defect in the wild, and what it may rightly be named, if not as it is.
# fmt: off
FAULTS_IN_THE_WILD: Mapping[str, str | tuple[str, str | tuple[str, ...]]] = {
    "attention_scale_left_out": ("the argument has no effect: tt-metal#33304, pytorch#151098", "scale-default"),
    "dot_scores_dot_product_in_float16": "the scale comes after a float16 product: metal-flash-attention#8",
    "dot_scores_dot_query_in_bfloat16": "the query is cast down on the way in: pytorch#158979's kind",
    "dot_scores_dot_key_in_float16": "a float16 key cache under a float32 query",
    "dot_scores_dot_query_without_the_last_feature": ("the loop over the width ends one early", "last-feature-dropped"),
    "dot_scores_dot_key_of_the_next_head": "head index off by one: HipKittens#22, FreeToken#177, pytorch#193893",
    "dot_scores_dot_key_of_the_first_batch_entry": "batch stride 0 read for the key: pytorch#191937's kind",
    "attention_rotary_sin_negated": ("the sign of rotate_half is lost", "rotary-backwards"),
    "general_attention_weight_in_bfloat16": "the weight is stored in bfloat16",
    "cosine_attention_scale_left_out": ("the temperature has no effect: tt-metal#33304's kind", "scale-one"),
    "attention_softcap_taken_twice": ("2c tanh(s / 2c): a cap handed on in another unit", "softcap-doubled"),
    "attention_bias_neutral": ("the argument has no effect: jax#32242's forward", "bias-ignored"),
    "attention_bias_negated": "sign inverted: attention-gym#86 (ALiBi)",
    "attention_bias_in_bfloat16": "ALiBi's distances in 16 bits: vllm#945",
    "attention_bias_taken_twice": ("added by the kernel and by its caller", "bias-twice"),
    "attention_bias_of_the_key_before": ("ALiBi's distance off by one: vllm#945", "bias-one-key-late"),
    "attention_bias_of_the_first_head": "a bias per head broadcast from head 0: jax#30593's kind",
    "attention_sinks_left_out":
        ("a kernel that has the code and never gets the argument: vllm-metal#212", "sinks-ignored"),
    "attention_weighted_sum_value_in_bfloat16": "the value is cast down on the way in",
    "attention_weighted_sum_value_in_tf32": "P V in TF32: triton#3498",
    "attention_weighted_sum_mean_in_bfloat16": "the output passes through bfloat16",
    "attention_weighted_sum_mean_in_tf32_cut_off": "a shift for a rounding conversion",
    "softmax_with_sinks_row_sum_sum_in_bfloat16": "the finished sum is stored in bfloat16: tt-metal#52045",
    "attention_mask_of_the_first_batch_entry": "one entry's mask for all: graph-transformer-pytorch#2",
    "attention_mask_with_batch_entry_and_head_exchanged": ("(B, H) read as (H, B): lighthouse#77, FuxiCTR#130", ()),
    "attention_mask_of_the_first_head": "one head's mask for all: lighthouse#77's kind",
    "attention_mask_of_the_first_query": "one row's mask for all: keras#20488's expansion",
    "attention_mask_inverted": "true read as drop: tensorflow text#894, unturtle#56",
    "attention_mask_neutral": ("the argument has no effect", "mask-ignored"),
    "attention_mask_fill_left_out":
        ("the argument has no effect: a row without a key is 0 or NaN, and not the mean", "fill-minus-infinity"),
    "attention_mask_fill_negated": ("the sign is lost: what is masked has all of the weight", "fill-negated"),
    "attention_window_one_wider_before":
        ("i - left - 1 <= j: mlx-lm#390, zml#763, transformers#26792", "window-too-wide-left"),
    "attention_window_one_narrower_before": ("i - left < j: transformers#39408", "window-too-narrow-left"),
    "attention_bias_with_each_head_in_reverse": ("heads in reverse", "bias-in-reverse-of-head"),
    "attention_key_lengths_one_less": ("j < length - 1: onnxruntime#25927's kind", "key-lengths-one-too-short"),
    "attention_key_lengths_of_the_next_batch_entry": "batch index off by one",
    "attention_past_value_with_each_past_key_in_reverse":
        ("a ring buffer unrolled backwards", "past-values-in-reverse"),
    "packed_attention_key_lengths_left_out":
        ("the lengths that are used have no effect: seqused_k dropped", "key-lengths-ignored"),
    "packed_attention_key_lengths_one_less": ("j < length - 1", "key-lengths-one-too-short"),
    "packed_attention_window_left_out": ("the window is dropped behind cu_seqlens: sglang#30050", ()),
    "packed_attention_is_causal_left_out": ("causality is dropped behind cu_seqlens", ()),
    "packed_attention_sinks_left_out": ("sinks are dropped behind cu_seqlens: vllm-metal#212's kind", "sinks-ignored"),
    "packed_attention_gradients_is_causal_left_out": ("the backward pass drops causality behind cu_seqlens", ()),
    "paged_attention_window_left_out": ("the window is dropped behind a cache: sglang#30050", "window-ignored"),
    "paged_attention_sinks_left_out": ("sinks are dropped in batched decoding: sglang#30050", "sinks-ignored"),
    "paged_attention_block_table_of_the_first_batch_entry": "one block table for the whole batch: a stride of 0",
    "paged_attention_key_lengths_one_more": ("j <= length", "key-lengths-one-too-long"),
    "paged_attention_key_lengths_one_less": ("the newest key is not seen", "key-lengths-one-too-short"),
    "paged_attention_key_lengths_of_the_first_batch_entry": "one length for all",
    "quantized_attention_key_scale_of_the_first_head": "a stride of 0 over heads: vllm#42580's kind",
    "quantized_attention_value_scale_of_the_first_head": "a stride of 0 over heads: vllm#42580's kind",
    "quantized_attention_key_scale_of_the_next_key": "scales of blocks are shifted by one key",
    "attention_weighted_sum_mean_without_the_last_feature":
        ("the loop over the value's width ends one early", "last-value-column-dropped"),
    "attention_weighted_sum_value_of_the_next_head": "head index off by one: HipKittens#22, pytorch#193893",
    "attention_weighted_sum_value_of_the_first_head":
        "one head's value for all, as with one key-value head: onnx#7274's kind",
    "multi_head_attention_query_bias_left_out": ("the bias is not loaded", "query-bias-missing"),
    "multi_head_attention_value_bias_left_out": ("the bias is not loaded", "value-bias-missing"),
    "multi_head_attention_output_bias_neutral": ("the bias is not loaded", "output-bias-missing"),
    "multi_head_attention_output_bias_taken_twice": ("by the kernel and by its caller", "output-bias-twice"),
    "attention_gradients_dot_grad_weights_in_bfloat16": "dp is stored in bfloat16: pytorch#133671's kind",
    "attention_gradients_weighted_sum_grad_scores_in_tf32": "TF32 in the backward pass, dq alone",
    "latent_attention_query_rotary_of_the_first_head":
        ("k_pe is made of all heads of k: every head adds the query of the first", "rotated-query-of-first-head"),
    "latent_attention_scale_left_out":
        ("the model's own scale is not handed on: huggingface/optimum-intel#1877", "scale-default"),
    "latent_attention_key_rotary_of_the_key_before":
        ("the cache of rotated parts is a token behind that of latent vectors", "rotated-part-one-position-late"),
    "latent_attention_query_rotary_with_each_query_in_reverse":
        ("q_pe is rotated by tables with the axis of heads for positions: tensorgi/TPA#4's kind", ()),
    "latent_attention_key_projection_of_the_next_head": "kv_b_proj is sharded one head off",
    "latent_attention_value_projection_of_the_next_head": "kv_b_proj is sharded one head off, behind the mean",
    "latent_attention_value_projection_of_the_first_head":
        "one matrix for all heads behind the mean: a product that spreads over the wrong axis",
    "latent_attention_latent_in_bfloat16": "latent vectors are kept in bfloat16 beside float32",
    "sparse_attention_key_indices_of_the_first_head":
        "every group of heads reads the indices of the first: flagos-ai/FlagGems#2184",
    "sparse_attention_key_indices_of_the_first_batch_entry": "one choice for the whole batch: a stride of 0",
    "sparse_attention_key_indices_of_the_next_batch_entry":
        "indices are read a row late beside padded requests: vllm#32175's kind",
    "sparse_attention_key_indices_of_the_first_query": "one choice for all queries: that of a query block",
    "sparse_attention_key_indices_with_head_and_query_exchanged":
        ("(B, Lq, Hkv, K), as fla and FlashMLA have it, is read as (B, Hkv, Lq, K)", ()),
    "sparse_attention_block_size_left_out":
        ("indices of blocks are read as those of keys: the size is not handed on", "block-size-ignored"),
    "sparse_attention_is_causal_left_out":
        ("prefill behind an indexer sees what follows: lablup/mlxcel#619", "causality-ignored"),
    "sparse_attention_window_left_out": ("the window is dropped behind indices: sglang#30050's kind", "window-ignored"),
    "sparse_attention_sinks_left_out": ("sinks are dropped behind indices: vllm-metal#212's kind", "sinks-ignored"),
    "normalized_attention_norm_left_out": ("Llama 4's L2Norm is a root mean square: a name for two", "norm-kind"),
    "merge_states_lse_base_left_out":
        ("log2 is written and log is read: flashinfer#2113, pytorch#181645", "lse-base-e"),
    "merge_states_log_sum_exps_in_bfloat16":
        ("log_sum_exp of each part is stored in 16 bits: flashinfer#3372's kind", ()),
    "merge_states_log_sum_exps_with_head_and_query_exchanged":
        ("(Lq, H) is read as (H, Lq): statistics of kernels have their own layout",
            "log-sum-exps-with-heads-and-queries-confused"),
    "merge_states_outputs_with_each_part_in_reverse":
        ("structure: outputs are gathered in the order in which devices answer", "parts-reversed"),
    "merge_states_log_sum_exps_of_the_first_head": "structure: one log-sum-exp per query is read for all heads",
}
"""Faults that people made: these are put to as many cases as those by hand, and named."""
# fmt: on


def _diagnosis_of_fault(fault_name: str) -> str | tuple[str, ...]:
    """Return the diagnosis of a fault of an array or argument: the reading of the same name, or an accuracy."""
    is_rounded = any(f"_in_{name}" in fault_name for name in _ROUNDINGS_BY_FORMAT)
    return ROUNDING_DIAGNOSIS if is_rounded else fault_name.replace("_of_the_", "_of_").replace("_", "-")


def _register_generated_fault(
    owner: str,
    fault_name: str,
    defect: str,
    steps: StepReplacements,
    stage: str,
    operation_and_argument: tuple[str, str],
) -> None:
    name = f"{owner}_{fault_name}"
    if name not in FAULTS_IN_THE_WILD:
        register_fault(
            "by the specification",
            None,
            name,
            defect,
            steps,
            stage=stage,
            dtypes=GENERATED_FAULT_DTYPES,
            operation_and_argument=operation_and_argument,
        )
        return
    met = FAULTS_IN_THE_WILD[name]
    defect, diagnosis = (met, _diagnosis_of_fault(fault_name)) if isinstance(met, str) else met
    more: Any = {
        "dtypes": WIDE_DTYPES if diagnosis == ROUNDING_DIAGNOSIS else ALL_BUT_BFLOAT16,
        "diagnosis": diagnosis,
    }
    register_fault(
        "by the specification",
        None,
        name,
        defect,
        steps,
        stage=stage,
        operation_and_argument=operation_and_argument,
        occurred_in_practice=True,
        **more,
    )


# fmt: off
for _operation in OPERATIONS.values():
    _what = _to_words(_operation.name)
    for _name, _spec in arguments_of_operation(_operation):
        for _fault in faults_of_argument(_operation, _name, _spec):
            _register_generated_fault(_operation.name, f"{_name}_{_fault.name}",
                            f"the {_to_words(_name)} of {_what} {_fault.defect}",
                kernel.change_argument(_operation.function_name, _name, _fault.change),
                _spec.requested_stage or _operation.stages[0], (_operation.name, _name))
    for _stage in returned_stages(_operation):
        _register_generated_fault(_operation.name, f"{_stage}_rounded_to_eight_bits",
            f"the {_to_words(_stage)} of {_what} is stored in bfloat16",
            round_stage(_operation.function_name, _stage), _stage, (_operation.name, ""))
for _array in STEP_ARRAYS:
    _step = _array.step.replace("._", "_").strip("_")
    for _fault in _array.possible_faults():
        _register_generated_fault(_step, f"{_array.name}_{_fault.name}",
            f"the {_to_words(_array.name)} of {_to_words(_step)} {_fault.defect}",
            _array.steps_with_change(_fault.change), _array.stage, (_array.operation, ""))
# fmt: on

_SUBJECT_MODULES = (*(topic.__name__ for topic in TOPIC_MODULES), __name__)
_ALL_SUBJECTS: tuple[Subject, ...] = tuple(
    subject for module in _SUBJECT_MODULES for subject in subjects_of_module(module)
)
MUTANTS: tuple[Mutant, ...] = tuple(subject for subject in _ALL_SUBJECTS if isinstance(subject, Mutant))
HAND_WRITTEN_FAULTS: tuple[Mutant, ...] = tuple(fault for fault in MUTANTS if not fault.is_generated)
"""The faults that are not derived from the specification, and those that are known to have occurred."""
CONTROLS: tuple[Control, ...] = tuple(subject for subject in _ALL_SUBJECTS if isinstance(subject, Control))
EQUIVALENTS: tuple[Equivalent, ...] = tuple(subject for subject in _ALL_SUBJECTS if isinstance(subject, Equivalent))
SUBJECTS_BY_NAME: Mapping[str, Subject] = {subject.name: subject for subject in (*MUTANTS, *CONTROLS, *EQUIVALENTS)}


def variant_named(name: str) -> Backend:
    """Return the implementation of a subject. Raises ``KeyError``."""
    return SUBJECTS_BY_NAME[name].backend
