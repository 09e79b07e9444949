"""onnxruntime 1.32: GroupQueryAttention hides NaN in causal float32

The tiled kernel, which is for causal attention in float32, divides by the sum of a row if that is greater than 0, and
gives zeros otherwise. The sum of a query that holds NaN is not: its output is zero, and what went wrong before it is
not seen. In float16, with a softcap, with sinks and without causality, which go another way, the output is NaN. So is
it for a query to which `attention_bias` leaves no key; the tiled kernel gives zeros there. It came with
microsoft/onnxruntime#28962.
"""

import onnxruntime as ort
import numpy as np
from onnx import TensorProto, helper

names = ["query", "key", "value", "", "", "seqlens_k", "total_sequence_length"]
outputs = ["output", "present_key", "present_value"]
options = {"domain": "com.microsoft", "num_heads": 1, "kv_num_heads": 1}
opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
found = []
for softcap in (1e6, 0.0):
    node = helper.make_node("GroupQueryAttention", names, outputs, softcap=softcap, **options)
    kind = lambda name: TensorProto.INT32 if name in names[5:] else TensorProto.FLOAT
    value_of = lambda name: helper.make_tensor_value_info(name, kind(name), None)
    given = [value_of(name) for name in names if name]
    graph = helper.make_graph([node], "g", given, [value_of(name) for name in outputs])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = {name: np.ones((1, 3, 8), np.float32) for name in names[:3]}
    inputs["query"][0, 1, 0] = np.nan
    inputs |= {"seqlens_k": np.array([2], np.int32), "total_sequence_length": np.array(3, np.int32)}
    found.append(float(session.run(None, inputs)[0][0, 1, 0]))
print("got", found, "expected", [np.nan] * 2)  # got [nan, 0.0] expected [nan, nan]
