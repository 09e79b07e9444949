"""onnx 1.23: the evaluator takes one causal row for all queries beside a mask for all of them

The standard spreads an `attn_mask` of shape (1, T) over the queries, and then asks for causality as well. The
evaluator adds causality to the mask before it spreads it, so that every query is masked as the first one. A mask of
one axis ends in a ValueError. The function that the standard defines the operator by is right, as onnxruntime
evaluates it. It was found in cases that were exported; no test of ONNX has such a mask without a window.
"""

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

names = ["Q", "K", "V", "attn_mask"]
value_of = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
node = helper.make_node("Attention", names, ["Y"], is_causal=1)
graph = helper.make_graph([node], "g", [value_of(name) for name in names], [value_of("Y")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
zeros, value = np.zeros((1, 1, 3, 1), np.float32), np.float32([0, 3, 6]).reshape(1, 1, 3, 1)
inputs = {"Q": zeros, "K": zeros, "V": value, "attn_mask": np.zeros((1, 3), np.float32)}
output = ReferenceEvaluator(model).run(None, inputs)[0]
print("got", output[0, 0, 2, 0], "expected", (0 + 3 + 6) / 3)  # got 0.0 expected 3.0
