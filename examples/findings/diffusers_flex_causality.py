"""diffusers 0.42: the backend flex forgets causality, and takes a mask of keys for one of queries

`_native_flex_attention` looks whether there is a mask before it looks whether the call is causal, and a call may not
have both: `is_causal` has no effect, and nothing says so. A mask (B, Lk), which the other backends take for one of
keys, is viewed as (B, 1, Lq, 1). `_native_math` and `_native_efficient` hand such a mask on as it is, which makes it
one of (Lq, Lk) for all batch entries where there are as many entries as queries. No thread names any of it;
huggingface/diffusers#12605 is of backends that ignored masks.
"""

import numpy as np
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

query, value = torch.zeros(1, 2, 1, 2), torch.tensor(np.float32([[[[1, 1]], [[3, 3]]]]))
causal = dispatch_attention_fn(query, query, value, is_causal=True, backend="flex")
print("got", *causal[0, :, 0, 0].tolist(), "expected", 1.0, 2.0)  # got 2.0 2.0 expected 1.0 2.0
masked = dispatch_attention_fn(query, query, value, torch.tensor([[True, False]]), backend="flex")
print("got", *masked[0, :, 0, 0].tolist(), "expected", 1.0, 1.0)  # got 2.0 0.0 expected 1.0 1.0
