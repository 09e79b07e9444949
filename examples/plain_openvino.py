"""OpenVINO in its own words, as plain_calls.py has other libraries.

It is imported here, and not in the call: it starts a thread when it is.
"""

import numpy as np
import openvino
from openvino import opset13


def openvino_sdpa(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None):
    """ScaledDotProductAttention-13 on a CPU."""
    attn_mask = mask if bias is None else bias
    if scale is not None and attn_mask is None:
        attn_mask = np.zeros((), query.dtype)  # "attention_mask ... or scalar float type zero value"
    given = [each for each in (query, key, value, attn_mask) if each is not None]
    given += [] if scale is None else [np.array(scale, query.dtype)]
    inputs = [opset13.parameter(list(each.shape), each.dtype) for each in given]
    model = openvino.Model([opset13.scaled_dot_product_attention(*inputs, causal=is_causal)], inputs)
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    request.infer([openvino.Tensor(each.copy()) for each in given])
    return {"output": np.array(request.get_output_tensor(0).data)}


openvino_sdpa.capabilities = {"dtypes": ["float32"]}
