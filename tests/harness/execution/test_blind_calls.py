"""Calls of a function in a process that shows nothing of this package, and what is observed around them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attncheck.execution import call_server, operations
from attncheck.execution.blind_calls import BlindFunction, load_blind
from attncheck.execution.operations import apply_memory_layout
from attncheck.execution.user_code import LoadError, Target, without_traces

KERNELS = """
import json, os, sys, threading, time
from pathlib import Path

import numpy as np


def traces(query, key, value):
    frame, files = sys._getframe(), []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    parents, process = [], os.getppid()
    while process > 1:
        parents.append(process)
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    seen = {"modules": [*sys.modules], "arguments": sys.argv, "variables": [*os.environ], "files": files}
    Path(__file__).with_suffix(".json").write_text(json.dumps({**seen, "parents": parents}))
    return query


def returns_strides(query, key, value):
    return np.array([query.strides, key.strides, value.strides])


def shares_memory(query, key, value):
    first, second = (array.__array_interface__["data"][0] for array in (query, key))
    return np.array([second - first])


def right(query, key, value):
    return query + 1


def several(query, key, value):
    return {"scores": query, "output": value * 2}


def changes_an_input(query, key, value):
    key[...] = 0
    return query + 1


def returns_its_input(query, key, value):
    return value[..., ::2]


BUFFER = np.zeros(6)


def one_buffer(query, key, value):
    BUFFER[...] = query.ravel()
    return BUFFER


def finishes_later(query, key, value):
    result = np.zeros(6)

    def finish():
        time.sleep(0.02)
        result[...] = query.ravel()

    threading.Thread(target=finish).start()
    return result


def unsupported(query, key, value):
    raise NotImplementedError("no such heads")
"""


@pytest.fixture(scope="module")
def kernel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "some_kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture
def load(kernel_file: Path) -> Iterator[Callable[[str], Any]]:
    """Load a function of the file in a blind process."""
    processes = []

    def load_function(name: str) -> BlindFunction:
        function, _, process = load_blind(Target(str(kernel_file), name, is_blind=True), "numpy", "")
        processes.append(process)
        function.process = process
        return function

    yield load_function
    for process in processes:
        process.kill()


def inputs(count: int = 3) -> list[np.ndarray[Any, Any]]:
    return [np.arange(6.0).reshape(1, 1, 2, 3) + number for number in range(count)]


def behaviours(function: Any) -> set[str]:
    return {observation.behaviour for observation in function.process.observations}


def test_a_kernel_finds_no_trace_of_the_package(load: Callable[[str], Any], kernel_file: Path) -> None:
    load("traces")(*inputs())
    seen = json.loads(kernel_file.with_suffix(".json").read_text())
    # An editable install adds a module to every process of Python, and NumPy has one for its own tests.
    words = [word for word in seen["modules"] if not word.startswith(("__editable__", "numpy."))]
    words += [Path(name).name for name in (*seen["arguments"], *seen["files"])] + seen["variables"]
    assert not [word for word in words if "attncheck" in word.lower() or "pytest" in word.lower()]


def test_no_process_above_a_kernel_is_one_of_ours(load: Callable[[str], Any], kernel_file: Path) -> None:
    load("traces")(*inputs())
    assert os.getpid() not in json.loads(kernel_file.with_suffix(".json").read_text())["parents"]


@pytest.mark.parametrize("kind", ["strided", "padded", "transposed", "reversed", "sliced"])
def test_a_memory_layout_arrives(load: Callable[[str], Any], kind: str) -> None:
    arrays = dict(zip(("query", "key", "value"), inputs(), strict=True))
    laid_out = apply_memory_layout(arrays, dict.fromkeys(arrays, kind))
    strides = load("returns_strides")(*laid_out.values())
    assert strides.tolist() == [list(array.strides) for array in laid_out.values()]


def test_inputs_of_one_memory_arrive_in_one_memory(load: Callable[[str], Any]) -> None:
    arrays = dict(zip(("query", "key", "value"), inputs(), strict=True))
    fused = apply_memory_layout(arrays, dict.fromkeys(arrays, "fused"))
    apart = call_server.address_of(fused["key"]) - call_server.address_of(fused["query"])
    assert load("shares_memory")(*fused.values()).tolist() == [apart]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_result_has_the_bits_of_a_call_here(load: Callable[[str], Any], dtype: Any) -> None:
    arrays = [array.astype(dtype) for array in inputs()]
    result = load("right")(*arrays)
    assert (result.dtype, result.tobytes()) == (arrays[0].dtype, (arrays[0] + 1).tobytes())


def test_a_right_kernel_is_observed_to_do_nothing(load: Callable[[str], Any]) -> None:
    function = load("right")
    for _ in range(3):
        function(*inputs())
    assert behaviours(function) == set()


def test_stages_keep_their_names(load: Callable[[str], Any]) -> None:
    assert [*load("several")(*inputs())] == ["scores", "output"]


@pytest.mark.parametrize(
    ("name", "behaviour", "calls"),
    [
        ("changes_an_input", call_server.CHANGED_INPUT, 1),
        ("returns_its_input", call_server.SHARED_MEMORY, 1),
        ("finishes_later", call_server.LATE, 1),
        ("one_buffer", call_server.OVERWRITTEN, 2),
    ],
)
def test_a_behaviour_is_observed(load: Callable[[str], Any], name: str, behaviour: str, calls: int) -> None:
    function = load(name)
    for number in range(calls):
        function(*(array * (number + 1) for array in inputs()))
    assert behaviours(function) == {behaviour}


def test_what_a_kernel_refuses_is_unsupported(load: Callable[[str], Any]) -> None:
    with pytest.raises(NotImplementedError, match="no such heads"):
        load("unsupported")(*inputs())


def test_a_file_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with pytest.raises(LoadError, match="ZeroDivisionError"):
        load_blind(Target(str(path), "attention", is_blind=True), "numpy", "")


def test_variables_of_tests_and_ci_systems_are_removed() -> None:
    variables = {
        "CI": "true",
        "ATTNCHECK_CACHE": "x",
        "PYTEST_CURRENT_TEST": "y",
        "OMP_NUM_THREADS": "1",
        "CIRCLE": "z",
    }
    assert without_traces(variables) == {"OMP_NUM_THREADS": "1", "CIRCLE": "z"}


def test_free_memory_is_filled_alike_everywhere() -> None:
    assert call_server.FREE_BYTE == operations.FREE_BYTE


@pytest.mark.torch
def test_a_tensor_has_the_storage_offset_of_its_array(tmp_path: Path) -> None:
    path = tmp_path / "offsets.py"
    path.write_text(
        "import torch\n\ndef offset(query, key, value):\n    return torch.tensor([query.storage_offset()])\n"
    )
    function, _, process = load_blind(Target(str(path), "offset", is_blind=True), "torch", "")
    memory = np.arange(12.0)
    query = memory[4:10].reshape(1, 1, 2, 3)
    assert function(query, *inputs(2)).tolist() == [4]
    assert process is not None
    process.kill()
