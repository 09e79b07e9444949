"""The HTML report, one file that needs nothing else: what every section shows, rendered by templates.

The compiled templates are kept, because compiling them takes longer than a report of a few cases. They lie where Python
keeps what it compiles modules to: beside the templates, or where ``PYTHONPYCACHEPREFIX`` says, and nowhere if Python
keeps nothing.
"""

from __future__ import annotations

import math
import re
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd
from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup

from attncheck.errors import ExitCode
from attncheck.reports.coverage import coverage
from attncheck.reports.defects import (
    EXPECTED_FAILURES_NOTE,
    Defect,
    address_of,
    commands_again,
    count_following,
    defects,
    empty_rows,
    expected_failure_groups,
)
from attncheck.reports.failure_patterns import described, in_common_lines
from attncheck.reports.frames import (
    CellRow,
    Column,
    Frames,
    State,
    cell_table,
    documents_of,
    environment_facts,
    expected_failures,
    failing,
    is_unsupported,
    records,
)
from attncheck.reports.html.contents import (
    BEYOND,
    LETTERS_PER_CASE,
    LETTERS_PER_CELL,
    LETTERS_PER_ROW,
    LETTERS_PER_STAGE,
    LEVELS,
    NOT_JUDGED,
    SYMBOLS,
    Anchors,
    Budget,
    budget_of,
    failing_words,
    make_anchors,
    urgent_first,
    within,
)
from attncheck.reports.html.details import case_details, drawn_lengths, verdict_matrix
from attncheck.reports.properties import OUTCOMES_NOTE, asked_rows, broken_properties, property_table
from attncheck.reports.summary import exit_code_of, findings, make_summary
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict

if TYPE_CHECKING:
    from attncheck.reports.html.evidence import DrawnDocument, Evidence


_AGREE, _FAILING, _UNSURE = ("agree", "✓"), ("failing", "✗"), ("xfail", "!")
_OF_RECORDS = ("misprint", "!")
"""No implementation is wrong: a document or a record is."""
_UNVERIFIED, _IN_PART = ("unverified", "?"), ("unverified", "◐")
_ALWAYS_SHOWN = (State.AGREE, State.UNVERIFIED, State.UNSUPPORTED, State.FAILING)
_FIRST = (State.FAILING, State.MISPRINT, State.XPASS)
"""Counted first, since a phone shows no more than one or two columns."""
_TAG = re.compile(r"[a-z][a-z0-9-]*")  # as the case format has it: each is a part of an address


@dataclass(frozen=True)
class DefectCard:
    """One defect: what is wrong, the simplest case with a wrong element, and all cases where they are several."""

    state: str
    implementation: str
    defect: Defect
    message: str
    described: str
    """The shape of the simplest case, and what it probes."""
    command: str
    anchor: str
    cases: tuple[tuple[str, str], ...]
    """Cases that are listed, each with its anchor."""


