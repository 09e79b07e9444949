"""Commands that reports print: a shell reads back what was meant, and nothing in them ends what they stand in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.backends import BACKENDS
from attncheck.commands import command, joined, words_again, words_of
from attncheck.execution.implementation_selection import select_callable, select_implementations
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits

NUMPY = Implementation(BACKENDS["numpy"])
KERNEL = "def attention(query, key, value):\n    return value\n"


def test_ordinary_words_stay_as_people_write_them() -> None:
    assert joined(["attncheck", "explain", "a/b-c", "my.py:f", "--dtype", "float32"]) == (
        "attncheck explain a/b-c my.py:f --dtype float32"
    )
    assert joined(["attncheck", "show", "it's/a b"]) == "attncheck show 'it'\"'\"'s/a b'"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no Bash")
@given(st.lists(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])), max_size=20))
def test_a_shell_reads_every_word_back(words: list[str]) -> None:
    text = joined(["printf", "%s\\0", "first", *words])
    assert text.isprintable()
    assert not any(each in text for each in ('"""', "`", "```"))
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[1:-1] == words


def test_what_looks_like_an_option_is_given_as_a_file() -> None:
    words = ["-k.py:f", "--framework", "torch"]
    assert command("explain", {"id": "-x/a"}, words, "float64") == (
        "attncheck explain ./-x/a ./-k.py:f --dtype float64 --framework torch"
    )
    assert command("repro", {"id": "o/a-case", "path": "/my files/o.yaml"}, ["numpy.eager"], "float64") == (
        "attncheck repro '/my files/o.yaml::a-case' numpy.eager --dtype float64"
    )


def test_a_bundled_implementation_is_named_by_its_name_even_where_a_run_did_not_say() -> None:
    assert words_again([NUMPY], Limits(), Path("elsewhere")) == {"numpy.eager": ["numpy.eager"]}
    assert words_of("torch.sdpa", {}) == ["torch.sdpa"]
    assert words_of("mine.attention", {}) == []


def test_limits_that_are_not_as_ever_are_said() -> None:
    limits = Limits(threads=2, case_seconds=0.5, hard_memory_limit=3 * 2**29)
    assert words_again([NUMPY], limits, None) == {
        "numpy.eager": ["numpy.eager", "--threads", "2", "--time-limit", "0.5", "--memory-limit", "1.5"]
    }


def test_an_own_one_is_named_as_it_was_given_with_its_framework_and_where_its_results_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my kernel.py").write_text(KERNEL, encoding="utf-8")
    (own,) = select_implementations(None, ["my kernel.py:attention"], "numpy").implementations
    words = ["my kernel.py:attention", "--framework", "numpy"]
    assert words_again([own], Limits(), Path("results/latest")) == {own.name: words}
    assert words_again([own], Limits(), Path("my results")) == {own.name: [*words, "--results", "my results"]}
    assert words_again([own], Limits(), None) == {own.name: words}


def test_an_object_has_no_name_on_a_command_line() -> None:
    own = select_callable(lambda query, key, value: value, None, None)
    assert words_again([own], Limits(), None) == {}
