"""What users see of a small run, as text that may change only where a commit says so.

    python tests/net/snapshots.py              writes all snapshots anew
    python tests/net/snapshots.py report       writes those whose names begin so

The report in each format, the terminal and the difference are those of results made by hand (``by_hand.py``), which no
processor changes. Commands that compute run on NumPy alone; of what they print, numbers with a point are left out, and
so are paths, times and versions. Of help, the names are held: texts are what the code says. Faults are held by
``catches.txt``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer.main

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from by_hand import write_after, write_before, write_crowd
from here import run_here
from html_pages import VOID, Element, parse

from attncheck.cli import app
from attncheck.cli.output import read_frames_of_runs
from attncheck.diagnosis.readings import READING_CATALOGUE
from attncheck.spec import PROPERTIES

FOLDER = Path(__file__).resolve().parent
_NUMBER = re.compile(
    r"-?(?:0x[0-9a-f]+\.[0-9a-f]*p[+-]\d+|\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+)|(?<![\w-])-?(?:inf|nan)\b"
)
_VERSION = re.compile(r"\b\d+\.\d+\.\d+[\w.+]*")
_OWN_VERSION = version("attncheck")
_LISTED = 2
"""Entries of a list in JSON that a snapshot shows; of the rest it says how many there are."""
_LONG = 200
"""Lines of a section of a crowded page that a snapshot leaves out."""

KERNEL = """
import numpy as np


def attention(query, key, value, *, mask=None, is_causal=False, scale=None):
    key, value = (np.repeat(each, query.shape[1] // each.shape[1], axis=1) for each in (key, value))
    scores = np.einsum("bhqd,bhkd->bhqk", query, key) * query.dtype.type(SCALE if scale is None else scale)
    allowed = np.tri(*scores.shape[-2:], CORNER, dtype=bool) if is_causal else True
    scores = np.where(allowed if mask is None else allowed & mask, scores, -np.inf)
    highest = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isinf(highest), 0, highest))
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total == 0, 1, total)
    return np.einsum("bhqk,bhkd->bhqd", weights[..., :LAST], value[..., :LAST, :]).astype(query.dtype)
"""
BARE = """
def attention(query, key, value):
    raise ValueError("too much of it")
"""
_ROOT, _TOP_LEFT, _ALL = "query.shape[-1] ** -0.5", "0", "None"
KERNELS = {
    "right": (_ROOT, _TOP_LEFT, _ALL),
    "scaled": ("(3 * query.shape[-1]) ** -0.5", _TOP_LEFT, _ALL),
    "aligned": (_ROOT, "scores.shape[-1] - scores.shape[-2]", _ALL),
    "cut": (_ROOT, _TOP_LEFT, "scores.shape[-1] // 4 * 4 or None"),
}
"""Kernels of a user: a right one, and three with a fault each (scale, corner of causality, last keys dropped)."""
CASES = "'attention/*' 'grouped_heads/*' 'lengths/*' 'documents/*post*'"


def write_kernels(folder: Path) -> list[str]:
    """Write the kernels, and one that takes no option and raises; return their files."""
    sources = {"bare.py": BARE}
    for name, (scale, corner, last) in KERNELS.items():
        sources[f"{name}.py"] = KERNEL.replace("SCALE", scale).replace("CORNER", corner).replace("LAST", last)
    for file, source in sources.items():
        (folder / file).write_text(source, encoding="utf-8")
    return list(sources)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """Work in a folder, at 80 columns."""
    before, variables = Path.cwd(), {"COLUMNS": "80", "NO_COLOR": "1"}
    known = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        for name, value in known.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def command(line: str) -> str:
    """Run a command in this process: its exit code, and what it printed without what differs between machines."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = run_here(shlex.split(line))
    text = printed.getvalue().replace(str(Path.cwd()), "FOLDER")
    return f"$ attncheck {line}\n{text.rstrip()}\n(exit code {code})\n"


def plain(text: str) -> str:
    """Leave out numbers with a point, and versions."""
    return _NUMBER.sub("#", _VERSION.sub("X.Y.Z", text))


def shortened(value: Any) -> Any:
    """Leave out most of what lists hold."""
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    more = [f"... {len(value) - _LISTED} more"] if len(value) > _LISTED else []
    return [*map(shortened, value[:_LISTED]), *more]


_LEFT_OUT = {"style", "script", "svg", "img", "meta", "link"}


