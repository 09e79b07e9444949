"""The protocol's messages: what is sent, what is read again, and what is said of an answer that is none."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from attncheck.execution.protocol import (
    MAX_HEADER,
    WIRE,
    Description,
    ProtocolError,
    Refused,
    call_request,
    describe_request,
    read_answer,
    read_description,
    read_header,
)

DESCRIBED = {"attncheck": 1, "functions": {"attention": ["mask", "scale"]}}


def line(header: Any) -> bytes:
    return json.dumps(header).encode() + b"\n"


def stage(name: str = "output", dtype: str = "float32", shape: Any = (2, 1)) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape}


def test_a_request_is_a_line_and_the_arrays_behind_it() -> None:
    query, mask = np.array([[1, -2.5]], np.float32), np.array([True, False])
    sent = b"".join(call_request("attention", {"query": query.T, "mask": mask}, {"scale": 0.1, "window": [2, None]}))
    header, _, rest = sent.partition(b"\n")
    assert json.loads(header) == {
        "attncheck": 1,
        "ask": "call",
        "function": "attention",
        "options": {"scale": 0.1, "window": [2, None]},
        "arrays": [stage("query", "float32", [2, 1]), stage("mask", "bool", [2])],
    }
    assert b" " not in header, "a search for a name finds its value right behind it"
    assert rest == b"\0\0\x80?\0\0 \xc0\1\0"
    assert json.loads(describe_request()) == {"attncheck": 1, "ask": "describe"}


@given(st.data(), st.sampled_from(sorted(WIRE)), array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
def test_what_is_sent_as_an_array_is_read_as_a_stage(data: Any, dtype: str, shape: tuple[int, ...]) -> None:
    kind = WIRE[dtype]
    raw = data.draw(arrays(np.uint8, (*shape, kind.itemsize)))
    array = (raw % 2)[..., 0].astype(bool) if dtype == "bool" else raw.view(kind)[..., 0]
    payload = b"".join(call_request("attention", {"output": array}, {})).partition(b"\n")[2]
    found = read_answer(BytesIO(line({"stages": [stage("output", dtype, list(shape))]}) + payload))
    assert isinstance(found, dict)
    assert (found["output"].dtype, found["output"].shape) == (array.dtype, array.shape)
    assert found["output"].tobytes() == array.tobytes()


def test_several_stages_and_the_next_answer_lie_one_behind_the_other() -> None:
    one = line({"stages": [stage("weights", "float64", [1]), stage()]}) + np.array([0.5]).tobytes() + b"\0" * 8
    stream = BytesIO(one + line({"unsupported": "no softcap"}) + line({"error": "no memory"}))
    found = read_answer(stream)
    assert isinstance(found, dict)
    assert list(found) == ["weights", "output"]
    assert read_answer(stream) == Refused("unsupported", "no softcap")
    assert read_answer(stream) == Refused("error", "no memory")
    with pytest.raises(EOFError):
        read_answer(stream)


def test_what_json_cannot_say_is_not_asked() -> None:
    with pytest.raises(NotImplementedError, match="cannot be written as JSON"):
        list(call_request("attention", {}, {"scale": float("inf")}))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"hello\n", r"expected a line of JSON; got b'hello\\n'"),
        (b'{"stages":[', "an end before the line's"),
        (b"x" * (MAX_HEADER + 9), f"no line end in its first {MAX_HEADER} bytes"),
        (b"[1]\n", "expected a JSON object"),
        (b"{}\n", 'expected "stages".*; got an empty object'),
        (line({"output": 1}), "got 'output'"),
        (line({"stages": []}), 'expected "stages", a list with an entry for each array'),
        (line({"stages": [3]}), 'a stage has "name", "dtype" and "shape"; got 3'),
        (line({"stages": [stage(dtype="f32")]}), "stage output: unknown dtype 'f32'; expected float64, float32"),
        (line({"stages": [stage(shape=[2, -1])]}), r"stage output: shape: expected a list of lengths; got \[2, -1\]"),
        (line({"stages": [stage(shape=[True])]}), "expected a list of lengths"),
        (line({"stages": [stage(shape=[2**20, 2**20])]}), "is larger than 2,147,483,648 bytes"),
        (line({"stages": [stage(), stage()]}), "stage output is there twice"),
        (line({"stages": [stage()]}) + b"1234567", "expected 8 bytes for shape .2, 1.; got 7, and the end"),
        (line({"stages": [stage(dtype="bool", shape=[1])]}) + b"\2", "a bool is a byte of 0 or 1; got 2"),
    ],
)
def test_an_answer_that_is_none_says_what_was_expected(answer: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read_answer(BytesIO(answer))


def test_a_description_is_read_with_what_is_not_said_left_as_it_is() -> None:
    assert read_description(BytesIO(line(DESCRIBED))) == Description({"attention": ("mask", "scale")})
    said = {
        "name": "mine",
        "version": "2",
        "dtypes": ["float16"],
        "grouped_heads": False,
        "classes": {"float16": "fused"},
    }
    found = read_description(BytesIO(line({**DESCRIBED, **said})))
    assert (found.name, found.version, found.dtypes, found.grouped_heads) == ("mine", "2", ("float16",), False)
    assert found.classes == {"float16": "fused"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"attncheck": 2}, 'expected "attncheck": 1'),
        ({"functions": None}, 'expected "functions", such as'),
        ({"functions": {"attention": "mask"}}, 'expected "functions", such as'),
        ({"dtypes": ["f32"]}, "unknown dtype 'f32'"),
        ({"dtypes": "float32"}, "dtypes: expected a list; got 'float32'"),
        ({"grouped_heads": 1}, "grouped_heads: expected true or false; got 1"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_a_description_that_is_none_says_what_was_expected(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read_description(BytesIO(line({**DESCRIBED, **changed})))


def test_a_header_without_end_is_not_read_for_ever() -> None:
    stream = BytesIO(b"x" * 10 * MAX_HEADER)
    with pytest.raises(ProtocolError):
        read_header(stream)
    assert stream.tell() <= MAX_HEADER + 1
