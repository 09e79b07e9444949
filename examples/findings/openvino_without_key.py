"""openvino 2026.4: without a key, or without features, the output is that of the call before

A cache before its first key has none. The output then has the right shape, and is not written: the request of a model
that was called before gives the answer of that call again, and a new one what was in memory. So it is where queries
and keys have no features, whose scores are all 0 and whose output is the mean of the values; the operator MatMul
makes zeros of such a product (openvinotoolkit/openvino#26830).
"""

import openvino as ov
import numpy as np
from openvino import opset13

inputs = [opset13.parameter(ov.PartialShape([-1, -1, -1, -1]), ov.Type.f32) for _ in range(3)]
model = ov.Model([opset13.scaled_dot_product_attention(*inputs, causal=False)], inputs)
compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
request = compiled.create_infer_request()


def attend(keys, width, number):
    tokens = [np.ones((1, 1, length, width), np.float32) for length in (3, keys)]
    request.infer([*tokens, np.full((1, 1, keys, 8), number, np.float32)])
    return request.get_output_tensor(0).data[0, 0, 0, 0]


print("got", attend(5, 8, 7), attend(0, 8, 6), "expected", 7.0, 0.0)  # got 7.0 7.0 expected 7.0 0.0
print("got", attend(5, 0, 3), "expected", 3.0)  # got 7.0 expected 3.0
