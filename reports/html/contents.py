"""Contents of the page: its size limits, the verdict matrix, each case with its stages, scripts and maps of lengths.

It also has the functions that write states, numbers, shapes and addresses on the page.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jinja2 import BytecodeCache, Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup

from attncheck.common.errors import ResultsError
from attncheck.common.store import user_store
from attncheck.common.wording import count_noun, truncate_list
from attncheck.reports.cells import Cell, CellRow, State, distinct_states
from attncheck.reports.coverage import DOCUMENT_VERDICTS
from attncheck.reports.document_model import Block, Details, Figure, Key, Text, anchor_of
from attncheck.reports.failure_patterns import WIDTH_LIMITS, LengthMap, length_maps
from attncheck.reports.frames import (
    Column,
    Frames,
    group_by_key,
    select_expected_failures,
    select_failing,
    stage_sort_key,
    to_records,
)
from attncheck.results.format import SCRIPTS_FOLDER
from attncheck.results.records import read_json
from attncheck.spec.verdicts import Verdict

URGENCY = (State.FAILING, State.MISPRINT, State.XPASS, State.XFAIL)


LETTERS_PER_ROW, LETTERS_PER_CELL = 400, 90
"""Markup of the matrix: of a case's row, and of each cell in it unless all are equal."""
LETTERS_PER_CASE, LETTERS_PER_STAGE = 1_600, 70
"""Markup of a case's details: of its description, and of each stage on one implementation in one dtype."""
LETTERS_PER_NUMBER = 70
"""Markup of a document's number on one implementation, with its share of the printed and the exact number."""


@dataclass(frozen=True)
class Budget:
    """The size limits of one page: 3 MB in all, which a phone opens and an issue accepts as an attachment.

    Sizes are of the markup, measured on the bundled corpus. Failures come first; the other files have the rest.
    """

    matrix_letters: int = 1_200_000
    detail_letters: int = 700_000
    evidence: int = 80
    """Cells with evidence, of 4 KB each: failures and expected failures."""
    map_letters: int = 150_000
    """A map of errors takes 1 to 10 KB, mostly 2; the numbers of a small array 5."""
    pictures: int = 40
    """A matrix of a document takes 2 KB, a large one 10."""
    failing_pictures: int = 100
    """Pictures of failing computations, in addition."""
    number_letters: int = 250_000
    """Markup of documents' numbers; failing ones come first."""
    computations: int = 60
    """If documents have more computations, each is laid out only when it comes into view."""
    script_letters: int = 80_000
    """A script that reproduces a cell takes 5 to 100 KB."""
    wrong: int = 100
    """Listed defects; results.csv has all failures."""
    listed: int = 500
    """A case that a defect lists takes 200 letters."""


def urgent_first(table: Mapping[str, CellRow]) -> list[str]:
    """Return the cases: failing ones, then those with expected failures, then the rest in their order."""
    return sorted(table, key=lambda case: _urgency_rank(table[case]))


def select_within_budget(cases: Iterable[str], size_of: Callable[[str], int], most: int) -> dict[str, None]:
    """Return the first cases whose sizes together stay within a budget, in their order.

    Example:
        >>> list(select_within_budget(["a", "b", "c"], {"a": 3, "b": 4, "c": 1}.__getitem__, 6))
        ['a']
    """
    kept: dict[str, None] = {}
    spent = 0
    for case in cases:
        spent += size_of(case)
        if spent > most:
            break
        kept[case] = None
    return kept


def _urgency_rank(row: CellRow) -> int:
    states = distinct_states(row)
    return next((urgency for urgency, state in enumerate(URGENCY) if state in states), len(URGENCY))


_MAX_BYTES = 100_000
"""A larger script has large inputs and is left out: `attncheck repro` writes it again."""


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._]+")
"""Characters that the name of a file must not have."""


def script_names(directories: Mapping[str, Path]) -> dict[str, dict[str, Path]]:
    """Return the path of each cell's script, by environment, without names of files in other folders."""
    scripts = {}
    for label, directory in directories.items():
        folder, content = directory / SCRIPTS_FOLDER, None
        with suppress(ResultsError):
            content = read_json(folder / "index.json")
        names = {key: name for key, name in (content or {}).items() if isinstance(name, str) and name}
        scripts[label] = {key: folder / name for key, name in names.items() if Path(name).name == name}
    return scripts


def script_details(
    scripts: Mapping[str, Mapping[str, Path]], case: str, dtype: str, column: Column
) -> Iterator[Details]:
    """Yield the script of a cell, if there is one."""
    path = scripts.get(column.environment, {}).get(f"{case}|{column.implementation}|{dtype}")
    with suppress(OSError, ValueError):
        # A link could show any file of whoever makes the report.
        if path and path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_BYTES:
            file = f"{_NOT_IN_NAMES.sub('-', f'{case} {column.implementation} {dtype}')}.py"
            shown = render_macro("script", file, Markup(escape(path.read_text(encoding="utf-8"), quote=False)))
            yield Details(f"The script that shows it without attncheck, {file}", [Figure(file, shown)])


