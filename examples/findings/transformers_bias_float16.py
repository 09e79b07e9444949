"""transformers 5.23: beside a bias in float16, a query without a key attends to what is masked

Where `sdpa` is given a `position_bias`, a mask becomes the lowest finite number of the dtype. In float16 that is
-65504, to which the kernel adds scores in float32: they all remain, and a softmax of a row in which every key is
masked is that of the row without a mask. In other dtypes the row is the mean of all values, and without a bias it is
zero.
"""

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

layer = torch.nn.Module()
layer.is_causal = False
torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 1, 6, 8, dtype=torch.float16).unbind(0)
nothing = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
bias = torch.zeros(1, 1, 6, 6, dtype=torch.float16)
call = ALL_ATTENTION_FUNCTIONS["sdpa"]
masked, _ = call(layer, query, key, value, nothing, position_bias=bias)
unmasked, _ = call(layer, query, key, value, None, position_bias=bias)
mean = value.float().mean(dim=2)[:, None]
print("got", (masked - unmasked).abs().max().item(), "from the unmasked row")  # got 0.001 from the unmasked row
print("and", (masked - mean).abs().max().item(), "from the mean of all values")  # and 1.118 from the mean of all values