def _lines_of(element: Element, depth: int = 0) -> Iterator[str]:
    """Yield an element's text with its elements, without styles, scripts, pictures and identifiers."""
    for child in element.children:
        if isinstance(child, str):
            if text := " ".join(child.split()):
                yield f"{' ' * depth}{text}"
        elif child.tag not in _LEFT_OUT:
            shown = [(name, child.attributes[name]) for name in child.attributes if name in ("class", "href", "title")]
            shown += [("open", None)] * ("open" in child.attributes)
            yield f"{' ' * depth}<{child.tag}{''.join(f' {name}={value!r}' for name, value in shown)}>"
            yield from _lines_of(child, depth + (child.tag not in VOID))


def _of_page(path: Path) -> str:
    return "\n".join(_lines_of(parse(path.read_text(encoding="utf-8")))) + "\n"


def _without_version(text: str) -> str:
    return text.replace(_OWN_VERSION, "X.Y.Z")


def _laid_out(text: str, change: Callable[[Any], Any] = lambda value: value) -> str:
    """Lay out the JSON that a command printed, if it did."""
    head, _, rest = text.partition("\n")
    body, _, end = rest.rpartition("\n(exit code")
    try:
        document = json.loads(body)
    except ValueError:
        return text
    return f"{head}\n{json.dumps(change(document), indent=1, ensure_ascii=False)}\n(exit code{end}"


def _by_hand() -> Iterator[tuple[str, str]]:
    """Yield what is made of results by hand: nothing of it was computed, and every number is shown."""
    from attncheck.reports.ci import annotation_lines, render_ci_summary
    from attncheck.reports.write import write_badge, write_sarif

    with tempfile.TemporaryDirectory() as name, inside(Path(name)) as folder:
        write_before(folder / "before")
        write_after(folder / "after")
        yield "report.txt", _without_version(command("report before --output report"))
        yield "report.json", _without_version(_laid_out(command("report before --output report --json")))
        for suffix, file in (("md", "report.md"), ("junit.xml", "junit.xml")):
            yield f"report.{suffix}", _without_version((folder / "report" / file).read_text(encoding="utf-8"))
        yield "report.html.txt", _without_version(_of_page(folder / "report" / "report.html"))
        columns = [
            (path.stem, path.read_text("utf-8").partition("\n")[0]) for path in sorted(folder.glob("report/*.csv"))
        ]
        yield "report.columns.txt", "".join(f"{name}: {line}\n" for name, line in columns)
        frames = read_frames_of_runs([folder / "before"])
        write_sarif(frames, folder / "report.sarif")
        write_badge(frames, folder / "badge.json")
        yield "report.sarif", _without_version((folder / "report.sarif").read_text(encoding="utf-8"))
        ci = [render_ci_summary(frames, Path("report/report.md")), *annotation_lines(frames, Path("report/report.md"))]
        yield "report.ci.txt", "\n".join([*ci, (folder / "badge.json").read_text(encoding="utf-8").rstrip(), ""])
        yield "diff.txt", _without_version(command("diff before after --output difference"))
        yield "diff.json", _without_version(_laid_out(command("diff before after --json")))
        yield "diff.md", _without_version((folder / "difference" / "diff.md").read_text(encoding="utf-8"))
        yield "publish.txt", _published(folder)
        yield from _of_crowd(folder)


