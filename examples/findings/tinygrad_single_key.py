"""tinygrad 0.14: with a single key, masks and NaN have no effect

The softmax of one score is simplified to 1 before it is computed, whatever the score is: a masked key is attended to,
and a query that holds NaN gets a number. With two keys both give NaN. In float arithmetic `x - x` is taken for 0 all
over: that `x * 0` is so too, with infinity, was seen in tinygrad/tinygrad#4982. No thread names attention.
"""

import os

import numpy as np

os.environ["DEV"] = "CPU"
from tinygrad import Tensor

of = lambda *numbers: Tensor(np.array(numbers, np.float32).reshape(1, 1, -1, 1))
holds_nan = of(np.nan).scaled_dot_product_attention(of(0), of(7)).numpy()[0, 0, 0, 0]
print("NaN in the query: got", holds_nan, "expected", np.nan)  # NaN in the query: got 7.0 expected nan
masked = of(0).scaled_dot_product_attention(of(0), of(7), Tensor(np.array([[False]]))).numpy()[0, 0, 0, 0]
print("masked: got", masked, "of two keys", np.nan)  # masked: got 7.0 of two keys nan
