"""What a shell offers: the protocol of the shells, every name there is, and nothing heavy behind it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest

from attncheck.cli import completion
from attncheck.execution.implementations import every_implementation
from attncheck.reading.selection import select_cases
from attncheck.spec import DTYPES

Invoke = Callable[..., tuple[int, str, str]]
WORDS = {
    "attncheck expl": "explain",
    "attncheck check --exp": "--expected-failures",
    "attncheck check -i torch.sdpa_m": "torch.sdpa_math",
    "attncheck explain attention/a-causal-row-sees": "attention/a-causal-row-sees-its-own-key-and-earlier-ones",
    "attncheck check -t poisoned-m": "poisoned-mask",
}


@pytest.fixture(autouse=True)
def called_attncheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program's name be its own where pytest runs as a module."""
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_offered_names(shell: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ATTNCHECK_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    for words, offered in WORDS.items():
        # As a shell asks; nothing is typed behind the last word.
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
        assert offered in invoke()[1]


def test_the_script_for_a_shell_asks_by_that_protocol(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ATTNCHECK_COMPLETE", "source_bash")
    script = invoke()[1]
    assert "_ATTNCHECK_COMPLETE=complete_bash" in script
    subprocess.run(["bash", "-n", "-c", script], check=True)


def test_every_bundled_case_is_offered_and_everything_offered_is_a_case() -> None:
    files = completion.complete_cases("")
    offered = {name for file in files for name in completion.complete_cases(f"{file}/")}
    ids = [case.id for case in select_cases([]).cases]
    plain, globs = {each for each in offered if "*" not in each}, [each for each in offered if "*" in each]
    assert [each for each in ids if each not in plain and not any(fnmatchcase(each, glob) for glob in globs)] == []
    asked_otherwise = "properties/"
    unknown = [each for each in plain - set(ids) if not each.startswith(asked_otherwise)]
    unknown += [glob for glob in globs if not any(fnmatchcase(each, glob) for each in ids)]
    assert unknown == []


def test_implementations_dtypes_and_tags_are_those_that_there_are() -> None:
    assert {item.name for item in every_implementation()} <= set(completion.complete_implementation(""))
    assert completion.complete_dtypes("float64,") == [f"float64,{dtype}" for dtype in DTYPES]
    assert completion.complete_tags("") == list(select_cases([]).tags)
    assert completion.complete_implementations("numpy,torch.sdpa_f") == ["numpy,torch.sdpa_flash"]


def test_nothing_heavy_is_imported_to_offer_names() -> None:
    code = (
        "import sys, attncheck.cli; from attncheck.cli import completion\n"
        "for name in dir(completion):\n"
        "    if name.startswith('complete_'): assert getattr(completion, name)(''), name\n"
        "assert completion.complete_cases('attention/')\n"
        "print(sorted({'numpy', 'pandas', 'pydantic', 'yaml', 'torch', 'jax', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