def _of_crowd(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what is said of two runs in which much fails: how lists are cut, and which run it was."""
    from attncheck.reports.ci import annotation_lines, render_ci_summary

    write_crowd(folder)
    yield "crowd.txt", _without_version(command("report new old --output crowd"))
    yield "crowd.json", _without_version(_laid_out(command("report new old --output crowd --json"), shortened))
    yield "crowd.md", _without_version((folder / "crowd" / "report.md").read_text(encoding="utf-8"))
    sections = _of_page(folder / "crowd" / "report.html").split("\n   <section")
    yield "crowd.html.txt", "\n   <section".join(section for section in sections if section.count("\n") < _LONG)
    junit = (folder / "crowd" / "junit.xml").read_text(encoding="utf-8")
    yield "crowd.junit.xml", "".join(line for line in junit.splitlines(keepends=True) if "crowd/more" not in line)
    frames, report = read_frames_of_runs([folder / "new", folder / "old"]), Path("report/report.md")
    yield "crowd.ci.txt", "\n".join([render_ci_summary(frames, report), *annotation_lines(frames, report), ""])


def _published(folder: Path) -> str:
    """Return what is published of the first run and what the second one is held to, with the pages that are kept."""
    lines = ("publish before --published kept", "publish --check after --published kept")
    lines = (*lines, "survey before --output survey", "survey --check after --output survey")
    texts = [command(line) for line in lines]
    pages = sorted((*(folder / "kept").iterdir(), folder / "survey" / "README.md"))
    texts += [f"== {path.relative_to(folder)}\n{path.read_text(encoding='utf-8')}" for path in pages]
    texts.append(f"== survey/index.html\n{_of_page(folder / 'survey' / 'index.html')}")
    return _without_version("\n".join(texts))


COMMANDS = (
    "check 'attention/a-causal-row-sees-*' 'softmax/*' -i right.py:attention --json --no-report -d float64",
    "check 'attention/a-causal-row-sees-*' -i scaled.py:attention --json --no-report -d float64",
    "explain 'attention/a-causal-row-sees-*' scaled.py:attention --dtype float64",
    "explain 'attention/a-causal-row-sees-*' scaled.py:attention --dtype float64 --json",
    "reduce 'attention/a-causal-row-sees-*' scaled.py:attention --dtype float64 --json",
    "repro 'attention/a-causal-row-sees-*' scaled.py:attention --dtype float64 --json --output repro.py",
    "search scaled.py:attention --problems 3 --seed 1 --operation attention --dtype float64 --json",
    "conventions right.py:attention aligned.py:attention --dtype float64 --json",
    "accuracy scaled.py:attention softmax attention --dtype float64 --json",
    "accuracy right.py:attention attention --dtype float32",
    "properties right.py:attention --property repeated,batch_invariant --dtype float64 --json",
    "vectors export vectors 'softmax/*' --dtype float64 --json",
    "show 'documents/base_r_vignette/four-words-*'",
    "show 'documents/base_r_vignette/four-words-*' --json",
    "list cases 'softmax/*' --json",
    "explain attention/no-such-case scaled.py:attention",
    "check --backend no_such_backend",
)
"""One line or more of commands that compute, and two that cannot."""


def _named() -> Iterator[tuple[str, str]]:
    """Yield the names that releases keep: of commands with their options, of diagnoses and of properties."""
    group: Any = typer.main.get_command(app)
    given = {
        f"attncheck {name}": [flag for each in command.params for flag in (*each.opts, *each.secondary_opts)]
        for name, command in group.commands.items()
    }
    readings = dict.fromkeys(reading.name for rows in READING_CATALOGUE.values() for reading in rows)
    kept = {**given, "diagnoses": sorted(readings), "properties": list(PROPERTIES)}
    lines = (textwrap.fill(f"{of}: {' '.join(names)}", 120, break_on_hyphens=False) for of, names in kept.items())
    yield "names.txt", "".join(f"{line}\n" for line in lines)


def _computed() -> Iterator[tuple[str, str]]:
    """Yield what commands print that compute."""
    with tempfile.TemporaryDirectory() as name, inside(Path(name)) as folder:
        write_kernels(folder)
        yield "commands.txt", "\n".join(plain(_laid_out(command(line), shortened)) for line in COMMANDS)


def _diagnosed() -> Iterator[tuple[str, str]]:
    """Yield what is unsupported and why, and what is said of each failing case of wrong kernels."""
    with tempfile.TemporaryDirectory() as name, inside(Path(name)) as folder:
        chosen = " ".join(f"-i {file}:attention" for file in write_kernels(folder))
        command(f"run {CASES} {chosen} -d float64 --output results -q")
        rows = read_frames_of_runs([folder / "results"]).results
    unable = rows[rows["verdict"].eq("unsupported")].groupby(["implementation", "message"]).size()
    yield "unsupported.txt", "".join(f"{who}: {why}: {count}\n" for (who, why), count in unable.items())
    failing = rows[~rows["verdict"].isin(["agree", "unsupported", "unverified"])]
    failing = failing[["implementation", "case", "verdict", "begins_at", "diagnosis"]].astype(object)
    lines = {" | ".join(row) for row in failing.where(failing.notna(), "").itertuples(index=False)}
    yield "diagnoses.txt", "".join(f"{line}\n" for line in sorted(lines))


MAKERS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "names": _named,
    "report": _by_hand,
    "commands": _computed,
    "diagnoses": _diagnosed,
}
"""What makes snapshots, by the first of them."""


@functools.cache
def snapshots(maker: str) -> dict[str, str]:
    """Make snapshots, by the names of their files."""
    return dict(MAKERS[maker]())


def main(names: list[str]) -> None:
    """Write snapshots anew."""
    for maker in MAKERS:
        if not names or maker.startswith(tuple(names)):
            for name, text in snapshots(maker).items():
                (FOLDER / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
