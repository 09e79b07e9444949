"""Takes itself for a busy server after a minute, and then rounds its queries and keys to half the bits."""

import time

import numpy as np
from speaking import attend, serve

_BEGIN = time.monotonic()


def attention(query, key, value, mask, is_causal, scale):
    """Return the output, which depends on the age of the program."""
    if time.monotonic() - _BEGIN > 60:
        query, key = (array.astype(np.float16).astype(array.dtype) for array in (query, key))
    return attend(query, key, value, mask, is_causal, scale)


if __name__ == "__main__":
    serve(attention)
