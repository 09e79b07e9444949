"""torch 2.13: the log-sum-exp of flex_attention overflows in base 2

The operator hands its log-sum-exp on in base 2 (pytorch/pytorch#133159), and `flex_attention` multiplies it by
log(2): one below -2.36e38 is minus infinity on the way. That says that the query has no key, although its output is
right.
"""

import torch
import numpy as np
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

query, key, value = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
bias = torch.full((3,), torch.finfo(torch.float32).min)
add = lambda score, batch, head, row, column: score + bias[column]
output, aux = flex_attention(query, key, value, score_mod=add, return_aux=AuxRequest(lse=True))
expected = np.logaddexp.reduce(bias.double().numpy())
print("got", aux.lse.item(), "expected", expected, "output", output[0, 0, 0, 0].item())  # -inf -3.4028 1.0
