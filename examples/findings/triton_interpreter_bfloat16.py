"""triton 3.9: the interpreter multiplies the bits of bfloat16

With `TRITON_INTERPRET=1`, which is how people debug a kernel without a GPU, `tl.dot` takes factors of bfloat16 for
the integers that store them, and says nothing. Its authors: "we just don't support it yet"
(triton-lang/triton#11584).
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
import triton
import torch
import triton.language as tl


@triton.jit
def multiply(given, product, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    factor = tl.load(given + places)
    tl.store(product + places, tl.dot(factor, factor))


ones, product = torch.ones(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
multiply[(1,)](ones, product, SIZE=16)
print("got", product[0, 0].item(), "expected", 16.0)  # got 4228120576.0 expected 16.0
