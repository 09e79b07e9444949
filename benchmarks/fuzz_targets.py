"""What the fuzzing campaign calls with each hostile input, as the commands do, and what may come of it.

A target makes input number n of a seed in a folder and takes it; what it returns says what became of it. Whatever it
raises is a finding.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fuzz_grammar
import fuzz_mutations
import fuzz_results
import numpy as np

from attncheck.common.errors import AttncheckError, CaseError, Diagnostic, UsageError
from attncheck.reading import array_kinds as kinds
from attncheck.reading.case import Case, make_case_record
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.inputs import convert_inputs, make_exact_inputs, make_problem_of_case
from attncheck.reading.loader import load_case_file, load_tags
from attncheck.reading.model import TagEntry
from attncheck.reading.selection import select_cases
from attncheck.reports.ci import annotation_lines, render_ci_summary
from attncheck.reports.frames import make_frames
from attncheck.reports.json_documents import document_to_json
from attncheck.reports.merge import merge_runs
from attncheck.reports.outcome import outcome_document
from attncheck.reports.summary import comparison_exit_code
from attncheck.reports.write import write_report
from attncheck.results.reader import find_runs, read_runs
from attncheck.settings.config import load_expected_failures_of, read_config

ACCEPTED, REFUSED = "accepted", "refused"
_MOST_OF_BATCH = 8
"""Elements of a batch for which a pattern has numbers of its own, about."""
_SMALL = 1 << 14
"""Numbers in the arrays of a case that are made here; what is larger is only loaded."""
_BY_SELECTION = 40
"""One case file in so many is read as a whole folder, beside the bundled tags."""
_WRITE, _WRITTEN = "write", 0.15
"""Beside results that are to be written in every format, and how many are: that takes longest."""

Random = random.Random


class WrongMessageError(Exception):
    """A refusal that does not say which file it is about, or says it in more than one printable line."""


@dataclass(frozen=True)
class Target:
    """One reader: ``make`` writes input number n into an empty folder, ``take`` reads it from there."""

    make: Callable[[Path, Random], None]
    take: Callable[[Path], str]
    standard: int
    """Inputs, unless the command line says otherwise."""
    warm: Callable[[Path], None] = lambda _: None
    """Does once in each worker what loads templates and libraries: no input is to answer for that."""


def _make_case(folder: Path, draw: Random) -> None:
    texts, data = _case_seeds()
    content = fuzz_grammar.case_file(draw) if draw.random() < 0.3 else fuzz_mutations.mutate(texts, data, draw)
    (folder / "case.yaml").write_bytes(content)
    if draw.randrange(_BY_SELECTION) == 0:
        tags, tag_data = _tag_seeds()
        (folder / "tags.yaml").write_bytes(fuzz_mutations.mutate(tags, tag_data, draw))


def _take_case(folder: Path) -> str:
    try:
        if (folder / "tags.yaml").exists():
            selection = select_cases(["."], base=folder)
            cases, faults, tags = selection.cases, selection.faults, selection.tags
        else:
            tags = _bundled_tags()
            cases, faults = tuple(load_case_file(folder / "case.yaml", "case.yaml", "case", tags)), ()
    except CaseError as error:
        cases, faults = (), tuple(error.faults)
    except UsageError as error:
        return _refused([Diagnostic("case.yaml", str(error))])
    for case in cases:
        _use(case, tags)
    return _refused(faults) if faults else ACCEPTED


def _refused(faults: Sequence[Diagnostic], names: tuple[str, ...] = ("case.yaml", "tags.yaml")) -> str:
    for fault in faults:
        if not str(fault).startswith(names) or not str(fault).isprintable() or not fault.message:
            raise WrongMessageError(str(fault))
    return REFUSED


def _use(case: Case, tags: dict[str, TagEntry]) -> None:
    """Write a case's record, and where it is small make its inputs in each dtype and the call that is made of them."""
    json.dumps(make_case_record(case, tags), ensure_ascii=False)
    if sum(map(_size, [*case.arrays.values(), *case.inputs.values()])) > _SMALL:
        return
    made = make_exact_inputs(case)
    shapes = {name: exact.array.shape for name, exact in made.items()}
    assert shapes == dict(case.input_shapes), f"made {shapes}, declared {case.input_shapes}"
    for dtype in case.dtypes:
        problem = make_problem_of_case(case, convert_inputs(case, made, dtype))
        problem.as_call()
        plain = problem.without_layout().canonical()
        if "mask" in plain.inputs and (scores := case.stage_shapes.get("masked")):
            assert np.broadcast_shapes(plain.inputs["mask"].shape, scores) == scores


def _size(source: kinds.Array) -> int:
    """Return how many numbers an array is made of, the parts of parts among them."""
    match source:
        case kinds.Drawn() | kinds.Constant() | kinds.Ascending() | kinds.Geometric():
            own = int(np.prod([max(1, length) for length in source.shape], dtype=object))
        case kinds.Identity():
            own = source.identity**2
        case kinds.PositionPattern() | kinds.Blocks():
            own = int(np.prod([max(1, length) for length in source.shape], dtype=object)) * _MOST_OF_BATCH
        case _:
            own = 1
    return max(own, len(source.rows or ())) + sum(_size(part) for _, part in kinds.array_parts_with_paths(source))


def _make_expected_failures(folder: Path, draw: Random) -> None:
    texts, data = _expected_failure_seeds()
    (folder / "known.yaml").write_bytes(fuzz_mutations.mutate(texts, data, draw))


def _take_expected_failures(folder: Path) -> str:
    try:
        for expected in load_expected_failures([folder / "known.yaml"]):
            expected.applies_to_evaluation("torch.sdpa", "attention/" + "a" * 300, "float32")
            expected.excuses_error("output", "numeric", 2.0)
    except CaseError as error:
        return _refused(error.faults, (str(folder / "known.yaml"),))
    return ACCEPTED


