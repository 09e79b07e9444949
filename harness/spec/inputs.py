"""The inputs of attention: their axes, their requirements, and the inputs into which they are folded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attncheck.backends.contract import CODE_FORMATS
from attncheck.spec.options import DEFAULT_FORMAT, statistics_dtype

Shape = tuple[int, ...]
Axes = tuple[str, ...]

SCORES_AXES: Axes = ("B", "H", "Lq", "T")


@dataclass(frozen=True)
class InputSpec:
    """The requirements of an operation on one input.

    ``axes`` are letters of ``AXES``. A case may leave leading axes out; they then have length 1. Axes of an
    ``is_broadcastable`` input (a mask or a bias on the scores) may have length 1. An axis of an ``is_per_block`` input
    may have any length that divides the axis: the input has a number for each block. ``is_count`` inputs are whole
    numbers, which stay integers in every dtype, from ``min_value`` to the length of ``max_value_axis``. Counts that are
    an ``is_index`` name entries of that axis, or blocks of these: none twice in a row, and -1 names none. An
    ``is_row_statistic`` input is float32 in a dtype of 16 bits: in bfloat16, a logarithm of 500 has steps of 2.
    ``scale_input`` is the input that, if given, makes this one codes.

    An input is refused without its ``required_input``. It has no effect without one of ``requires_one_of``, which are
    options and inputs. It replaces the option ``replaced_option``; ``conflict_reason`` says why both together are
    refused.

    ``requested_stage`` is the stage that is computed only if this input or another that requests it is given.
    Otherwise ``first_affected_stage`` is the first stage that the input changes. ``neutral_value`` is the number
    without effect, for an input that may be left out. ``folds_into_input`` is the input into which this one is folded
    before anything is computed; if it is ``only_in_files``, before any implementation is called. An input that
    ``adds_key`` is the logit of one more key per head, of zeros and with a value of zeros, for which no stage has a
    column. Gradients are taken with respect to ``is_differentiable`` inputs.

    ``plain_name`` is the name of an input that an implementation may ignore, in messages. ``name_per_head`` is the name
    of one head's number, for inputs with a number per head. ``synonyms`` are its names in public kernels.
    """

    axes: Axes
    required: bool = True
    is_boolean: bool = False
    is_broadcastable: bool = False
    may_be_infinite: bool = False
    required_input: str | None = None
    requires_one_of: tuple[str, ...] = ()
    replaced_option: str | None = None
    conflict_reason: str = ""
    is_count: bool = False
    max_value_axis: str = "T"
    min_value: int = 0
    is_index: bool = False
    scale_input: str | None = None
    is_per_block: bool = False
    is_row_statistic: bool = False
    requested_stage: str | None = None
    neutral_value: float | None = None
    folds_into_input: str | None = None
    only_in_files: bool = False
    adds_key: bool = False
    is_differentiable: bool = False
    plain_name: str | None = None
    name_per_head: str | None = None
    first_affected_stage: str = "weights"
    synonyms: tuple[str, ...] = ()

    @property
    def first_stage(self) -> str:
        """The stage in which it shows first."""
        return self.requested_stage or self.first_affected_stage

    @property
    def is_narrow(self) -> bool:
        """Return whether the input may be stored in a narrower format than the working dtype."""
        return self.scale_input is not None or self.is_per_block

    @property
    def is_number(self) -> bool:
        """Return whether the input is rounded to the working dtype, as masks and counts are not."""
        return not (self.is_boolean or self.is_count)


def optional_input(*axes: str, neutral_value: float | None = 0, **more: Any) -> InputSpec:
    """Return an optional input: ``neutral_value`` is the number that changes nothing, None if there is none."""
    return InputSpec(axes, required=False, neutral_value=neutral_value, **more)


QUERY = InputSpec(("B", "H", "Lq", "D"), is_differentiable=True, synonyms=("q", "queries", "xq", "query_states"))
KEY = InputSpec(("B", "H", "Lk", "D"))
WIDE_KEY = InputSpec(("B", "H", "Lk", "Dk"))
"""The key of the bilinear and the additive score, whose width may differ from the query's."""
SCORE_INPUT = InputSpec(SCORES_AXES, may_be_infinite=True)
INPUTS_ON_SCORES: Mapping[str, InputSpec] = {
    "mask": optional_input(
        *SCORES_AXES,
        neutral_value=1,
        is_boolean=True,
        is_broadcastable=True,
        requested_stage="masked",
        plain_name="the mask",
        synonyms=("attn_mask", "attention_mask", "att_mask"),
    ),
    "bias": optional_input(
        *SCORES_AXES,
        is_broadcastable=True,
        may_be_infinite=True,
        requested_stage="biased",
        plain_name="the bias",
        is_differentiable=True,
        synonyms=("attn_bias", "attention_bias", "attn_biases"),
    ),
    "key_lengths": optional_input(
        "B",
        neutral_value=None,
        is_count=True,
        requested_stage="masked",
        folds_into_input="mask",
        plain_name="the key lengths",
        synonyms=("kv_lengths", "seqlens_k", "key_value_seq_lengths", "cache_seqlens", "kv_lens"),
    ),
    "query_mask": optional_input(
        *("B", "Lq"),
        neutral_value=1,
        is_boolean=True,
        is_broadcastable=True,
        requested_stage="masked",
        folds_into_input="mask",
        only_in_files=True,
        plain_name="the query mask",
    ),
}
INPUTS_ON_ROWS: Mapping[str, InputSpec] = {
    **INPUTS_ON_SCORES,
    "sinks": optional_input(
        "H",
        neutral_value=-math.inf,
        may_be_infinite=True,
        adds_key=True,
        plain_name="the sinks",
        name_per_head="the sink",
        is_differentiable=True,
        synonyms=("sink", "s_aux", "attention_sinks", "attn_sink", "sink_logits", "learnable_sink", "softmax_sink"),
    ),
    "head_scale": optional_input(
        "H",
        neutral_value=None,
        replaced_option="scale",
        conflict_reason="is one number for all heads, and head_scale holds one for each",
        plain_name="the scale of each head",
        name_per_head="the scale",
        first_affected_stage="scores",
        synonyms=("head_scales", "scale_per_head", "per_head_scale"),
    ),
}
"""Inputs of a row's softmax in addition to query, key and value."""
PER_HEAD_INPUTS: Mapping[str, InputSpec] = {name: spec for name, spec in INPUTS_ON_ROWS.items() if spec.name_per_head}
"""A number for each head."""
ROTARY_INPUTS: Mapping[str, InputSpec] = {
    "rotary_cos": optional_input(
        *("Lr", "R"),
        neutral_value=None,
        required_input="rotary_sin",
        requested_stage="rotated_query",
        folds_into_input="query_cos",
        synonyms=("cos", "cos_cache", "rope_cos"),
    ),
    "rotary_sin": optional_input(
        *("Lr", "R"),
        neutral_value=None,
        required_input="rotary_cos",
        requested_stage="rotated_key",
        folds_into_input="query_sin",
        synonyms=("sin", "sin_cache", "rope_sin"),
    ),
}
"""Cosines and sines by position; they come together."""
MIN_AXIS_LENGTHS: Sequence[tuple[str, tuple[str, ...]]] = (("Lr", ("P", "Lq")), ("Lr", ("P", "Lk")), ("D", ("R", "R")))
"""Axes that are as long as others together, or longer."""
ATTENTION_INPUTS: Mapping[str, InputSpec] = {
    "query": QUERY,
    "key": InputSpec(("B", "Hkv", "Lk", "D"), is_differentiable=True, synonyms=("k", "keys", "xk", "key_states")),
    "value": InputSpec(
        ("B", "Hkv", "Lk", "Dv"), is_differentiable=True, synonyms=("v", "values", "xv", "value_states")
    ),
    **INPUTS_ON_ROWS,
    **ROTARY_INPUTS,
}
GATED_INPUTS: Mapping[str, InputSpec] = {
    **ATTENTION_INPUTS,
    "gate": InputSpec(
        ("B", "H", "Lq", "Dv"),
        first_affected_stage="output",
        plain_name="the gate",
        is_differentiable=True,
        synonyms=("output_gate", "attn_gate", "gate_score", "gate_states"),
    ),
}
"""What is attended to, and what the sigmoid is taken of that the output is multiplied with."""
FOLDED_INPUTS: Mapping[str, InputSpec] = {
    **dict.fromkeys(("query_cos", "query_sin"), InputSpec(("Lq", "R"), requested_stage="rotated_query")),
    **dict.fromkeys(("key_cos", "key_sin"), InputSpec(("T", "R"), requested_stage="rotated_key")),
    "cached_key": InputSpec(("B", "Hkv", "P", "D")),
    "cached_value": InputSpec(("B", "Hkv", "P", "Dv")),
    "key_factor": InputSpec(("B", "Hkv", "T", "D"), is_broadcastable=True),
    "value_factor": InputSpec(("B", "Hkv", "T", "Dv"), is_broadcastable=True),
    "query_factor": InputSpec(("B", "H", "Lq", "D"), is_broadcastable=True),
    "key_shift": InputSpec(("B", "Hkv", "T", "D"), is_broadcastable=True),
    "value_shift": InputSpec(("B", "Hkv", "T", "Dv"), is_broadcastable=True),
    "key_projection": InputSpec(("H", "C", "D")),
    "value_projection": InputSpec(("H", "C", "Dv")),
    "query_norm": InputSpec(("H", "D")),
    "key_norm": InputSpec(("Hkv", "D")),
    "row_values": InputSpec(("B", "H", "Lq", "N", "Dv")),
    "gate": GATED_INPUTS["gate"],
}
"""What the canonical form of a case has in place of other inputs: a row for each query and each key.

What is cached is a past in front of projections. Factors stand for scales of what is in codes, and shifts for zero
points; weights of norms have a row for each head; projections make keys and values of latent vectors; parts that are
merged are values of each query's own. A gate stays what it is.
"""
CODE_INPUTS: Sequence[str] = ("key_factor", "value_factor", "key_shift", "value_shift")
"""What belongs to keys and values in codes, by head and key."""
QUERY_KEY_VALUE: Sequence[str] = ("query", "key", "value")
PART_INPUTS: Mapping[str, InputSpec] = {
    "outputs": InputSpec(("N", "B", "H", "Lq", "Dv"), folds_into_input="row_values"),
    "log_sum_exps": InputSpec(
        ("N", "B", "H", "Lq"), may_be_infinite=True, is_row_statistic=True, folds_into_input="scores"
    ),
}
"""Results of attention over parts of the keys."""
PAST_INPUTS: Mapping[str, InputSpec] = {
    "past_key": optional_input(
        *("B", "Hkv", "P", "D"),
        neutral_value=None,
        required_input="past_value",
        folds_into_input="key",
        synonyms=("key_cache", "k_cache", "past_k"),
    ),
    "past_value": optional_input(
        *("B", "Hkv", "P", "Dv"),
        neutral_value=None,
        required_input="past_key",
        folds_into_input="value",
        synonyms=("value_cache", "v_cache", "past_v"),
    ),
}
OFFSET_INPUTS: Mapping[str, InputSpec] = {
    "query_offsets": optional_input(
        "B",
        neutral_value=None,
        is_count=True,
        requires_one_of=("is_causal", "window", "rotary_cos"),
        replaced_option="alignment",
        conflict_reason="says where queries stand, and query_offsets say it of each batch entry",
        folds_into_input="mask",
        synonyms=("q_offsets", "start_positions", "seqlen_offsets"),
    ),
}
"""The position of the first query of each batch entry among all keys."""
PACKED_PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "in_proj_weight": ("query_weight", "key_weight", "value_weight"),
    "in_proj_bias": ("query_bias", "key_bias", "value_bias"),
}
"""An input that replaces three inputs: their rows, one after the other, as torch packs them."""
_LIMITS = InputSpec(("S1",), is_count=True, requested_stage="masked")
PACKED_INPUTS: Mapping[str, InputSpec] = {
    **{name: ATTENTION_INPUTS[name] for name in QUERY_KEY_VALUE},
    "cu_seqlens_q": replace(_LIMITS, max_value_axis="Lq", synonyms=("cu_seqlens_query", "cu_seq_q", "qo_indptr")),
    "cu_seqlens_k": replace(
        _LIMITS, max_value_axis="Lk", synonyms=("cu_seqlens_key", "cu_seqlens_kv", "cu_seq_k", "kv_indptr")
    ),
}
"""Several sequences, packed one after the other, and the offsets at which each begins and ends."""
USED_KEYS: Mapping[str, InputSpec] = {
    "key_lengths": optional_input(
        "S",
        neutral_value=None,
        is_count=True,
        max_value_axis="Lk",
        synonyms=("seqused_k", "seqlens_k", "cache_seqlens"),
    ),
    **PER_HEAD_INPUTS,
}
_SCALE = InputSpec(("B", "Hkv", "Lk"), is_broadcastable=True)
_KEY_SCALE_WORDS = ("k_scale", "k_descale", "key_descale", "scale_k")
_VALUE_SCALE_WORDS = ("v_scale", "v_descale", "value_descale", "scale_v")


