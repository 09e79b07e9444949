"""torch 2.13: flex_attention for CPUs is compiled to C++ that is no C++

Once a second shape has come, sizes are symbols. The template puts its own names in the place of two of them by
replacing text (`CppFlexAttentionTemplate.modification`): where one symbol's name begins another's, as `ks1` does
`ks15`, the other is cut, and the compiler meets a name that nobody declared, such as `cur_qSplitSize5`. A mask that
is captured is enough. With `dynamic=False` there are no symbols, and so `torch.flex_compile` is compiled here.
"""

import torch
import numpy as np
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

compiled, failed = torch.compile(flex_attention), []


def attend(batch, queries, keys):
    query, key = torch.ones(batch, 2, queries, 8), torch.ones(batch, 2, keys, 8)
    mask = torch.ones(batch, 2, queries, keys, dtype=torch.bool)
    given = lambda b, head, row, column: mask[b, head, row, column]
    block_mask = create_block_mask(given, batch, 2, queries, keys, device="cpu")
    try:
        compiled(query, key, key, block_mask=block_mask)
    except RuntimeError as error:
        failed.extend(line for line in str(error).splitlines() if "was not declared" in line)


attend(2, 8, 8), attend(3, 16, 24)
print("failed", np.float64(bool(failed)), "expected", 0.0)  # failed 1.0 expected 0.0