def page_sections(frames: Frames, budget: Budget) -> dict[str, Any]:
    """Return everything that the templates show, by the name that they call it by."""
    whole_table = cell_table(frames)
    table = {case: row for case, row in whole_table.items() if not is_unsupported(row)}
    anchors = make_anchors(sorted(table), frames.columns)
    every = defects(frames)
    found = every[: budget.wrong]
    detailed = _detailed(frames, table, {each.row["case"] for each in found}, budget)
    evidence, evidence_left_out = _evidence(frames, table, anchors, detailed, budget)
    columns = _failing_first(frames, table)
    files = verdict_matrix(frames, columns, table, anchors, detailed, budget)
    linked = frozenset({*detailed, *(row.case for file in files for row in file.rows)})
    tone, symbol = _tone(frames, table)
    occurring = {cell.state for row in whole_table.values() for cells in row.values() for cell in cells.values()}
    states = (state for state in State if state in occurring or state in _ALWAYS_SHOWN)
    shown = tuple(sorted(states, key=lambda state: _FIRST.index(state) if state in _FIRST else len(_FIRST)))
    tags = tuple(sorted({tag for case in table for tag in frames.cases[case]["tags"]}))
    words = {cell.word for row in table.values() for cells in row.values() for cell in cells.values()}
    documents = _documents(frames, anchors, budget)
    return {
        "answer": make_summary(frames),
        "tone": tone,
        "symbol": symbol,
        "notes": frames.notes,
        "states": tuple((state.value, SYMBOLS[state], state.value) for state in shown),
        "counts": tuple(_counts(frames, column, whole_table, shown) for column in frames.columns),
        "defects": _defect_cards(frames, found, _links(frames, anchors, linked), budget.listed),
        "defects_left_out": len(every) - len(found),
        # what the failing cases have in common and the passing ones have not
        "in_common": tuple(in_common_lines(frames)),
        # where in (Lq, Lk) each implementation fails
        "lengths": drawn_lengths(frames) if len(findings(frames)) else (),
        "title": frames.title,
        "columns": columns,
        "many_environments": frames.has_several_environments,
        "files": files,
        "cases": len(table),
        "unsupported": [each for each in coverage(frames) if each.lacks.cases or each.lacks.not_offered],
        "dtypes": tuple(d for d in DTYPES if any(d in cells for row in table.values() for cells in row.values())),
        "tags": tags,
        "words": tuple(sorted(words)),
        # what each tag probes, and the bug that it is meant to catch
        "probes": _probes(frames, tags),
        "details": tuple(case_details(frames, table, anchors, detailed, evidence)),
        "details_left_out": len(table) - len(detailed),
        "evidence_left_out": evidence_left_out,
        "has_maps": any(item.maps for items in evidence.values() for item in items),
        "documents": documents,
        # whether they are so many that a computation is laid out only when it comes into view
        "documents_late": sum(document.shown for document in documents) > budget.computations,
        "pairs": pair_table(frames, anchors),
        "expected_failures": tuple(expected_failure_groups(frames)),
        "following": count_following(frames),
        "empty_rows": empty_rows(frames),
        "expected_failures_note": EXPECTED_FAILURES_NOTE,
        "environments": tuple(frames.environments["environment"]),
        "incomplete": tuple(frames.environments.loc[~frames.environments["complete"].astype(bool), "environment"]),
        # those of the incomplete that were asked to stop
        "stopped": frozenset(label for label, asked in frames.asked.items() if asked.stopped),
        "facts": environment_facts(frames),
        **_properties(frames, budget),
        # cases that have an anchor on the page
        "linked": linked,
        "case_anchor": anchors.case,
        "address_of": address_of,
    }


def _evidence(
    frames: Frames, table: Mapping[str, CellRow], anchors: Anchors, detailed: Collection[str], budget: Budget
) -> tuple[Mapping[str, list[Evidence]], int]:
    """Return the evidence by case, and how many cells had to go without; what makes it is imported where any is."""
    cells = (cell for row in table.values() for cells in row.values() for cell in cells.values())
    if not any(cell.state in (State.FAILING, State.XFAIL) for cell in cells):
        return {}, 0
    from attncheck.reports.html.evidence import make_evidence

    return make_evidence(frames, table, anchors.cell, detailed, budget)


def _documents(frames: Frames, anchors: Anchors, budget: Budget) -> tuple[DrawnDocument, ...]:
    if not documents_of(frames):
        return ()
    from attncheck.reports.html.evidence import drawn_documents

    return drawn_documents(frames, anchors, budget)


def _properties(frames: Frames, budget: Budget) -> dict[str, Any]:
    """Return what was asked of properties; the table is None where nothing was."""
    broken = broken_properties(frames) if frames.properties else ()
    return {
        "properties": property_table(asked_rows(frames)) if frames.properties else None,
        "properties_note": OUTCOMES_NOTE,
        "broken": broken[: budget.wrong],
        "broken_left_out": max(0, len(broken) - budget.wrong),
    }


