"""jax 0.10: the sigmoid of a float16 below -11 is zero

`jax.nn.sigmoid` is 1 / (1 + e^-x), in float16 as elsewhere, op by op and compiled. There e^-x is infinite where x is
below -11.09, though the sigmoid is 1.5e-5 at that place and float16 goes down to 6e-8: a gate that is nearly closed
is shut, and so is its gradient.
"""

import jax
import jax.numpy as jnp

opened = jax.nn.sigmoid(jnp.float16(-12))
print("got", opened, "expected", 6.1e-06)  # got 0.0 expected 6.1e-06
