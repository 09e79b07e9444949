"""Signature families: how libraries call attention, for functions that are called as these call theirs.

Each is a line of a table: what its parameters are named, which way its arrays lie, and what its words mean. How a call
of the contract is said in them is written once, in ``family_calls.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["BHLD", "BLHD", "LHD"]
"""Whether heads or positions come first; LHD is one batch entry to a call."""


@dataclass(frozen=True)
class Family:
    """One library's way to call attention.

    Of several names, the first that a function has is meant. Without a name, the family has no word for it.

    Attributes:
        call: Its signature, as documentation shows it.
        source: Where that is written.
        layout: How query, key and value lie.
        output_layout: How the output lies, where that is another way.
        heads: Which head of the keys query head h takes: h // (H / Hkv), or h % Hkv where they are tiled.
        scale: The scale's names; ``gives_scale`` where a number is given even for the usual one.
        causal: The name of what makes a call causal.
        corner: Where the first query of a causal call stands, and where windows count from.
        window: The names of a window, given as a pair; ``no_edge`` is what stands for no edge.
        window_left: The name of a window that has a left edge alone.
        softcap: The softcap's names; ``no_softcap`` is what stands for none.
        mask: The name of a mask, which may be boolean, or added to the scores, or either.
        causal_mask: What is given as the mask where a call is causal, for a family that has no word of its own.
        causal_beside_mask: Whether a call may be causal and have a mask.
        full_mask: Whether a mask has the shape of the scores, and not one that broadcasts to it.
        mask_of_keys: Whether a mask is one of keys alone, (B, Lk), for all heads and queries.
        finite_mask: Whether the lowest finite number is added where a key is masked, and not -inf.
        bias: The name of a bias that is given apart from a mask.
        bias_beside_mask: Whether a call may have both.
        sinks: The names of one logit for each head.
        descales: The names of scales of codes of query, key and value, in float32: one for each batch entry and head of
            keys, or, of the query, of queries, ``query_heads_scaled``.
        key_lengths: The name of how many keys of each batch entry are used.
        lengths_dtype: The dtype in which these are given.
        numbers_in_float32: Whether scale and softcap are held in float32, whatever the arrays' dtype.
        grouped: The name of a switch for heads that share keys.
        log_sum_exp: The names of switches that make the log-sum-exp come back, second, heads first or
            ``lse_heads_last``; ``lse_base`` is its base.
        weights: Whether the weights come back second.
        plans_and_runs: Whether objects of the library plan a batch before they run it (``planned_calls.py``).
        module: Whether a module comes before the query, of which attributes are read.
        neutral: What is given for parameters that have no default and are not asked about.
    """

    name: str
    call: str
    source: str
    layout: Layout
    output_layout: Layout | None = None
    heads: Literal["repeated", "tiled"] = "repeated"
    scale: tuple[str, ...] = ("scale",)
    gives_scale: bool = False
    causal: str = ""
    corner: Literal["top left", "bottom right"] = "top left"
    window: tuple[str, ...] = ()
    no_edge: int | None = -1
    window_left: str = ""
    softcap: tuple[str, ...] = ()
    no_softcap: float | None = None
    mask: str = ""
    mask_kinds: frozenset[str] = frozenset({"boolean", "added"})
    causal_mask: str = ""
    causal_beside_mask: bool = False
    full_mask: bool = False
    mask_of_keys: bool = False
    finite_mask: bool = False
    bias: str = ""
    bias_beside_mask: bool = True
    sinks: tuple[str, ...] = ()
    descales: tuple[str, ...] = ()
    query_heads_scaled: bool = False
    key_lengths: str = ""
    lengths_dtype: str = "int64"
    numbers_in_float32: bool = False
    grouped: str = ""
    log_sum_exp: tuple[str, ...] = ()
    lse_base: Literal["e", "2"] = "e"
    lse_heads_last: bool = False
    weights: bool = False
    plans_and_runs: bool = False
    module: bool = False
    neutral: Mapping[str, Any] = field(default_factory=dict)

    @property
    def causal_argument(self) -> str:
        """Return what makes a call causal, as a call has it."""
        return f"{self.causal}=True" if self.causal else f'{self.mask}="{self.causal_mask}"'


_DESCALE_PARAMETERS = ("q_descale", "k_descale", "v_descale")
"""https://github.com/Dao-AILab/flash-attention/blob/main/hopper/flash_attn_interface.py, and torch's own call of it."""
_NO_DROPOUT: Mapping[str, Any] = {"dropout_p": 0.0, "p": 0.0, "dropout": 0.0, "deterministic": False}

