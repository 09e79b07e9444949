"""The HTML report, one file that needs nothing else: sections from their blocks, all else rendered by templates."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import Any

import pandas as pd
from markupsafe import Markup

from attncheck.common.errors import ExitCode
from attncheck.reports import sections
from attncheck.reports.cells import CellRow, State, cell_table, distinct_states, is_unsupported_everywhere
from attncheck.reports.coverage import coverage_by_column
from attncheck.reports.defects import causes_by_column, find_defects
from attncheck.reports.document_model import LINE_BREAK, Inline, Mark, Page, Section, Table, Text, anchor_of
from attncheck.reports.frames import Frames, documents_of, sampled_row_texts, select_expected_failures, select_failing
from attncheck.reports.html import contents, evidence
from attncheck.reports.summary import comparison_exit_code, make_summary
from attncheck.spec import DTYPES
from attncheck.spec.verdicts import Verdict

_AGREE, _FAILING, _UNSURE = ("agree", "✓"), ("failing", "✗"), ("xfail", "!")
_RECORDS_TONE = ("misprint", "!")
"""No implementation is wrong: a document or a record is."""
_UNVERIFIED, _IN_PART = ("unverified", "?"), ("unverified", "◐")
_TONE_SIGNS: Mapping[str, tuple[str, str]] = {
    **{state: (state, sign) for state, sign in contents.SYMBOLS.items()},
    "near": ("near", "✓"),
    "errata": ("erratum", "!"),
}
"""By kind of mark: the class of the tag that it is, and its sign."""
_TAG_PATTERN = re.compile(r"[a-z][a-z0-9-]*")  # as the case format has it: each is a part of an address


def template_variables(frames: Frames, budget: contents.Budget) -> dict[str, Any]:
    """Return the variables of the templates, by name."""
    whole_table = cell_table(frames)
    table = {case: row for case, row in whole_table.items() if not is_unsupported_everywhere(row)}
    every = find_defects(frames)
    detailed = _select_detailed_cases(frames, table, {defect.first.case for defect in every[: budget.wrong]}, budget)
    shown, evidence_left_out = evidence.make_evidence(frames, table, detailed, budget)
    failing_in = Counter(
        column
        for row in table.values()
        for column, cells in row.items()
        if any(cell.state is State.FAILING for cell in cells.values())
    )
    files = contents.verdict_matrix(frames, table, budget)
    linked = frozenset({*detailed, *(case for file in files for case in file.cases)})
    tone, symbol = _tone_and_sign(frames, table)
    tags = tuple(sorted({tag for case in table for tag in frames.cases[case]["tags"]}))
    probes = {tag: entry for record in frames.cases.values() for tag, entry in record.get("probes", {}).items()}
    words = {cell.word for row in table.values() for cells in row.values() for cell in cells.values()}
    maps = contents.length_map_details(frames) if every else ()
    pictures = {item.key: item.figures for items in shown.values() for item in items}
    return {
        "answer": make_summary(frames),
        "tone": tone,
        "symbol": symbol,
        "frames": frames,
        "wrong": sections.defects_section(frames, budget.wrong, most_cases=budget.listed, pictures=pictures, maps=maps),
        "causes": [
            (frames.title(column, with_version=False), texts) for column, texts in causes_by_column(frames).items()
        ],
        "with_breaks": contents.with_breaks_after_dots,
        "counts": sections.implementations_section(frames),
        # that of most failing cases first, so that a narrow screen shows it
        "columns": sorted(frames.columns, key=lambda column: -failing_in[column]),
        "verdicts_note": sections.VERDICTS_NOTE,
        "files": files,
        "cases": len(table),
        "dtypes": tuple(d for d in DTYPES if any(d in cells for row in table.values() for cells in row.values())),
        "tags": tags,
        "words": tuple(sorted(words)),
        # what each tag probes, and the bug that it is meant to catch; results of other versions may not say it
        "probes": {tag: probes[tag] for tag in tags if tag in probes and _TAG_PATTERN.fullmatch(tag)},
        # by case: its cells, and how many query rows stand for all
        "table": table,
        "sampled": sampled_row_texts(frames),
        "cells_alike": contents.distinct_cells,
        "are_alike": contents.have_equal_cells,
        "symbols": contents.SYMBOLS,
        "dtypes_of": lambda row: " ".join(d for d in DTYPES if any(d in cells for cells in row.values())),
        "anchor": anchor_of,
        "cell_anchor": partial(contents.cell_anchor, frames),
        "detailed": detailed,
        "details": contents.case_details(frames, table, detailed, shown),
        "details_left_out": len(table) - len(detailed),
        "evidence_left_out": evidence_left_out,
        "has_maps": any(pictures.values()),
        "documents": evidence.DocumentPages(frames, linked, budget).section() if documents_of(frames) else None,
        "pairs": pair_section(frames),
        "expected_failures": sections.expected_failures_section(frames),
        "empty_rows": sections.empty_rows_section(frames),
        "environments": sections.environments_section(frames),
        "incomplete": tuple(frames.environments.loc[~frames.environments["complete"].astype(bool), "environment"]),
        # those of the incomplete that were asked to stop
        "stopped": frozenset(label for label, asked in frames.requests.items() if asked.stopped),
        "properties": sections.properties_section(frames, budget.wrong),
        "address_of": _make_address_function(frames, linked),
        "signs": _TONE_SIGNS,
    }


def _select_detailed_cases(
    frames: Frames, table: Mapping[str, CellRow], first: set[str], budget: contents.Budget
) -> Collection[str]:
    """Return the cases whose stages are shown, as many as fit on the page, the most urgent ones first.

    The simplest cases of defects come before all others.
    """
    letters = contents.LETTERS_PER_CASE + contents.LETTERS_PER_STAGE * frames.results.groupby("case").size()
    order = sorted(contents.urgent_first(table), key=lambda case: case not in first)
    return contents.select_within_budget(order, lambda case: int(letters.get(case, 0)), budget.detail_letters)


def _tone_and_sign(frames: Frames, table: Mapping[str, CellRow]) -> tuple[str, str]:
    """Return the page's tone and its sign: green and a tick only if everything was judged and agrees."""
    code = comparison_exit_code(frames)
    if not len(frames.results) or code not in (ExitCode.AGREE, ExitCode.DISAGREE):
        return _UNSURE
    if code is ExitCode.DISAGREE:
        blamed = any(State.FAILING in distinct_states(row) for row in table.values())
        return _FAILING if blamed or len(select_failing(frames.pairs)) else _RECORDS_TONE
    if frames.numbers["verdict"].eq(Verdict.UNVERIFIED).any():
        return _UNVERIFIED
    return _AGREE if all(entry.judged_all_requested for entry in coverage_by_column(frames)) else _IN_PART


