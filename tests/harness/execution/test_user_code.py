"""Somebody's own implementation: how it is named, what it declares, and what it may not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attncheck.errors import UsageError
from attncheck.execution.implementation_selection import select_callable, select_implementations, user_implementation
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.execution.runner import Group, GroupRunner
from attncheck.execution.user_code import Target
from attncheck.execution.worker import Computed, Failure, Outcome, Task

ATTENTION = """
import numpy as np

def attention(query, key, value, *, mask=None):
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(query.shape[-1] ** -0.5, query.dtype)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> str:
        path = tmp_path / "kernel.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def problem(**options: object) -> Task:
    rng = np.random.default_rng(7)
    inputs = {
        "query": rng.normal(size=(1, 2, 3, 5)),
        "key": rng.normal(size=(1, 2, 4, 5)),
        "value": rng.normal(size=(1, 2, 4, 6)),
    }
    return Task("attention", options, inputs)


def outcome_of(implementation: Implementation, task: Task, folder: Path, seconds: float = 30) -> Outcome:
    runner: GroupRunner[str] = GroupRunner(Group(implementation, ("float64",)), Limits(case_seconds=seconds), folder)
    try:
        return runner.evaluate(task)
    finally:
        runner.close()


def reference() -> np.ndarray:
    task = problem()
    query, key, value = (task.inputs[name] for name in ("query", "key", "value"))
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(5)
    weights = np.exp(scores)
    result: np.ndarray = weights / weights.sum(-1, keepdims=True) @ value
    return result


def test_a_function_of_a_file_is_called_and_its_array_is_the_output(write: Write, tmp_path: Path) -> None:
    (found,) = select_implementations(None, [f"{write(ATTENTION)}:attention"]).implementations
    assert found.name == "kernel.attention"
    outcome = outcome_of(found, problem(), tmp_path)
    assert isinstance(outcome, Computed)
    np.testing.assert_allclose(outcome.stages["output"], reference(), rtol=1e-13)


def test_its_own_parameter_names_and_a_function_of_another_name_do_not_matter(write: Write, tmp_path: Path) -> None:
    text = ATTENTION.replace("attention(query, key, value", "my_kernel(q, k, v").replace("key, -1", "k, -1")
    text = text.replace("query", "q").replace("@ value", "@ v")
    (found,) = select_implementations(None, [f"{write(text)}:my_kernel"]).implementations
    outcome = outcome_of(found, problem(), tmp_path)
    assert isinstance(outcome, Computed)
    np.testing.assert_allclose(outcome.stages["output"], reference(), rtol=1e-13)


def test_a_module_by_itself_offers_whatever_it_calls_as_the_contract_does(write: Write, tmp_path: Path) -> None:
    text = (
        ATTENTION
        + "\ndef softmax(scores):\n    e = np.exp(scores)\n    return {'weights': e / e.sum(-1, keepdims=True)}\n"
    )
    (found,) = select_implementations(None, [write(text)]).implementations
    scores = np.array([[[[0.0, 1.0]]]])
    outcome = outcome_of(found, Task("softmax", {}, {"scores": scores}), tmp_path)
    assert isinstance(outcome, Computed)
    np.testing.assert_allclose(outcome.stages["weights"].sum(), 1)


def test_what_is_no_parameter_is_unsupported(write: Write, tmp_path: Path) -> None:
    (found,) = select_implementations(None, [f"{write(ATTENTION)}:attention"]).implementations
    assert outcome_of(found, problem(softcap=3.0), tmp_path) == Failure("unsupported", "takes no softcap", ("softcap",))
    scores = Task("softmax", {}, {"scores": np.zeros((1, 1, 1, 2))})
    assert outcome_of(found, scores, tmp_path) == Failure("unsupported", "has no softmax", ("softmax()",))


@pytest.mark.parametrize(
    ("keywords", "missing"),
    [("*, mask=None", ("empty_rows",)), ("*, mask=None, empty_rows='zero'", ()), ("*, mask=None, **more", ())],
)
def test_a_convention_is_asked_of_who_has_a_keyword_for_it(
    write: Write, tmp_path: Path, keywords: str, missing: tuple[str, ...]
) -> None:
    text = ATTENTION.replace("*, mask=None", keywords)
    if not missing:
        text += (
            "    return np.full_like(output, {'nan': np.nan}.get(locals().get('more', locals())['empty_rows'], 0))\n"
        )
        text = text.replace("    return weights", "    output = weights")
    (found,) = select_implementations(None, [f"{write(text)}:attention"]).implementations
    outcome = outcome_of(found, problem(empty_rows="nan"), tmp_path)
    assert isinstance(outcome, Computed), outcome
    assert outcome.not_asked == missing
    assert bool(np.isnan(outcome.stages["output"]).all()) is not bool(missing)