def _block_scale_input(name: str, *axes: str, needs: str | None = None) -> InputSpec:
    words = (f"{name[0]}_sf", f"{name}_block_scales", f"{name}_sf")
    return optional_input(
        *axes, neutral_value=1, is_broadcastable=True, is_per_block=True, required_input=needs, synonyms=words
    )


def _block_zero_point_input(name: str, *axes: str, needs: str | None = None) -> InputSpec:
    words = (f"{name}_zero_point", f"{name[0]}_zeros")
    return optional_input(
        *axes,
        is_broadcastable=True,
        is_per_block=True,
        scale_input=f"{name}_scale",
        required_input=needs,
        synonyms=words,
    )


def _code_scale_inputs(*lies: str, needs: str | None = None) -> Mapping[str, InputSpec]:
    """Return what makes numbers of codes beside the scales of keys and values, which lie on these axes."""
    rows = ("B", "H", "Lq")
    words = ("q_scale", "q_descale", "query_descale", "scale_q")
    return {
        "query_scale": optional_input(
            *rows, neutral_value=None, is_broadcastable=True, required_input=needs, synonyms=words
        ),
        "query_block_scale": _block_scale_input("query", *rows, "D", needs="query_scale"),
        "key_block_scale": _block_scale_input("key", *lies, "D", needs=needs),
        "value_block_scale": _block_scale_input("value", *lies, "Dv", needs=needs),
        "key_zero": _block_zero_point_input("key", *lies, "D", needs=needs),
        "value_zero": _block_zero_point_input("value", *lies, "Dv", needs=needs),
    }


