"""openvino 2026.4: without a key the output is that of the call before

A cache before its first key has none. The output then has the right shape, and is not written: the request of a model
that was called before gives the answer of that call again, and a new one what was in memory.
"""

import openvino as ov
import numpy as np
from openvino import opset13

inputs = [opset13.parameter(ov.PartialShape([-1, -1, -1, -1]), ov.Type.f32) for _ in range(3)]
model = ov.Model([opset13.scaled_dot_product_attention(*inputs, causal=False)], inputs)
compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
request = compiled.create_infer_request()
query = np.ones((1, 1, 3, 8), np.float32)
for keys in (5, 0):
    request.infer([query, np.ones((1, 1, keys, 8), np.float32), np.full((1, 1, keys, 8), 7, np.float32)])
output = request.get_output_tensor(0).data
print("got", output.min(), output.max(), "expected", 0.0, 0.0)  # got 7.0 7.0 expected 0.0 0.0