def test_a_function_whose_third_input_is_no_value_is_not_looked_at_as_if_it_were(write: Write, tmp_path: Path) -> None:
    (found,) = select_implementations(
        None, [write("def general_scores(query, key, weight):\n    return query @ weight @ key.mT")]
    ).implementations
    inputs = {"query": np.ones((1, 1, 2, 3)), "key": np.ones((1, 1, 4, 5)), "weight": np.ones((3, 5))}
    outcome = outcome_of(found, Task("scoring", {"score": "general"}, inputs), tmp_path)
    assert isinstance(outcome, Computed), outcome
    np.testing.assert_array_equal(outcome.stages["scores"], np.full((1, 1, 2, 4), 15.0))


def test_a_lambda_that_is_handed_over_runs_in_a_worker_too(tmp_path: Path) -> None:
    offset = 2.0
    found = select_callable(lambda query, key, value: np.zeros_like(query) + offset, None, None)
    outcome = outcome_of(found, problem(), tmp_path)
    assert isinstance(outcome, Computed)
    assert (outcome.stages["output"] == offset).all()


def test_what_a_function_declares_is_read_before_it_runs(write: Write) -> None:
    declared = (
        "attention.capabilities = {'dtypes': ['float32', 'float16'], 'grouped_heads': False}\n"
        "attention.classes = {'float16': 'fused'}\nattention.conventions = {'empty_rows': 'nan'}\n"
        "attention.resources = {'GPU': 1}\nattention.framework = 'numpy'\n"
    )
    (found,) = select_implementations(None, [f"{write(ATTENTION + declared)}:attention"]).implementations
    assert dict(found.declared.classes) == {"float32": "native", "float16": "fused"}
    assert {name: each.value for name, each in found.declared.conventions.items()} == {"empty_rows": "nan"}
    assert found.needs == {"numpy": 1, "GPU": 1}


def test_what_a_function_requires_is_padded_in_the_run(write: Write, tmp_path: Path) -> None:
    asserting = "    assert query.shape[-1] == value.shape[-1]\n    scores ="
    text = ATTENTION.replace("    scores =", asserting, 1).replace("mask=None", "scale=None, mask=None")
    text = text.replace("query.shape[-1] ** -0.5", "query.shape[-1] ** -0.5 if scale is None else scale")
    text += "attention.requires = {'value_width': 'equal'}"
    (found,) = select_implementations(None, [f"{write(text)}:attention"]).implementations
    outcome = outcome_of(found, problem(), tmp_path)
    assert isinstance(outcome, Computed), outcome
    assert outcome.padded == "zero columns (D 5 to 6)"
    np.testing.assert_allclose(outcome.stages["output"], reference(), rtol=1e-13)


def test_what_a_module_requires_goes_for_its_functions_that_say_nothing(write: Write) -> None:
    text = ATTENTION + "requires = {'width_multiple': 8}\ndef softmax(scores): ...\nsoftmax.requires = {'widths': [4]}"
    (found,) = select_implementations(None, [write(text)]).implementations
    assert found.requires("attention") == ({"width_multiple": 8}, {"mask"})
    assert found.requires("softmax") == ({"widths": [4]}, frozenset())
    assert found.requires("dot_scores") == ({}, frozenset())


@pytest.mark.parametrize(
    ("line", "is_advised"),
    [
        ("assert query.shape[-1] % 8 == 0", True),
        ("assert query.shape[-1] % 8 == 0, 'head size'", True),
        ("raise RuntimeError('head_dim should be a multiple of 8')", True),
        ("raise ValueError('block size must be a power of 2')", True),
        ("raise ValueError('out of luck')", False),
        ("assert False", False),
        ("raise NotImplementedError('head size must be a multiple of 8')", False),
    ],
)
def test_an_error_about_shapes_says_how_they_are_declared(
    write: Write, tmp_path: Path, line: str, is_advised: bool
) -> None:
    text = f"def attention(query, key, value):\n    {line}\n"
    (found,) = select_implementations(None, [f"{write(text)}:attention"]).implementations
    outcome = outcome_of(found, problem(), tmp_path)
    assert isinstance(outcome, Failure)
    assert ('attention.requires = {"width_multiple": 8} (docs/kernels.md)' in outcome.message) is is_advised
    (declaring,) = select_implementations(
        None, [f"{write(text + 'attention.requires = dict(min_width=1)')}:attention"]
    ).implementations
    outcome = outcome_of(declaring, problem(), tmp_path)
    assert isinstance(outcome, Failure)
    assert "declare" not in outcome.message


