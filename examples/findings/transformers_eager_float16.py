"""transformers 5.23: eager attention in float16 is NaN where every key is masked

The mask adds -65504, the lowest number of float16, to every score. Where all scores of the row are below -16, each
sum is minus infinity, and the softmax NaN; with others the row is the mean of all values, or, because neighbours are
32 apart there, that of some. Padding on the left makes such rows.
"""

import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

layer = torch.nn.Module()
layer.num_key_value_groups = 1
layer.training = False
query, value = torch.ones(1, 1, 1, 1, dtype=torch.float16), torch.ones(1, 1, 2, 1, dtype=torch.float16)
masked = torch.full((1, 1, 1, 2), torch.finfo(torch.float16).min, dtype=torch.float16)
for score in (3.0, -40.0):
    output, _ = eager_attention_forward(layer, query, value * score, value, masked, scaling=1.0)
print("got", output.item(), "expected", 1.0)  # got nan expected 1.0
