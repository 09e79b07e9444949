"""onnx 1.23: Attention in float64 is accurate to seven digits

The function that defines the operator computes the default scale, and its root, in float32, and casts it to float64
afterwards; the evaluator does so with the root of a given scale. onnxruntime, which has no kernel for float64, runs
that function. The error is not in the dtype of the query, which is float64 from end to end.
"""

import onnxruntime as ort
import numpy as np
from onnx import TensorProto, helper

value_of = lambda name: helper.make_tensor_value_info(name, TensorProto.DOUBLE, None)
node = helper.make_node("Attention", ["Q", "K", "V"], ["Y", "", "", "qk"])
graph = helper.make_graph([node], "g", [value_of(name) for name in "QKV"], [value_of("Y"), value_of("qk")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
query = np.full((1, 1, 1, 3), 1000.0)
score = session.run(["qk"], {"Q": query, "K": query, "V": query})[0].item()
print("off by", score - 3e6 / np.sqrt(3), "of", 3e6 / np.sqrt(3))  # off by -0.1149 of 1732050.8076
