"""attncheck from Python: one call that says whether a function is attention, one case explained, and calls captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

import attncheck
from attncheck import check
from attncheck.backends import numpy_backend
from attncheck.dtypes import numpy_dtype
from attncheck.errors import UsageError
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases

pytestmark = pytest.mark.usefixtures("forked_workers")

Array = NDArray[Any]

PLAIN = "attention/every-dimension-is-different-and-none-is-forgotten"


def attention(
    query: Array, key: Array, value: Array, *, mask: Array | None = None, scale: float | None = None
) -> Array:
    output: Array = numpy_backend.attention(query, key, value, mask=mask, scale=scale)["output"]
    return output


def test_a_right_function_agrees_and_a_wrong_one_is_explained_and_the_rest_counted(tmp_path: Path) -> None:
    result = check(attention, cases=["attention/[a-e]*"], dtypes=["float64"], output=tmp_path / "kept")
    assert result.agrees
    assert result.explain().splitlines()[0] == result.headline
    assert set(result.frames.results["verdict"]) == {"agree", "unsupported"}
    assert (tmp_path / "kept" / "summary.json").is_file()
    result = check(lambda query, key, value: attention(query, key, value, scale=1.0), cases=["attention/e*"])
    assert not result.agrees
    assert (PLAIN, "float32", "numeric") in {(row.case, row.dtype, row.verdict) for row in result.failures}
    told = result.explain(most=1)
    assert ("exact" in told, "more that fail" in told) == (True, True)


# Calls that are captured


def attend(query: Array, key: Array, value: Array, mask: Array | None = None, **more: Any) -> Array:
    """Stand for a model's own attention: what it computes does not matter here."""
    width = getattr(value, "shape", (1,))[-1]
    return np.resize(query * 2, (*query.shape[:-1], width)).astype(query.dtype)


def arrays(dtype: Any = np.float32, queries: int = 3, keys: int = 5) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(11)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6))
    query, key, value = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return query, key, value


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", attncheck.CaptureWarning)
        yield


def only_case(folder: Path) -> Case:
    selection = select_cases([folder.name], base=folder.parent)
    assert selection.faults == ()
    [case] = selection.cases
    return case


def numbers(case: Case, dtype: str | None = None) -> dict[str, Array]:
    return dict(convert_inputs(case, make_exact_inputs(case), dtype or case.dtypes[0]).arrays)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_call_becomes_a_case_with_the_same_bits(dtype: str, tmp_path: Path) -> None:
    given = dict(zip(("query", "key", "value"), arrays(numpy_dtype(dtype)), strict=True))
    attention = attncheck.capture(attend, tmp_path / "captured")
    output = attention(given["query"], given["key"], value=given["value"], is_causal=True, scale=0.5, softcap=3.0)
    assert output.tobytes() == attend(**given).tobytes()
    assert attention.files == [tmp_path / "captured" / "attend-1.yaml"]
    case = only_case(tmp_path / "captured")
    assert (case.name, case.dtypes) == ("Call 1 of attend", (dtype,))
    assert dict(case.options) == {"is_causal": True, "scale": 0.5, "softcap": 3.0}
    assert {name: array.tobytes() for name, array in numbers(case).items()} == {
        name: array.tobytes() for name, array in given.items()
    }
    (expected,) = case.expected
    assert (expected.of, expected.stored, case.computed_in) == ("output", True, dtype)
    assert expected.numbers is not None
    np.testing.assert_array_equal(np.asarray(expected.numbers.value), output.astype(float))


def test_masks_lengths_windows_and_other_names_are_understood(tmp_path: Path) -> None:
    query, key, value = arrays()
    allowed, lengths = np.tri(3, 5, dtype=bool), np.array([5, 2])

    def flash(q: Array, k: Array, v: Array, **more: Any) -> Array:
        return q[..., :6]

    bias = np.where(allowed, 1, -np.inf).astype(np.float32)
    more = {"attn_mask": allowed, "attn_bias": bias, "key_lengths": lengths}
    layout = [each.swapaxes(1, 2) for each in (query, key, value)]
    attention = attncheck.capture(flash, tmp_path / "x", layout="length_first", alignment="bottom_right")
    attention(*layout, causal=True, softmax_scale=0.25, window_size=(4, -1), softcap=0.0, dropout_p=0.0, **more)
    case = only_case(tmp_path / "x")
    assert dict(case.options) == {"is_causal": True, "scale": 0.25, "window": (4, None), "alignment": "bottom_right"}
    found = numbers(case)
    np.testing.assert_array_equal(found["key"], key)
    np.testing.assert_array_equal(found["mask"][0, 0], allowed)
    assert found["mask"].dtype == bool
    np.testing.assert_array_equal(found["bias"][0, 0], bias)
    np.testing.assert_array_equal(found["key_lengths"], lengths)
    assert case.notes == ()
    attncheck.capture(attend, tmp_path / "y")(query, key, value, mask=bias)  # a mask of numbers
    np.testing.assert_array_equal(numbers(only_case(tmp_path / "y"))["bias"][0, 0], bias)


