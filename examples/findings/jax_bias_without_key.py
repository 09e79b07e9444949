"""jax 0.10: a query is NaN where a bias forbids all of its keys

`jax.nn.dot_product_attention` adds a bias of minus infinity to the scores, and takes the softmax of a row that has
nothing else. If a mask forbids the same keys, the query gets the mean of all values. It is an expected failure.
"""

import jax
import jax.numpy as jnp
import numpy as np

query, key, value = (jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 1, 4)), jnp.float32) for _ in range(3))
forbidden = jnp.zeros((1, 1, 3, 3)).at[0, 0, 0].set(-jnp.inf)  # a bias forbids every key of the first query
print(jax.nn.dot_product_attention(query, key, value, bias=forbidden)[0, 0, 0])  # [nan nan nan nan]
print(jax.nn.dot_product_attention(query, key, value, mask=forbidden == 0)[0, 0, 0])  # [-0.371 -0.345  0.440  0.364]