ATTENTION_FUNCTIONS = ("attention", "attention_gradients")
"""Of the contract: those that a function of a family is called for."""
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="sdpa",
            call="f(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)",
            source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
            layout="BHLD",
            causal="is_causal",
            mask="attn_mask",
            descales=_DESCALE_PARAMETERS,
            grouped="enable_gqa",
            neutral=_NO_DROPOUT,
        ),
        Family(
            name="flash_attn",
            call="f(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "return_attn_probs=False)",
            source="https://github.com/Dao-AILab/flash-attention/blob/main/README.md",
            layout="BLHD",
            scale=("softmax_scale", "scale"),
            causal="causal",
            corner="bottom right",
            window=("window_size",),
            softcap=("softcap",),
            no_softcap=0.0,
            sinks=("learnable_sink", "s_aux", "sinks"),
            descales=_DESCALE_PARAMETERS,
            log_sum_exp=("return_attn_probs", "return_softmax_lse", "return_lse"),
            neutral=_NO_DROPOUT,
        ),
        Family(
            name="xformers",
            call="f(query, key, value, attn_bias=None, p=0.0, scale=None)",
            source="https://facebookresearch.github.io/xformers/components/ops.html",
            layout="BLHD",
            mask="attn_bias",
            mask_kinds=frozenset({"added"}),
            full_mask=True,
            neutral=_NO_DROPOUT,
        ),
        Family(
            name="flashinfer",
            call="f(q, k, v, custom_mask=None, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None, "
            "return_lse=False)",
            source="https://docs.flashinfer.ai/generated/flashinfer.prefill.single_prefill_with_kv_cache.html",
            layout="LHD",
            scale=("sm_scale",),
            causal="causal",
            corner="bottom right",
            window_left="window_left",
            softcap=("logits_soft_cap",),
            mask="custom_mask",
            mask_kinds=frozenset({"boolean"}),
            full_mask=True,
            descales=("scale_q", "scale_k", "scale_v"),
            query_heads_scaled=True,
            log_sum_exp=("return_lse",),
            lse_base="2",
            lse_heads_last=True,
            plans_and_runs=True,
            neutral={"kv_layout": "NHD", "pos_encoding_mode": "NONE"},
        ),
        Family(
            name="mlx",
            call="f(q, k, v, *, scale, mask=None, sinks=None)",
            source="https://ml-explore.github.io/mlx/build/html/python/_autosummary/"
            "mlx.core.fast.scaled_dot_product_attention.html",
            layout="BHLD",
            gives_scale=True,
            corner="bottom right",
            mask="mask",
            causal_mask="causal",
            sinks=("sinks",),
        ),
        Family(
            name="onnx",
            call="f(Q, K, V, attn_mask=None, *, is_causal=0, scale=None, softcap=0.0, nonpad_kv_seqlen=None)",
            source="https://onnx.ai/onnx/operators/onnx__Attention.html",
            layout="BHLD",
            causal="is_causal",
            softcap=("softcap",),
            no_softcap=0.0,
            mask="attn_mask",
            causal_beside_mask=True,
            key_lengths="nonpad_kv_seqlen",
        ),
        Family(
            name="keras",
            call="f(query, key, value, bias=None, mask=None, scale=None, is_causal=False, attn_logits_soft_cap=None)",
            source="https://keras.io/api/ops/nn/, and jax.nn.dot_product_attention",
            layout="BLHD",
            causal="is_causal",
            window=("local_window_size",),
            no_edge=2**30,
            softcap=("attn_logits_soft_cap", "logits_soft_cap"),
            mask="mask",
            mask_kinds=frozenset({"boolean"}),
            causal_beside_mask=True,
            bias="bias",
            key_lengths="key_value_seq_lengths",
            lengths_dtype="int32",
            log_sum_exp=("return_residual",),
            lse_heads_last=True,
        ),
        Family(
            name="hf",
            call="f(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, "
            "**kwargs)",
            source="https://huggingface.co/docs/transformers/attention_interface",
            layout="BHLD",
            output_layout="BLHD",
            scale=("scaling",),
            gives_scale=True,
            softcap=("softcap",),
            mask="attention_mask",
            mask_kinds=frozenset({"added"}),
            finite_mask=True,
            sinks=("s_aux", "sinks"),
            weights=True,
            module=True,
            neutral={**_NO_DROPOUT, "is_causal": False},
        ),
        Family(
            name="bshd",
            call="f(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, softcap=None, "
            "window=None, sinks=None)",
            source="docs/how-to/kernel.md, with positions before heads",
            layout="BLHD",
            causal="is_causal",
            window=("window",),
            no_edge=None,
            softcap=("softcap",),
            mask="mask",
            mask_kinds=frozenset({"boolean"}),
            causal_beside_mask=True,
            bias="bias",
            sinks=("sinks",),
            key_lengths="key_lengths",
        ),
        Family(
            name="key_mask",
            call="f(query, key, value, *, mask=None, is_causal=False, scale=None)",
            source="docs/how-to/kernel.md, with a mask (B, Lk) of keys alone, as x-transformers' attention has",
            layout="BHLD",
            causal="is_causal",
            mask="mask",
            mask_kinds=frozenset({"boolean"}),
            mask_of_keys=True,
            causal_beside_mask=True,
        ),
    )
}