def test_what_cannot_be_said_is_left_out_and_told(tmp_path: Path) -> None:
    query, key, value = arrays(np.float16)
    bias = np.ones((3, 5), np.float32)
    with pytest.warns(attncheck.CaptureWarning) as told:
        attncheck.capture(attend, tmp_path / "x")(query, key, value, dropout_p=0.1, block_table=[1], attn_bias=bias)
    case = only_case(tmp_path / "x")
    assert case.notes == (
        "dropout_p=0.1 has no meaning in a case",
        "block_table=list has no meaning in a case",
        "bias is of float32, and rounded to float16 in the case",
    )
    assert [str(each.message) for each in told] == [
        f"attend-1.yaml is not the whole call: {note}" for note in case.notes
    ]
    assert {Path(each.filename).name for each in told} == {Path(__file__).name}


def test_what_is_no_case_or_cannot_be_written_is_told_and_the_model_goes_on(tmp_path: Path) -> None:
    query, key, value = arrays()

    def projected(query: Array, key: Array, value: Array) -> Array:
        return query @ np.ones((8, 3), np.float32)

    def broken(query: Array, key: Array, value: Array) -> Array:
        raise ZeroDivisionError

    calls: tuple[tuple[Callable[..., Array], tuple[Any, ...], dict[str, Any], str], ...] = (
        (attend, (query, key), {"value": None}, "no argument is called value"),
        (attend, (query.astype(int), key, value), {}, "the query is of int64; expected one of"),
        (attend, (query, key[..., :3], value), {}, r"expected axis D of \(B, Hkv, Lk, D\) to be 8"),
        (attend, (query, key, SimpleNamespace()), {}, "a SimpleNamespace is no array of numpy"),
        (projected, (query, key, value), {}, r"returned \(2, 4, 3, 3\), and attention .* \(2, 4, 3, 6\)"),
    )
    for function, arguments, named, reason in calls:
        attention = attncheck.capture(function, tmp_path / "x")
        with pytest.warns(attncheck.CaptureWarning, match=f"was not captured: .*{reason}"):
            assert attention(*arguments, **named).shape[:3] == (2, 4, 3)
        assert attention.files == []
    assert list((tmp_path / "x").glob("*")) == []
    with pytest.warns(attncheck.CaptureWarning, match="was not captured: FileExistsError"):
        attncheck.capture(attend, __file__)(query, key, value)
    with pytest.raises(ZeroDivisionError):
        attncheck.capture(broken, tmp_path / "x")(query, key, value)
    assert only_case(tmp_path / "x").name == "Call 1 of broken", "a call that fails fails as ever, and is captured"


@pytest.mark.usefixtures("quiet")
def test_the_first_calls_are_taken_and_nothing_is_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        attention = attncheck.capture(attend, tmp_path / "x", calls=2)
        for queries in (1, 2, 3):
            attention(*arrays(queries=queries))
        assert len(attention.files) == 2
    cases = select_cases(["x"], base=tmp_path).cases
    assert [case.input_shapes["query"][2] for case in cases] == [1, 2, 1, 2]


def test_what_cannot_be_captured_is_refused_at_once(tmp_path: Path) -> None:
    method = MethodType(attend, SimpleNamespace(state_dict=dict))
    refused: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (3, {}, "expected"),
        (attend, {"layout": "bhld"}, "expected"),
        (attend, {"calls": 0}, "expected"),
        (method, {}, "capture the function that it calls"),
    )
    for function, more, message in refused:
        with pytest.raises(UsageError, match=message):
            attncheck.capture(function, tmp_path, **more)


@pytest.mark.torch
def test_calls_of_torch_are_captured(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    query, key, value = (torch.from_numpy(each).to(torch.bfloat16).requires_grad_() for each in arrays())
    allowed = torch.ones(3, 5, dtype=torch.bool).tril()
    captured = attncheck.capture(functional.scaled_dot_product_attention, tmp_path / "x")
    with mock.patch.object(functional, "scaled_dot_product_attention", captured):
        output = functional.scaled_dot_product_attention(query, key, value, allowed, 0.0, scale=0.5, enable_gqa=True)
    assert output.shape == (2, 4, 3, 6)
    case = only_case(tmp_path / "x")
    assert (case.dtypes, dict(case.options)) == (("bfloat16",), {"scale": 0.5})
    found = numbers(case)
    assert found["key"].tobytes() == key.detach().view(torch.uint16).numpy().tobytes()
    np.testing.assert_array_equal(found["mask"][0, 0], allowed.numpy())
