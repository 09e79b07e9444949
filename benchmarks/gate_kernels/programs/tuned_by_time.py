"""Times two right variants in the first request of a shape, and keeps the faster one."""

import time

from speaking import attend, online, serve

_fastest = {}


def attention(*arguments):
    """Return the output of the faster variant."""
    query, key = arguments[:2]
    place = query.shape, key.shape, query.dtype
    if place not in _fastest:
        seconds = {}
        for variant in (attend, online):
            begin = time.perf_counter()
            variant(*arguments)
            seconds[variant] = time.perf_counter() - begin
        _fastest[place] = min(seconds, key=seconds.get)
    return _fastest[place](*arguments)


if __name__ == "__main__":
    serve(attention)
