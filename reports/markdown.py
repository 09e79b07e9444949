"""The report in Markdown that reads well on a forge, and the elements of Markdown that show any text as it is.

In order: the answer; a row for each implementation; what is wrong or expected to be; each document's printed numbers
beside each implementation's; the verdict of every case on every implementation, or, of very many, of those that do not
agree; properties; the largest differences; versions. Sections are rendered from their blocks (``document_model.py``).
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attncheck.reports import sections
from attncheck.reports.cells import FAILS_A_RUN
from attncheck.reports.document_model import (
    Block,
    Code,
    Coloured,
    Details,
    Entries,
    Figure,
    Inline,
    Items,
    Mark,
    Nested,
    Page,
    PageOnly,
    Section,
    Subsection,
    Table,
    Text,
    anchor_of,
)
from attncheck.reports.documents import (
    NUMBERS_EXPLAINED,
    DocumentComputation,
    computations_by_document,
    expectation_parts,
    source_blocks,
)
from attncheck.reports.frames import Column, Frames, element_text, group_by_key, sampled_row_texts, to_records
from attncheck.reports.summary import make_summary, verdict_table

_MAX_LISTED = 50
_MAX_DIFFERENCES = 15


def render_markdown(frames: Frames) -> str:
    """Return the whole report. The same frames give the same text."""
    answer = make_summary(frames)
    said = Items([*answer.sentences, *(f"{note}." for note in frames.notes)])
    shown = (
        sections.implementations_section(frames),
        sections.defects_section(frames, _MAX_LISTED),
        sections.expected_failures_section(frames),
        sections.empty_rows_section(frames),
        sections.documents_section(frames),
        verdict_section(frames),
        sections.properties_section(frames),
        _documents_section(frames),
        _largest_differences(frames),
        sections.environments_section(frames),
    )
    opening: list[Block] = [
        Text(Mark(answer.first_line, "strong")),
        *([said] if said.items else []),
    ]
    return render_page_markdown(Page("Attention conformance report", opening, list(filter(None, shown))))


_DIFFERENCES_EXPLAINED = (
    "Two implementations disagree where they differ by more than the sum of their error bounds; the column before the "
    "last says what part of that sum the difference is."
)


def _largest_differences(frames: Frames) -> Section | None:
    """Return the pairs that differ most, whether or not they still agree; None without any."""
    pairs = frames.pairs[frames.pairs["ratio"].notna()]
    pairs = pairs.sort_values(["ratio", "difference"], ascending=False, kind="stable").head(_MAX_DIFFERENCES)
    rows: list[tuple[Inline, ...]] = []
    for row in to_records(pairs):
        digits = 9 if row["dtype"] == "float32" else 17
        rows.append(
            (
                *(Mark(row["case"]), Mark(row["stage"]), row["dtype"]),
                frames.name_with_environment(row["implementation"], row["environment"]),
                frames.name_with_environment(row["other"], row["other_environment"]),
                element_text(frames.cases[row["case"]], row),
                *(short_number_or_empty(row["value"], digits), short_number_or_empty(row["reference"], digits)),
                *(short_number_or_empty(row["difference"]), short_number_or_empty(row["ratio"]), row["verdict"]),
            )
        )
    headings = ("case", "stage", "dtype", "one", "other", "at", "value", "other value", "difference")
    title = "Largest differences between two implementations"
    table = Table(title, (*headings, "of the allowed", "verdict"), rows, "llllllrrrrl")
    return Section(title, "largest", [Text(_DIFFERENCES_EXPLAINED), table]) if rows else None


def _documents_section(frames: Frames) -> Section | None:
    """Return each document's cases with their printed and unprinted numbers; None without any."""
    parts = [_document_subsection(frames, *item) for item in computations_by_document(frames).items()]
    text = Text(NUMBERS_EXPLAINED)
    return Section("Documents", "documents", [text, *parts]) if parts else None


def _document_subsection(frames: Frames, name: str, computations: Sequence[DocumentComputation]) -> Subsection:
    """Return one document, with a link to its pictures in the HTML report."""
    first = computations[0].case
    drawn = (
        "Drawn in ",
        Mark("report.html", "link", f"report.html#{anchor_of('document', name)}"),
        ".",
    )
    cases = (
        Subsection(item.case["name"], [*map(Text, item.notes), *expectation_parts(frames, item)], 4)
        for item in computations
    )
    return Subsection(first["title"], [*source_blocks(first), Text(drawn), *cases], 3)


_MAX_LISTED_CASES, _MAX_CELLS = 2_000, 40_000
"""A code hosting site does not show a file of many megabytes."""
Verdicts = Mapping[str, Mapping[Column, Inline]]


