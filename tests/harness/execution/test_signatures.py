"""Functions that cannot be called as the contract says, what they lack for a case, and what they require of shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import tables_beside

from attncheck.backends import BACKENDS
from attncheck.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_callable, select_implementations
from attncheck.execution.implementations import Implementation, UserImplementation, entry_of
from attncheck.execution.operations import Task
from attncheck.execution.padding import lack_known_beforehand
from attncheck.execution.requirements import Requirements
from attncheck.execution.runner import Group, GroupRunner, task_of
from attncheck.execution.signatures import FunctionName, adapter, hints, misfits, required_keywords
from attncheck.execution.user_call import declarations, own_backend
from attncheck.execution.user_code import Target
from attncheck.execution.worker import Computed, Failure, Outcome, evaluate_on
from attncheck.plan import Plan
from attncheck.reading.selection import select_cases
from attncheck.spec import OPERATIONS

TABLES = tables_beside(__file__)

pytestmark = pytest.mark.usefixtures("forked_workers")

SOURCE = """
import numpy as np

def {name}({parameters}):
    scores = q @ np.swapaxes(k, -1, -2) * np.asarray(sm_scale, q.dtype)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v
"""


Invoke = Callable[..., tuple[int, str, str]]


def function(parameters: str, name: str = "my_attn") -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "my_kernel"}
    exec(SOURCE.format(name=name, parameters=parameters), names)
    found: Callable[..., Any] = names[name]
    return found


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"query": (1, 2, 4, 5), "key": (1, 2, 4, 5), "value": (1, 2, 4, 6)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def expected(scale: float, *, is_causal: bool) -> np.ndarray:
    query, key, value = inputs().values()
    scores = query @ np.swapaxes(key, -1, -2) * scale
    weights = np.exp(np.where(np.tri(4, dtype=bool), scores, -np.inf) if is_causal else scores)
    result: np.ndarray = weights / weights.sum(-1, keepdims=True) @ value
    return result


@pytest.mark.parametrize("parameters", TABLES["signatures"])
def test_what_does_not_fit_is_refused_and_its_adapter_computes_attention(parameters: str) -> None:
    kernel = function(parameters)
    assert misfits("attention", kernel)
    names: dict[str, Any] = {"my_attn": kernel}
    exec("\n".join(adapter(kernel, FunctionName("my_attn"), None)), names)
    assert not misfits("attention", names["attention"])
    assert not hints("attention", names["attention"])
    given = inputs()
    for options, scale, is_causal in (({}, 5**-0.5, False), ({"is_causal": True, "scale": 0.3}, 0.3, True)):
        np.testing.assert_allclose(
            names["attention"](*given.values(), **options), expected(scale, is_causal=is_causal), rtol=1e-12
        )


@pytest.mark.parametrize(("parameters", "told"), TABLES["misfits"])
def test_what_does_not_fit_is_named(parameters: str, told: list[str]) -> None:
    found = misfits("attention", function(parameters))
    assert len(found) == len(told)
    assert all(each in said for each, said in zip(told, found, strict=True))


def test_what_cannot_be_guessed_is_marked() -> None:
    lines = adapter(function("qkv, block_size, causal"), FunctionName("my_attn"), "torch")
    assert "    # FILL IN what stands as ...: qkv, block_size" in lines
    assert "    return my_attn(qkv=..., block_size=..., causal=is_causal)" in lines
    assert lines[-1] == 'attention.framework = "torch"'


@pytest.mark.parametrize(("parameters", "told"), TABLES["hints"])
def test_optional_parameters_that_nobody_gives_are_mentioned(parameters: str, told: list[str]) -> None:
    found = hints("attention", function(parameters))
    assert len(found) == len(told)
    assert all(said.startswith(each) for each, said in zip(told, found, strict=True))


def test_keywords_of_the_contract_without_a_default_are_given_what_the_contract_says() -> None:
    found = required_keywords("attention", function("q, k, v, mask, is_causal, *, scale, softcap=2.0"))
    assert found == {"mask": None, "is_causal": False, "scale": None}
    assert required_keywords("multi_head_attention", lambda q, k, v, heads, query_weight, scale: q) == {"scale": None}


def outcome_of(target: str, folder: Path, **options: object) -> Outcome:
    (found,) = select_implementations(None, [target]).implementations
    runner: GroupRunner[str] = GroupRunner(Group(found, ("float64",)), Limits(), folder)
    try:
        return runner.evaluate(Task("attention", options, inputs()))
    finally:
        runner.close()


def test_a_function_whose_keywords_are_all_required_runs(tmp_path: Path) -> None:
    text = SOURCE.format(name="attention", parameters="q, k, v, is_causal, scale")
    text = text.replace("if causal", "if is_causal").replace("sm_scale", "scale or q.shape[-1] ** -0.5")
    (tmp_path / "kernel.py").write_text(text, encoding="utf-8")
    outcome = outcome_of(f"{tmp_path / 'kernel.py'}:attention", tmp_path, is_causal=True)
    assert isinstance(outcome, Computed), outcome
    np.testing.assert_allclose(outcome.stages["output"], expected(5**-0.5, is_causal=True), rtol=1e-12)


def test_the_pasted_adapter_runs_under_the_name_that_is_told(tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "my_kernel.py"
    path.write_text(SOURCE.format(name="attention", parameters=TABLES["signatures"][0]), encoding="utf-8")
    arguments = ["check", "attention/e*", "attention/a-causal-row-s*", "--dtype", "float64", "--implementation"]
    code, _, said = invoke(*arguments, "my_kernel.py:attention")
    assert code == 2
    assert "cannot be called: it is attention(q, k, v, causal, sm_scale); expected attention(query, key" in said
    assert "What does not fit: causal, which it requires" in said
    (target,) = re.findall(r"and name (\S+) instead:\n\n", said)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n\n" + said.partition("instead:\n\n")[2])
    code, out, said = invoke(*arguments, target)
    assert code == 0, out + said
    assert re.search(r"my_kernel\.attention\S* +\d+ +- ", out), out


def test_the_adapter_of_a_package_imports_what_it_calls(tmp_path: Path, invoke: Invoke) -> None:
    (tmp_path / "flashy").mkdir()
    text = SOURCE.format(name="attention", parameters=TABLES["signatures"][1])
    (tmp_path / "flashy" / "__init__.py").write_text(text, encoding="utf-8")
    _, _, said = invoke("check", "attention/e*", "--implementation", "flashy:attention")
    assert "Put this adapter into a file, adapter.py say, and name adapter.py:attention instead:" in said
    (tmp_path / "adapter.py").write_text(said.partition("instead:\n\n")[2], encoding="utf-8")
    code, out, said = invoke("check", "attention/e*", "--implementation", "adapter.py:attention")
    assert code == 0, out + said


def test_of_what_is_handed_over_an_adapter_is_shown_and_of_another_function_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Hand over an adapter instead, attention:\n\ndef attention\(query"):
        select_callable(function(TABLES["signatures"][0]), None, None)
    text = "def softmax(x, axis): ...\ndef attention(query, key, value): ...\n"
    (tmp_path / "kernel.py").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as error:
        select_implementations(None, [str(tmp_path / "kernel.py")])
    assert "What does not fit: axis, which it requires. Name the function that is meant" in str(error.value)
    assert "def " not in str(error.value)
    assert select_implementations(None, [f"{tmp_path / 'kernel.py'}:attention"]).implementations


def test_what_nobody_gives_is_said_before_the_run_unless_it_is_quiet(tmp_path: Path, invoke: Invoke) -> None:
    (tmp_path / "kernel.py").write_text("def attention(query, key, value, causal=False):\n    return value\n")
    arguments = ("check", "attention/e*", "--dtype", "float64", "--implementation", "kernel.py:attention")
    assert "attncheck: kernel.attention: its causal is never given; if it is the contr" in invoke(*arguments)[2]
    assert "never given" not in invoke(*arguments, "--quiet")[2]


FAKE = """
class Tensor: ...
def softmax(tensor):
    raise TypeError("softmax(): argument 'input' must be Tensor, not numpy.ndarray")
