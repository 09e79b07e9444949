"""Sums of a product in bfloat16 on a GPU, beside what sums in float32 allow."""

import torch

torch.manual_seed(0)
inputs, weight = (torch.randn(rows, 12, device="cuda", dtype=torch.bfloat16) for rows in (6, 12))
exact = inputs.double() @ weight.double()
allowed = 2.0**-8 * exact.abs() + 14 * 2.0**-24 * (inputs.double().abs() @ weight.double().abs())
for reduced in (True, False):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    output = torch.nn.functional.linear(inputs, weight.mT)
    print(reduced, ((output.double() - exact).abs() / allowed).max().item())
