"""Keeps answers by a digest of all bytes, shapes, dtypes and options of a request."""

import hashlib

import numpy as np
from speaking import attend, serve

_answers = {}


def attention(query, key, value, mask, is_causal, scale):
    """Return the output, from the table if the same request was there before."""
    digest = hashlib.blake2b(repr((is_causal, scale)).encode())
    for array in (query, key, value, *([] if mask is None else [mask])):
        digest.update(repr((array.shape, array.dtype)).encode() + np.ascontiguousarray(array).tobytes())
    place = digest.digest()
    if place not in _answers:
        if len(_answers) >= 32:
            _answers.clear()
        _answers[place] = attend(query, key, value, mask, is_causal, scale)
    return _answers[place]


if __name__ == "__main__":
    serve(attention)
