"""The backward pass of a bias that is spread over the keys, in the memory-efficient kernel of torch on a GPU."""

import torch
from torch.nn.functional import scaled_dot_product_attention

query, key, value = (torch.randn(1, 1, length, 8, device="cuda", requires_grad=True) for length in (9, 8, 8))
bias = torch.randn(1, 1, 9, 1, device="cuda", requires_grad=True)
scaled_dot_product_attention(query, key, value, attn_mask=bias).sum().backward()
