#!/bin/sh
# JAX 0.10.2 cannot interpret its own kernel of ragged paged attention.
#
# jax.experimental.pallas.ops.tpu.ragged_paged_attention is the call of serving engines on TPUs. Off a TPU, Pallas has an
# interpreter for TPU kernels, jax.experimental.pallas.tpu.force_tpu_interpret_mode, which runs flash_attention of the
# same package. Guess before the first run: it runs this kernel, too, and agrees with ref_ragged_paged_attention.
# Seen: the reference returns finite numbers. The kernel ends with
#     AttributeError: 'ReshapeTransform' object has no attribute 'indices'
# from the interpreter, since the kernel views its buffer of pages in another shape before it reads from it. The other
# interpreter, pallas_call(..., interpret=True), cannot run it either. So no test without a TPU can check the kernel.
#
# Needs Python 3.11 or newer and the network. Exits with 0 if the behaviour is as above, and with 1 if it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention, ref_ragged_paged_attention

draw = np.random.default_rng(0).standard_normal
query = jnp.asarray(draw((5, 4, 128)), jnp.float32)
pages = jnp.asarray(draw((6, 16, 4, 128)), jnp.float32)  # keys and values of two heads, alternating
tables = [jnp.asarray(numbers, jnp.int32) for numbers in ([20, 17, 9], [[3, 0], [3, 1], [2, 4]], [0, 3, 4, 5], [3])]
print("jax", jax.__version__)
reference = ref_ragged_paged_attention(query, pages, *tables, sm_scale=0.1)
print("reference:", reference.shape, "finite:", bool(jnp.isfinite(reference).all()))
with tpu.force_tpu_interpret_mode():
    square = jnp.asarray(draw((1, 1, 128, 128)), jnp.float32)
    print("flash_attention, interpreted:", flash_attention(square, square, square).shape)
    try:
        output = ragged_paged_attention(
            query, pages, *tables, sm_scale=0.1, num_kv_pages_per_block=2, num_queries_per_block=8
        )
        error = "none; off by " + str(float(jnp.abs(output - reference).max()))
    except Exception as raised:  # JAX wraps what a callback raises
        error = next(line.strip() for line in reversed(str(raised).splitlines()) if "Error: " in line)
print("ragged_paged_attention, interpreted:", error)
raise SystemExit("'ReshapeTransform' object has no attribute 'indices'" not in error)
PYTHON
JAX_PLATFORMS=cpu "$folder/environment/bin/python" "$folder/run.py" 2> "$folder/errors" || {
    code=$?
    cat "$folder/errors"
    exit "$code"
}
