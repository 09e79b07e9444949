"""A program that speaks the protocol: what an author in any language writes. It needs Python and NumPy alone."""

import json
import math
import sys

import numpy as np

source, sink = sys.stdin.buffer, sys.stdout.buffer
calls = 0
while line := source.readline():
    request = json.loads(line)
    if request["ask"] == "describe":
        sink.write(b'{"attncheck":1,"name":"mine","version":"7.1","functions":{"attention":["is_causal","scale"]}}\n')
        sink.flush()
        continue
    arrays = {}
    for each in request["arrays"]:
        count = math.prod(each["shape"])
        raw = source.read(count * np.dtype(each["dtype"]).itemsize)
        arrays[each["name"]] = np.frombuffer(raw, each["dtype"]).reshape(each["shape"])
    calls += 1
    if request["function"] != "attention":
        sink.write(b'{"unsupported":"it has attention alone"}\n')
        sink.flush()
        continue
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    key, value = (np.repeat(each, query.shape[1] // each.shape[1], axis=1) for each in (key, value))
    options = request["options"]
    scale = options["scale"] if "scale" in options else query.shape[-1] ** -0.5
    scores = query @ key.swapaxes(-1, -2) * query.dtype.type(scale)
    if options.get("is_causal"):
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e30))
    output = powers / powers.sum(axis=-1, keepdims=True) @ value
    pass  # HOOK
    listed = [{"name": "output", "dtype": str(output.dtype), "shape": list(output.shape)}]
    sink.write(json.dumps({"stages": listed}).encode() + b"\n" + output.tobytes())
    sink.flush()
