"""The options of attention, declared once: as the fields of ``Options``; and its dtypes with their rounding models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from attncheck.backends.contract import (
    CODE_FORMATS,
    EmptyRows,
    LseBase,
    Norm,
    NormOver,
    Packing,
    StoredAs,
    Swizzle,
    Window,
)

ScoreKind = Literal["dot", "scaled_dot", "general", "additive", "cosine"]
DEFAULT_SCORE: ScoreKind = "scaled_dot"
_NAMES_THAT_CAN_FORBID_KEYS = (
    "is_causal",
    "window",
    "mask",
    "key_lengths",
    "query_mask",
    "cu_seqlens_q",
    "key_indices",
    "bias",
    "scores",
)
"""Options and inputs that can forbid a key, a bias and scores by minus infinity."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
DEFAULT_DTYPES = ("float64", "float32")
"""The dtypes of a case if neither it nor its file lists any."""
SIXTEEN_BIT_DTYPES = ("bfloat16", "float16")
ROUNDING_MODELS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("native", "native_lse"), ("float64", "float32")),
    **dict.fromkeys(("tf32_products", "bf16x3_products", "bf16_products"), ("float32",)),
    **dict.fromkeys(
        ("fused", "fused_bwd", "fused_lse", "fused_fp8", "eager", "eager_pre", "eager_lse"), SIXTEEN_BIT_DTYPES
    ),
    "eager_cut": ("bfloat16",),
}
"""The rounding models that an implementation may declare, and their dtypes; see ``spec.classes``."""


DEFAULT_FORMAT = next(iter(CODE_FORMATS))
"""The format of keys and values in codes if a case has no ``stored_as``."""
FORMATS_KNOWN_BY_DTYPE = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Formats that a function can tell from the dtype of the codes."""


def statistics_dtype(dtype: str) -> str:
    """Return the dtype of statistics of rows, such as a log_sum_exp, of numbers in a dtype."""
    return "float32" if dtype in SIXTEEN_BIT_DTYPES else dtype


DEFAULT_EMPTY_ROWS: EmptyRows = "zero"
"""The convention of a case without ``empty_rows``."""
EMPTY_ROWS: Mapping[str, str] = {"nan": "NaN", "uniform": "the mean of all values (uniform)", "zero": "zero"}
"""The result of a query that may attend to no key by each convention, in words."""

DECLARABLE_CONVENTIONS: Mapping[str, Mapping[str, str]] = {
    "corner": {
        "bottom_right": "causality and windows count from the last query and key",
        "top_left": "causality and windows count from the first query and key",
    },
    "window": {
        "counts_itself": "the left side of a window counts the query's own key",
        "exclusive": "both ends of a window lie outside it",
    },
    "heads": {"tiled": "query head h takes key and value head h % Hkv"},
    "mask": {"true_forbids": "True in a mask forbids"},
    "key_lengths": {
        "last_index": "a key length is the last key's index",
        "from_the_end": "the last keys are those that count",
    },
    "scale": {"1": "the default scale is 1", "1/D": "the default scale is 1/D"},
    "bias": {"before_scale": "the bias is added before the scores are scaled"},
    "softcap": {
        "behind_bias": "the softcap is applied after the bias",
        "behind_mask": "the softcap is applied after the mask",
    },
}
"""Other conventions that a user's function may declare, each value in words, in the order in which they are applied.

