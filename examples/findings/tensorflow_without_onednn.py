"""tensorflow 2.21: without oneDNN, bfloat16 products are cut off, and einsum adds up in 16 bits

On processors without VNNI, AMX or bfloat16 units, and with `TF_ENABLE_ONEDNN_OPTS=0` on all others, `tf.matmul` in
bfloat16 multiplies in float32 and drops the lower half of each result: `FloatToBFloat16` of
`tensorflow/core/framework/bfloat16.cc` copies 16 bits, where `RoundFloatToBFloat16` beside it would round. Every
product is up to one unit in the last place too small in magnitude. attncheck knows it as a rounding model of its own,
`eager_cut` (numerics), so that no case fails for it. `tf.einsum` there rounds every partial sum to float16 or
bfloat16: terms that are small beside the sum are lost. No thread was found for either.
"""

import os
import subprocess
import sys

PRODUCTS = """
import sys
import numpy as np
import tensorflow as tf
terms = np.array([[1], [3 * 2**-9]])  # 1 + 0.75 * 2**-7
cut = tf.matmul(tf.ones((1, 2), tf.bfloat16), tf.constant(terms, tf.bfloat16))
terms = tf.constant([2048.0] + 64 * [1.0], tf.float16)[tf.newaxis, :, tf.newaxis]
ones = tf.ones((1, 1, 65), tf.float16)
for product in cut, tf.matmul(ones, terms), tf.einsum("bij,bjk->bik", ones, terms):
    sys.stdout.write(f"{product.numpy().item()} ")
"""
without = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
ended = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, check=True, env=without)
cut, matmul, einsum = map(float, ended.stdout.split())
print("product", cut, "expected", 1 + 2**-7)  # product 1.0 expected 1.0078125
print("matmul", matmul, "expected", 2112.0)  # matmul 2112.0 expected 2112.0
print("einsum", einsum, "expected", 2112.0)  # einsum 2048.0 expected 2112.0
