"""timm 1.0: without fused attention a mask is forgotten beside causality, and added as 0 and 1 when pooling

`resolve_self_attn_mask` drops the mask of a call that is causal as well; `scaled_dot_product_attention`, which the same
module calls with fused attention, takes both on a CPU. `AttentionPoolLatent` adds its mask to the scores as it comes,
so that a boolean one is added as 0 and 1: huggingface/pytorch-image-models#2674 was mended for self-attention alone
(huggingface/pytorch-image-models#2686).
"""

import sys
from importlib.util import find_spec, module_from_spec

import torch

sys.modules["torchvision"] = None  # timm's own files import without it, their packages do not
for package in ("timm", "timm.layers"):
    sys.modules[package] = module_from_spec(find_spec(package))
from timm.layers.attention import Attention
from timm.layers.attention_pool import AttentionPoolLatent

tokens = torch.tensor([[[1.0, 1], [3, 3]]])
only_values = torch.cat([torch.zeros(4, 2), torch.eye(2)])
layer = Attention(2, 1)
layer.qkv.weight.data, layer.proj, layer.fused_attn = only_values, torch.nn.Identity(), False
output = layer(tokens, torch.tensor([[True, True], [False, True]]), is_causal=True)
print("beside causality: got", output[0, 1, 0].item(), "expected", 3.0)  # beside causality: got 2.0 expected 3.0

pool = AttentionPoolLatent(2, num_heads=1, qkv_bias=False)
pool.q, pool.proj, pool.mlp, pool.fused_attn = torch.nn.Identity(), torch.nn.Identity(), None, False
pool.kv.weight.data = only_values[2:]
output = pool(tokens, torch.tensor([[True, False]]))
print("pooling: got", output[0, 0].item(), "expected", 1.0)  # pooling: got 1.538 expected 1.0