AddressFunction = Callable[[Mark], str]
"""Returns the address of a mark; empty if it has none."""


def _make_address_function(frames: Frames, linked: frozenset[str]) -> AddressFunction:
    """Return the function that links marks of cases to the case on the page, or to its result on an implementation."""
    columns = {column.key: column for column in frames.columns}

    def address_of(mark: Mark) -> str:
        case = mark.case or mark.text
        if mark.kind != "case" or case not in linked:
            return mark.address
        column = columns.get(mark.column)
        return f"#{anchor_of('case', case) if column is None else contents.cell_anchor(frames, case, column)}"

    return address_of


_PAIRS_EXPLAINED = (
    "Two implementations disagree where they differ by more than the sum of their error bounds. In each cell, how many "
    "comparisons disagree of all, and the largest difference over what is allowed, expected failures apart; it leads "
    "to the case where that is. What differs by more than a tenth of the allowed has another colour."
)
_NEAR_BOUND = 0.1
"""The part of the allowed difference above which agreeing pairs have another colour."""
_PAIR_KEYS = ["environment", "implementation", "other_environment", "other"]


def pair_section(frames: Frames) -> Section | None:
    """Return a table of the comparisons of every two implementations; None if no two were compared."""
    pairs = frames.pairs[frames.pairs["verdict"].ne(Verdict.UNVERIFIED)]
    if pairs.empty:
        return None
    cells = _pair_cells(pairs)
    compared = {key[:2] for key in cells} | {key[2:] for key in cells}
    columns = [column for column in frames.columns if column.key in compared]
    keys = [column.key for column in columns]
    titles = [frames.title(column) for column in columns]
    cells = {(*key[2:], *key[:2]): cell for key, cell in cells.items()} | cells  # either way round
    cells |= {(*key, *key): "\N{EM DASH}" for key in keys}
    rows = [
        (title, *(cells.get((*first, *second), "") for second in keys))
        for title, first in zip(titles, keys, strict=True)
    ]
    table = Table("Disagreements of every two implementations", ["", *titles], rows)
    return Section("Pair by pair", "pairs", [Text(_PAIRS_EXPLAINED), table])