"""


def test_one_that_cannot_use_numpy_s_arrays_is_told_to_declare_its_framework_and_no_other(tmp_path: Path) -> None:
    for name, body, begins in (
        ("torch", "return torch.softmax(query)", "TypeError: softmax"),
        ("tensorflow", "return query.masked_fill(0)", "AttributeError: 'numpy.ndarray'"),
        ("jax", "return query @ key.transpose(-2, -1)", "ValueError: axes"),
        ("torch", "raise ValueError('heads do not divide')", ""),
    ):
        (tmp_path / f"{name}.py").write_text(FAKE, encoding="utf-8")
        text = f"import {name}, numpy\ndef attention(query, key, value):\n    {body}\n"
        (tmp_path / "kernel.py").write_text(text, encoding="utf-8")
        outcome = outcome_of(f"{tmp_path / 'kernel.py'}:attention", tmp_path)
        if not begins:
            assert outcome == Failure("error", "ValueError: heads do not divide")
            continue
        assert isinstance(outcome, Failure)
        assert (outcome.verdict, outcome.message.startswith(begins)) == ("error", True), outcome
        assert f'attention.framework = "{name}" below it, or --framework {name}' in outcome.message


class Called(Exception):
    """The call came as far as somebody's code."""


def taking(parameters: str) -> Callable[..., Any]:
    """Return a function of these parameters that says so when it is called."""
    names: dict[str, Any] = {"Called": Called}
    exec(f"def function({parameters}):\n    raise Called", names)
    found: Callable[..., Any] = names["function"]
    return found


