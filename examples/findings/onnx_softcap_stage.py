"""onnx 1.23: the evaluator hands out the wrong stage with a softcap

With `qk_matmul_output_mode` 0 the fourth output is the scaled product of query and key. The standard's text, its
function and onnxruntime agree; `onnx.reference` returns the logits after the softcap, which is mode 1. The order of
softcap and mask had been changed in onnx/onnx#7867.
"""

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

value_of = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
node = helper.make_node("Attention", ["Q", "K", "V"], ["Y", "", "", "qk"], softcap=2.0, qk_matmul_output_mode=0)
graph = helper.make_graph([node], "g", [value_of(name) for name in "QKV"], [value_of("Y"), value_of("qk")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
query = np.float32([[[[4, 4, 4, 4]]]])
_, stage = ReferenceEvaluator(model).run(None, {"Q": query, "K": query, "V": query})
print("got", stage.item(), "expected", float((query * query).sum() / 2))  # got 2.0 expected 32.0