def _pair_cells(pairs: pd.DataFrame) -> dict[Any, Inline]:
    is_bad, is_expected = (
        pairs.index.isin(rows.index) for rows in (select_failing(pairs), select_expected_failures(pairs))
    )
    marked = pairs[[*_PAIR_KEYS, "case", "ratio"]].assign(bad=is_bad, expected=is_expected)
    of_two = marked.groupby(_PAIR_KEYS)
    counts = of_two[["bad", "expected"]].sum().assign(compared=of_two.size())
    # The largest difference, without expected failures if possible; of disagreements without a number the first.
    marked = marked.sort_values(["expected", "bad", "ratio"], ascending=[True, False, False], na_position="last")
    worst = marked.drop_duplicates(_PAIR_KEYS).set_index(_PAIR_KEYS)[["case", "ratio"]]
    return {key: _pair_cell(*row) for key, *row in counts.join(worst).itertuples()}


def _pair_cell(disagree: int, expected: int, compared: int, case: str, ratio: float) -> Inline:
    near = "near" if ratio > _NEAR_BOUND else State.AGREE.value
    kind = State.FAILING.value if disagree else State.XFAIL.value if expected else near
    also = f", {expected:,} expected" if expected else ""
    size = "told by no number" if math.isnan(ratio) else f"{ratio:.2g} of the allowed"
    return (
        Mark(f"{disagree:,} of {compared:,}{also}", kind),
        LINE_BREAK,
        Mark(size, "case", case=case),
    )


_PIECES_PER_CHUNK = 1000
"""A template gives a piece for each of its words."""
# HTML allows none of these, not even as references.
_FORBIDDEN_PATTERN = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")


def render_html(frames: Frames, budget: contents.Budget | None = None) -> str:
    """Return the whole report. The same frames give the same text."""
    return "".join(render_html_pieces(frames, budget))


def render_html_pieces(frames: Frames, budget: contents.Budget | None = None) -> Iterator[str]:
    """Give the whole report piece by piece.

    Every text that comes from a case or a framework is escaped, and the page's content security policy allows no
    script but its own and no request to anywhere.
    """
    page, script = template_variables(frames, budget or contents.Budget()), _read_template("report.js")
    later = ("documents", "pairs", "properties", "expected_failures", "environments")
    first, *others = ([(part.anchor, part.title)] if (part := page[name]) else [] for name in ("wrong", *later))
    tags = [("tags", "Tags")] if page["probes"] else []
    links = [*first, ("verdicts", "Verdicts"), *chain.from_iterable(others), ("cases", "Cases"), *tags]
    stream = (
        contents.template_environment()
        .get_template("page.html")
        .stream(
            page=page,
            title=f"{page['answer'].word} · attention conformance",
            links=links,
            script=script,
            style=_read_template("report.css"),
            script_hash=b64encode(sha256(script.encode()).digest()).decode("ascii"),
            levels=contents.ERROR_LEVELS,
        )
    )
    stream.enable_buffering(_PIECES_PER_CHUNK)
    return (_replace_forbidden(piece) for piece in stream)


def render_page(page: Page, style: str) -> str:
    """Return a page of sections, with a style sheet in addition to the report's. It requests no other file."""
    text = (
        contents.template_environment()
        .get_template("shell.html")
        .render(
            page={
                "title": page.title,
                "opening": page.opening,
                "sections": page.sections,
                "address_of": lambda mark: mark.address,
                "signs": _TONE_SIGNS,
            },
            title=f"{page.title} · attncheck",
            links=[(section.anchor, section.title) for section in page.sections],
            style=_read_template("report.css") + _read_template(style),
        )
    )
    return _replace_forbidden(text)


def _read_template(name: str) -> Markup:
    """Read a file that the page includes unchanged."""
    return Markup((contents.TEMPLATES / name).read_text(encoding="utf-8"))


def _replace_forbidden(text: str) -> str:
    """Replace characters that HTML does not allow in any form."""
    return _FORBIDDEN_PATTERN.sub("\N{REPLACEMENT CHARACTER}", text)
