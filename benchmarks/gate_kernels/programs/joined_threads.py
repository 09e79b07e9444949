"""Writes tiles of 64 rows in threads, and joins all of them before it answers."""

import threading

import numpy as np
from speaking import repeat_heads, serve, weights_of


def attention(query, key, value, mask, is_causal, scale):
    """Return the output once all threads have ended."""
    weights, value = weights_of(query, key, mask, is_causal, scale), repeat_heads(value, query)
    output = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)

    def write(rows):
        output[:, :, rows] = weights[:, :, rows] @ value

    starts = range(0, query.shape[2], 64)
    threads = [threading.Thread(target=write, args=(slice(start, start + 64),)) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return output


if __name__ == "__main__":
    serve(attention)
