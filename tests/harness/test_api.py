"""attncheck from Python: one call that says whether a function is attention, one case explained, and calls captured."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import attncheck
from attncheck import check
from attncheck.backends import BACKENDS, BackendEntry
from attncheck.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.explain import explain_case, find_implementation
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases, select_one
from attncheck.reports.explanation import print_explanation

pytestmark = pytest.mark.usefixtures("forked_workers")

Array = NDArray[Any]

PLAIN = "attention/every-dimension-is-different-and-none-is-forgotten"


def attention(
    query: Array, key: Array, value: Array, *, mask: Array | None = None, scale: float | None = None
) -> Array:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(factor, query.dtype)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    output: Array = weights / np.where(total == 0, 1, total) @ value
    return output


def test_a_right_function_agrees_and_says_what_it_was_not_asked(tmp_path: Path) -> None:
    result = check(attention, cases=["attention/[a-e]*"], dtypes=["float64"], output=tmp_path / "kept")
    assert result.agrees
    assert result.explain().splitlines()[0] == result.headline
    verdicts = result.frames.results["verdict"]
    assert set(verdicts) == {"agree", "unsupported"}
    assert (tmp_path / "kept" / "summary.json").is_file()


def test_a_wrong_one_does_not_and_the_explanation_names_case_stage_and_element_and_counts_the_rest() -> None:
    result = check(lambda query, key, value: attention(query, key, value, scale=1.0), cases=["attention/e*"])
    assert not result.agrees
    verdicts = {(row.case, row.dtype): row.verdict for row in result.failures}
    assert len(verdicts) > 1
    assert verdicts[PLAIN, "float32"] == "numeric"
    told = result.explain(most=1)
    assert "exact" in told
    assert "more that fail" in told


@pytest.fixture(scope="module")
def case() -> Case:
    return select_one(PLAIN)[0]


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Implementation]:
    """A NumPy backend in which one function is replaced."""

    def make(source: str) -> Implementation:
        head = (
            "from attncheck.backends import numpy_backend as reference",
            "from attncheck.backends.numpy_backend import *",
        )
        (tmp_path / "faulty_for_explain.py").write_text("\n".join([*head, source]), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        return Implementation(BackendEntry("faulty", "faulty_for_explain", ("numpy",)))

    return make


def test_an_honest_implementation_is_within_its_bounds_at_every_stage(case: Case) -> None:
    explanation = explain_case(case, find_implementation("numpy"), "float32", Limits())
    assert {judgement.stage: str(judgement.verdict) for judgement in explanation.judgements} == dict.fromkeys(
        ("raw_scores", "scores", "weights", "log_sum_exp", "output"), "agree"
    )
    assert explanation.begins_at == explanation.failure == explanation.outside == ""


def test_where_it_begins_or_what_was_raised_is_told(
    case: Case, faulty: Callable[[str], Implementation], capsys: pytest.CaptureFixture[str]
) -> None:
    head = "def attention(query, key, value, **options):\n    "
    off = 'options["scale"] = (1 + 1e-5) / query.shape[-1] ** 0.5'
    off += "\n    return reference.attention(query, key, value, **options)"
    tags = select_cases([PLAIN]).tags
    explanation = explain_case(case, faulty(head + off), "float32", Limits())
    assert explanation.begins_at == "scores"
    print_explanation(explanation, tags)
    told = capsys.readouterr().out
    assert all(words in told for words in ("It goes wrong at scores:", "computed", "exact", "<- begins here"))
    assert "0x" not in told
    explanation = explain_case(case, faulty(f"{head}raise ValueError('no attention today')"), "float32", Limits())
    assert explanation.failure == "error: ValueError: no attention today"
    print_explanation(explanation, tags)
    assert "no attention today" in capsys.readouterr().out


def test_an_implementation_is_found_by_its_name_or_its_backends() -> None:
    assert find_implementation("numpy") == find_implementation("numpy.eager") == Implementation(BACKENDS["numpy"])
    for name in ("numpy.fast", "nothing"):
        with pytest.raises(UsageError, match="no implementation is called"):
            find_implementation(name)


def attend(query: Array, key: Array, value: Array, mask: Array | None = None, **more: Any) -> Array:
    """Stand for a model's own attention: what it computes does not matter here."""
    width = getattr(value, "shape", (1,))[-1]
    return np.resize(query * 2, (*query.shape[:-1], width)).astype(query.dtype)


