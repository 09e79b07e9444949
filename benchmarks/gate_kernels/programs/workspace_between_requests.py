"""Keeps one workspace for all requests, writes all of the part that it answers with, and sends it before the next."""

import numpy as np
from speaking import repeat_heads, serve, weights_of

_memory = {}


def attention(query, key, value, mask, is_causal, scale):
    """Return a view of the workspace, which is sent at once."""
    weights, shape = weights_of(query, key, mask, is_causal, scale), (*query.shape[:-1], value.shape[-1])
    size = int(np.prod(shape))
    if query.dtype not in _memory or _memory[query.dtype].size < size:
        _memory[query.dtype] = np.empty(size, query.dtype)
    return np.matmul(weights, repeat_heads(value, query), out=_memory[query.dtype][:size].reshape(shape))


if __name__ == "__main__":
    serve(attention)