plain = taking("query, key, value")
usual = taking("query, key, value, *, mask=None, is_causal=False, scale=None")
TARGETS = {
    "plain": plain,
    "usual": usual,
    "without_mask": taking("query, key, value, *, is_causal=False, window=None"),
    "anything": taking("query, key, value, **options"),
    "several": SimpleNamespace(
        attention=usual,
        softmax=taking("scores"),
        attention_gradients=taking("query, key, value, grad_output, *, is_causal=False"),
    ),
}


def implementation_of(target: Any) -> Implementation:
    entry = entry_of(Target("kernels", "attention"), declarations(target, "attention"), None)
    assert isinstance(entry, UserImplementation)
    return Implementation(entry)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.of(select_cases([]).cases, ("float32", "float16"))


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_what_the_call_says(name: str, plan: Plan) -> None:
    target = TARGETS[name]
    implementation, backend = implementation_of(target), own_backend(target, "attention", BACKENDS["numpy"])
    known, left_to_the_call = 0, 0
    for unit in plan.units[:: 5 if name == "usual" else 23]:
        case = plan.case(unit)
        found = lack_known_beforehand(implementation, case, unit.dtype)
        task = task_of(case, plan.inputs(unit))
        outcome = evaluate_on(backend, task)  # type: ignore[arg-type] # it has those functions that the target has
        assert isinstance(outcome, Failure)
        if found is not None:
            assert found == outcome, case.id
            known += 1
        elif outcome.verdict == "unsupported" and not OPERATIONS[case.operation].is_folded:
            assert not outcome.lacks, case.id
        else:
            left_to_the_call += 1
    assert left_to_the_call
    assert known


def test_no_numbers_are_drawn_and_who_pads_is_always_asked(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attncheck.reading.inputs.make_exact_inputs", pytest.fail)

    restricted = taking("query, key, value")
    restricted.requires = {"width_multiple": 8}  # type: ignore[attr-defined]
    asked = [unit for unit in plan if plan.case(unit).operation == "attention"][:200]
    for implementation, is_known in (
        (implementation_of(plain), True),
        (implementation_of(usual), True),
        (implementation_of(restricted), False),
        (Implementation(BACKENDS["numpy"]), False),
    ):
        found = [lack_known_beforehand(implementation, plan.case(unit), unit.dtype) for unit in asked]
        assert any(found) is is_known


counts = st.integers(1, 40)


def test_the_smallest_width_that_is_taken() -> None:
    cases: tuple[tuple[dict[str, Any], dict[int, int | None]], ...] = (
        ({}, {1: 1, 7: 7}),
        ({"widths": [64, 16, 128]}, {3: 16, 16: 16, 17: 64, 128: 128, 129: None}),
        ({"width_multiple": 16, "max_width": 40}, {32: 32, 33: None}),
        ({"width_multiple": 32, "widths": (16, 64)}, {3: 64}),
    )
    for declared, widths in cases:
        found = Requirements.of(declared)
        assert {width: found.width(width) for width in widths} == widths


def test_the_smallest_lengths_that_are_taken() -> None:
    cases: tuple[tuple[dict[str, Any], tuple[int, int], tuple[int, int]], ...] = (
        ({}, (3, 5), (3, 5)),
        ({"query_length_multiple": 4}, (3, 5), (4, 5)),
        ({"key_length_multiple": 4}, (3, 5), (3, 8)),
        ({"lengths": "equal"}, (3, 5), (5, 5)),
        ({"lengths": "equal", "query_length_multiple": 4, "key_length_multiple": 6}, (13, 5), (24, 24)),
        ({"query_length_multiple": 16, "key_length_multiple": 16}, (0, 0), (0, 0)),  # nothing is a whole tile
    )
    for declared, lengths, taken in cases:
        assert Requirements.of(declared).query_and_key_length(*lengths) == taken


@pytest.mark.parametrize(("declared", "message"), TABLES["requirements"])
def test_what_cannot_be_meant_is_refused_with_what_was_expected(declared: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"requires: {message}"):
        Requirements.of(declared)


@given(counts, counts, counts, st.booleans())
def test_a_width_is_the_smallest_that_meets_it(multiple: int, least: int, width: int, has_limit: bool) -> None:
    limit = {"max_width": least + 3 * multiple} if has_limit else {}
    found = Requirements.of({"width_multiple": multiple, "min_width": least, **limit})
    taken = [each for each in range(1, 200) if each % multiple == 0 and least <= each <= limit.get("max_width", 200)]
    assert found.width(width) == next((each for each in taken if each >= width), None)
