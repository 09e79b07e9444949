"""onnxruntime 1.32: MultiHeadAttention ends the process where queries and keys have no features

All scores are 0 then, and the output is the mean of the values. The process ends with SIGFPE, and nothing can be
caught; the kernel of Attention-24 refuses such a call with an error. No thread says so.
"""

import subprocess
import sys

script = """
import onnxruntime as ort
import numpy as np
from onnx import TensorProto, helper

names = ["query", "key", "value"]
node = helper.make_node("MultiHeadAttention", names, ["output"], domain="com.microsoft", num_heads=1, scale=1.0)
value_of = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
graph = helper.make_graph([node], "g", [value_of(name) for name in names], [value_of("output")])
opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
widths = {"query": 0, "key": 0, "value": 8}
session.run(None, {name: np.ones((1, 3, width), np.float32) for name, width in widths.items()})
"""
ended = subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
print("got signal", -float(ended.returncode), "expected", 0.0)  # got signal 8.0 expected 0.0