ERROR_LIMITS = (0.1, 1.0, 10.0)
ERROR_LEVELS: Mapping[str, str] = {
    "e0": "below a tenth of the bound",
    "e1": "within the bound",
    "e2": "up to ten times it",
    "e3": "more than ten times it, or not finite",
    "en": "not judged",
}
"""Ranges of the error over its bound, by class of the style sheet: up to each limit, beyond all, or unknown."""

SYMBOLS: Mapping[State, str] = {
    State.AGREE: "✓",
    State.ERRATUM: "✓",
    State.UNVERIFIED: "?",
    State.UNSUPPORTED: "\N{EN DASH}",
    State.XFAIL: "≈",
    State.XPASS: "!",
    State.MISPRINT: "!",
    State.FAILING: "✗",
}
"""A sign next to every word, so that no verdict is shown only by a colour."""

NO_VALUE = "\N{EN DASH}"
"""The text for a missing number."""

SHORT_DTYPES: Mapping[str, str] = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


TEMPLATES = Path(__file__).parent / "templates"


@cache
def template_environment() -> Environment:
    """Return the environment that renders the templates, with every text escaped."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=_bytecode_cache(),
    )


class _OptionalBytecodeCache(FileSystemBytecodeCache):
    """Compiled templates in a folder; a folder that cannot be written is no fault."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError):
            super().dump_bytecode(bucket)


def _bytecode_cache() -> BytecodeCache | None:
    """Return the cache of compiled templates, next to the store; None if the user's store may not be used.

    Compiling the templates takes a tenth of the time of a run whose results are stored.
    """
    store = user_store().folder
    if store is None:
        return None
    folder = store.parent / "templates"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return _OptionalBytecodeCache(str(folder))


def with_breaks_after_dots(text: str) -> Markup:
    """Return a text in which a browser may break a dotted name after each dot, rather than inside a word.

    Example:
        >>> with_breaks_after_dots("torch.compile_output is wrong.")
        Markup('torch.<wbr>compile_output is wrong.')
    """
    return Markup(re.sub(r"(?<=[A-Za-z_]\.)(?=[A-Za-z_])", "<wbr>", escape(text)))


def render_macro(name: str, *values: object) -> Markup:
    """Draw a figure of the page by its macro."""
    return Markup(getattr(template_environment().get_template("figures.html").module, name)(*values))


def short_number_or_dash(value: float | None, digits: int = 3) -> str:
    """Write a number with few digits; a dash for no number."""
    return NO_VALUE if value is None or math.isnan(value) else f"{value:.{digits}g}"


def shape_text(shape: Sequence[int]) -> str:
    """Write the lengths of axes."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, shape)) or "scalar"


def cell_anchor(frames: Frames, case: str, column: Column) -> str:
    """Return the anchor of a case's result on one implementation."""
    return anchor_of("cell", case, frames.title(column, with_version=False))


@dataclass(frozen=True)
class CellEvidence:
    """The evidence of a failure or expected failure: its verdict, its implementation, and blocks that show it."""

    state: str
    text: str
    title: str
    note: str
    blocks: tuple[Block, ...]
    key: Key = ("", "", "", "")

    @property
    def figures(self) -> list[Figure]:
        """Return the pictures among the blocks."""
        return [block for block in self.blocks if isinstance(block, Figure)]


class StageCell(NamedTuple):
    """One stage: its largest error over the bound, accumulated and introduced, and a mark if that is notable."""

    accumulated: str
    introduced: str
    state: str
    mark: str


StageRows = Mapping[tuple[str, str, str], Mapping[str, Mapping[str, Any]]]
"""By environment, implementation and dtype, then by stage: the rows of a case."""