PAGED_INPUTS: Mapping[str, InputSpec] = {
    "query": replace(QUERY, scale_input="query_scale"),
    "key_pages": InputSpec(
        ("Np", "Lp", "Hkv", "D"), scale_input="key_scale", synonyms=("k_cache", "key_cache", "paged_key")
    ),
    "value_pages": InputSpec(
        ("Np", "Lp", "Hkv", "Dv"), scale_input="value_scale", synonyms=("v_cache", "value_cache", "paged_value")
    ),
    "block_table": InputSpec(
        ("B", "W"),
        is_count=True,
        max_value_axis="Np",
        min_value=-1,  # engines fill places that are not used with 0, with -1, or with any number
        synonyms=("block_tables", "page_table"),
    ),
    "key_lengths": InputSpec(
        ("B",),
        is_count=True,
        max_value_axis="Ts",
        requested_stage="masked",
        synonyms=("cache_seqlens", "seq_lens", "context_lens", "kv_lens"),
    ),
    "key_scale": optional_input(
        *("Np", "Lp", "Hkv"),
        neutral_value=None,
        is_broadcastable=True,
        required_input="value_scale",
        synonyms=_KEY_SCALE_WORDS,
    ),
    "value_scale": optional_input(
        *("Np", "Lp", "Hkv"),
        neutral_value=None,
        is_broadcastable=True,
        required_input="key_scale",
        synonyms=_VALUE_SCALE_WORDS,
    ),
    **_code_scale_inputs("Np", "Lp", "Hkv", needs="key_scale"),
    **PER_HEAD_INPUTS,
}
"""Keys and values in the pages of a cache, and which pages hold those of each batch entry.

Pages hold codes if there are scales of them.
"""
RAGGED_PAGED_INPUTS: Mapping[str, InputSpec] = {
    **PAGED_INPUTS,
    "cu_seqlens_q": replace(PACKED_INPUTS["cu_seqlens_q"], synonyms=("cu_q_lens", "query_start_loc", "qo_indptr")),
    "block_table": replace(PAGED_INPUTS["block_table"], axes=("S", "W")),
    "key_lengths": replace(PAGED_INPUTS["key_lengths"], axes=("S",)),
    "tree_mask": optional_input(
        *("Lq", "Ts"),
        neutral_value=1,
        is_boolean=True,
        requested_stage="masked",
        plain_name="the tree mask",
        synonyms=("custom_mask", "draft_mask", "spec_decoding_mask"),
    ),
}
"""As for pages, with the queries of several sequences one after the other, and the keys that each of them sees."""
QUANTIZED_INPUTS: Mapping[str, InputSpec] = {
    "query": replace(QUERY, scale_input="query_scale"),
    "key": replace(ATTENTION_INPUTS["key"], scale_input="key_scale"),
    "value": replace(ATTENTION_INPUTS["value"], scale_input="value_scale"),
    "key_scale": replace(_SCALE, synonyms=_KEY_SCALE_WORDS),
    "value_scale": replace(_SCALE, synonyms=_VALUE_SCALE_WORDS),
    **_code_scale_inputs("B", "Hkv", "Lk"),
    **{name: INPUTS_ON_ROWS[name] for name in ("mask", "key_lengths")},
    **PER_HEAD_INPUTS,
}
"""Keys and values in codes, and what makes numbers of these: (code - zero) block_scale scale."""
SCALE_PREFIX: Mapping[str, str] = {
    name: spec.scale_input.removesuffix("_scale")
    for inputs in (QUANTIZED_INPUTS, PAGED_INPUTS)
    for name, spec in inputs.items()
    if spec.scale_input and not spec.is_per_block
}
"""Inputs that may be in codes, and the prefix of the names of their scales and zero points."""
SCALES = frozenset(f"{stem}{part}_scale" for stem in SCALE_PREFIX.values() for part in ("", "_block"))
"""Inputs that are scales of codes."""
ZERO_POINTS = "int8"
"""The dtype of zero points, whatever the dtype of the codes."""


