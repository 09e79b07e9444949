"""onnxruntime 1.32: the last causal query of MultiHeadAttention sees every key

`unidirectional` lets every token "only attend to previous tokens". The mask for CPUs is made for all queries but the
last, which is taken for one that stands at the last key, and not at all for a single query. With more keys than
queries, all others are aligned top left, and the last sees keys that come after it. `Attention` of ONNX had the like
for one query (microsoft/onnxruntime#29020).
"""

import onnxruntime as ort
import numpy as np
from onnx import TensorProto, helper

names = ["query", "key", "value"]
options = {"domain": "com.microsoft", "num_heads": 1, "unidirectional": 1}
node = helper.make_node("MultiHeadAttention", names, ["output"], **options)
value_of = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
graph = helper.make_graph([node], "g", [value_of(name) for name in names], [value_of("output")])
opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
value = np.arange(5, dtype=np.float32).reshape(1, 5, 1)
for queries in (1, 2, 3):
    inputs = {"query": np.zeros((1, queries, 1), np.float32), "key": np.zeros_like(value), "value": value}
    output = session.run(None, inputs)[0]
print("got", output.ravel().tolist(), "expected", [0.0, 0.5, 1.0])  # got [0.0, 0.5, 2.0] expected [0.0, 0.5, 1.0]
