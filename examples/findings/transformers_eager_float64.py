"""transformers 5.23: eager attention in float64 is as accurate as float32

The softmax is told `dtype=torch.float32` whatever the scores are (huggingface/transformers#48459, about GPT-NeoX).
"""

import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

layer = torch.nn.Module()
layer.num_key_value_groups = 1
query, value = torch.zeros(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 3, 1, dtype=torch.float64)
output, _ = eager_attention_forward(layer, query, value, value, None, scaling=1.0)
print("got", (output.item() - 1) * 1e8, "expected", 0.0)  # got 2.980 expected 0.0