class CaseDetails(NamedTuple):
    """One case: its record, its cells, the stages of all implementations with their rows, and the evidence."""

    record: Mapping[str, Any]
    row: CellRow
    stages: tuple[str, ...]
    rows: StageRows
    evidence: tuple[CellEvidence, ...]

    @property
    def in_short(self) -> str:
        """The failures and expected failures, in a few words; empty if all agree."""
        urgent = (State.FAILING, State.XFAIL)
        notes = [f"{item.text} in {item.title}" for item in self.evidence if item.state in DOCUMENT_VERDICTS]
        notes += [
            f"{column.implementation}: {cell.text}"
            for column, cells in self.row.items()
            for cell in cells.values()
            if cell.state in urgent
        ]
        return "; ".join(truncate_list(2, list(dict.fromkeys(notes))))

    @property
    def state(self) -> str:
        """Return the state that matters most."""
        return (*URGENCY, State.AGREE)[_urgency_rank(self.row)].value

    @property
    def options(self) -> list[str]:
        """Return the options of the case, and the declared memory layout of its inputs."""
        record = self.record
        notes = [f"{name} = {value}" for name, value in record["options"].items()]
        notes += [f"inputs stored in {record['storage']}"] if record.get("storage") else []
        notes += [f"{name} in memory: {form}" for name, form in record.get("memory_layout", {}).items()]
        return [*notes, *(f"{name} has its heads merged" for name in record.get("merged", []))]

    @property
    def inputs(self) -> list[str]:
        """Return the inputs with their shapes."""
        return [f"{name} {shape_text(shape)}" for name, shape in self.record["inputs"].items()]

    def lines(self, column: Column) -> Iterator[tuple[str, Cell, Sequence[StageCell | None], str, str]]:
        """Yield the outcome of one implementation in each dtype.

        Each is the dtype, the cell, a cell per stage (empty without stages), the padding, and why there is no stage.
        """
        for dtype, cell in self.row[column].items():
            rows_by_stage = self.rows.get((*column.key, dtype), {})
            stages = [_stage_cell(rows_by_stage[stage]) if stage in rows_by_stage else None for stage in self.stages]
            padded = next((row["padded"] for row in rows_by_stage.values() if row["padded"] is not None), "")
            yield (
                dtype,
                cell,
                stages if any(stages) else (),
                padded,
                str(rows_by_stage[""]["message"]) if "" in rows_by_stage else "",
            )


def case_details(
    frames: Frames,
    table: Mapping[str, CellRow],
    detailed: Collection[str],
    evidence: Mapping[str, Sequence[CellEvidence]],
) -> Iterator[CaseDetails]:
    """Yield the details of some cases, in the order of the matrix."""
    results = frames.results[frames.results["case"].isin(detailed)]
    marks = pd.Series("", index=results.index)
    marks[select_failing(results).index] = "failing"
    marks[select_expected_failures(results).index] = "xfail"
    by_case: dict[str, dict[tuple[str, str, str], dict[str, Mapping[str, Any]]]] = {}
    for item in to_records(results.assign(state=marks)):
        key = (item["environment"], item["implementation"], item["dtype"])
        by_case.setdefault(item["case"], {}).setdefault(key, {})[item["stage"]] = item
    for case in table:
        if case in detailed:
            stages_present = {stage for rows in by_case[case].values() for stage in rows if stage}
            stages = tuple(sorted(stages_present, key=stage_sort_key))
            why = tuple(evidence.get(case, ()))
            yield CaseDetails(frames.cases[case], table[case], stages, by_case[case], why)


def _stage_cell(row: Mapping[str, Any]) -> StageCell:
    if row["verdict"] == Verdict.UNVERIFIED:
        return StageCell("?", "", "", "")
    tiers = [tier for tier in (row["tier"], row["introduced_tier"]) if tier not in (None, "within")]
    open_ = "?" if not pd.isna(row["unjudged"]) and row["unjudged"] else ""  # elements without an exact answer
    # in the order of the alphabet, the worst first
    mark = row["verdict"] if row["state"] else min(tiers, default=open_)
    return StageCell(
        short_number_or_dash(row["ratio"], 2), short_number_or_dash(row["introduced_ratio"], 2), row["state"], mark
    )


def distinct_cells(cells: Mapping[str, Cell]) -> list[tuple[Cell, str, str]]:
    """Return the different cells of a case, each with the long and the short names of its dtypes."""
    return [
        (cell, " ".join(dtypes), " ".join(SHORT_DTYPES.get(dtype, dtype) for dtype in dtypes))
        for cell, dtypes in group_by_key(cells, cells.__getitem__).items()
    ]


def have_equal_cells(row: CellRow, columns: Sequence[Column]) -> bool:
    """Return whether several columns have the same cells of a case, which are then shown once."""
    first = row.get(columns[0]) if columns else None
    return len(columns) > 1 and all(row.get(column) == first for column in columns)


@dataclass(frozen=True)
class FileRows:
    """The listed cases of one file, and its counts of all and of failing cases, in words."""

    file: str
    title: str
    anchor: str
    cases: tuple[str, ...]
    left_out: int
    counts: str


