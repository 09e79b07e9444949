"""tokamax 0.0.12: a local window needs as many queries as keys

`local_window_size` is counted from the positions of the keys, for each of which it makes a start and an end, where
each query has one (`api.py`). One query after a cache, or cross-attention, raises a ValueError when these are
broadcast.
"""

import jax.numpy as jnp
import tokamax
from absl import flags

flags.FLAGS(["script"])  # tokamax takes the words of every command line for its own: openxla/tokamax#957
key, value = jnp.zeros((1, 6, 1, 8)), jnp.arange(6.0).reshape(1, 6, 1, 1).repeat(8, axis=3)  # batch, keys, heads, width


def attend(queries):
    query = jnp.zeros((1, queries, 1, 8))
    return tokamax.dot_product_attention(query, key, value, local_window_size=(1, 0), implementation="xla")[0, 3, 0, 0]


try:
    found = attend(4)
except ValueError:
    found = jnp.nan
print("got", attend(6), found, "expected", 2.5, 2.5)  # got 2.5 nan expected 2.5 2.5
