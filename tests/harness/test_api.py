"""attncheck from Python: one call that says whether a function is attention and why not, and calls that it captures."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from here import own_code_here
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tables import tables_beside

import attncheck
from attncheck import ask, check, explain
from attncheck.asking.again import calls_before, find_minimal_sequence
from attncheck.backends import numpy_backend
from attncheck.common.errors import AttncheckError, UsageError
from attncheck.common.store import CACHE_VARIABLE
from attncheck.diagnosis import examine as examining
from attncheck.diagnosis.failing_evaluations import ReturnedStagesLookup
from attncheck.diagnosis.run import MIN_CONFIRMING_CASES
from attncheck.execution.worker import Computed
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_inputs
from attncheck.reading.selection import select_cases
from attncheck.results.format import Row, StoredArray
from attncheck.results.last_failed import FailureLimit
from attncheck.results.writer import ResultsWriter
from attncheck.spec.dtypes import numpy_dtype

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
    return dict(make_inputs(case, dtype or case.dtypes[0]).arrays)


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


def test_a_mask_of_0_and_minus_infinity_is_captured_as_a_boolean_mask(tmp_path: Path) -> None:
    query, key, value = arrays()
    allowed = np.tri(3, 5, 1, dtype=bool)
    additive = np.where(allowed, 0, -np.inf).astype(np.float32)
    attncheck.capture(attend, tmp_path / "x")(query, key, value, attn_mask=additive)
    captured = numbers(only_case(tmp_path / "x"))
    assert ("bias" in captured, captured["mask"].dtype) == (False, bool)
    np.testing.assert_array_equal(captured["mask"][0, 0], allowed)
    odd = np.array([True, True, False, True, True])
    attncheck.capture(attend, tmp_path / "y")(query, key, value, mask=odd[None], attn_bias=additive)
    np.testing.assert_array_equal(numbers(only_case(tmp_path / "y"))["mask"][0, 0], allowed & odd)
    additive[0] = -np.inf  # a row without a key: its output depends on the kind of the mask
    attncheck.capture(attend, tmp_path / "z")(query, key, value, attn_mask=additive)
    assert "mask" not in numbers(only_case(tmp_path / "z"))


def test_a_capture_that_nothing_calls_warns_at_its_end(tmp_path: Path) -> None:
    captures = [attncheck.capture(attend, tmp_path / "x")]
    with pytest.warns(attncheck.CaptureWarning, match="no call of attend was captured: .*need_weights=False") as told:
        captures.clear()
    assert Path(told[0].filename).name == Path(__file__).name


def test_what_cannot_be_said_is_left_out_and_told(tmp_path: Path) -> None:
    query, key, value = arrays(np.float16)
    bias = np.ones((3, 5), np.float32)
    with pytest.warns(attncheck.CaptureWarning) as told:
        attncheck.capture(attend, tmp_path / "x")(query, key, value, dropout_p=0.1, block_table=[1], attn_bias=bias)
    case = only_case(tmp_path / "x")
    assert case.notes == (
        "a case cannot express dropout_p=0.1",
        "a case cannot express block_table=list",
        "bias has dtype float32, and is rounded to float16 in the case",
    )
    assert [str(each.message) for each in told] == [
        f"attend-1.yaml is not the complete call: {note}" for note in case.notes
    ]
    assert {Path(each.filename).name for each in told} == {Path(__file__).name}


def test_what_is_no_case_or_cannot_be_written_is_told_and_the_model_goes_on(tmp_path: Path) -> None:
    query, key, value = arrays()

    def projected(query: Array, key: Array, value: Array) -> Array:
        return query @ np.ones((8, 3), np.float32)

    def broken(query: Array, key: Array, value: Array) -> Array:
        raise ZeroDivisionError

    calls: tuple[tuple[Callable[..., Array], tuple[Any, ...], dict[str, Any], str], ...] = (
        (attend, (query, key), {"value": None}, "expected an argument named value"),
        (attend, (query.astype(int), key, value), {}, "the query has dtype int64; expected one of"),
        (attend, (query, key[..., :3], value), {}, r"expected axis D of \(B, Hkv, Lk, D\) to be 8"),
        (attend, (query, key, SimpleNamespace()), {}, "a SimpleNamespace is no array of numpy"),
        (projected, (query, key, value), {}, r"expected an output of shape \(2, 4, 3, 6\), got \(2, 4, 3, 3\)"),
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


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_the_fewest_calls_are_exactly_those_that_it_takes(given: tuple[int, set[int]]) -> None:
    length, needed = given
    failing: list[Sequence[int]] = [range(length)]

    def fails_after(calls: Sequence[int]) -> bool:
        if fails := needed <= set(calls):
            failing.append(calls)
        return fails

    sequence, is_minimal = find_minimal_sequence(range(length), fails_after)
    assert is_minimal
    assert list(sequence) == list(failing[-1]) == sorted(needed)


def test_what_was_asked_before_begins_behind_the_last_death_and_has_the_same_process_alone() -> None:
    asked = dict.fromkeys(
        [("a", "float64"), ("a", "float32"), ("b", "float32"), ("c", "float16"), ("d", "float32")], ""
    )
    place, dtypes = ("d", "float32"), ("float64", "float32")
    assert calls_before(asked, place, dtypes) == [("a", "float64"), ("a", "float32"), ("b", "float32")]
    asked["a", "float64"] = "crash: the worker process was ended by SIGKILL"
    assert calls_before(asked, place, dtypes) == [("a", "float32"), ("b", "float32")]
    asked["b", "float32"] = "timeout: not done after 1 s"
    assert calls_before(asked, place, dtypes) == []
    assert calls_before(asked, ("gone", "float32"), dtypes) == []


# One question


def with_default_scale(query: Array, key: Array, value: Array, *, scale: float | None = None) -> Array:
    return attention(query, key, value)


@pytest.fixture
def code_here() -> Iterator[None]:
    """The function runs in this process: a worker would have to import this module, and all that it needs."""
    with own_code_here():
        yield


def call_of(dtype: str, width: int = 8) -> dict[str, Any]:
    random = np.random.default_rng(4)
    return {each: random.normal(size=(1, 2, 5, width)).astype(dtype) for each in ("query", "key", "value")}


@pytest.mark.usefixtures("code_here")
def test_a_question_with_arrays_of_ones_own_is_judged_by_its_exact_answer() -> None:
    inputs = {**call_of("float32"), "value": call_of("float32", width=6)["value"]}
    right, wrong = (ask(each, inputs=inputs, options={"scale": 0.5}) for each in (attention, with_default_scale))
    assert right.agrees
    assert {row.stage for row in right.rows} == {"output"}
    assert not wrong.agrees
    assert wrong.diagnosis == "scale-default"
    assert "error/bound" in explain(wrong)


def with_scale_of_all_heads(query: Array, key: Array, value: Array) -> Array:
    return attention(query, key, value, scale=(query.shape[1] * query.shape[3]) ** -0.5)


@pytest.mark.usefixtures("code_here")
def test_one_question_gets_the_diagnosis_of_a_check_of_one_case() -> None:
    case = "attention/every-dimension-is-different-and-none-is-forgotten"
    checked = check(with_scale_of_all_heads, cases=[case]).failures
    assert {row.diagnosis for row in checked} == {ask(with_scale_of_all_heads, case).diagnosis}
    assert checked[0].diagnosis == "scale-inverse-root-of-3D or scale-inverse-root-of-HD"


def test_a_case_is_asked_in_float32_unless_another_dtype_is_wanted() -> None:
    case = "softcap/scores-at-the-cap-at-its-half-and-at-nought"
    assert [ask("numpy", case, dtype=dtype).question.key for dtype in (None, "float64")] == [
        (case, "float32"),
        (case, "float64"),
    ]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({}, "either a case or inputs"),
        ({"case": PLAIN, "options": {"scale": 2.0}}, "belong to inputs"),
        ({"inputs": {}}, "query, key and value missing"),
        ({"inputs": [1, 2]}, "expected a mapping by name"),
        ({"inputs": call_of("float32"), "options": ["scale"]}, "options: expected a mapping"),
        ({"inputs": call_of("float32"), "operation": "atention"}, "did you mean attention?"),
        ({"inputs": call_of("float32") | {"quary": 1}}, "unknown 'quary'; did you mean query?"),
        ({"inputs": call_of("int64")}, "query is int64; say with dtype"),
        ({"inputs": call_of("float32") | {"key": call_of("float16")["key"]}}, "query float32, key float16"),
        ({"inputs": call_of("complex64"), "dtype": "float32"}, "query: expected real numbers; got complex64"),
        ({"inputs": call_of("float32") | {"query": [[1], [1, 2]]}}, "inputs: query: "),
        ({"inputs": call_of("float32") | {"mask": np.zeros((1, 1, 5, 5))}}, "are the input bias"),
        ({"inputs": call_of("float32") | {"key_lengths": np.ones(1)}}, "expected whole numbers"),
        ({"inputs": call_of("float32"), "dtype": "float8"}, "dtype: unknown 'float8'"),
        ({"inputs": call_of("float32"), "options": {"colour": 1}}, "colour"),
        ({"inputs": call_of("float32") | {"value": np.ones((1, 2, 6, 8), np.float32)}}, "Lk"),
    ],
)
def test_a_question_that_is_none_is_refused(call: Any, says: str) -> None:
    with pytest.raises(AttncheckError, match=re.escape(says)):
        ask("numpy", **call)


@pytest.mark.usefixtures("code_here")
def test_an_answer_can_be_asked_again_and_an_input_may_be_none() -> None:
    answer = ask(attention, inputs={**call_of("float32", 64), "mask": None})
    again = ask(attention, answer.question)
    assert (again.agrees, again.rows) == (True, answer.rows)


def giving_nan(query: Array, key: Array, value: Array, *, mask: Array | None = None) -> Array:
    output = numpy_backend.attention(query, key, value, mask=mask, empty_rows="nan")["output"]
    return np.asarray(output)


@pytest.mark.usefixtures("code_here")
@pytest.mark.parametrize(("declared", "agrees"), [({"empty_rows": "nan"}, True), ({}, False)])
def test_what_a_function_declares_is_no_disagreement(
    declared: dict[str, str], agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_nan, "conventions", declared, raising=False)
    mask = np.ones((1, 1, 5, 5), np.bool_)
    mask[..., 2, :] = False
    assert ask(giving_nan, inputs=call_of("float32") | {"mask": mask}).agrees is agrees


@pytest.mark.usefixtures("code_here")
def test_a_function_without_an_option_does_not_agree_with_a_call_that_needs_it() -> None:
    answer = ask(attention, inputs=call_of("float32"), options={"softcap": 2.0})
    assert (answer.agrees, answer.fails, answer.is_unsupported) == (False, False, True)


# What failing cases say together

TEXTS = tables_beside(__file__)["diagnosing"]


def ignoring_causality(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
    return np.asarray(numpy_backend.attention(query, key, value)["output"])


def write_causal(folder: Path, lengths: Sequence[int]) -> str:
    """Write a case for each number of queries into a folder."""
    texts = [
        TEXTS["of_queries"].replace("NAME", f"Queries {n}" + " again" * (n in lengths[:at]))
        for at, n in enumerate(lengths)
    ]
    cases = [text.replace("LENGTH", str(n)) for text, n in zip(texts, lengths, strict=True)]
    folder.mkdir()
    (folder / "causal.yaml").write_text(TEXTS["causal"] + "".join(cases), encoding="utf-8")
    return str(folder)


@pytest.fixture
def causal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write eleven cases, with two to twelve queries, into a folder."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with own_code_here():
        yield write_causal(tmp_path / "cases", range(2, 13))


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases that are diagnosed by exact arithmetic."""
    found: list[str] = []
    examine = examining.judge_and_diagnose_outcome

    def noted(blank: Row, case: Case, *arguments: Any, **keywords: Any) -> Any:
        found.append(case.id)
        return examine(blank, case, *arguments, **keywords)

    monkeypatch.setattr(examining, "judge_and_diagnose_outcome", noted)
    return found


