"""The functions that a backend module offers, stated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, ForwardRef, Literal, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar, Unpack

if TYPE_CHECKING:
    # A worker reads the table of backends before it limits NumPy's threads, so nothing here may import NumPy.
    from numpy.typing import NDArray

AXES: Mapping[str, str] = {
    "B": "batch",
    "H": "heads",
    "Hkv": "heads of key and value",
    "Lq": "query length",
    "Lk": "key length",
    "P": "length of the past",
    "T": "P + Lk",
    "D": "query and key width per head",
    "Dk": "key width of the bilinear and the additive score",
    "Dv": "value width per head",
    "E": "model width of the query",
    "Ek": "model width of the key",
    "Ev": "model width of the value",
    "Eo": "model width of the output",
    "C": "width of latent vectors",
    "Dr": "width of the part of query and key that is rotated",
    "A": "width of the additive score's hidden layer",
    "Lr": "positions in the tables of the rotary embedding",
    "R": "pairs of elements that the rotary embedding rotates",
    "S": "sequences that lie one after the other",
    "S1": "S + 1",
    "Np": "pages of a cache",
    "Lp": "keys of a page",
    "W": "width of the block table: pages of a sequence",
    "Ts": "keys that these pages hold, W Lp: T for paged_attention, T / S for ragged_paged_attention",
    "N": "parts that the keys were split into",
    "K": "indices of keys, or of blocks of keys, that a query has",
    "Nq": "width of a norm of queries: D, or H D over the full width",
    "Nk": "width of a norm of keys: D, or Hkv D over the full width",
}
"""Axis letters, used in every docstring of the project."""

Tensor: TypeAlias = Any
"""A framework's own array. Opaque outside its module."""

Stages: TypeAlias = dict[str, Tensor]
"""Named intermediates, in the order in which they are computed."""


Window: TypeAlias = tuple[int | None, int | None]
"""How many keys a query may attend to before and after its own position; None is unbounded."""

EmptyRows = Literal["zero", "uniform", "nan"]
"""What a query that may attend to no key gives: weights of zero, the same weight for every key, or NaN."""

LseBase = Literal["e", "2"]
"""The base of the logarithm that a log_sum_exp is."""

Norm = Literal["rms", "l2"]
"""What queries and keys are divided by: the root of the mean of squares, or of their sum."""

NormOver = Literal["head", "full"]
"""What a norm is taken of: each head by itself, or all heads of a position together."""

StoredAs = Literal[
    "float8_e4m3fn", "float8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4",
    "int8", "int4", "uint4",
]  # fmt: skip
"""The format that keys and values are stored in: a row of ``CODE_FORMATS``."""

Packing = Literal["low_first", "high_first"]
"""Which half of a byte holds the first of two codes of 4 bits."""

Swizzle = Literal["4x4", "128x4"]
"""How scales of blocks lie in memory otherwise than in rows."""


class CodeFormat(NamedTuple):
    """A format of stored numbers: codes, and the scales of blocks of them.

    ``elements`` is the dtype of a code, of so many ``bits``; ``scales`` that of a block's scale, None where it is the
    working dtype. In its standard ``group`` elements of the width share one, None where any may.
    """

    elements: str
    bits: int = 8
    scales: str | None = None
    group: int | None = None


CODE_FORMATS: Mapping[str, CodeFormat] = {
    # OCP 8-bit Floating Point Specification 1.0
    "float8_e4m3fn": CodeFormat("float8_e4m3fn"),
    "float8_e5m2": CodeFormat("float8_e5m2"),
    # Open Compute Microscaling Formats 1.0, section 5.2
    "mxfp8_e4m3": CodeFormat("float8_e4m3fn", 8, "float8_e8m0fnu", 32),
    "mxfp8_e5m2": CodeFormat("float8_e5m2", 8, "float8_e8m0fnu", 32),
    "mxfp6_e2m3": CodeFormat("float6_e2m3fn", 6, "float8_e8m0fnu", 32),
    "mxfp6_e3m2": CodeFormat("float6_e3m2fn", 6, "float8_e8m0fnu", 32),
    "mxfp4": CodeFormat("float4_e2m1fn", 4, "float8_e8m0fnu", 32),
    # NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, section 2: a second scale of all
    "nvfp4": CodeFormat("float4_e2m1fn", 4, "float8_e4m3fn", 16),
    # whole numbers, with a zero point where the least is not the negative of the largest: AWQ, arXiv 2306.00978
    "int8": CodeFormat("int8"),
    "int4": CodeFormat("int4", 4),
    "uint4": CodeFormat("uint4", 4),
}
"""What a number may be stored as; a kernel that is given codes of fewer than 8 bits gets bytes."""


