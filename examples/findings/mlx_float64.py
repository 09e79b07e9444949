"""mlx 0.32: float64 is as accurate as float32

The exponential on a CPU is that of float32 for every dtype (ml-explore/mlx#3047), and with it the softmax.
"""

import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
scores = np.array([-3.1, -1.0, 0.7])
weights = np.array(mx.softmax(mx.array(scores, dtype=mx.float64), precise=True))
error = np.abs(weights * np.exp(scores).sum() / np.exp(scores) - 1).max()
print("bits lost", np.log2(error / 2.0**-53), "of at most", 3.0)  # bits lost 28.853 of at most 3.0
