"""jax 0.10: NaN in unused slots of a page reaches the output of Pallas' paged attention

`pallas.ops.gpu.paged_attention` loads blocks of whole pages and gives the keys beyond the length of a sequence a
weight of 0. Their values are multiplied all the same, and 0 times NaN is NaN. A pool of pages that nobody wrote yet,
or that another request left NaN in, spoils a sequence that does not use those slots. The kernel came with
jax-ml/jax#25839; vLLM's for ROCm (`csrc/rocm/attention.cu`) sets such values to 0.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

query, keys = jnp.zeros((1, 1, 16)), jnp.zeros((1, 1, 4, 16))  # one page of four slots, of which two are used
values = jnp.ones((1, 1, 4, 16)).at[:, :, 2:].set(jnp.nan)
table, lengths = jnp.zeros((1, 1), jnp.int32), jnp.array([2])
found = paged_attention(query, keys, values, table, lengths, k_splits=1, interpret=True)
print("got", found[0, 0, 0], "expected", 1.0)  # got nan expected 1.0
