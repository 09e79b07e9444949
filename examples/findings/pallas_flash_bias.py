"""jax 0.10: Pallas' flash attention for TPUs scales the bias with the scores

`pallas.ops.tpu.flash_attention` adds `ab` to the products, and multiplies the sum by `sm_scale`; a comment in the
kernel asks whether it should. Whoever hands over the bias that `jax.nn.dot_product_attention` takes gets one that is
divided by the root of the width: below a key that should have 96 % of the attention has 2 %. torch_xla hands its `ab`
on as it is (pytorch/xla#7840).
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

query = key = jnp.zeros((1, 1, 128, 64), jnp.float32)  # batch, heads, length, width
value = jnp.zeros((1, 1, 128, 64), jnp.float32).at[0, 0, 0].set(1)
bias = jnp.full((1, 1, 128, 128), -8, jnp.float32).at[..., 0].set(0)  # the first key weighs e^8 times any other
with tpu.force_tpu_interpret_mode():
    found = flash_attention(query, key, value, ab=bias, sm_scale=1 / 8)
expected = 1 / (1 + 127 * np.exp(-8.0))
print("got", found[0, 0, 0, 0].round(4), "expected", expected.round(4))  # got 0.021 expected 0.9591
