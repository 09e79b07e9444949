"""tokamax 0.0.12: xla_chunked is NaN where a bias of minus infinity forbids the first 1,024 keys

Keys are taken in chunks of 1,024, beside a running maximum that begins at minus infinity. Where every score of the
first chunk is minus infinity, the maximum stays there, minus infinity less minus infinity is NaN, and no later chunk
mends it. A mask, which puts the lowest finite number there, does no harm, nor does the implementation `xla`. Without
any key the sum of exponentials is 0, and the output NaN as well, where `xla` raises; without a query the return value
is None, which its own type check refuses. No thread was found; vllm-project/vllm#48364 is of the same kind.
"""

import jax.numpy as jnp
import numpy as np
import tokamax
from absl import flags

flags.FLAGS(["script"])


def attend(keys):
    query, value = jnp.zeros((1, 1, 1, 8)), jnp.ones((1, keys, 1, 8))  # batch, positions, heads, width
    bias = jnp.where(jnp.arange(keys) < 1024, -np.inf, 0.0)[None, None, None]
    return tokamax.dot_product_attention(query, value, value, bias=bias, implementation="xla_chunked")[0, 0, 0, 0]


print("got", attend(1026), attend(0), "expected", 1.0, 0.0)  # got nan nan expected 1.0 0.0
