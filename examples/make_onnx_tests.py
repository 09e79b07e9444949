"""Writes the tests of one of ONNX's operators as folders: python make_onnx_tests.py FOLDER Attention."""

import sys
from pathlib import Path

from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases

folder, operator = Path(sys.argv[1]), sys.argv[2]
for case in collect_testcases(operator):
    test, [(inputs, outputs), *_] = folder / case.name, case.data_sets
    (test / "test_data_set_0").mkdir(parents=True)
    (test / "model.onnx").write_bytes(case.model.SerializeToString())
    graph = case.model.graph
    for kind, arrays, infos in (("input", inputs, graph.input), ("output", outputs, graph.output)):
        for number, (array, info) in enumerate(zip(arrays, infos, strict=True)):
            tensor = array if isinstance(array, TensorProto) else numpy_helper.from_array(array, info.name)
            (test / "test_data_set_0" / f"{kind}_{number}.pb").write_bytes(tensor.SerializeToString())
