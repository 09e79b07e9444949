"""PyTorch kernels that call PyTorch's attention although they are offered as kernels: right numbers, no kernel.

attncheck check --implementation benchmarks/gate_kernels/torch_delegates.py:tiled_attention
"""

import torch
from torch.nn import functional as functional_kernels

framework = "torch"


def _prepared(query, key, mask, is_causal, scale):
    """Return the scaled query, and the mask with causality, as PyTorch takes only one of the two."""
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    if not is_causal or mask is None:
        return query, mask, is_causal
    return query, mask & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(), False


def _with_nan_queries(query, output):
    """Return the output with NaN for queries with NaN, which some paths of PyTorch replace by 0."""
    return output.masked_fill(query.isnan().any(dim=-1, keepdim=True), torch.nan)


def tiled_attention(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes one tile that has the size of the problem."""
    tile = functional_kernels.scaled_dot_product_attention
    query, mask, is_causal = _prepared(query, key, mask, is_causal, scale)
    output = tile(query, key, value, mask, is_causal=is_causal, scale=1.0, enable_gqa=True)
    return _with_nan_queries(query, output)


def attention_by_name(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Looks its inner loop up by a name that is put together from the steps of the algorithm."""
    steps = "scaled", "dot", "product", "attention"
    compute = getattr(torch._C._nn, "_".join(steps))
    query, mask, is_causal = _prepared(query, key, mask, is_causal, scale)
    output = compute(query, key, value, mask, is_causal=is_causal, scale=1.0, enable_gqa=True)
    return _with_nan_queries(query, output)


class _FusedAttention(torch.nn.Module):
    """A module with the name of a fused kernel."""

    def __init__(self):
        super().__init__()
        self.compute = functional_kernels.scaled_dot_product_attention

    def forward(self, query, key, value, mask, is_causal, scale):
        """Return the output."""
        query, mask, is_causal = _prepared(query, key, mask, is_causal, scale)
        output = self.compute(query, key, value, mask, is_causal=is_causal, scale=1.0, enable_gqa=True)
        return _with_nan_queries(query, output)


_FUSED = []


def compiled_fused_attention(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Compiles its module once, and runs the compiled program."""
    if not _FUSED:
        _FUSED.append(torch.compile(_FusedAttention(), backend="eager"))
    return _FUSED[0](query, key, value, mask, is_causal, scale)


def attention_of_a_layer(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Runs the layer of the library with weights that change nothing."""
    if not query.numel() or not key.numel():
        raise NotImplementedError("the layer needs at least one query and one key")
    if not all(bool(array.isfinite().all()) for array in (query, key, value)):
        raise NotImplementedError("the layer mixes all features of an input, so that these must be finite")
    batch, heads, rows, features = query.shape
    keys, value_width = key.shape[2], value.shape[-1]
    width = max(features, value_width)
    whole = heads * width
    key, value = (array.repeat_interleave(heads // array.shape[1], dim=1) for array in (key, value))
    query = query * ((features**-0.5 if scale is None else scale) * width**0.5)
    query, key, value = (functional_kernels.pad(array, (0, width - array.shape[-1])) for array in (query, key, value))
    query, key, value = (array.permute(2, 0, 1, 3).reshape(-1, batch, whole) for array in (query, key, value))
    hidden = (
        torch.ones(rows, keys, dtype=torch.bool).triu(1) if is_causal else torch.zeros(rows, keys, dtype=torch.bool)
    )
    hidden = hidden if mask is None else hidden | ~mask
    hidden = hidden.expand(batch, heads, rows, keys).reshape(batch * heads, rows, keys)
    same, nothing = torch.eye(whole, dtype=query.dtype), torch.zeros(3 * whole, dtype=query.dtype)
    output, _ = functional_kernels.multi_head_attention_forward(
        query, key, value, whole, heads, torch.cat([same] * 3), nothing, None, None, False, 0.0, same,
        nothing[:whole], training=False, need_weights=False, attn_mask=hidden,
    )  # fmt: skip
    return output.reshape(rows, batch, heads, width).permute(1, 2, 0, 3)[..., :value_width]


def _eager(query, key, value, mask, is_causal, scale):
    """Return the output of separate steps."""
    query, mask, is_causal = _prepared(query, key, mask, is_causal, scale)
    scores = query @ key.transpose(-1, -2)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1).nan_to_num(0.0) @ value


def _library(query, key, value, mask, is_causal, scale):
    """Return the output of the library."""
    query, mask, is_causal = _prepared(query, key, mask, is_causal, scale)
    output = torch.ops.aten.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=1.0, enable_gqa=True
    )
    return _with_nan_queries(query, output)


_ATTENTION_FUNCTIONS = {"eager": _eager, "sdpa": _library}


def attention_of_a_registry(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Chooses a function by the name in its settings, as model libraries do."""
    settings = {"attention_implementation": "sdpa"}
    compute = _ATTENTION_FUNCTIONS[settings["attention_implementation"]]
    return compute(query, key, value, mask, is_causal, scale)