def verdict_section(frames: Frames) -> Section:
    """Return the verdict of every case on every implementation, a table per topic; failing cases if there are many."""
    verdicts: Verdicts = verdict_table(frames)
    most = min(_MAX_LISTED_CASES, max(1, _MAX_CELLS // max(1, len(frames.columns))))
    instead: list[Block] = []
    if len(verdicts) > most:
        others = [case for case, cells in verdicts.items() if set(cells.values()) != {"agree"}]
        shown = set(
            sorted(others, key=lambda case: not any("**" in render_inline(cell) for cell in verdicts[case].values()))[
                :most
            ]
        )
        which = f"the {len(shown):,}" if len(shown) == len(others) else f"{len(shown):,} of the {len(others):,}"
        text = (
            f"{len(verdicts):,} cases on {len(frames.columns):,} implementations are too many to be read one by one. "
            f"The tables below show {which} in which some implementation does not agree or did not run, those that "
            "fail first; every verdict is in "
        )
        instead = [Text((text, Mark("results.csv"), "."))]
        verdicts = {case: cells for case, cells in verdicts.items() if case in shown}
    explained = Text(f"{sections.VERDICTS_NOTE} Without another word, all dtypes agree.")
    return Section("Verdicts", "verdicts", [*instead, *_verdict_tables(frames, verdicts), explained])


def _verdict_tables(frames: Frames, verdicts: Verdicts) -> Iterator[Subsection]:
    headings = ["case", *map(frames.title, frames.columns)]
    sampled = {case: f" ({text})" for case, text in sampled_row_texts(frames).items()}
    for file, cases in group_by_key(verdicts, lambda case: str(frames.cases[case]["file"])).items():
        title = frames.cases[cases[0]]["title"]
        rows = [
            (
                frames.cases[case]["name"] + sampled.get(case, ""),
                *(verdicts[case][column] for column in frames.columns),
            )
            for case in cases
        ]
        yield Subsection((f"{title} (", Mark(file), ")"), [Table(title, headings, rows)], 3)


def render_page_markdown(page: Page) -> str:
    """Return a whole page."""
    parts = [[f"# {page.title}", "", *blocks_lines(page.opening)], *map(section_lines, page.sections)]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def section_lines(section: Section | None) -> list[str]:
    """Render a section; empty for None."""
    return [] if section is None else [f"## {section.title}", "", *blocks_lines(section.blocks)]


def blocks_lines(blocks: Iterable[Block]) -> list[str]:
    """Render blocks, an empty line between them."""
    lines = [line for block in blocks for line in [*_block_lines(block), ""]]
    return lines[:-1]


def _block_lines(block: Block) -> list[str]:
    lines: list[str] = []
    match block:
        case Items():
            for item in block.items:
                content, *inner = (item.content, *item.items) if isinstance(item, Nested) else (item,)
                lines += [f"- {render_inline(content)}", *(f"  - {render_inline(child)}" for child in inner)]
        case Table():
            lines = _table_lines(block)
        case Code():
            lines = ["```", *block.lines, "```"]
        case Details():
            summary = html.escape(" ".join(block.summary.split()))  # in one line: a line of its own may be a heading
            start = f"<details{' open' * block.is_open}>", f"<summary>{summary}</summary>"
            lines = [*start, "", *blocks_lines(block.blocks), "", "</details>"]
        case Subsection():
            lines = [f"{'#' * block.level} {render_inline(block.title)}", "", *blocks_lines(block.blocks)]
        case PageOnly():
            lines = blocks_lines(block.in_words)
        case Entries():
            entries = ((f"{number}. ", blocks) for number, (_, blocks) in enumerate(block.entries, 1))
            lines = [line for entry in entries for line in _entry_lines(*entry)]
        case Figure():
            lines = [escape_markdown(block.words)]
        case Text():
            lines = [render_inline(block.content)]
    return lines


def _table_lines(block: Table) -> list[str]:
    """Render a table without columns of pictures, which have no heading."""
    kept = [number for number, heading in enumerate(block.headings) if heading or not number]
    align = block.align.ljust(len(block.headings), "l")
    rows = [
        [escape_markdown(block.headings[number]) for number in kept],
        ["---:" if align[number] == "r" else "---" for number in kept],
        *([render_inline(row[number]) for number in kept] for row in block.rows),
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _entry_lines(number: str, blocks: Sequence[Block]) -> list[str]:
    """Render an entry of a numbered list: its texts line by line, then its other blocks, indented by the number."""
    texts = [block for block in blocks if isinstance(block, Text)]
    first = "<br>".join(render_inline(text.content) for text in texts)
    rest = blocks_lines(block for block in blocks if not isinstance(block, Text))
    return [f"{number}{first}", *(f"{' ' * len(number)}{line}".rstrip() for line in (["", *rest, ""] if rest else []))]


def render_inline(part: Inline) -> str:
    """Render a text with its marks."""
    if isinstance(part, tuple):
        return "".join(map(render_inline, part))
    if isinstance(part, str):
        edges = (" " if part != part.lstrip() else "", " " if part.strip() != part.lstrip() else "")
        return escape_markdown(part).join(edges) if part.strip() else part
    if isinstance(part, Figure | Coloured):
        return escape_markdown(part.words) if isinstance(part, Figure) else render_inline(part.content)
    if part.kind == "break":
        return "<br>"
    if part.address:
        is_bare = part.text == part.address and "://" in part.address
        return f"<{part.text}>" if is_bare else f"[{escape_markdown(part.text)}]({part.address})"
    text = code_span(part.text) if part.kind in ("code", "case") else escape_markdown(part.text)
    return f"**{text}**" if part.kind in ("strong", *FAILS_A_RUN) else text


# An ampersand is special only where it begins a character reference, such as &lt;
_SPECIAL_PATTERN = re.compile(r"([\\`*_{}\[\]<>|~#]|&(?=#?\w+;))")


def escape_markdown(text: object) -> str:
    r"""Show a text literally: no markup, no line break.

    Example:
        >>> print(escape_markdown("a_b | c"))
        a\_b \| c
    """
    return _SPECIAL_PATTERN.sub(r"\\\1", " ".join(str(text).split()))


def code_span(text: object) -> str:
    r"""Show a name in monospace; it cannot end the span or the cell.

    Example:
        >>> print(code_span("a|b`c"))
        `a\|b'c`
    """
    inner = " ".join(str(text).split()).replace("`", "'")
    if "\\|" in inner:  # in a code span neither of the two can be escaped
        return f"<code>{escape_markdown(inner)}</code>"
    inner = inner.replace("|", "\\|")
    return f"`{inner}`" if inner else ""


def short_number_or_empty(value: float | None, digits: int = 3) -> str:
    """Write a number with few digits; empty for no number."""
    return "" if value is None or math.isnan(value) else f"{value:.{digits}g}"