def verdict_matrix(frames: Frames, table: Mapping[str, CellRow], budget: Budget) -> tuple[FileRows, ...]:
    """Return the files in order; above the budget, cases in which everything agrees are only counted."""

    def letters(case: str) -> int:
        cells = 1 if have_equal_cells(table[case], frames.columns) else len(frames.columns)
        return LETTERS_PER_ROW + LETTERS_PER_CELL * cells

    kept = select_within_budget(urgent_first(table), letters, budget.matrix_letters)
    files = group_by_key(table, lambda case: str(frames.cases[case]["file"]))
    return tuple(
        FileRows(
            file=file,
            title=frames.cases[cases[0]]["title"],
            anchor=f"file-{number}",
            cases=tuple(case for case in cases if case in kept),
            left_out=sum(case not in kept for case in cases),
            counts=_counts_text([table[case] for case in cases]),
        )
        for number, (file, cases) in enumerate(files.items(), start=1)
    )


def _counts_text(rows: list[CellRow]) -> str:
    states = Counter(max(distinct_states(row), key=list(State).index, default=State.UNSUPPORTED) for row in rows)
    words = [count_noun(len(rows), "case")]
    words += [f"{states[state]:,} {word}" for state, word in _COUNTED.items() if states[state]]
    return ", ".join(words)


_COUNTED = {
    State.FAILING: "failing",
    State.MISPRINT: "with misprints",
    State.XPASS: "with records that no longer hold",
    State.XFAIL: "with expected failures",
}


_LEGEND = (
    "A square: the chosen cases of these lengths. Crossed out: all of them fail; one stroke: some fail; plain: all "
    "pass. Dashed: Lq = Lk."
)


def length_map_details(frames: Frames) -> list[Details]:
    """Return a map for every implementation that fails, with switches that choose what it shows."""
    return [_one_length_map(frames, length_map, number) for number, length_map in enumerate(length_maps(frames), 1)]


def _one_length_map(frames: Frames, length_map: LengthMap, number: int) -> Details:
    title = frames.title(length_map.column, with_version=False)
    cases, tile, axes = length_map.cases, length_map.tile, (length_map.queries, length_map.keys)
    words = f"{cases['fails'].sum():,} of {count_noun(len(cases), 'case')} fail. {length_map.drawn_tiles_text()}"
    ends = [list(_tile_ends(lengths, tile)) if tile else [] for lengths in axes]
    views = [(f"{causality}{width}", *_places_by_outcome(chosen)) for causality, width, chosen in length_map.views()]
    counts = {view[:2]: f" ({view[2]['fails'].sum():,} of {len(view[2]):,})" for view in length_map.views()}
    kinds = [(f"c{kind}", f"{_CAUSALITY_WORDS[kind]}{count}") for (kind, width), count in counts.items() if not width]
    widths = [(f"w{width}", f"{_WIDTH_RANGES[width]}{count}") for (kind, width), count in counts.items() if not kind]
    # Switches that choose among several views.
    switches = [(name, choices) for name, choices in (("cases", kinds), ("width", widths)) if len(choices) > 1]
    picture = render_macro("lengths", length_map, number, title, switches, views, _diagonal_ends(length_map), ends)
    figure = Figure(length_map.words(), picture)
    summary = f"Where {title} fails, by the lengths of queries and keys"
    return Details(summary, [Text(words), figure, Text(_LEGEND, "muted")], is_open=number == 1)


def _places_by_outcome(cases: pd.DataFrame) -> list[list[tuple[int, int]]]:
    """Return the rows and columns at which all cases pass, some fail, all fail, and any fails."""
    share = cases.groupby(["row", "column"])["fails"].mean()
    return [list(share.index[chosen]) for chosen in (share == 0, (share > 0) & (share < 1), share == 1, share > 0)]


_CAUSALITY_WORDS = ("all", "causal", "not causal")
_WIDTH_RANGES = (
    "all",
    f"D ≤ {WIDTH_LIMITS[0]}",
    *(f"{low + 1} to {high}" for low, high in pairwise(WIDTH_LIMITS)),
    f"D > {WIDTH_LIMITS[-1]}",
)


def _diagonal_ends(length_map: LengthMap) -> list[tuple[float, float]]:
    """Return the line of as many queries as keys, in the range that both have, as row and column positions."""
    low, high = (max(length_map.queries[0], length_map.keys[0]), min(length_map.queries[-1], length_map.keys[-1]))
    lengths = sorted(length for length in {*length_map.queries, *length_map.keys, low, high} if low <= length <= high)
    rows, columns = (np.interp(lengths, axis, np.arange(len(axis))) for axis in (length_map.queries, length_map.keys))
    return list(zip(rows, columns, strict=True))


def _tile_ends(lengths: Sequence[int], tile: int) -> Iterator[int]:
    """Yield the positions before which a tile ends: shorter lengths come before it, longer ones after it.

    Example:
        >>> list(_tile_ends([15, 16, 17, 31, 33], 16))
        [2, 4]
    """
    for place in range(1, len(lengths)):
        if -(-lengths[place] // tile) != -(-lengths[place - 1] // tile):
            yield place
