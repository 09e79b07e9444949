"""jax 0.10: the float64 gradient of dot_product_attention is NaN beyond the range of float32

The softmax runs in float32 whatever the inputs are (jax-ml/jax#21371), and so does its gradient: a value of more than
3.4e38 times a gradient of 1 becomes infinity there, and infinity minus infinity is NaN. The output itself is right.
"""

import jax
import jax.numpy as jnp

with jax.enable_x64(True):
    query, value = jnp.zeros((1, 1, 1, 8)), jnp.full((1, 1, 1, 8), 1e40)  # (B, T, N, H)
    attend = lambda query: jax.nn.dot_product_attention(query, query, value).sum()
    output, gradient = float(attend(query)), float(jax.grad(attend)(query)[0, 0, 0, 0])
print("output", output / 8e40, "expected", 1.0)  # output 1.0 expected 1.0
print("got", gradient, "expected", 0.0)  # got nan expected 0.0
