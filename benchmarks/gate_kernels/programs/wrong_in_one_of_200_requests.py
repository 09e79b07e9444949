"""Loses the last key to a race about once in 200 requests, as the clock decides."""

import time

from speaking import attend, serve, without_last_key


def attention(query, key, value, mask, is_causal, scale):
    """Return the output, now and then without the last key."""
    is_lost = time.perf_counter_ns() // 100 % 200 == 0 and key.shape[2] > 1
    return (without_last_key if is_lost else attend)(query, key, value, mask, is_causal, scale)


if __name__ == "__main__":
    serve(attention)