def honest(query: Array, key: Array, value: Array) -> Array:
    key, value = np.repeat(key, 2, 1), np.repeat(value, 2, 1)
    weights = np.exp(query @ key.swapaxes(-1, -2) * query.dtype.type(8**-0.5))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ value)


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
def test_a_call_becomes_a_case_with_the_same_bits(tmp_path: Path) -> None:
    query, key, value = arrays()
    attention = attncheck.capture(attend, tmp_path / "captured")
    output = attention(query, key, value=value, is_causal=True, scale=0.5, softcap=3.0)
    np.testing.assert_array_equal(output, attend(query, key, value))
    assert attention.files == [tmp_path / "captured" / "attend-1.yaml"]
    case = only_case(tmp_path / "captured")
    assert case.name == "Call 1 of attend"
    assert dict(case.options) == {"is_causal": True, "scale": 0.5, "softcap": 3.0}
    assert case.dtypes == ("float32",)
    found = numbers(case)
    for name, array in (("query", query), ("key", key), ("value", value)):
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    (expected,) = case.expected
    assert (expected.of, expected.stored, case.computed_in) == ("output", True, "float32")
    assert expected.numbers is not None
    np.testing.assert_array_equal(np.asarray(expected.numbers.value, np.float32), output)


def test_what_is_not_attention_of_its_shapes_is_refused_in_words(tmp_path: Path) -> None:
    def projected(query: Array, key: Array, value: Array) -> Array:
        return query @ np.ones((8, 3), np.float32)

    with pytest.warns(attncheck.CaptureWarning, match=r"returned \(2, 4, 3, 3\), and attention .* \(2, 4, 3, 6\)"):
        attncheck.capture(projected, tmp_path / "x")(*arrays())
    module = SimpleNamespace(state_dict=dict)
    with pytest.raises(UsageError, match=r"capture the function that it calls"):
        attncheck.capture(MethodType(attend, module), tmp_path / "x")
    assert not list(tmp_path.glob("x/*"))


@pytest.mark.usefixtures("quiet")
def test_every_dtype_is_kept(tmp_path: Path) -> None:
    for dtype in ("float64", "float16", "bfloat16"):
        query, key, value = arrays(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        attncheck.capture(attend, tmp_path / dtype)(query, key, value)
        case = only_case(tmp_path / dtype)
        assert case.dtypes == (dtype,)
        assert numbers(case)["query"].tobytes() == query.tobytes()


def attention_of(layout: str, offset: int) -> Any:
    """Causal attention with arrays in a layout, whose first query stands at a key."""

    def attend(query: Array, key: Array, value: Array, is_causal: bool = True) -> Array:
        turned = layout == "length_first"
        query, key, value = (each.swapaxes(1, 2) if turned else each for each in (query, key, value))
        scores = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5
        weights = np.exp(np.where(np.tri(*scores.shape[-2:], offset, dtype=bool), scores, -np.inf))
        output: Array = (weights / weights.sum(-1, keepdims=True) @ value).astype(query.dtype)
        return output.swapaxes(1, 2) if turned else output

    return attend


def test_a_call_that_means_another_layout_or_alignment_is_told_how_to_be_captured(tmp_path: Path) -> None:
    query, key, value = np.random.default_rng(1).normal(size=(3, 2, 4, 5, 6)).astype("float32")
    told = {}
    for layout, offset in product(("heads_first", "length_first"), (0, 2)):
        given = [query[:, :, :3] if layout == "heads_first" else query[:, :2], key, value]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attncheck.capture(attention_of(layout, offset), tmp_path / f"{layout}{offset}")(*given, is_causal=True)
        instead = re.compile(r"capture\(\.\.\., (.*)\) writes")
        told[layout, offset] = [found[1] for each in caught if (found := instead.search(str(each.message)))]
    assert told == {
        ("heads_first", 0): [],
        ("heads_first", 2): ['alignment="bottom_right"'],
        ("length_first", 0): ['layout="length_first"'],
        ("length_first", 2): ['layout="length_first", alignment="bottom_right"'],
    }


def test_masks_lengths_windows_and_other_names_are_understood(tmp_path: Path) -> None:
    query, key, value = arrays()
    allowed, lengths = np.tri(3, 5, dtype=bool), np.array([5, 2])

    def flash(q: Array, k: Array, v: Array, **more: Any) -> Array:
        return q[..., :6]

    more = {"attn_mask": allowed, "attn_bias": np.ones((3, 5), np.float32), "key_lengths": lengths}
    layout = [each.swapaxes(1, 2) for each in (query, key, value)]
    attention = attncheck.capture(flash, tmp_path / "x", layout="length_first", alignment="bottom_right")
    attention(*layout, causal=True, softmax_scale=0.25, window_size=(4, -1), softcap=0.0, dropout_p=0.0, **more)
    case = only_case(tmp_path / "x")
    assert dict(case.options) == {"is_causal": True, "scale": 0.25, "window": (4, None), "alignment": "bottom_right"}
    found = numbers(case)
    np.testing.assert_array_equal(found["key"], key)
    np.testing.assert_array_equal(found["mask"][0, 0], allowed)
    assert found["mask"].dtype == bool
    np.testing.assert_array_equal(found["key_lengths"], lengths)
    assert case.notes == ()


@pytest.mark.usefixtures("quiet")
def test_a_mask_of_numbers_is_a_bias_and_infinity_is_kept(tmp_path: Path) -> None:
    query, key, value = arrays()
    mask = np.where(np.tri(3, 5, dtype=bool), 0, -np.inf).astype(np.float32)
    attncheck.capture(attend, tmp_path / "x")(query, key, value, mask=mask)
    np.testing.assert_array_equal(numbers(only_case(tmp_path / "x"))["bias"][0, 0], mask)


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
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
        ((query, key), {"value": None}, "no argument is called value"),
        ((query.astype(int), key, value), {}, "the query is of int64; expected one of"),
        ((query, key[..., :3], value), {}, "expected axis D of (B, Hkv, Lk, D) to be 8"),
        ((query, key, SimpleNamespace()), {}, "a SimpleNamespace is no array of numpy"),
    )
    for arguments, named, reason in calls:
        attention = attncheck.capture(attend, tmp_path / "x")
        with pytest.warns(attncheck.CaptureWarning, match="a call of attend was not captured") as told:
            assert attention(*arguments, **named).shape[:3] == (2, 4, 3)
        assert reason in str(told[0].message)
        assert attention.files == []
    assert list((tmp_path / "x").glob("*")) == []
    (tmp_path / "file").write_text("a file")
    with pytest.warns(attncheck.CaptureWarning, match="was not captured: FileExistsError"):
        attncheck.capture(attend, tmp_path / "file")(query, key, value)


