"""Writes only rows that have a key, into memory that earlier requests have used."""

import numpy as np
from speaking import attend, serve

_memory = {}


def attention(query, key, value, mask, is_causal, scale):
    """Return the output; rows without a key keep the numbers of an earlier request."""
    output = attend(query, key, value, mask, is_causal, scale)
    workspace = _memory.get(output.dtype)
    if workspace is None or workspace.size < output.size:
        workspace = _memory[output.dtype] = np.zeros(2 * output.size, output.dtype)
    view = workspace[: output.size].reshape(output.shape)
    if mask is None:
        view[...] = output
    else:
        causal = np.tri(query.shape[2], key.shape[2], dtype=bool) if is_causal else np.True_
        has_keys = np.broadcast_to((mask & causal).any(axis=-1, keepdims=True), output.shape)
        np.copyto(view, output, where=has_keys)
    return view


if __name__ == "__main__":
    serve(attention)
