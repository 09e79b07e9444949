"""jax 0.10: dot_product_attention under jit refuses a single query and key in bfloat16

With one batch entry, one head, one query and one key, as at the first step of decoding with one head, the compiled
function raises in bfloat16, whatever the width; op by op it returns the value, and so it does with a second batch
entry, head or key. The products ask for the algorithm BF16_BF16_F32; of 1 by 1 matrices XLA makes elementwise
operations, and their emitter knows no algorithm (`EmitDot` in `xla/service/elemental_ir_emitter.cc`). A search of
random problems found it; no public thread about it was found.
"""

import jax
import jax.numpy as jnp


def compiled(length):
    ones = jnp.ones((1, length, 1, 8), jnp.bfloat16)  # (B, T, N, H)
    try:
        return float(jax.jit(jax.nn.dot_product_attention)(ones, ones, ones)[0, 0, 0, 0])
    except jax.errors.JaxRuntimeError:  # INVALID_ARGUMENT: Algorithm not supported by the ElementalIrEmitter
        return float("nan")


print("two tokens", compiled(2), "expected", 1.0)  # two tokens 1.0 expected 1.0
print("got", compiled(1), "expected", 1.0)  # got nan expected 1.0