def dtype_of_input(spec: InputSpec, present: Collection[str], options: Mapping[str, Any], dtype: str) -> str:
    """Return the dtype in which an input of numbers is stored, in a call with the ``present`` inputs."""
    form = CODE_FORMATS[options.get("stored_as") or DEFAULT_FORMAT]
    if spec.is_per_block:
        return ZERO_POINTS if spec.scale_input else form.scales or dtype
    if spec.scale_input in present:
        return form.elements
    return statistics_dtype(dtype) if spec.is_row_statistic else dtype


NORMALIZED_INPUTS: Mapping[str, InputSpec] = {
    **{name: ATTENTION_INPUTS[name] for name in QUERY_KEY_VALUE},
    "query_norm_weight": optional_input(
        "Nq", neutral_value=1, synonyms=("q_norm_weight", "q_norm", "q_weight", "norm_q_weight")
    ),
    "key_norm_weight": optional_input(
        "Nk", neutral_value=1, synonyms=("k_norm_weight", "k_norm", "k_weight", "norm_k_weight")
    ),
    **{name: INPUTS_ON_ROWS[name] for name in ("mask", "bias", "key_lengths")},
    **PER_HEAD_INPUTS,
    **ROTARY_INPUTS,
}
"""What is attended to once queries and keys are normalised, and the weights of their norms."""
LATENT_INPUTS: Mapping[str, InputSpec] = {
    "query": replace(QUERY, synonyms=("q_nope", *QUERY.synonyms)),
    "latent": InputSpec(("B", "Lk", "C"), synonyms=("kv_c", "compressed_kv", "c_kv", "ckv", "kv_latent")),
    "key_projection": InputSpec(("H", "C", "D"), synonyms=("w_uk", "w_kc", "key_up_projection")),
    "value_projection": InputSpec(("H", "C", "Dv"), synonyms=("w_uv", "w_vc", "value_up_projection")),
    "query_rotary": optional_input(
        *("B", "H", "Lq", "Dr"),
        neutral_value=None,
        required_input="key_rotary",
        synonyms=("q_pe", "q_rope", "query_rope"),
    ),
    "key_rotary": optional_input(
        *("B", "Lk", "Dr"),
        neutral_value=None,
        required_input="query_rotary",
        synonyms=("k_pe", "k_rope", "kpe", "key_rope"),
    ),
    **{name: INPUTS_ON_ROWS[name] for name in ("mask", "bias", "key_lengths", "head_scale")},
    **OFFSET_INPUTS,
}
"""Latent vectors, what makes keys and values of them, and the part of queries and keys that is rotated already."""

