"""onnxruntime 1.32: one query after a cache sees keys that come after it

With `is_causal` query i of a block attends to key j if j <= i + P after a past of P keys. The kernel for CPUs leaves
the mask out where there is one query and a past, as if that query came after all keys: with three new keys it sees
two that come later. Without a past this was fixed in microsoft/onnxruntime#29050.
"""

import onnxruntime as ort
import numpy as np
from onnx import TensorProto, helper

names = ["Q", "K", "V", "", "past_key", "past_value"]
node = helper.make_node("Attention", names, ["Y", "present_key", "present_value"], is_causal=1)
value_of = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
graph = helper.make_graph(
    [node], "g", [value_of(each) for each in names if each], [value_of(each) for each in node.output]
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
zeros = lambda length: np.zeros((1, 1, length, 2), np.float32)
past_value, value = zeros(1), np.float32([[[[4, 4], [100, 100], [100, 100]]]])
inputs = {"Q": zeros(1), "K": zeros(3), "V": value, "past_key": zeros(1), "past_value": past_value}
print("got", session.run(["Y"], inputs)[0][0, 0, 0, 0], "expected", (0 + 4) / 2)  # got 51.0 expected 2.0