_CONFIG = b"[tool.attncheck]\ncases = ['own/', 'case.yaml']\nexpected_failures = ['known.yaml']\n[tool.other]\nx = 1\n"
_CONFIG_VALUES = (
    *("3", "'x'", "[3]", "['']", "['\\u0000']", "['" + "x" * 5000 + "']", "['/dev/zero']", "['..']", "{a = 1}", "[[]]"),
    *("9" * 5000, "1979-05-27", "nan", "[" * 2000 + "]" * 2000, "{a=" * 2000, "'''\n'''", '"\\uD800"', "['gone']"),
)


def _make_config(folder: Path, draw: Random) -> None:
    text = _CONFIG
    for _ in range(draw.choice((1, 1, 2, 3))):
        if draw.random() < 0.5:
            lines = text.splitlines(keepends=True) or [b""]
            key = draw.choice((b"cases", b"expected_failures", b"x", b"tool", b"tool.attncheck", b"[tool]\nattncheck"))
            lines.insert(draw.randrange(len(lines) + 1), key + b" = " + draw.choice(_CONFIG_VALUES).encode() + b"\n")
            if draw.random() < 0.7:
                del lines[draw.randrange(len(lines))]
            text = b"".join(lines)
        else:
            text = fuzz_mutations.change_bytes(text, [_CONFIG], draw)
    (folder / "own").mkdir()
    (folder / "own" / "a.yaml").write_bytes(_case_seeds()[0][0])
    (folder / "case.yaml").write_bytes(_case_seeds()[0][1])
    (folder / "known.yaml").write_text("[]\n", encoding="utf-8")
    (folder / "pyproject.toml").write_bytes(text)


def _take_config(folder: Path) -> str:
    try:
        config = read_config(folder)
        if config.cases:
            select_cases(config.cases, base=folder)
        load_expected_failures(config.expected_failure_lists)
        load_expected_failures_of(["numpy"])
    except AttncheckError as error:
        if "\n" in str(error) and not isinstance(error, CaseError):
            raise WrongMessageError(str(error)) from None
        return REFUSED
    return ACCEPTED


def _make_results(folder: Path, draw: Random) -> None:
    (folder / "outside").mkdir()
    (folder / "outside" / "kept.txt").write_text("kept\n", encoding="utf-8")
    shutil.copytree(fuzz_results.pristine(), folder / "run")
    fuzz_results.damage(folder / "run", folder / "outside", draw)
    if draw.random() < 0.3:
        shutil.copytree(fuzz_results.pristine(), folder / "other")
    if draw.random() < _WRITTEN:
        (folder / _WRITE).touch()


def _warm_results(folder: Path) -> None:
    shutil.copytree(fuzz_results.pristine(), folder / "run")
    (folder / _WRITE).touch()
    _take_results(folder)


def _take_results(folder: Path) -> str:
    before = {path: _state(path) for path in _tree(folder)}
    output = folder / "run" / "report" if (folder / "run").is_dir() else folder / "report"
    outcome = ACCEPTED
    try:
        runs = read_runs(find_runs([path for path in (folder / "run", folder / "other") if path.exists()]))
        frames = make_frames(merge_runs(runs))
        if (folder / _WRITE).exists():
            render_ci_summary(frames, output)
            list(annotation_lines(frames, output))
            json.loads(document_to_json(outcome_document(frames, comparison_exit_code(frames), report=output)))
            write_report(frames, output)
    except AttncheckError as error:
        if "\n" in str(error):
            raise WrongMessageError(str(error)) from None
        outcome = REFUSED
    after = {path: _state(path) for path in _tree(folder) if not path.is_relative_to(output)}
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if strange := [path for path in changed if not path.is_relative_to(output) and path != output]:
        raise AssertionError(f"written outside of the output folder: {sorted(map(str, strange))}")
    return outcome


def _tree(folder: Path) -> Iterator[Path]:
    """Yield what is below a folder, links as links."""
    for path in folder.iterdir():
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _tree(path)


def _state(path: Path) -> Any:
    """Return what shows whether a file was written: not its times alone, for it may be written within one tick."""
    status = path.lstat()
    content = path.read_bytes() if path.is_file() and not path.is_symlink() and status.st_size < 1 << 20 else b""
    return None if path.is_dir() else (status.st_mode, status.st_size, status.st_ino, content)


@cache
def _case_seeds() -> tuple[list[bytes], list[Any]]:
    texts = fuzz_mutations.case_texts()
    return texts, fuzz_mutations.as_data(texts[:400:5])


@cache
def _tag_seeds() -> tuple[list[bytes], list[Any]]:
    texts = [b"tags:\n  causal: {probes: a mask, defect: a hole}\n  scale: {probes: it, defect: none}\n"]
    return texts, fuzz_mutations.as_data(texts)


@cache
def _expected_failure_seeds() -> tuple[list[bytes], list[Any]]:
    texts = fuzz_mutations.expected_failure_texts()
    return texts, fuzz_mutations.as_data(texts)


@cache
def _bundled_tags() -> dict[str, TagEntry]:
    from importlib.resources import files

    return load_tags(Path(str(files("attncheck.cases"))), "cases/tags.yaml")


TARGETS: dict[str, Target] = {
    "loader": Target(_make_case, _take_case, 200_000),
    "expected_failures": Target(_make_expected_failures, _take_expected_failures, 20_000),
    "config": Target(_make_config, _take_config, 20_000),
    "results": Target(_make_results, _take_results, 12_000, _warm_results),
}