def test_the_simplest_cases_are_examined_once_after_all_verdicts_and_what_they_name_is_handed_on(
    causal: str, examined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    see = FailureLimit.record_rows

    def noted(self: FailureLimit, rows: Any) -> bool:
        seen.append(len(examined))
        return see(self, rows)

    monkeypatch.setattr(FailureLimit, "record_rows", noted)
    result = check(ignoring_causality, cases=[causal])
    assert seen == [0] * 11
    assert {(row.verdict, row.diagnosis) for row in result.failures} == {("numeric", "causality-ignored")}
    rows = result.frames.results
    assert (set(rows["verdict"]), set(rows["diagnosis"])) == ({"numeric"}, {"causality-ignored"})
    assert all(message.startswith("causality is ignored; ") for message in rows["message"])
    assert len(examined) == MIN_CONFIRMING_CASES
    assert check(ignoring_causality, cases=[causal]).failures == result.failures
    assert len(examined) == MIN_CONFIRMING_CASES, "what two runs have in common is diagnosed once"


def test_a_case_that_a_name_does_not_explain_is_examined_and_has_no_name(causal: str, examined: list[str]) -> None:
    def attention(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
        return ignoring_causality(query, key, value) + (query.shape[-2] == 12)

    failures = check(attention, cases=[causal]).failures
    names = {row.case.partition("causal/")[2]: row.diagnosis for row in failures}
    assert names.pop("queries-12") is None
    assert set(names.values()) == {"causality-ignored"}
    assert (examined[-1].partition("causal/")[2], len(examined)) == ("queries-12", MIN_CONFIRMING_CASES + 1)


def test_the_rest_has_no_name_where_the_simplest_cases_say_nothing(causal: str, examined: list[str]) -> None:
    def attention(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
        return np.random.default_rng(1).standard_normal(query.shape)

    failures = check(attention, cases=[causal]).failures
    assert ({row.diagnosis for row in failures}, len(failures), len(examined) < 11) == ({None}, 11, True)


@pytest.mark.usefixtures("causal")
def test_an_accuracy_that_only_large_cases_tell_is_that_of_the_small_ones_too(tmp_path: Path) -> None:
    def attention(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
        narrow = (each.astype(np.float32) for each in (query, key, value))
        return np.asarray(numpy_backend.attention(*narrow, is_causal=is_causal)["output"], np.float64)

    failures = check(attention, cases=[write_causal(tmp_path / "few", [1, 2, 3, 1, 2, 3, 16, 17, 18])]).failures
    assert [row.diagnosis for row in failures] == ["accuracy-of-float32"] * 9


@pytest.mark.usefixtures("causal")
def test_one_case_has_no_name_that_passing_cases_refute_beside_a_name_of_many(tmp_path: Path) -> None:
    def attention(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
        if query.shape[-2] >= 12:
            return ignoring_causality(query, key, value, is_causal=is_causal)
        behind = (key.shape[-2] - query.shape[-2]) * (query.shape[-2] == 11)
        allowed = np.tri(query.shape[-2], key.shape[-2], behind, dtype=bool)
        return np.asarray(numpy_backend.attention(query, key, value, mask=allowed[None, None])["output"])

    path = write_causal(tmp_path / "few", list(range(6, 18)))
    names = {int(row.case.rpartition("-")[2]): row.diagnosis for row in check(attention, cases=[path]).failures}
    assert names == {11: None, **dict.fromkeys(range(12, 18), "causality-ignored")}


def test_what_an_earlier_part_of_a_run_has_kept_is_read_from_its_folder(tmp_path: Path) -> None:
    output = np.arange(3.0)
    writer = ResultsWriter(tmp_path)
    writer.add_arrays([StoredArray("file/one", "float64", "kernel", "output", output)])
    writer.flush()
    returned = ReturnedStagesLookup(tmp_path, {("kernel", "file/two", "float64"): Computed({"output": output + 1})})
    for case, expected in (("file/one", output), ("file/two", output + 1)):
        found = returned(("kernel", case, "float64"))
        assert found is not None
        np.testing.assert_array_equal(found.stages["output"], expected)
    assert returned(("kernel", "file/three", "float64")) is None
    assert returned(("another", "file/one", "float64")) is None