The exact answer of a call is then that of the call as the function reads it.
"""
ACCURACY_PREFIX = "accuracy-of-"
"""Prefix of the diagnoses that give the size of the errors, and no cause."""
ACCURACY_OF_FLOAT32 = f"{ACCURACY_PREFIX}float32"
CONVENTION_OF_READING: Mapping[str, tuple[str, str]] = {
    **{f"empty-rows-{value}": ("empty_rows", value) for value in EMPTY_ROWS},
    "aligned-bottom-right": ("corner", "bottom_right"),
    "aligned-top-left": ("corner", "top_left"),
    "window-too-narrow-left": ("window", "counts_itself"),
    "window-too-narrow-left-and-right": ("window", "exclusive"),
    "heads-tiled": ("heads", "tiled"),
    "mask-inverted": ("mask", "true_forbids"),
    "key-lengths-one-too-long": ("key_lengths", "last_index"),
    "key-lengths-from-the-end": ("key_lengths", "from_the_end"),
    "scale-one": ("scale", "1"),
    "scale-inverse-width": ("scale", "1/D"),
    "bias-scaled": ("bias", "before_scale"),
    "softcap-after-biased": ("softcap", "behind_bias"),
    "softcap-after-masked": ("softcap", "behind_mask"),
}
"""By the name of a reading, the convention and its value by which a function declares that it reads calls so."""


def empty_row_message(actual: str, expected: str) -> str:
    """Return a sentence: the result for a query that may attend to no key, and the result that the case expects."""
    return f"a query without a key gives {EMPTY_ROWS[actual]}; the case expects {expected}"


@dataclass(frozen=True)
class OptionSpec:
    """The specification of an option.

    ``requested_stage`` is the stage that is computed only if the option or another that requests it is given.
    ``plain_name`` is the name of an option that an implementation may ignore, in messages. Options that are
    ``only_in_files`` are passed to no implementation. An ``is_convention`` option sets the meaning of a result that the
    mathematics leaves open: an implementation without such a keyword gets the case without it, and its result is judged
    under its convention. ``must_be_positive`` numbers are larger than 0. An option has no effect without its
    ``required_input``, and without one of ``requires_one_of``, which are options and inputs. ``typical_values`` are
    numbers that models use, and the limits of the range. ``synonyms`` are its names in public kernels.
    """

    description: str
    requested_stage: str | None = None
    plain_name: str | None = None
    only_in_files: bool = False
    is_convention: bool = False
    must_be_positive: bool = False
    required_input: str | None = None
    requires_one_of: tuple[str, ...] = ()
    typical_values: tuple[float, ...] = ()
    synonyms: tuple[str, ...] = ()
    name: str = ""
    type: Any = None


def option_field(description: str, **spec_fields: Any) -> Any:
    """Return a field of ``Options`` with its specification."""
    return field(default=None, metadata={"spec": OptionSpec(description, **spec_fields)})


@dataclass(frozen=True, eq=False, kw_only=True)
class Options(Mapping[str, Any]):
    """Everything that changes what an operation computes; which options apply depends on the operation.

    None is what is not given. As a mapping it holds what is given alone, by name.
    """

    score: ScoreKind | None = option_field(
        "Kind of score (operation scoring); scaled_dot if absent.", only_in_files=True
    )
    scale: float | None = option_field(
        "Factor on the raw scores; if absent 1 for dot and cosine, otherwise 1/sqrt(D).",
        typical_values=(0.0, 0.125, 0.5, 1.0, 2.0, -0.25, -1.0),
        synonyms=(
            *("sm_scale", "softmax_scale", "attn_scale", "attention_scale"),
            *("scaling", "scale_factor", "qk_scale"),
        ),
    )
    softcap: float | None = option_field(
        "c: a scaled score s becomes c tanh(s / c), before the bias and the mask (dot and scaled_dot).",
        requested_stage="capped",
        plain_name="the softcap",
        must_be_positive=True,
        typical_values=(0.5, 1.0, 5.0, 30.0, 50.0),
        synonyms=("soft_cap", "logit_cap", "logits_soft_cap", "attn_logit_softcapping", "attn_logits_soft_cap"),
    )
    rotary_interleaved: bool | None = option_field(
        "The rotary embedding rotates neighbouring elements, (x_2c, x_(2c + 1)); if absent those that are R apart, "
        "(x_c, x_(c + R)).",
        required_input="rotary_cos",
        synonyms=("interleaved", "is_neox_style"),
    )
    is_causal: bool | None = option_field(
        "A query at position p attends to key j only if j <= p; `alignment` says what p is.",
        requested_stage="masked",
        plain_name="causality",
        synonyms=("causal", "use_causal_mask", "use_causal"),
    )
    window: Window | None = option_field(
        "[left, right]: a query at position p attends to key j only if p - left <= j <= p + right; "
        "null is unbounded, on one side at most.",
        requested_stage="masked",
        plain_name="the window",
        synonyms=("window_size", "sliding_window", "local_window_size"),
    )
    alignment: Literal["top_left", "bottom_right"] | None = option_field(
        "The position p of query i, for is_causal and window: top_left is i; bottom_right is such that the "
        "last query stands at the last key, and may be negative. If absent i + P, after a past of P keys.",
        only_in_files=True,
        requires_one_of=("is_causal", "window"),
    )
    mask_fill: float | None = option_field(
        "The number that takes the place of a score where the mask, causality, the window or the key lengths say "
        "no, rounded to the dtype; minus infinity if absent, and where the dtype has no such number.",
        requires_one_of=_NAMES_THAT_CAN_FORBID_KEYS,
        typical_values=(-1e9, -1e6, -1e4, -60.0, -4.0, -0.5, -1e-9, 0.0, 2.0),
        synonyms=("mask_value", "masked_value", "fill_value", "mask_filter_value", "neg_inf"),
    )
    heads: int | None = option_field(
        "Number of heads: needed by multi_head_attention and by `layout: merged`.", must_be_positive=True
    )
    kv_heads: int | None = option_field(
        "Number of heads of key and value, which the query heads share evenly; as `heads` if absent.",
        must_be_positive=True,
    )
    projections: Literal["linear"] | None = option_field(
        "How the weights of projections are laid out. linear: (out, in), as nn.Linear of torch holds them; "
        "`in_proj_weight` and `in_proj_bias` may then hold those of query, key and value. If absent (in, out).",
        only_in_files=True,
    )
    stored_as: StoredAs | None = option_field(
        "The format that keys and values are stored in, and a query that has a scale; float8_e4m3fn if absent. A "
        "function is told of those other than float8_e4m3fn and float8_e5m2, which the dtype says.",
        requires_one_of=("key_scale",),
    )
    packing: Packing | None = option_field(
        "Which half of a byte holds the first of two codes of 4 bits: low_first (if absent) or high_first.",
        requires_one_of=("key_scale",),
        synonyms=("nibble_order",),
    )
    swizzle: Swizzle | None = option_field(
        "How scales of blocks lie otherwise than in rows: 4x4, those of values, or 128x4, all of them.",
        requires_one_of=("query_block_scale", "key_block_scale", "value_block_scale"),
        synonyms=("sf_layout", "scale_layout"),
    )
    poison: Literal["nan", "large"] | None = option_field(
        "What keys and values hold that no query may use: nan, or large, which is 1e30 or the dtype's largest "
        "number. If absent, what was drawn.",
        only_in_files=True,
        required_input="key_lengths",
    )
    empty_rows: EmptyRows | None = option_field(
        "What a query that may attend to no key gives: zero (if absent), uniform (the mean of all values) "
        "or nan. Asked of every implementation that has the keyword. Only where something can forbid a key.",
        is_convention=True,
        requires_one_of=_NAMES_THAT_CAN_FORBID_KEYS,
    )
    lse_base: LseBase | None = option_field(
        "The base of the logarithms that merge_states is given and returns: e (if absent) or 2.",
        synonyms=("log_base", "base"),
    )
    norm: Norm | None = option_field(
        "What queries and keys are divided by: rms (if absent), sqrt(mean(x^2) + epsilon), or l2, max(|x|, epsilon).",
        synonyms=("qk_norm", "norm_type"),
    )
    norm_over: NormOver | None = option_field(
        "What a norm is taken of: each head (if absent), or the full width, all heads of a position."
    )
    epsilon: float | None = option_field(
        "The smallest divisor of l2, or what rms adds to the mean of squares; 1e-6 if absent.",
        must_be_positive=True,
        typical_values=(1e-6, 1e-5, 1e-3, 0.1, 1.0),
        synonyms=("eps", "norm_eps", "rms_norm_eps", "variance_epsilon", "layer_norm_epsilon"),
    )
    norm_after_rotation: bool | None = option_field(
        "The rotation comes before the norm; if absent after it.", required_input="rotary_cos"
    )
    block_size: int | None = option_field(
        "How many keys an index names: index j those from j n on, n of them, as far as there are keys; 1 if absent.",
        must_be_positive=True,
        required_input="key_indices",
        typical_values=(2, 3, 4, 8, 16, 64),
        synonyms=("selection_block_size", "sparse_block_size", "moba_chunk_size"),
    )

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in OPTIONS else None
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in OPTIONS if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_TYPES = get_type_hints(Options)
OPTIONS: Mapping[str, OptionSpec] = {
    item.name: replace(item.metadata["spec"], name=item.name, type=get_args(_TYPES[item.name])[0])  # besides None
    for item in fields(Options)
}
CONVENTIONS = frozenset(name for name, spec in OPTIONS.items() if spec.is_convention)
