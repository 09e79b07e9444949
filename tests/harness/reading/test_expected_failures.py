"""Lists of expected failures: read as plain data, with every fault at its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tables import tables_beside

from attncheck.backends import EVERYTHING
from attncheck.errors import CaseError
from attncheck.reading.expected_failures import (
    ExpectedFailure,
    bundled_expected_failures,
    load_expected_failures,
    recorded_empty_rows,
)

ENTRY = """\
- implementation: torch.sdpa
  cases: [masking/*, "attention/a-*"]
  dtypes: [float32, bfloat16]
  stages: [output]
  verdict: semantic
  reason: aligned to the lower right corner
  decided: semantic
  thread: pytorch/pytorch#108108
"""
LEAST = """\
- implementation: "torch.*"
  cases: ["*"]
  verdict: crash
  reason: dies without a key
  decided: crash
"""

Load = Callable[[str], tuple[ExpectedFailure, ...]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def read(text: str) -> tuple[ExpectedFailure, ...]:
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return load_expected_failures([path])

    return read


def test_an_entry_is_read_with_its_line(load: Load, tmp_path: Path) -> None:
    first, second = load(f"# A comment.\n{ENTRY}{LEAST}")
    assert first.location == f"{tmp_path / 'mine.yaml'}:2"
    assert second.line == 10
    assert (first.entry.verdict, first.entry.decided, first.entry.thread) == (
        "semantic",
        "semantic",
        "pytorch/pytorch#108108",
    )
    assert (second.entry.dtypes, second.entry.stages, second.entry.thread) == (None, None, None)


@pytest.mark.parametrize(("implementation", "case", "dtype", "concerned"), tables_beside(__file__)["concerned"])
def test_what_an_entry_concerns(load: Load, implementation: str, case: str, dtype: str, concerned: bool) -> None:
    (entry,) = load(ENTRY)
    assert entry.concerns(implementation, case, dtype) is concerned


def test_an_entry_excuses_its_own_verdict_at_its_stages(load: Load) -> None:
    stages, whole = load(ENTRY + LEAST)
    assert stages.excuses("output", "semantic")
    assert not stages.excuses("weights", "semantic")
    assert not stages.excuses("output", "numeric")
    assert whole.excuses("", "crash")
    assert whole.excuses("weights", "crash")
    assert whole.concerns("torch.eager", "any/case", "float16")


def test_the_faults_of_all_files_are_told_together(tmp_path: Path) -> None:
    paths = [tmp_path / "one.yaml", tmp_path / "two.yaml", tmp_path / "none.yaml"]
    paths[0].write_text("{}\n", encoding="utf-8")
    paths[1].write_text("- 1\n", encoding="utf-8")
    with pytest.raises(CaseError) as raised:
        load_expected_failures(paths)
    assert [Path(fault.file).name for fault in raised.value.faults] == ["one.yaml", "two.yaml", "none.yaml"]


def test_every_backend_has_a_list_that_can_be_read_and_names_it() -> None:
    for name, entry in EVERYTHING.items():
        names = {f"{name}.{mode}" for mode in (*entry.all_modes, *(each.name for each in entry.device_modes))}
        for expected in bundled_expected_failures([name]):
            assert expected.file == f"backends/expected_failures/{name}.yaml"
            assert any(
                expected.names(each, _named(expected.entry.cases[0]), dtype)
                for each in names
                for dtype in expected.entry.dtypes or ["float64"]
            )


def test_what_is_known_of_a_number_in_every_case_has_a_limit() -> None:
    """Or it would hide every other error of that implementation."""
    everywhere = [each for each in bundled_expected_failures(list(EVERYTHING)) if "*" in each.entry.cases]
    assert everywhere
    assert [
        each.location for each in everywhere if each.entry.verdict == "numeric" and each.entry.max_ratio is None
    ] == []


def test_another_meaning_that_is_known_in_every_case_is_that_of_one_convention() -> None:
    """Or it would hide every other difference of meaning: a mask that is read the other way round, say."""
    everywhere = [each for each in bundled_expected_failures(list(EVERYTHING)) if "*" in each.entry.cases]
    assert [
        each.location for each in everywhere if each.entry.verdict == "semantic" and not each.entry.empty_rows
    ] == []


def test_an_entry_with_a_convention_excuses_that_one_alone(load: Load) -> None:
    (found,) = load(ENTRY.replace("reason: aligned", "empty_rows: nan\n  reason: aligned"))
    given = {value: found.excuses("output", "semantic", empty_rows=value) for value in ("nan", "uniform", None)}
    assert given == {"nan": True, "uniform": False, None: False}
    assert recorded_empty_rows([found], "torch.sdpa", "masking/x", "float32") == ("nan",)
    assert recorded_empty_rows([found], "torch.eager", "masking/x", "float32") == ()
    assert recorded_empty_rows(load(ENTRY), "torch.sdpa", "masking/x", "float32") == ()


@pytest.mark.parametrize(
    ("flags", "concerns", "must_happen"),
    [(frozenset({"avx2"}), False, True), (frozenset({"avx2", "amx_bf16"}), True, True), (None, True, False)],
)
def test_an_entry_of_a_processor_is_left_out_where_it_is_known_to_be_another(
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    flags: frozenset[str] | None,
    concerns: bool,
    must_happen: bool,
) -> None:
    monkeypatch.setattr("attncheck.reading.expected_failures.processor_flags", lambda: flags)
    (found,) = load(ENTRY.replace("reason: aligned", "processor: amx_bf16\n  reason: aligned"))
    assert found.concerns("torch.sdpa", "masking/x", "float32") is concerns
    assert found.must_happen is must_happen
    assert found.names("torch.sdpa", "masking/x", "float32")
    (anywhere,) = load(ENTRY)
    assert anywhere.concerns("torch.sdpa", "masking/x", "float32")
    assert anywhere.must_happen


@pytest.mark.parametrize(
    ("flags", "concerns"), [(frozenset({"avx2"}), True), (frozenset({"avx2", "amx_bf16"}), False), (None, True)]
)
def test_an_entry_of_processors_that_cannot_do_something(
    load: Load, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str] | None, concerns: bool
) -> None:
    monkeypatch.setattr("attncheck.reading.expected_failures.processor_flags", lambda: flags)
    (found,) = load(ENTRY.replace("reason: aligned", "processor: not amx_bf16\n  reason: aligned"))
    assert found.concerns("torch.sdpa", "masking/x", "float32") is concerns


def _named(glob: str) -> str:
    return glob.replace("*", "x").replace("?", "x")


def test_an_entry_of_a_property_says_nothing_of_a_call_and_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    entry = "{{implementation: a.b, cases: [x/*]{}, verdict: {}, decided: numeric, reason: it rolls a die}}"
    path.write_text(f"- {entry.format(', property: repeated', 'broken')}\n", encoding="utf-8")
    (found,) = load_expected_failures([path])
    assert found.concerns_property("repeated", "a.b", "x/1", "float32")
    assert not found.concerns_property("threads", "a.b", "x/1", "float32")
    assert not found.concerns("a.b", "x/1", "float32")
    for wrong in (entry.format(", property: repeated", "numeric"), entry.format("", "broken")):
        path.write_text(f"- {wrong}\n", encoding="utf-8")
        with pytest.raises(CaseError, match="propert"):
            load_expected_failures([path])