class Edges(TypedDict, total=False):
    """Causality and a window."""

    is_causal: bool
    window: Window | None


class HeadScale(TypedDict, total=False):
    """A factor of the scores for each head, in the place of one for all."""

    head_scale: Tensor | None


class ScaleAndCap(HeadScale, total=False):
    """The factor of scaled dot products, for all heads or for each, and their softcap."""

    scale: float | None
    softcap: float | None


class Sinks(TypedDict, total=False):
    """One more logit of each head."""

    sinks: Tensor | None


class Masks(Edges, total=False):
    """The keys that a query may attend to, and a bias."""

    mask: Tensor | None
    bias: Tensor | None
    key_lengths: Tensor | None


class MaskedRows(Masks, total=False):
    """Masks, the score of a forbidden key, and what a query without a key gives."""

    mask_fill: float | None
    empty_rows: EmptyRows


class Rotary(TypedDict, total=False):
    """The tables of a rotary embedding."""

    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool


class Past(TypedDict, total=False):
    """Keys and values of a cache, before those of the call."""

    past_key: Tensor | None
    past_value: Tensor | None


class Positions(TypedDict, total=False):
    """The first position of each batch entry's queries."""

    query_offsets: Tensor | None


class Scored(ScaleAndCap, Sinks, Edges, total=False):
    """Keywords of attention to sequences and to pages."""


class Differentiated(MaskedRows, ScaleAndCap, Sinks, Rotary, total=False):
    """Keywords of attention that has gradients."""


class Attended(Differentiated, Past, Positions, total=False):
    """All keywords of ``attention``."""


class Stored(Scored, total=False):
    """Keywords of attention to codes: their format, and the scales and zero points of their blocks."""

    query_scale: Tensor | None
    query_block_scale: Tensor | None
    key_block_scale: Tensor | None
    value_block_scale: Tensor | None
    key_zero: Tensor | None
    value_zero: Tensor | None
    stored_as: StoredAs | None
    packing: Packing
    swizzle: Swizzle | None


class StoredPages(Stored, total=False):
    """Keywords of attention to pages, which may hold codes: their scales besides."""

    key_scale: Tensor | None
    value_scale: Tensor | None


class Normalized(Masks, ScaleAndCap, Sinks, Rotary, total=False):
    """Keywords of attention behind a norm, beside those of the norm."""


class Latent(Masks, ScaleAndCap, Positions, total=False):
    """Keywords of attention to latent vectors, beside the parts that are rotated."""


class Chosen(Scored, Positions, total=False):
    """Keywords of attention to keys that are chosen by index."""

    key_lengths: Tensor | None


class Projected(MaskedRows, HeadScale, Sinks, Rotary, Past, total=False):
    """Keywords of attention between projections, beside ``scale`` and those of the projections."""


@dataclass(frozen=True)
class CallOptions:
    """Every keyword of a group with its default, in the order of signatures."""

    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    head_scale: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False
    is_causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    window: Window | None = None
    key_lengths: Tensor | None = None
    past_key: Tensor | None = None
    past_value: Tensor | None = None
    query_offsets: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    query_scale: Tensor | None = None
    query_block_scale: Tensor | None = None
    key_block_scale: Tensor | None = None
    value_block_scale: Tensor | None = None
    key_zero: Tensor | None = None
    value_zero: Tensor | None = None
    stored_as: StoredAs | None = None
    packing: Packing = "low_first"
    swizzle: Swizzle | None = None
    mask_fill: float | None = None
    empty_rows: EmptyRows = "zero"

    def with_past(self, key: Tensor, value: Tensor, concatenate: Callable[..., Tensor]) -> tuple[Tensor, Tensor, int]:
        """Return all keys and values, those of a past first, and how many of them are the past's."""
        if self.past_key is None or self.past_value is None:
            return key, value, 0
        keys, values = (concatenate(pair, -2) for pair in ((self.past_key, key), (self.past_value, value)))
        return keys, values, self.past_key.shape[-2]


