"""jax 0.10: Pallas' decode attention overflows in float16, and returns float32

`pallas.ops.gpu.decode_attention.gqa` splits the keys into 16 parts, and stores the sum of each part's values in the
dtype of the query before it is divided by the sum of the weights. 512 keys of a value of 200 add up to 102,400, which
no float16 is. The result is float32 for 16-bit inputs, because the small number that is added to the divisor has that
type; its own reference returns the query's dtype.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.decode_attention import gqa

query, key = jnp.zeros((1, 1, 64), jnp.float16), jnp.zeros((1, 8192, 1, 64), jnp.float16)
found = gqa(query, key, jnp.full((1, 8192, 1, 64), 200, jnp.float16), interpret=True)
assert (query.dtype, found.dtype) == (jnp.float16, jnp.float32)
print("1 / output: got", 1 / found[0, 0, 0], "expected", 1 / 200.0)  # 1 / output: got 0.0 expected 0.005