def test_a_capability_that_is_denied_is_unsupported(write: Write, tmp_path: Path) -> None:
    (found,) = select_implementations(
        None, [f"{write(ATTENTION + 'attention.capabilities = dict(value_width=False)')}:attention"]
    ).implementations
    outcome = outcome_of(found, problem(), tmp_path)
    assert outcome == Failure("unsupported", "says that it has no value width", ("value width",))


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("", "attention", "has no attention"),
        ("import no_such_module", "attention", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)", "attention", "cannot be loaded: SystemExit: 3"),
        (
            "def attention(query): ...",
            "attention",
            "cannot be called: it is attention(query); expected attention(query, key",
        ),
        ("def attention(*, query, key, value): ...", "attention", "cannot be called"),
        ("import os; os._exit(4)", "attention", "its process died with exit code 4"),
        (ATTENTION + "attention.conventions = {'empty_rows': 'maybe'}", "attention", "expected empty_rows, one of"),
        (ATTENTION + "attention.capabilities = {'dtypes': ['float8']}", "attention", "unknown dtype 'float8'"),
        (
            ATTENTION + "attention.classes = {'float32': 'tf32'}",
            "attention",
            "classes: float32 has no class 'tf32'; expected native, native_lse, tf32_products, bf16x3_products, bf16_",
        ),
        (ATTENTION + "attention.classes = {'float8': 'native'}", "attention", "classes: unknown dtype 'float8'"),
        (
            ATTENTION + "attention.requires = {'width_multipel': 8}",
            "attention",
            "requires: unknown key 'width_multipel'; expected width_multiple, widths,",
        ),
        (ATTENTION + "attention.requires = 8", "attention", "requires: expected a dict such as"),
        (ATTENTION + "attention.resources = ['GPU']", "attention", "expected names and positive amounts, such as"),
        (ATTENTION + "attention.resources = {'GPU': 0}", "attention", "resources: expected names and positive amounts"),
    ],
)
def test_a_target_that_cannot_be_used_says_why(write: Write, text: str, target: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        select_implementations(None, [f"{write(text)}:{target}"])
    assert message in str(error.value)


def test_a_file_that_never_ends_loading_is_stopped(write: Write) -> None:
    target = Target.of(f"{write('import time; time.sleep(60)')}:attention")
    with pytest.raises(UsageError, match="not loaded after 3 s"):
        user_implementation(target, None, Limits(start_seconds=3))


def test_a_file_that_is_not_there_and_a_framework_without_a_target_are_usage_errors() -> None:
    with pytest.raises(UsageError, match=r"no file nowhere\.py"):
        select_implementations(None, ["nowhere.py:attention"])
    with pytest.raises(UsageError, match=r"name one: file\.py:function"):
        select_implementations(None, [], "torch")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "TypeError: returned a list; expected an array, or a dict of stages that are arrays"),
        ("return None", "TypeError: returned a NoneType; expected an array"),
        ("return {'output': 'text'}", "TypeError: returned a str; expected an array"),
        ("return object()", "returned builtins's object; expected a NumPy array, or name its framework"),
        ("key[:] = 0; return value", "Misbehaved: changed its input key"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True, name='mine').start()"
            "; return value",
            "Misbehaved: left 1 thread(s) running: mine",
        ),
        ("import os; os.fork(); return value", "Misbehaved: forked, and the child process came back from the call"),
        ("raise ValueError('not today')", "ValueError: not today"),
        ("raise SystemExit('gone')", "SystemExit: gone"),
    ],
)
def test_what_no_implementation_may_do_is_an_error_with_its_reason(
    write: Write, tmp_path: Path, body: str, message: str
) -> None:
    text = f"def attention(query, key, value):\n    {body}\n"
    (found,) = select_implementations(None, [f"{write(text)}:attention"]).implementations
    outcome = outcome_of(found, problem(), tmp_path)
    assert isinstance(outcome, Failure)
    assert outcome.verdict == "error"
    assert message in outcome.message


def test_one_that_hangs_and_one_that_dies_are_a_timeout_and_a_crash(write: Write, tmp_path: Path) -> None:
    hanging = f"{write('import time' + chr(10) + 'def attention(query, key, value): time.sleep(60)')}:attention"
    (found,) = select_implementations(None, [hanging]).implementations
    assert outcome_of(found, problem(), tmp_path, 2) == Failure("timeout", "not done after 2 s; the worker was stopped")
    dying = f"{write('import os' + chr(10) + 'def attention(query, key, value): os._exit(5)')}:attention"
    (found,) = select_implementations(None, [dying]).implementations
    outcome = outcome_of(found, problem(), tmp_path)
    assert isinstance(outcome, Failure)
    assert outcome.verdict == "crash"


def test_what_it_prints_goes_to_the_log_and_not_to_standard_output(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "print('while loading')\n" + ATTENTION.replace("    scores =", "    print('while running')\n    scores =", 1)
    (found,) = select_implementations(None, [f"{write(text)}:attention"]).implementations
    assert isinstance(outcome_of(found, problem(), tmp_path), Computed)
    assert "while" not in capfd.readouterr().out
    assert "while running" in "".join(path.read_text() for path in tmp_path.glob("*.txt"))
