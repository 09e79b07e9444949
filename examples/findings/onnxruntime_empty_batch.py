"""onnxruntime 1.32: GroupQueryAttention ends the process on an empty batch

A batch without entries is divided by: the process ends with SIGFPE, and nothing can be caught.
"""

import subprocess
import sys

script = """
import onnxruntime as ort
import numpy as np
from onnx import TensorProto, helper

names = ["query", "key", "value", "", "", "seqlens_k", "total_sequence_length"]
outputs = ["output", "present_key", "present_value"]
options = {"domain": "com.microsoft", "num_heads": 1, "kv_num_heads": 1}
node = helper.make_node("GroupQueryAttention", names, outputs, **options)
kind = lambda name: TensorProto.INT32 if name in names[5:] else TensorProto.FLOAT
value_of = lambda name: helper.make_tensor_value_info(name, kind(name), None)
given = [value_of(name) for name in names if name]
graph = helper.make_graph([node], "g", given, [value_of(name) for name in outputs])
opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
inputs = {name: np.ones((0, 3, 8), np.float32) for name in names[:3]}
inputs |= {"seqlens_k": np.zeros(0, np.int32), "total_sequence_length": np.array(3, np.int32)}
session.run(None, inputs)
"""
ended = subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
print("got signal", -float(ended.returncode), "expected", 0.0)  # got signal 8.0 expected 0.0