DEFAULTS: Mapping[str, Any] = {option.name: option.default for option in fields(CallOptions)}
Function = TypeVar("Function", bound=Callable[..., Any])


def show_keywords_of(group: Any) -> Callable[[Function], Function]:
    """Add all keywords of a group to a function's signature, because attncheck reads capabilities from signatures."""

    def add_signature(function: Function) -> Function:
        *positional, _ = inspect.signature(function).parameters.values()
        texts = group.__annotations__
        keywords = (
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_text(texts[name]))
            for name, default in DEFAULTS.items()
            if name in texts
        )
        function.__signature__ = inspect.Signature([*positional, *keywords])  # type: ignore[attr-defined]
        return function

    return add_signature


def pass_as_options(*names: str) -> Callable[[Callable[..., Stages]], Callable[..., Stages]]:
    """Pass the keywords of these names as the function's last parameter, and show them in its signature."""

    def wrap(function: Callable[..., Stages]) -> Callable[..., Stages]:
        *positional, options = inspect.signature(function).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        keywords = [inspect.Parameter(name, kind, default=DEFAULTS[name]) for name in DEFAULTS if name in names]

        @wraps(function)
        def call(*inputs: Any, **named: Any) -> Stages:
            chosen = {name: named.pop(name) for name in names if name in named}
            return function(*inputs, **named, **{options.name: CallOptions(**chosen)})

        call.__signature__ = inspect.Signature([*positional, *keywords])  # type: ignore[attr-defined]
        return call

    return wrap


def _text(annotation: Any) -> Any:
    return annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation


class UnsupportedError(NotImplementedError):
    """An implementation has not what a case asks for; ``lacks`` names it: parameters, functions, capabilities."""

    def __init__(self, message: str, lacks: tuple[str, ...]) -> None:
        super().__init__(message)
        self.lacks = lacks

    @classmethod
    def of_function(cls, name: str) -> UnsupportedError:
        """Return the error of a function of the contract that is not there."""
        return cls(f"has no {name}", (f"{name}()",))


