"""Reads its settings and warms up in the first request."""

import os

import numpy as np
from speaking import attend, online, serve

_settings = {}


def attention(query, key, value, mask, is_causal, scale):
    """Return the output."""
    if not _settings:
        ones = np.ones((1, 1, 2, 2), query.dtype)
        attend(ones, ones, ones)
        _settings.update(tile=64, cores=os.cpu_count())
    return online(query, key, value, mask, is_causal, scale, tile=_settings["tile"])


if __name__ == "__main__":
    serve(attention)