def _probes(frames: Frames, tags: Iterable[str]) -> dict[str, Mapping[str, str]]:
    """Return what tags mean, each of which stands with one case at least; results of other versions may not say it."""
    found = {tag: entry for record in frames.cases.values() for tag, entry in record.get("probes", {}).items()}
    return {tag: found[tag] for tag in tags if tag in found and _TAG.fullmatch(tag)}


def _detailed(frames: Frames, table: Mapping[str, CellRow], first: set[str], budget: Budget) -> Collection[str]:
    """Return the cases whose stages are shown, as many as the page has room for, in the order in which they matter.

    Those come first that stand for a defect. What the matrix does not take up is theirs.
    """
    letters = LETTERS_PER_CASE + LETTERS_PER_STAGE * frames.results.groupby("case").size()
    rows = len(table) * (LETTERS_PER_ROW + LETTERS_PER_CELL * len(frames.columns))
    most = budget.detail_letters + max(0, budget.matrix_letters - rows)
    order = sorted(urgent_first(table), key=lambda case: case not in first)
    return within(order, lambda case: int(letters.get(case, 0)), most)


def _tone(frames: Frames, table: Mapping[str, CellRow]) -> tuple[str, str]:
    """Return the page's tone and its sign: green, and a tick, only where everything was judged and holds."""
    code = exit_code_of(frames)
    if not len(frames.results) or code not in (ExitCode.AGREE, ExitCode.DISAGREE):
        return _UNSURE
    if code is ExitCode.DISAGREE:
        blamed = any(
            cell.state is State.FAILING for row in table.values() for of in row.values() for cell in of.values()
        )
        return _FAILING if blamed or len(failing(frames.pairs)) else _OF_RECORDS
    if frames.numbers["verdict"].eq(Verdict.UNVERIFIED).any():
        return _UNVERIFIED
    return _AGREE if all(each.is_whole for each in coverage(frames)) else _IN_PART


def _failing_first(frames: Frames, table: Mapping[str, CellRow]) -> list[Column]:
    """Return the columns of the matrix, that of most failing cases first, so that a narrow screen shows it."""
    failing_in = Counter(
        column
        for row in table.values()
        for column, cells in row.items()
        if any(cell.state is State.FAILING for cell in cells.values())
    )
    return sorted(frames.columns, key=lambda column: -failing_in[column])


def _counts(
    frames: Frames, column: Column, table: Mapping[str, CellRow], shown: Iterable[State]
) -> tuple[str, int, list[tuple[str, str, str, int, str]]]:
    """Count evaluations, that is cases in dtypes: the title, all of them, and of each state its share in percent."""
    states = Counter(cell.state for row in table.values() for cell in row.get(column, {}).values())
    total = states.total()
    counts = [
        (state.value, SYMBOLS[state], state.value, states[state], f"{100 * states[state] / max(total, 1):.2f}")
        for state in shown
    ]
    return frames.title(column), total, counts


_STATE_OF = {State.MISPRINT.value: State.MISPRINT, State.XPASS.value: State.XPASS}


def _defect_cards(
    frames: Frames, found: Sequence[Defect], link: Callable[..., str], most: int
) -> tuple[DefectCard, ...]:
    """Return a card for each defect; all cards together list so many cases."""
    if not found:
        return ()
    from attncheck.reports.machine.outcome import failures_of
    from attncheck.reports.terminal import how_wrong

    cards = []
    failures = failures_of(frames, pd.DataFrame([each.row for each in found]))
    for defect, failure in zip(found, failures, strict=True):
        message = str(defect.row["message"])
        if defect.diagnosis:
            message = how_wrong(failure, of_several=len(defect.dtypes) > 1)
        listed = defect.cases[:most] if defect.others else ()
        most -= len(listed)
        anchor, cases = link(defect.row, str(defect.row["case"])), [(case, link(defect.row, case)) for case in listed]
        cards.append(_defect_card(frames, defect, message, anchor, cases))
    return tuple(cards)