SPARSE_INPUTS: Mapping[str, InputSpec] = {
    **{name: ATTENTION_INPUTS[name] for name in QUERY_KEY_VALUE},
    "key_indices": InputSpec(
        ("B", "Hkv", "Lq", "K"),
        is_count=True,
        is_index=True,
        min_value=-1,
        is_broadcastable=True,
        max_value_axis="Lk",
        requested_stage="masked",
        synonyms=("topk_indices", "topk_idxs", "block_indices", "selected_indices", "sparse_indices", "indices"),
    ),
    "key_lengths": INPUTS_ON_ROWS["key_lengths"],
    **PER_HEAD_INPUTS,
    **OFFSET_INPUTS,
}
"""What is attended to, and the indices of the keys that each query may attend to, or of blocks of these."""


@dataclass(frozen=True)
class LayoutSpec:
    """One memory layout of an input: a description in words, and ``min_axes``, the fewest axes of such an input.

    In a layout with ``max_slices``, slices are apart: the first axis longer than 1, except for the last axis, has at
    most so many.
    """

    description: str
    min_axes: int = 1
    max_slices: int | None = None


MEMORY_LAYOUTS: Mapping[str, LayoutSpec] = {
    "strided": LayoutSpec("every second number of the last axis"),
    "padded": LayoutSpec("rows of a wider array"),
    "sliced": LayoutSpec("the first rows of twice as many, as of a cache with room", min_axes=2),
    "transposed": LayoutSpec("heads inside of length", min_axes=4),
    "fused": LayoutSpec(
        "cut out of one projection: the heads of all fused inputs of a batch and length side by side in each token",
        min_axes=4,
    ),
    "spaced": LayoutSpec(
        "slices along the first axis of several as far apart as two are long, as pages beside those of values",
        max_slices=2**31,
    ),
    "distant": LayoutSpec("such slices, 64 at most, more than 65,536 numbers apart", max_slices=64),
    "broadcast": LayoutSpec("stride 0 along the axes, other than the last, in which all slices are alike"),
    "reversed": LayoutSpec("negative strides along the last two axes, where a framework has them", min_axes=2),
    "unaligned": LayoutSpec("one number behind a boundary of 64 bytes"),
}
"""The memory layouts of inputs; row by row by default."""
