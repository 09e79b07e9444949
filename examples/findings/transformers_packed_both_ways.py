"""transformers 5.23: packed sequences that attend both ways attend to one another

With `is_causal=False` in the config, `create_causal_mask` hands everything but `position_ids` to
`create_bidirectional_mask`, which takes them in its `**kwargs` as well, and does not read them. No mask is made, and
each sequence attends to all others. That an `attention_mask` of ones does the same where attention is causal is
known: huggingface/transformers#46634.
"""

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

config = PreTrainedConfig(is_causal=False)
config._attn_implementation = "eager"
two_sequences = torch.tensor([[0, 1, 2, 0, 1]])
mask = create_causal_mask(config, torch.zeros(1, 5, 1), None, None, position_ids=two_sequences)
layer = torch.nn.Module()
layer.num_key_value_groups = 1
query, value = torch.zeros(1, 1, 5, 1), torch.tensor([0, 0, 0, 10, 10.0]).view(1, 1, 5, 1)
output, _ = eager_attention_forward(layer, query, query, value, mask, scaling=1.0)
print("got", output[0, 0, 0, 0].item(), "expected", 0.0)  # got 4.0 expected 0.0
