"""The README: its kernel as a newcomer copies it, and the outcome that it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from here import own_code_here

from attncheck import check

README = Path(__file__).resolve().parents[2] / "README.md"
CASES = ["attention", "grouped_heads", "coincidences"]


@pytest.fixture(scope="module")
def kernel() -> str:
    (text,) = re.findall(r"```python\n# my_kernel\.py\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return str(text)


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


def test_the_outcome_that_it_shows_has_the_documents_numbers_and_versions_that_are_published() -> None:
    text = README.read_text(encoding="utf-8")
    (shown,) = re.findall(r"ends like this:\n\n```\w*\n(.*?)```", text, re.DOTALL)
    assert len(shown.splitlines()) == 5
    published = (README.parent / "reports" / "published" / "README.md").read_text(encoding="utf-8")
    (documents,) = re.findall(r"^- (The documents print .*)$", published.partition("\n## ")[0], re.MULTILINE)
    assert documents in shown.splitlines()  # what is published is of all cases on JAX too
    versions = re.findall(r"^\| (\w+\.\w+) \| (\S+) \|$", published, re.MULTILINE)
    assert len(versions) == 4
    assert all(f"`{name} {version}`" in text for name, version in versions)


def test_it_is_the_kernel_of_the_examples(kernel: str) -> None:
    example = (README.parent / "examples" / "numpy_kernel.py").read_text(encoding="utf-8")
    assert example.endswith(f"\n\n{kernel}")


def test_the_kernel_agrees(kernel: str, tmp_path: Path) -> None:
    (tmp_path / "my_kernel.py").write_text(kernel, encoding="utf-8")
    with own_code_here():
        result = check(f"{tmp_path}/my_kernel.py:attention", cases=CASES)
    assert result.agrees, result.explain()
    assert {"agree", "unsupported"} == set(result.frames.results["verdict"])


@pytest.mark.parametrize(
    ("right", "wrong", "verdict", "told"),
    [
        (
            "np.tri(*scores.shape[-2:], dtype=bool)",
            "np.tri(*scores.shape[-2:], scores.shape[-1] - scores.shape[-2], dtype=bool)",
            "semantic",
            "causality is aligned bottom-right",
        ),
        ("query.shape[-1] ** -0.5 if", "1 / query.shape[-1] if", "numeric", "instead of"),
    ],
    ids=["causality aligned bottom right", "a wrong scale"],
)
def test_a_usual_mistake_is_told_by_name(
    kernel: str, tmp_path: Path, right: str, wrong: str, verdict: str, told: str
) -> None:
    assert right in kernel
    (tmp_path / "my_kernel.py").write_text(kernel.replace(right, wrong), encoding="utf-8")
    with own_code_here():
        result = check(f"{tmp_path}/my_kernel.py:attention", cases=["attention"], dtypes=["float32"])
    failing = [row for row in result.failures if row.comparison == "stage"]
    assert {row.verdict for row in failing} == {verdict}
    assert all(told in row.message for row in failing)
    if verdict == "numeric":
        assert {row.begins_at for row in failing} == {"scores"}
