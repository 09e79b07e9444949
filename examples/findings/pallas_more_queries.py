"""jax 0.10: with more queries than keys, Pallas' causal attention for GPUs reads beyond the keys

The loop over blocks of keys of `pallas.ops.gpu.attention.mha` ends at the diagonal, and not at the last key. Queries
that stand beyond all keys attend to what lies in memory after these. In the interpreter that is NaN. Queries and keys
of different lengths have been wrong before (jax-ml/jax#24491); causality was not part of that.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

query = jnp.zeros((1, 64, 1, 16), jnp.float32)  # batch, queries, heads, width
key, value = jnp.zeros((1, 32, 1, 16), jnp.float32), jnp.ones((1, 32, 1, 16), jnp.float32)
found = mha(query, key, value, None, causal=True, block_sizes=BlockSizes(16, 16), interpret=True)
print("got", found[0, 31, 0, 0], found[0, 32, 0, 0], "expected", 1.0, 1.0)  # got 1.0 nan expected 1.0 1.0