def _defect_card(
    frames: Frames, defect: Defect, message: str, anchor: str, cases: Iterable[tuple[str, str]]
) -> DefectCard:
    row = defect.row
    implementation, verdict = str(row["implementation"]), str(row["verdict"])
    is_known = defect.is_shown_by_calls
    return DefectCard(
        state=_STATE_OF.get(verdict, State.FAILING).value,
        implementation=frames.named(implementation, row["environment"]),
        defect=defect,
        message=message,
        described=described(frames.cases[row["case"]]) if implementation else "",
        command=next(iter(commands_again(frames, row)), "") if is_known else "",
        anchor=anchor,
        cases=tuple(cases),
    )


def _links(frames: Frames, anchors: Anchors, linked: frozenset[str]) -> Callable[[Mapping[str, Any], str], str]:
    """Return what gives the anchor of a case as a row's implementation computes it; none where the page has it not."""
    columns = {(column.environment, column.implementation): column for column in frames.columns}

    def link(row: Mapping[str, Any], case: str) -> str:
        column = columns.get((row["environment"], row["implementation"]))
        return "" if case not in linked else anchors.case(case) if column is None else anchors.cell(case, column)

    return link


_NEAR = 0.1
"""Of what is allowed: pairs that differ by more are told apart, though they agree."""
_PAIR = ["environment", "implementation", "other_environment", "other"]


@dataclass(frozen=True)
class PairCell:
    """Two implementations: how many stages were compared, how many disagree, and the case where most."""

    compared: int
    disagree: int
    expected: int
    ratio: str
    state: str
    symbol: str
    case: str
    anchor: str
    label: str


