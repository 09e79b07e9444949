"""The gate: what it concludes from kernels that misbehave, and that it lets right ones pass."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import attncheck
from attncheck import pytest_plugin
from attncheck.common.store import NO_STORE
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import find_implementation
from attncheck.gating import behaviours
from attncheck.gating.kernel_under_test import Finding, KernelUnderTest, behaviour_of_failure, plain_problems
from attncheck.gating.run import GateResult
from attncheck.gating.steps import (
    FreshProblems,
    observe_delegation,
    rate_interval,
    repeat_first_problems,
    repeat_problems,
    run_first_problems,
    try_sizes,
    try_surroundings,
)

EXAMPLES = Path(__file__).parents[3] / "examples"
RIGHT = (EXAMPLES / "numpy_kernel.py").read_text()
CALLS = "import os, sys, threading\nCALLS = []\n"
SUPPORTS = "query, key, value, *, mask=None, is_causal=False, scale=None"


def variant(line: str) -> str:
    """Return the right kernel with a function that changes its result by a line of code."""
    body = f"""
def attention_of_others({SUPPORTS}):
    CALLS.append(1)
    output = attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale)
    {line}
    return output
"""
    return f"{RIGHT}\n{CALLS}\n{body}"


@pytest.fixture
def subject_of(tmp_path: Path) -> Iterator[Callable[[str], KernelUnderTest]]:
    subjects = []

    def make(line: str) -> KernelUnderTest:
        path = tmp_path / "kernel.py"
        path.write_text(variant(line))
        subject = KernelUnderTest.make(find_implementation(f"{path}:attention_of_others"), Limits(), NO_STORE, seed=7)
        subjects.append(subject)
        return subject

    yield make
    for subject in subjects:
        subject.engine.close()


def named(subject: KernelUnderTest) -> set[str]:
    return {finding.behaviour for finding in subject.findings}


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_a_right_kernel_passes_every_step(subject_of: Callable[[str], KernelUnderTest]) -> None:
    subject = subject_of("pass")
    firsts = run_first_problems(subject)
    FreshProblems(subject).run(soon(), max_problems=20)
    repeat_problems(subject, firsts, soon(1))
    sizes = list(try_sizes(subject, "float32", soon()))
    try_surroundings(subject, firsts, soon())
    repeat_first_problems(subject, firsts)
    assert (subject.findings, "65,536 keys" in sizes) == ([], True)


def test_a_kernel_that_is_wrong_after_many_calls_is_named(subject_of: Callable[[str], KernelUnderTest]) -> None:
    subject = subject_of("output = output + (len(CALLS) > 100)")
    repeat_problems(subject, run_first_problems(subject), soon(4))
    assert named(subject) == {behaviours.WRONG_LATER}


def test_a_kernel_that_is_wrong_now_and_then_is_named(subject_of: Callable[[str], KernelUnderTest]) -> None:
    subject = subject_of("output = output + (len(CALLS) % 40 == 13)")
    repeat_problems(subject, run_first_problems(subject), soon(2))
    assert behaviours.WRONG_NOW_AND_THEN in named(subject)


def test_a_kernel_that_recognises_the_package_is_named(subject_of: Callable[[str], KernelUnderTest]) -> None:
    subject = subject_of("output = output + ('attncheck' not in sys.modules)")
    run_first_problems(subject)
    assert named(subject) == {behaviours.RECOGNISES_TESTS}


def test_a_kernel_that_fails_few_hard_problems_is_not_said_to_know_the_cases(
    subject_of: Callable[[str], KernelUnderTest],
) -> None:
    subject = subject_of("pass")
    subject.judged_counts["fresh problems"], subject.failed_counts["fresh problems"] = 800, 1
    subject.add_finding(Finding(behaviours.ONLY_KNOWN_CASES, "fresh problems", "NaN swallowed"))
    assert [finding.behaviour for finding in subject.root_findings()] == [behaviours.WRONG]


def test_a_kernel_that_is_right_in_known_cases_only_is_named(subject_of: Callable[[str], KernelUnderTest]) -> None:
    subject = subject_of("output = output + 1")
    run_first_problems(subject)
    assert named(subject) == {behaviours.ONLY_KNOWN_CASES}


def test_the_size_from_which_a_kernel_is_wrong_is_told(subject_of: Callable[[str], KernelUnderTest]) -> None:
    subject = subject_of("output = output + (key.shape[2] > 4096)")
    list(try_sizes(subject, "float32", soon()))
    (finding,) = subject.findings
    assert finding.behaviour == behaviours.WRONG_BEYOND_SIZE
    assert "wrong with 4,097 keys, right with 1,025" in finding.text


@pytest.mark.parametrize(
    ("line", "behaviour"),
    [
        ("output = output + (query.flags.f_contiguous)", behaviours.DEPENDS_ON_LAYOUT),
        ("output = output + (os.environ['OMP_NUM_THREADS'] != '1')", behaviours.DEPENDS_ON_THREADS),
        ("output = output + ('CI' in os.environ)", behaviours.DEPENDS_ON_ENVIRONMENT),
    ],
)
def test_a_kernel_that_depends_on_its_surroundings_is_named(
    subject_of: Callable[[str], KernelUnderTest], line: str, behaviour: str
) -> None:
    subject = subject_of(line)
    try_surroundings(subject, run_first_problems(subject), soon())
    assert named(subject) == {behaviour}


@pytest.mark.parametrize(
    ("line", "behaviour"),
    [
        ("output = output + 1", behaviours.WRONG),
        ("output = output + (not query.flags.c_contiguous)", behaviours.DEPENDS_ON_LAYOUT),
    ],
)
def test_a_failure_with_a_memory_layout_is_tried_without_it(
    subject_of: Callable[[str], KernelUnderTest], line: str, behaviour: str
) -> None:
    subject = subject_of(line)
    problem = replace(plain_problems(1, ["float32"])[0], memory_layout={"query": "strided"})
    question = subject.as_question(problem, "laid-out")
    answer = subject.engine.judge(subject.blind, question, subject.compute(question, "sizes"))
    assert subject.conclude(answer, "sizes").behaviour == behaviour


def test_what_follows_from_late_results_is_called_wrong(subject_of: Callable[[str], KernelUnderTest]) -> None:
    late = "true = output; output = output * 0; threading.Timer(0.01, output.__iadd__, [true]).start()"
    subject = subject_of(late)
    run_first_problems(subject)
    assert {finding.behaviour for finding in subject.root_findings()} == {behaviours.LATE, behaviours.WRONG}


@pytest.mark.torch
def test_a_call_of_another_attention_is_observed(subject_of: Callable[[str], KernelUnderTest]) -> None:
    others = "import torch; torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (query, key, value)))"
    subject = subject_of(others)
    observe_delegation(subject, run_first_problems(subject), soon())
    assert "aten::scaled_dot_product_attention" in subject.delegations


def test_a_failure_of_a_check_is_a_behaviour_by_its_message() -> None:
    told = {
        "changed its input query": behaviours.CHANGED_INPUT,
        "Misbehaved: left 1 thread(s) running: Thread-1": behaviours.LEAVES_THREADS,
        "RuntimeError: no": behaviours.FAILS,
    }
    assert {message: behaviour_of_failure("error", message) for message in told} == told


def test_a_rate_has_an_interval() -> None:
    least, most = rate_interval(5, 1000)  # Wilson's formula by hand: 0.0068943 -+ 0.0047568
    assert (round(least, 5), round(most, 5)) == (0.00214, 0.01165)


def test_every_behaviour_has_a_row_in_the_documentation() -> None:
    page = (EXAMPLES.parent / "docs" / "how-to" / "gate.md").read_text()
    assert [name for name in behaviours.BEHAVIOURS if f"| `{name}` |" not in page] == []


def test_the_command_writes_what_it_answers(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(variant("query[...] = 0"))
    words = ["gate", "kernel.py:attention_of_others", "--budget", "15s", "--seed", "3", "--json"]
    command = [sys.executable, "-m", "attncheck", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert (done.returncode, document["seed"]) == (1, 3)
    assert "changes-inputs" in document["answer"]
    page = (tmp_path / "results" / "gate" / "gate.html").read_text()
    assert "A call changes an input" in page


@pytest.mark.parametrize("line", ["while True: print('x' * 10_000)"])
def test_a_kernel_that_never_returns_is_not_decided(tmp_path: Path, line: str) -> None:
    (tmp_path / "kernel.py").write_text(variant(line))
    result = attncheck.gate(f"{tmp_path / 'kernel.py'}:attention_of_others", budget=4, seed=1)
    assert (result.exit_code, result.may_be_merged) == (3, False)


def test_a_bundled_implementation_is_refused() -> None:
    with pytest.raises(attncheck.UsageError, match="code of your own"):
        attncheck.gate("numpy")


@pytest.mark.parametrize("text", ["soon", "1s", "-1m"])
def test_a_budget_that_is_no_duration_is_refused(invoke: Callable[..., tuple[int, str, str]], text: str) -> None:
    code, _, err = invoke("gate", "numpy", "--budget", text)
    assert (code, "--budget" in err) == (2, True)


def test_the_test_of_a_refused_kernel_fails_with_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(behaviours.CHANGED_INPUT, "first calls", "the call changed its input query")
    result = GateResult("my.kernel", 7, 10.0, findings=[finding], exit_code=attncheck.ExitCode.DISAGREE)
    monkeypatch.setattr("attncheck.api.gate", lambda function, **keywords: result)
    with pytest.raises(pytest.fail.Exception, match="do not merge it: changes-inputs") as raised:
        pytest_plugin.gate("my.py:kernel")()
    assert "seed=7" in str(raised.value)
