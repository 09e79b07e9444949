"""onnxruntime 1.32: a bias of the lowest finite number empties a row

A bias that is the same for every key changes no weight. The kernel masks by the lowest finite number, and takes a row
that has it everywhere for one without a key: its output is zero, also where causality leaves no other key. Models of
Hugging Face mask by this number. The guard came with microsoft/onnxruntime#28958.

Such numbers also stand in the stage that `qk_matmul_output_mode` 2 hands out, where the standard's masks add minus
infinity (microsoft/onnxruntime#25966).
"""

import onnxruntime as ort
import numpy as np
from onnx import TensorProto, helper

names = ["Q", "K", "V", "attn_mask"]
value_of = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
node = helper.make_node("Attention", names, ["Y"])
graph = helper.make_graph([node], "g", [value_of(name) for name in names], [value_of("Y")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
query, value = np.zeros((1, 1, 1, 2), np.float32), np.float32([[[[1, 1], [3, 3]]]])
for bias in (0, -3e38, np.finfo(np.float32).min):
    inputs = {"Q": query, "K": np.zeros_like(value), "V": value, "attn_mask": np.full((1, 1, 1, 2), bias, np.float32)}
    output = session.run(["Y"], inputs)[0]
print("got", output[0, 0, 0, 0], "expected", (1 + 3) / 2)  # got 0.0 expected 2.0