@dataclass(frozen=True)
class PairTable:
    """Implementations against implementations; None on the diagonal and where nothing was compared."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, tuple[PairCell | None, ...]], ...]


def pair_table(frames: Frames, anchors: Anchors) -> PairTable | None:
    """Return the table of pairs, of those that were compared with any; None where no two were."""
    pairs = frames.pairs[frames.pairs["verdict"].ne(Verdict.UNVERIFIED)]
    if pairs.empty:
        return None
    cells = _cells(pairs, anchors)
    compared = {key[:2] for key in cells} | {key[2:] for key in cells}
    columns = [column for column in frames.columns if (column.environment, column.implementation) in compared]
    keys = [(column.environment, column.implementation) for column in columns]
    titles = [frames.title(column) for column in columns]
    rows = [
        (title, tuple(cells.get((*one, *other)) or cells.get((*other, *one)) for other in keys))
        for title, one in zip(titles, keys, strict=True)
    ]
    return PairTable(tuple(titles), tuple(rows))


def _cells(pairs: pd.DataFrame, anchors: Anchors) -> dict[Any, PairCell]:
    bad, expected = failing(pairs), expected_failures(pairs)
    compared = pairs.groupby(_PAIR).size()
    disagree, xfailed = bad.groupby(_PAIR).size(), expected.groupby(_PAIR).size()
    worst = _worst(pairs.drop(expected.index))
    worst_expected = _worst(expected)
    return {
        key: _cell(int(number), int(disagree.get(key, 0)), int(xfailed.get(key, 0)), row, anchors)
        for key, number in compared.items()
        if (row := worst.get(key) or worst_expected.get(key) or {"case": "", "stage": "", "ratio": float("nan")})
    }


def _worst(pairs: pd.DataFrame) -> dict[Any, Mapping[str, Any]]:
    """Return the row with the largest ratio for every two; of disagreements without a number the first."""
    ordered = pairs.assign(_bad=pairs.index.isin(failing(pairs).index))
    ordered = ordered.sort_values(["_bad", "ratio"], ascending=False, kind="stable", na_position="last")
    first = ordered.drop_duplicates(_PAIR)
    return {tuple(row[name] for name in _PAIR): row for row in records(first)}


def _cell(compared: int, disagree: int, expected: int, worst: Mapping[str, Any], anchors: Anchors) -> PairCell:
    ratio, case = worst["ratio"], str(worst["case"])
    if disagree:
        state, symbol = "failing", "✗"
    elif expected:
        state, symbol = "xfail", "≈"
    else:
        state, symbol = ("near", "✓") if ratio > _NEAR else ("agree", "✓")
    return PairCell(
        compared=compared,
        disagree=disagree,
        expected=expected,
        ratio=f"{ratio:.2g} of the allowed" if not math.isnan(ratio) else "told by no number",
        state=state,
        symbol=symbol,
        case=case,
        anchor=anchors.case(case) if case in anchors.cases else "",
        label=f"{case} at {worst['stage']}" if case else "",
    )


TEMPLATES = Path(__file__).parent / "templates"
_PIECES_TOGETHER = 1000
"""A template gives a piece for each of its words."""
# HTML allows none of these, not even as references.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")


def render_html(frames: Frames, budget: Budget | None = None) -> str:
    """Return the whole report. The same frames give the same text."""
    return "".join(html_pieces(frames, budget))


def html_pieces(frames: Frames, budget: Budget | None = None) -> Iterator[str]:
    """Give the whole report piece by piece.

    Every text that comes from a case or a framework is escaped, and the page's content security policy allows no
    script but its own and no request to anywhere.
    """
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    stream = (
        environment()
        .get_template("page.html")
        .stream(
            page=page_sections(frames, budget or budget_of(len(frames.columns))),
            script=Markup(script),
            style=Markup(style),
            script_hash=b64encode(sha256(script.encode()).digest()).decode("ascii"),
            failing_words=failing_words,
            levels=[*((name, text) for _, name, text in LEVELS), BEYOND, NOT_JUDGED],
        )
    )
    stream.enable_buffering(_PIECES_TOGETHER)
    return (without_forbidden(piece) for piece in stream)


def without_forbidden(text: str) -> str:
    """Return a text without what HTML does not allow in any form."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def environment() -> Environment:
    """Return what renders the templates, every text escaped."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=CompiledTemplates(TEMPLATES),
    )


_CHECKSUM = 16
_OPTIONS = ("autoescape", "trim_blocks", "lstrip_blocks", "keep_trailing_newline", "is_async", "sandboxed", "optimized")
"""Of an environment, by which its templates are compiled."""


class CompiledTemplates(BytecodeCache):
    """Keeps what the templates of a folder were compiled to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load_bytecode(self, bucket: Bucket) -> None:
        """Take what was kept; what is damaged, or of another compiler or source, leaves the template to be compiled."""
        with suppress(OSError, NotImplementedError):
            entry = self._path(bucket).read_bytes()
            if entry[:_CHECKSUM] == self._checksum(bucket, entry[_CHECKSUM:]):
                bucket.bytecode_from_string(entry[_CHECKSUM:])

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep what a template was compiled to, where that can be written."""
        if sys.dont_write_bytecode:
            return
        code = bucket.bytecode_to_string()
        with suppress(OSError, NotImplementedError):
            path = self._path(bucket)
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent) as folder:  # of two processes each writes a whole file
                whole = Path(folder, path.name)
                whole.write_bytes(self._checksum(bucket, code) + code)
                whole.replace(path)

    def _path(self, bucket: Bucket) -> Path:
        """Return the place of one template."""
        return Path(cache_from_source(str(self._folder / f"{bucket.key}.py"))).with_suffix(".template")

    def _checksum(self, bucket: Bucket, code: bytes) -> bytes:
        options = [getattr(bucket.environment, name) for name in _OPTIONS]
        follows_from = [jinja2.__version__, sys.version, options, bucket.key, bucket.checksum]
        found = blake2b(f"{follows_from}\n".encode(), digest_size=_CHECKSUM)
        found.update(code)
        return found.digest()
