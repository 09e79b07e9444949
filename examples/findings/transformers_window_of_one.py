"""transformers 5.23: with a window of 1, decoding attends to every token of the past

A cache of a layer with a window keeps the keys from `-sliding_window + 1` on. With a window of 1 that is 0, and all
are kept. The mask is made for those that should be left: it has one key for one query, and is broadcast to all of
them. With more queries than one the shapes do not fit, which raises. No thread was found about it.
"""

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

config = PreTrainedConfig(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=1)
config._attn_implementation = "sdpa"
cache = DynamicCache(config=config)
past, token = torch.zeros(1, 1, 8, 4), torch.ones(1, 1, 1, 4)
cache.update(past, past, 0)
mask = create_sliding_window_causal_mask(config, token[0], None, cache)
key, value = cache.update(token, token, 0)
layer = torch.nn.Module()
layer.is_causal = True
output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, token, key, value, mask, scaling=0.5)
print("got", output[0, 0, 0, 0].item(), "expected", 1.0)  # got 0.480 expected 1.0
