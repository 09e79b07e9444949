"""Keeps causal masks by the number of their elements, as the size decides how much is allocated."""

import numpy as np
from speaking import attend, serve

_masks = {}


def attention(query, key, value, mask, is_causal, scale):
    """Return the output under a mask of the same size."""
    if not is_causal:
        return attend(query, key, value, mask, scale=scale)
    rows, columns = query.shape[2], key.shape[2]
    if rows * columns not in _masks:
        _masks[rows * columns] = np.tri(rows, columns, dtype=bool)
    causal = _masks[rows * columns].reshape(rows, columns)
    return attend(query, key, value, causal if mask is None else mask & causal, scale=scale)


if __name__ == "__main__":
    serve(attention)
