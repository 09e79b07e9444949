"""paddle 3.3: what is masked leaks, and a scale of zero is none

The softmax on a CPU takes no score to be more than 64 below the largest of its row, minus infinity neither
(`ValueClip`, of which PaddlePaddle/Paddle#9686 asks where the number is from). Masked keys have a weight of e^-64,
1.6e-28, by a mask as by causality. It shows where what is masked holds large numbers, and in gradients that ought to
be 0. A scale of 0 is taken for none: `scale or head_dim**-0.5`.
"""

import paddle
import numpy as np
from paddle.nn.functional import scaled_dot_product_attention

paddle.set_device("cpu")
of_two = lambda *numbers: paddle.to_tensor(np.array(numbers, np.float32).reshape(1, 2, 1, 1).repeat(8, axis=3))
zeros = of_two(0, 0)  # batch, length, heads, width
causal = scaled_dot_product_attention(zeros, zeros, of_two(1, 1e30), is_causal=True).numpy()[0, 0, 0, 0]
print("leaks: got", causal, "expected", 1.0)  # leaks: got 161.3811 expected 1.0
scaled = scaled_dot_product_attention(of_two(9, 9), of_two(0, 9), of_two(0, 1), scale=0.0).numpy()[0, 0, 0, 0]
print("scale: got", scaled, "expected", 0.5)  # scale: got 1.0 expected 0.5
