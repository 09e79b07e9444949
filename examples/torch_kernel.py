"""Attention on PyTorch's tensors: ``attncheck check --implementation torch_kernel.py:attention``.

What the signature cannot say stands behind the function, as its attributes.
"""

import torch


def attention(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, softcap=None):
    """query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv) -> scores, weights, output"""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale
    stages = {"scores": scores}
    if softcap is not None:
        scores = stages["capped"] = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = stages["biased"] = scores + bias
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = stages["masked"] = scores.masked_fill(~mask, -torch.inf)
    # A query without a key has only -inf, of which a softmax makes NaN: it gets zeros.
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return {**stages, "weights": weights, "output": weights @ value}


attention.framework = "torch"
attention.capabilities = {"grouped_heads": False, "dtypes": ["float64", "float32", "bfloat16"]}
attention.classes = {"bfloat16": "eager"}
