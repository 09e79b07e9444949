"""tensorflow 2.21: a product of a batch with one head reads and writes beyond its operands

`tf.matmul` of a batch of one head, (B, 1, M, K), and one matrix for all of it, (1, K, N) or (K, N), hands oneDNN
strides of the matrix where there is nothing to step over: everything from the first rows on is what lies elsewhere in
memory, another number each time, and with larger shapes the process ends with SIGSEGV or a damaged heap. Float32,
float16 and bfloat16 do so with AVX-512, where the batch has two entries or more, if TensorFlow calls oneDNN: it does so
by default if the processor has AVX512_VNNI or a newer extension. With `TF_ENABLE_ONEDNN_OPTS=0` all is right. It meets
latent attention with one head, which multiplies its context by the projection of the values. `attncheck search
tensorflow.absorbed` found it. It is known (tensorflow/tensorflow#117700, uxlfoundation/oneDNN#4396) and fixed
(tensorflow/tensorflow#120199), but not in this release.
"""

# on a processor with avx512f
import os
import subprocess
import sys

PRODUCT = """
import numpy as np
import tensorflow as tf
context, projection = np.ones((2, 1, 64, 64), np.float32), np.ones((1, 64, 64), np.float32)  # (B, H, Lq, C), (H, C, Dv)
assert (tf.matmul(context, projection).numpy() == 64).all()
"""
with_onednn = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1"}
ended = subprocess.run([sys.executable, "-c", PRODUCT], capture_output=True, check=False, env=with_onednn)
print("right", float(ended.returncode == 0), "expected", 1.0)  # right 0.0 expected 1.0