@pytest.mark.usefixtures("quiet")
def test_the_first_calls_are_taken_and_nothing_is_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        attention = attncheck.capture(attend, tmp_path / "x", calls=2)
        for queries in (1, 2, 3):
            attention(*arrays(queries=queries))
        assert len(attention.files) == 2
    cases = select_cases(["x"], base=tmp_path).cases
    assert [case.input_shapes["query"][2] for case in cases] == [1, 2, 1, 2]


def test_a_call_that_fails_fails_as_ever(tmp_path: Path) -> None:
    def broken(query: Array, key: Array, value: Array) -> Array:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        attncheck.capture(broken, tmp_path / "x")(*arrays())
    assert only_case(tmp_path / "x").name == "Call 1 of broken"


def test_what_cannot_be_captured_is_refused_at_once(tmp_path: Path) -> None:
    refused: tuple[tuple[Any, dict[str, Any]], ...] = ((3, {}), (attend, {"layout": "bhld"}), (attend, {"calls": 0}))
    for function, more in refused:
        with pytest.raises(UsageError, match="expected"):
            attncheck.capture(function, tmp_path, **more)


def test_a_captured_call_is_checked(tmp_path: Path, invoke: Callable[..., tuple[int, str, str]]) -> None:
    model = SimpleNamespace(attention=honest)
    with mock.patch.object(model, "attention", attncheck.capture(model.attention, tmp_path / "captured")):
        model.attention(*arrays())
    assert model.attention is honest
    code, out, _ = invoke("check", "captured/", "--backend", "numpy")
    assert code == 0
    assert "numpy agrees with the exact answer. Judged 1 of 1 case" in out


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


@pytest.mark.jax
def test_calls_of_jax_are_captured_but_under_tracing(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    query, key, _ = (jax.numpy.asarray(each.swapaxes(1, 2)) for each in arrays())
    attention = attncheck.capture(jax.nn.dot_product_attention, tmp_path / "x", calls=2, layout="length_first")
    with pytest.warns(attncheck.CaptureWarning, match="was not captured: TracerArrayConversionError"):
        jax.jit(lambda *each: attention(*each))(query, key, key)
    attention(query, key, key, is_causal=True)
    case = only_case(tmp_path / "x")
    assert dict(case.options) == {"is_causal": True}
    np.testing.assert_array_equal(numbers(case)["query"], arrays()[0])


@pytest.mark.tensorflow
def test_calls_with_tensors_of_tensorflow_are_captured(tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    query, key, value = (tensorflow.cast(tensorflow.constant(each), tensorflow.bfloat16) for each in arrays())
    attncheck.capture(lambda query, key, value: query[..., :6], tmp_path / "x")(query, key, value)
    case = only_case(tmp_path / "x")
    assert case.dtypes == ("bfloat16",)
    assert numbers(case)["value"].tobytes() == value.numpy().tobytes()
