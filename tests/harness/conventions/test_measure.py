"""Kernels that are known to mean something: each meaning is found, alone or beside others, and told from all others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tables import tables_beside
from typer.testing import CliRunner

from attncheck.asking.conventions import (
    QUESTIONS,
    MeasuredConvention,
    matches_meaning,
    measure_all_conventions,
    truth_of_meaning,
)
from attncheck.cli import app
from attncheck.common.errors import OutputError, UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import find_implementation
from attncheck.execution.implementations import ImplementationSelection
from attncheck.reports.frames import make_frames
from attncheck.reports.merge import merge_runs
from attncheck.results.reader import read_runs
from attncheck.spec import DTYPES, ROUNDING_MODELS
from attncheck.spec.dtypes import round_to

pytestmark = pytest.mark.usefixtures("forked_workers")

TABLES = tables_beside(__file__)
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(*changes: tuple[str, str], below: str = "") -> str:
        text = TABLES["kernel"]
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        (tmp_path / "kernel.py").write_text(text + below, encoding="utf-8")
        return f"{tmp_path / 'kernel.py'}:attention"

    return written


def measured(target: str, dtype: str | None = None) -> dict[str, MeasuredConvention]:
    found = measure_all_conventions(find_implementation(target), dtype, Limits(case_seconds=30))
    return {each.question.name: each for each in found}


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_kernel_that_means_what_cases_mean(dtype: str | None, write: Write) -> None:
    found = measured(write(), dtype)
    assert not [each for each in found.values() if each.departs]
    assert {each.kind for each in found.values()} == {"measured"}
    assert found["causal, after a past"].means == "at the first key of the past"
    assert found["NaN in a masked key"].means == "nothing"
    assert found["NaN in a masked value"].means == "it makes the output NaN"


def test_meanings_are_results_that_report_and_diff_read(write: Write, tmp_path: Path) -> None:
    inverted = ("allowed & mask", "allowed & ~mask")
    below = '\nattention.conventions = {"mask": "true_forbids"}\n'
    wanted = {}
    for name, changes, text in (("other", [inverted], ""), ("declared", [], below), ("same", [], "")):
        words = ["conventions", write(*changes, below=text), "--output", str(tmp_path / name)]
        CliRunner().invoke(app, words)
        code = CliRunner().invoke(app, ["report", str(tmp_path / name)]).exit_code
        rows = make_frames(merge_runs(read_runs([tmp_path / name]))).results.set_index("case")
        wanted[name] = code, *rows.loc["mask/mask-what-true-means-in-a-mask", ["verdict", "xfail"]]
    assert wanted == {"other": (0, "semantic", True), "declared": (1, "semantic", False), "same": (0, "agree", False)}
    changed = CliRunner().invoke(app, ["diff", str(tmp_path / "declared"), str(tmp_path / "same")])
    assert "0 verdicts got worse, 1 got better" in changed.stdout


def test_a_folder_that_holds_something_else_is_refused_before_anything_is_asked(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "attncheck.asking.conventions.measure_all_conventions", Mock(side_effect=AssertionError("it was asked"))
    )
    error = CliRunner().invoke(app, ["conventions", write(), "--output", str(tmp_path)]).exception
    assert (type(error), "holds no earlier results" in str(error)) == (OutputError, True)


def test_who_is_not_installed_has_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = ImplementationSelection((), missing=("torch",))
    monkeypatch.setattr("attncheck.cli.probing._select_implementations", lambda *_: nobody)
    result = CliRunner().invoke(app, ["conventions", "torch", "--output", str(tmp_path / "new")])
    assert (result.exit_code, (tmp_path / "new").exists()) == (3, False)


MEANINGS: list[dict[str, tuple[str, str, str]]] = TABLES["meanings"]
"""Kernels that mean otherwise in several questions at once: of each, a text, what stands for it, and its words."""


def test_a_kernel_that_means_otherwise(write: Write) -> None:
    for meanings in MEANINGS:
        answers = measured(write(*((before, after) for before, after, _ in meanings.values() if before)))
        for name, (_, _, words) in meanings.items():
            found = answers[name]
            assert found.means.startswith(words) if words.startswith("something") else found.means == words
            assert found.kind == ("open" if words.startswith("something") else "measured")
            assert found.departs == bool(found.question.expected), name


def test_what_it_does_is_declared_as_it_is_found(write: Write) -> None:
    uniform = (
        "weights / np.where(total == 0, 1, total)",
        "np.where(total == 0, 1 / keys, weights / np.where(total == 0, 1, total))",
    )
    name = "a query without a key"
    undeclared = measured(write(uniform))[name]
    assert (undeclared.means, undeclared.declaration) == ("the mean of all values", "uniform")
    rightly = measured(write(uniform, below='attention.conventions = {"empty_rows": "uniform"}\n'))[name]
    assert not rightly.contradicts
    assert rightly.declaration == ""
    wrongly = measured(write(uniform, below='attention.conventions = {"empty_rows": "nan"}\n'))[name]
    assert (wrongly.declared, wrongly.means, wrongly.contradicts) == ("NaN", "the mean of all values", True)
    assert wrongly.declaration == "uniform"
    by_keyword = measured(
        write(
            ("past_value=None):", 'past_value=None, empty_rows="nan"):'),
            ("np.where(total == 0, 1, total)", 'np.where(total == 0, 1 if empty_rows == "zero" else 0, total)'),
        )
    )
    assert (by_keyword[name].means, by_keyword[name].declaration) == ("NaN", "")


def test_what_is_inaccurate_is_recognised_all_the_same(write: Write) -> None:
    rough = measured(write(("output.astype(query.dtype)", "(output + 1e-6).astype(query.dtype)")))
    assert (rough["mask"].means, rough["mask"].kind, rough["mask"].is_exact) == ("may attend", "measured", False)
    assert (rough["NaN in a masked key"].means, rough["NaN in a masked key"].is_exact) == ("nothing", False)
    wrong = measured(write(("output.astype(query.dtype)", "(output + 1).astype(query.dtype)")))
    assert wrong["mask"].kind == "open"
    assert wrong["mask"].means.startswith("something else: shape (1, 2, 3, 4), first number ")
    assert wrong["NaN in a masked key"].kind == "open"


def test_what_it_cannot_be_asked_and_what_fails_says_why(write: Write) -> None:
    found = measured(
        write(
            (" softcap=None,", ""),
            ("    if softcap is not None:\n        scores = softcap * np.tanh(scores / softcap)\n", ""),
            ("    if window is not None:\n", "    if window is not None:\n        raise ValueError('no windows')\n"),
        )
    )
    assert found["softcap, with a bias"].kind == "unsupported"
    assert "softcap" in found["softcap, with a bias"].means
    assert found["window (2, 0)"].kind == "failed"
    assert "no windows" in found["window (2, 0)"].means
    with pytest.raises(UsageError, match=r"kernel\.attention declares no float64; expected one of float32"):
        measured(write(below='attention.capabilities = {"dtypes": ["float32"]}\n'), "float64")


def test_a_function_called_like_flash_attention_is_asked_by_its_own_words(tmp_path: Path) -> None:
    names = (
        "causal, more keys than queries",
        "causal, more queries than keys",
        "window (1, 1), more keys than queries",
    )
    right, left = "the corner is bottom right", "the corner is top left"
    at_the_end = (right, f"{right}, without a key: zero", "so that the last query stands at the last key")
    for number, (corner, means, departs) in enumerate(
        (("k.shape[2] - q.shape[2]", at_the_end, False), ("0", (left, left, "at the first key"), True))
    ):
        path = tmp_path / f"flash{number}.py"
        path.write_text(TABLES["flash"].replace("CORNER", corner), encoding="utf-8")
        found = measured(f"{path}:attention")
        assert [found[name].means for name in names] == list(means)
        assert {found[name].departs for name in names} == {departs}
        assert found[names[0]].question.asks == "which keys a query sees with causal=True"


MODELS = [(dtype, model) for model, dtypes in ROUNDING_MODELS.items() for dtype in DTYPES if dtype in dtypes]


def test_the_answer_of_a_meaning_is_that_of_no_other() -> None:
    assert len({question.name for question in QUESTIONS}) == len(QUESTIONS)
    for question in QUESTIONS:
        for meaning in question.meanings:
            for dtype, model in MODELS if meaning.problem is not None else [("float64", "native")]:
                if meaning.problem is None:
                    exact = np.zeros((1, 2, 3) if question.stage == "log_sum_exp" else (1, 2, 3, 4))
                    exact[:, :, meaning.rows] = meaning.constant
                else:
                    exact = truth_of_meaning(meaning, dtype).exact[question.stage].high / meaning.factor
                array = round_to(exact, dtype)
                found = [
                    each.text for each in question.meanings if matches_meaning(question, each, array, dtype, model)
                ]
                assert found == [meaning.text], (question.name, dtype, model)
