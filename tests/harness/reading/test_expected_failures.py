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
from attncheck.spec import DTYPES

TABLES = tables_beside(__file__)
ENTRY, LEAST = TABLES["entry"], TABLES["least_entry"]

Load = Callable[[str], tuple[ExpectedFailure, ...]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def read(text: str) -> tuple[ExpectedFailure, ...]:
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return load_expected_failures([path])

    return read


def test_an_entry_excuses_its_verdict_at_its_stages_in_what_it_concerns(load: Load, tmp_path: Path) -> None:
    first, second = load(f"# A comment.\n{ENTRY}{LEAST}")
    assert (first.location, second.line) == (f"{tmp_path / 'mine.yaml'}:2", 10)
    assert first.entry.thread == "pytorch/pytorch#108108"
    for *called, concerned in TABLES["concerned"]:
        assert first.concerns(*called) is concerned, called
    for stage, verdict, by_first, by_second in (
        ("output", "semantic", True, False),
        ("weights", "semantic", False, False),
        ("output", "numeric", False, False),
        ("", "crash", False, True),
        ("weights", "crash", False, True),
    ):
        assert (first.excuses(stage, verdict), second.excuses(stage, verdict)) == (by_first, by_second)
    assert second.concerns("torch.eager", "any/case", "float16")


def test_every_backend_has_a_list_that_names_it_and_in_every_case_excuses_one_thing() -> None:
    """An entry of every case would otherwise hide any other error, or a mask that is read the other way round."""
    for name, entry in EVERYTHING.items():
        names = {f"{name}.{mode}" for mode in (*entry.all_modes, *(each.name for each in entry.device_modes))}
        for expected in bundled_expected_failures([name]):
            case = expected.entry.cases[0].replace("*", "x").replace("?", "x")
            assert expected.file == f"backends/expected_failures/{name}.yaml"
            assert any(expected.names(each, case, dtype) for each in names for dtype in expected.entry.dtypes or DTYPES)
            if "*" in expected.entry.cases:
                limit = {"numeric": expected.entry.max_ratio, "semantic": expected.entry.empty_rows}
                assert limit.get(expected.entry.verdict, True), expected.location


def test_an_entry_with_a_convention_excuses_that_one_alone(load: Load) -> None:
    (found,) = load(ENTRY.replace("reason: aligned", "empty_rows: nan\n  reason: aligned"))
    given = {value: found.excuses("output", "semantic", empty_rows=value) for value in ("nan", "uniform", None)}
    assert given == {"nan": True, "uniform": False, None: False}
    assert recorded_empty_rows([found], "torch.sdpa", "masking/x", "float32") == ("nan",)
    assert recorded_empty_rows([found], "torch.eager", "masking/x", "float32") == ()
    assert recorded_empty_rows(load(ENTRY), "torch.sdpa", "masking/x", "float32") == ()


def test_an_entry_of_a_processor_is_left_out_where_it_is_known_to_be_another(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = ("torch.sdpa", "masking/x", "float32")
    anywhere, those, others = (
        load(ENTRY.replace("reason: aligned", f"{processor}reason: aligned"))[0]
        for processor in ("", "processor: amx_bf16\n  ", "processor: not amx_bf16\n  ")
    )
    for flags, with_it, without, is_known in (
        ({"avx2"}, False, True, True),
        ({"avx2", "amx_bf16"}, True, False, True),
        (None, True, True, False),
    ):
        monkeypatch.setattr(
            "attncheck.reading.expected_failures.processor_flags", lambda flags=flags: flags and frozenset(flags)
        )
        assert [each.concerns(*called) for each in (anywhere, those, others)] == [True, with_it, without]
        assert (anywhere.must_happen, those.must_happen) == (True, is_known)
        assert those.names(*called)


def test_an_entry_of_a_property_says_nothing_of_a_call_and_is_broken(load: Load) -> None:
    entry = "- {{implementation: a.b, cases: [x/*]{}, verdict: {}, decided: numeric, reason: it rolls a die}}\n"
    (found,) = load(entry.format(", property: repeated", "broken"))
    assert found.concerns("a.b", "x/1", "float32", "repeated")
    assert not found.concerns("a.b", "x/1", "float32", "threads")
    assert not found.concerns("a.b", "x/1", "float32")
    for wrong in (entry.format(", property: repeated", "numeric"), entry.format("", "broken")):
        with pytest.raises(CaseError, match="propert"):
            load(wrong)