class Backend(Protocol):
    """One framework's attention, as that framework's users would write it.

    Every operation keeps the dtype of its inputs; a ``log_sum_exp`` may be float32 beside outputs of 16 bits. A row in
    which no key may be attended (every score is -inf) has weights of zero and a log_sum_exp of -inf, unless
    ``empty_rows`` asks for another convention: ``uniform``, which is 1/T for each of T keys, or ``nan``. No gradient
    reaches such a row's scores; that of the values follows from its weights.

    A module need not have every function, nor every keyword: a case that asks for one that is not there is unsupported.
    ``empty_rows`` alone is different: a function without it gets such a case all the same, and what it gives instead is
    a difference of meaning, not an error. What is no keyword (a dtype, grouped heads, Dv unlike D) and cannot be
    expressed raises ``NotImplementedError`` with the reason.

    Heads may be grouped: H is a multiple of Hkv, and query head h attends with key and value head h // (H / Hkv). With
    a past of P keys, T = P + Lk, and query i stands at position P + i; without one, T = Lk and it stands at i.
    """

    def prepare(self, dtype: str, threads: int) -> None:
        """Configure the framework for this process, before anything is computed."""

    def describe(self) -> dict[str, str]:
        """Version, device and switches of the framework that may change its numbers."""

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        """Turn a NumPy array into the framework's own, dtype and shape kept."""

    def to_numpy(self, tensor: Tensor) -> NDArray[Any]:
        """Turn the framework's array into NumPy's, dtype and shape kept."""

    def dot_scores(
        self, query: Tensor, key: Tensor, *, scale: float | None = None, softcap: float | None = None
    ) -> Stages:
        """Score by scaled dot product: q k^T, times ``scale`` (1/sqrt(D) when None), then c tanh(s / c) for softcap c.

        query (B, H, Lq, D), key (B, H, Lk, D) -> raw_scores, scores (B, H, Lq, Lk), and capped with a softcap.
        Vaswani et al. 2017, section 3.2.1; with scale 1, Luong et al. 2015, section 3.1, "dot"; the softcap as in Gemma
        Team 2024, "Gemma 2", section 2.
        """

    def cosine_scores(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Stages:
        """Score by the cosine of the angle between query and key, times ``scale`` (1 when None).

        query (B, H, Lq, D), key (B, H, Lk, D), no vector of length 0 -> scores (B, H, Lq, Lk).
        Graves et al. 2014, "Neural Turing Machines", section 3.3.1.
        """

    def general_scores(self, query: Tensor, key: Tensor, weight: Tensor, *, score_bias: Tensor | None = None) -> Stages:
        """Score by a bilinear form: q W k^T + b.

        query (B, H, Lq, D), key (B, H, Lk, Dk), weight (D, Dk), score_bias (H,), or (1,) for all heads
        -> scores (B, H, Lq, Lk). Luong et al. 2015, section 3.1, "general"; with a bias torch.nn.Bilinear of one
        output, and BilinearMatrixAttention of Gardner et al. 2018, "AllenNLP".
        """

    def additive_scores(
        self,
        query: Tensor,
        key: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        score_vector: Tensor,
        *,
        score_bias: Tensor | None = None,
    ) -> Stages:
        """Score by a small feed-forward network: tanh(q Wq + k Wk + b) . v.

        query (B, H, Lq, D), key (B, H, Lk, Dk), query_weight (D, A), key_weight (Dk, A), score_vector (A,),
        score_bias (A,) -> scores (B, H, Lq, Lk). Bahdanau et al. 2015, appendix A.1.2.
        """

    def mask_scores(
        self,
        scores: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        query_offsets: Tensor | None = None,
        mask_fill: float | None = None,
    ) -> Stages:
        """Add ``bias``, set what is forbidden to -inf, or ``mask_fill``; stages that nothing asks for are left out.

        scores (B, H, Lq, T); mask, boolean, True = may attend, and bias broadcast to it; key_lengths (B,), integers
        -> biased, masked (B, H, Lq, T).
        Query i may attend to key j iff the mask says so; when causal, j <= i (aligned top left); with a window (left,
        right), i - left <= j <= i + right, where None is unbounded; with key lengths, j < key_lengths[batch]. With
        query_offsets (B,), integers, causality and window count from query_offsets[batch] + i in the place of i.
        ``mask_fill`` is a finite number of the scores' dtype: it takes the place of a forbidden score, whatever that
        was, -inf too, and nothing is added. Rush 2018, "The Annotated Transformer", has -1e9.
        """

    def softmax(self, scores: Tensor, *, empty_rows: EmptyRows = "zero") -> Stages:
        """Normalise each row over the keys.

        scores (B, H, Lq, T) -> weights (B, H, Lq, T), log_sum_exp (B, H, Lq).
        """

    @show_keywords_of(Attended)
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **options: Unpack[Attended],
    ) -> Stages:
        """Rotate, score, mask, normalise and average the values.

        query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), past_key (B, Hkv, P, D), past_value
        (B, Hkv, P, Dv), mask and bias of rank 4, broadcasting to (B, H, Lq, T), key_lengths (B,), counted over T,
        sinks (H,), head_scale (H,), rotary_cos and rotary_sin (Lr, R), either both or none
        -> rotated_query (B, H, Lq, D) and rotated_key (B, Hkv, T, D) with a rotary embedding, the stages of
        ``dot_scores``, ``mask_scores`` and ``softmax``, then output (B, H, Lq, Dv).
        The past comes before the keys. A window counts from a query's position P + i. ``is_causal`` is never given
        together with a past: such a case comes with a mask. With query_offsets (B,), integers, query i of a batch entry
        stands at query_offsets[batch] + i instead, whatever the past: ``is_causal`` and ``window`` count from there,
        and a rotary embedding takes that row; keys stay at their own index. A sink is one more logit of every query of
        its head, behind softcap, bias and mask, of a key that has a value of 0: it is part of the denominator of the
        weights and of log_sum_exp, and has no column in any stage. A row that may attend to no key but has a sink is
        not empty: its weights and output are 0. A sink of -inf is none. OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model
        Card", arXiv 2508.10925. With head_scale the scores of query head h are q k^T times head_scale[h], whatever
        ``scale`` is: 0 makes all of them 0, and what is NaN makes its head NaN and no other. Per head as in Liu et al.
        2022, "Swin Transformer V2", section 3.3.

        ``mask_fill`` as in ``mask_scores``: a key that is forbidden then takes part with that score, in weights,
        log_sum_exp and output, and a row in which all are forbidden has the same weight for every key.

        A rotary embedding rotates query i and key j by row P + i and P + j of its tables; a past comes rotated. The
        first 2R elements of a vector are rotated in pairs, (x_c, x_(c + R)), or (x_2c, x_(2c + 1)) where
        ``rotary_interleaved``: (x, y) becomes (x cos - y sin, y cos + x sin). The others stay. Su et al. 2021,
        "RoFormer", section 3.4.2; pairs that are R apart as in Black et al. 2022, "GPT-NeoX-20B", section 2.1.1.
        """

    @show_keywords_of(MaskedRows)
    def general_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        *,
        score_bias: Tensor | None = None,
        **masks: Unpack[MaskedRows],
    ) -> Stages:
        """Attend with a bilinear score: q W k^T + b.

        query (B, H, Lq, D), key (B, H, Lk, Dk), value (B, H, Lk, Dv), weight (D, Dk), score_bias (H,), or (1,) for all
        heads; mask, bias and key_lengths as in ``mask_scores``
        -> the stages of ``general_scores``, ``mask_scores`` and ``softmax``, then output (B, H, Lq, Dv).
        Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", sections 3 and 3.1.
        """

    @show_keywords_of(MaskedRows)
    def additive_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        score_vector: Tensor,
        *,
        score_bias: Tensor | None = None,
        **masks: Unpack[MaskedRows],
    ) -> Stages:
        """Attend with an additive score, a small feed-forward network: tanh(q Wq + k Wk + b) . v.

        query (B, H, Lq, D), key (B, H, Lk, Dk), value (B, H, Lk, Dv), query_weight (D, A), key_weight (Dk, A),
        score_vector (A,), score_bias (A,); mask, bias and key_lengths as in ``mask_scores``
        -> the stages of ``additive_scores``, ``mask_scores`` and ``softmax``, then output (B, H, Lq, Dv).
        Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate", section 3.1 and
        appendix A.1.2.
        """

    @show_keywords_of(MaskedRows)
    def cosine_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        **masks: Unpack[MaskedRows],
    ) -> Stages:
        """Attend with a score that is the cosine of the angle between query and key, times ``scale`` (1 when None).

        query (B, H, Lq, D), key (B, H, Lk, D), neither with a vector of length 0, value (B, H, Lk, Dv); mask, bias and
        key_lengths as in ``mask_scores``
        -> the stages of ``cosine_scores``, ``mask_scores`` and ``softmax``, then output (B, H, Lq, Dv).
        Graves et al. 2014, "Neural Turing Machines", section 3.3.1.
        """

    @show_keywords_of(Differentiated)
    def attention_gradients(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_output: Tensor,
        **options: Unpack[Differentiated],
    ) -> Stages:
        """Differentiate sum(grad_output * output) of ``attention`` by the framework's own means.

        As ``attention``, grad_output (B, H, Lq, Dv)
        -> grad_query (B, H, Lq, D), grad_key (B, Hkv, Lk, D), grad_value (B, Hkv, Lk, Dv), and grad_bias in the shape
        of the bias that was given, and grad_sinks (H,). A row in which no key may be attended has no part in the
        gradients of query, key, bias and sinks; nor has a score that ``mask_fill`` took the place of.
        """

    @show_keywords_of(Attended)
    def gated_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor,
        **options: Unpack[Attended],
    ) -> Stages:
        """Attend, and multiply each element of the output with the sigmoid of its gate: 1 / (1 + e^-gate).

        As ``attention``, gate (B, H, Lq, Dv) -> the stages of ``attention``, of which the output is called context,
        then output (B, H, Lq, Dv).
        Qiu et al. 2025, "Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free",
        arXiv 2505.06708, section 2.2: behind the mean of the values and in front of the output projection, as in
        Qwen3-Next. A gate for each head, which the paper has, too, is one whose elements are alike.
        """

    @show_keywords_of(Differentiated)
    def gated_attention_gradients(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor,
        grad_output: Tensor,
        **options: Unpack[Differentiated],
    ) -> Stages:
        """Differentiate sum(grad_output * output) of ``gated_attention`` by the framework's own means.

        As ``attention_gradients``, gate (B, H, Lq, Dv) -> its stages, and grad_gate (B, H, Lq, Dv).
        """

    @show_keywords_of(Scored)
    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        key_lengths: Tensor | None = None,
        **options: Unpack[Scored],
    ) -> Stages:
        """Attend within each of S sequences that lie one after the other.

        query (1, H, Lq, D), key (1, Hkv, Lk, D), value (1, Hkv, Lk, Dv), cu_seqlens_q and cu_seqlens_k (S1,): the
        queries of sequence s are those from cu_seqlens_q[s] up to cu_seqlens_q[s + 1], its keys likewise; both begin
        with 0 and end with Lq and Lk; key_lengths (S,), integers: of the keys of a sequence so many are used, and the
        others may hold anything; sinks and head_scale (H,)
        -> log_sum_exp (1, H, Lq), output (1, H, Lq, Dv), and stages of ``attention`` where there are any.
        ``is_causal`` and ``window`` count within a sequence, and from its end: its last query stands at its last key
        that is used. A query without a key gets zeros. A sequence may be empty. Dao 2023, "FlashAttention-2",
        flash_attn_varlen_func.
        """

    @show_keywords_of(Scored)
    def packed_attention_gradients(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        grad_output: Tensor,
        *,
        key_lengths: Tensor | None = None,
        **options: Unpack[Scored],
    ) -> Stages:
        """Differentiate sum(grad_output * output) of ``packed_attention`` by the framework's own means.

        As ``packed_attention``, grad_output (1, H, Lq, Dv)
        -> grad_query (1, H, Lq, D), grad_key (1, Hkv, Lk, D), grad_value (1, Hkv, Lk, Dv), and grad_sinks (H,). What no
        query uses has a gradient of 0.
        """

    @show_keywords_of(StoredPages)
    def paged_attention(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        block_table: Tensor,
        key_lengths: Tensor,
        **options: Unpack[StoredPages],
    ) -> Stages:
        """Attend to keys and values that lie in pages of a cache.

        query (B, H, Lq, D), key_pages (Np, Lp, Hkv, D), value_pages (Np, Lp, Hkv, Dv), block_table (B, W), integers:
        key t of batch entry b is key t % Lp of page block_table[b, t // Lp]; key_lengths (B,), integers: so many keys
        of a batch entry are used, its own among them; whatever else pages hold, and the rest of the table, may be
        anything; sinks and head_scale (H,)
        -> log_sum_exp (B, H, Lq), output (B, H, Lq, Dv), and stages of ``attention`` where there are any.
        ``is_causal`` and ``window`` count from the end: the last query stands at the last key that is used. A query
        without a key gets zeros. Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
        PagedAttention", section 4.1.

        Pages are in codes where there is a key_scale and a value_scale, (Np, Lp, Hkv), as in ``quantized_attention``: a
        slot of a page stands for a key there, and scales of blocks and zero points lie in pages as codes do. A swizzle
        has the rows and columns (Lp, S) of each head of a page.
        """

    @show_keywords_of(StoredPages)
    def ragged_paged_attention(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        cu_seqlens_q: Tensor,
        block_table: Tensor,
        key_lengths: Tensor,
        *,
        tree_mask: Tensor | None = None,
        **options: Unpack[StoredPages],
    ) -> Stages:
        """Serve several sequences in one call: prefill, chunks of it, and decoding, over the pages of one cache.

        query (1, H, Lq, D), the queries of all sequences one after the other, cu_seqlens_q (S + 1,), integers: those of
        sequence s are cu_seqlens_q[s] <= i < cu_seqlens_q[s + 1]; block_table (S, W) and key_lengths (S,), integers;
        pages, codes, sinks and head_scale as in ``paged_attention``
        -> log_sum_exp (1, H, Lq), output (1, H, Lq, Dv), and stages of ``attention`` where there are any, with T = S W
        Lp keys.
        A query attends to the keys of its own sequence alone. ``is_causal`` and ``window`` count from the end of each:
        its last query stands at the last key that is used. A sequence may have no query, or no key; a query without a
        key gets zeros. With a tree_mask (Lq, Ts), boolean, query i may attend to key t of its sequence only where
        tree_mask[i, t] is true: a tree of draft tokens, of which each sees its ancestors, as in Miao et al. 2023,
        "SpecInfer", arXiv 2305.09781. Kwon et al. 2023, as ``paged_attention``, with the limits of
        sequences of FlashAttention's varlen calls; Jiang et al. 2026, "Ragged Paged Attention", arXiv 2604.15464.
        """

    @show_keywords_of(Stored)
    def quantized_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_scale: Tensor,
        value_scale: Tensor,
        *,
        mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        **options: Unpack[Stored],
    ) -> Stages:
        """Attend to keys and values that are stored in fewer bits.

        query (B, H, Lq, D) in the working dtype, key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv) in float8_e4m3fn or
        float8_e5m2, key_scale and value_scale in the working dtype, broadcasting to (B, Hkv, Lk): one for all, for each
        head, or for each key -> the stages of ``attention`` with keys and values times their scales.
        Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433.

        ``stored_as`` names another format of ``CODE_FORMATS``. It is (code - zero) block_scale scale. key_zero and
        key_block_scale hold one for each block: an axis of n of the key's L elements has blocks of L / n. Zero points
        are int8, scales of blocks in the format's own dtype. Codes of 6 bits lie in a byte each, those of 4 bits two in
        a byte along the width, uint8 both. The query is in codes where there is a query_scale, (B, H, Lq).
        In rows, scales of blocks lie as they are. ``swizzle`` "4x4": those of values (T, S) lie at row
        4 (t // 4) + s // (S / 4), column 4 (s % (S / 4)) + t % 4 (vLLM, nvfp4_kv_cache_kernels.cu). "128x4": all are
        filled up to whole tiles of 128 x 4, which lie one after the other, (t, s) of a tile at
        16 (t % 32) + 4 (t // 32) + s (cuBLAS, "1D Block Scaling Factors Layout").
        """

    @show_keywords_of(Normalized)
    def normalized_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        norm: Norm = "rms",
        norm_over: NormOver = "head",
        epsilon: float = 1e-6,
        norm_after_rotation: bool = False,
        query_norm_weight: Tensor | None = None,
        key_norm_weight: Tensor | None = None,
        **options: Unpack[Normalized],
    ) -> Stages:
        """Normalise queries and keys, then rotate them and attend; or rotate them first, ``norm_after_rotation``.

        As ``attention``, query_norm_weight (Nq,), key_norm_weight (Nk,), 1 where they are left out
        -> normalized_query (B, H, Lq, D), normalized_key (B, Hkv, Lk, D), and the stages of ``attention``.
        With x the vector of a head, or over the full width those of all heads of a position side by side, n long, and w
        the weight: ``rms`` is w x / sqrt(x.x / n + epsilon), ``l2`` is w x / max(N, epsilon), N = sqrt(x.x). A row
        of zeros stays.
        Statistics are taken in float32 where the inputs have 16 bits.

        Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 3. Per head and before the rotation:
        Yang et al. 2025, "Qwen3 Technical Report", section 2; after it, without weights: Llama 4 (Meta 2025). Over the
        full width: OLMo et al. 2024, "2 OLMo 2 Furious", section 3.3. Unit vectors: Henry et al. 2020, "Query-Key
        Normalization for Transformers", section 3, with epsilon as in torch.nn.functional.normalize.
        """

    @show_keywords_of(Latent)
    def latent_attention(
        self,
        query: Tensor,
        latent: Tensor,
        key_projection: Tensor,
        value_projection: Tensor,
        *,
        query_rotary: Tensor | None = None,
        key_rotary: Tensor | None = None,
        **options: Unpack[Latent],
    ) -> Stages:
        """Attend to keys and values that are projections of one latent vector of each token (MLA).

        query (B, H, Lq, D), latent (B, Lk, C), key_projection (H, C, D), value_projection (H, C, Dv), query_rotary
        (B, H, Lq, Dr) and key_rotary (B, Lk, Dr), either both or none; mask, bias, key_lengths and query_offsets as in
        ``attention`` -> the stages of ``attention`` without a rotary embedding of its own.
        With c the latent vector of a key, head h has the key (c Wk_h, key_rotary) and the value c Wv_h; its query is
        (query, query_rotary). What is rotated comes rotated, and all heads share key_rotary. ``scale`` is
        1/sqrt(D + Dr) when None.

        The projections can be absorbed, so that no key and no value is made: the query Wk_h^T q meets the latent
        vectors themselves, and Wv_h the weighted mean of these. Both forms are right, and have one bound.
        DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, sections 2.1.2 and 2.1.3.
        """

    @show_keywords_of(Chosen)
    def sparse_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_indices: Tensor,
        *,
        block_size: int = 1,
        **options: Unpack[Chosen],
    ) -> Stages:
        """Attend to the keys that each query names by index, and to no other.

        query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), key_indices, integers, broadcasting to
        (B, Hkv, Lq, K): query i of a head that has key and value head g attends to the keys key_indices[b, g, i, :] of
        batch entry b. -1 is no key, wherever it stands. No query names a key twice; the order says nothing. sinks and
        head_scale (H,), key_lengths and query_offsets (B,) as in ``attention``
        -> log_sum_exp (B, H, Lq), output (B, H, Lq, Dv), and stages of ``attention`` where there are any, with a column
        for every key.
        With ``block_size`` n, index j names a block of keys, j n to (j + 1) n - 1; the last block may be shorter.
        ``is_causal``, ``window`` and key_lengths forbid keys of those that are chosen. They count positions of keys,
        and not of indices. A query that has no key left gets zeros.

        Keys one by one: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, one choice for all heads;
        FlashMLA, flash_mla_sparse_fwd, has indices of -1. Blocks of keys: Yuan et al. 2025, "Native Sparse Attention",
        arXiv 2502.11089, one choice for each group of heads; Lu et al. 2025, "MoBA: Mixture of Block
        Attention for Long-Context LLMs", arXiv 2502.13189, one for each head.
        """

    @show_keywords_of(Projected)
    def multi_head_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        heads: int,
        kv_heads: int | None = None,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        output_weight: Tensor | None = None,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        scale: float | None = None,
        **options: Unpack[Projected],
    ) -> Stages:
        """Project, attend in every head, merge the heads and project once more.

        query (B, Lq, E), key (B, Lk, Ek), value (B, Lk, Ev), query_weight (E, H*D), key_weight (Ek, Hkv*D),
        value_weight (Ev, Hkv*Dv), output_weight (H*Dv, Eo), ``kv_heads`` Hkv, as many as ``heads`` when None; without
        output_weight the merged heads are the output, and an output_bias is refused
        -> query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), the stages of ``attention``,
        context (B, H, Lq, Dv), output (B, Lq, Eo).
        A past is what a cache holds: keys and values that are projected already, past_key (B, Hkv, P, D), past_value
        (B, Hkv, P, Dv). It comes before the projected ones, is not part of the stages key and value, and comes rotated,
        as in ``attention``. Vaswani et al. 2017, section 3.2.2.
        """

    def merge_states(self, outputs: Tensor, log_sum_exps: Tensor, *, lse_base: LseBase = "e") -> Stages:
        """Merge what attention gave for N parts of the keys to what it gives for all of them.

        outputs (N, B, H, Lq, Dv), log_sum_exps (N, B, H, Lq)
        -> weights of the parts (B, H, Lq, N), log_sum_exp (B, H, Lq), output (B, H, Lq, Dv):

            log_sum_exp = log sum_n e^(log_sum_exps_n),    weights_n = e^(log_sum_exps_n - log_sum_exp),
            output = sum_n weights_n outputs_n

        or the same in base 2, of the logarithms that are given and of the one that is returned, where ``lse_base`` is
        "2". A part in which a query may attend to no key has a log_sum_exp of -inf there; its output, whatever it is,
        counts for nothing. Where all parts are empty, weights and output are 0 and log_sum_exp is -inf.
        log_sum_exps, log_sum_exp and the weights are float32 where the outputs have 16 bits.
        Juravsky et al. 2024, "Hydragen", arXiv 2402.05099, section 3.1; Dao et al. 2023, "Flash-Decoding".
        """


def inputs_of(name: str) -> tuple[str, ...]:
    """Return what a function of the contract is given by position, in order: its own names for these do not matter."""
    parameters = list(inspect.signature(getattr(Backend, name)).parameters.values())[1:]  # self
    return tuple(
        parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
