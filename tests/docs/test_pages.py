"""The pages of the documentation: every command, snippet and file in them is run, and what they print is as shown."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import ALL_ENTRIES
from attncheck.common.processors import processor_flags
from attncheck.reports.survey import PublishedFinding, read_findings

sys.path.insert(0, str(Path(__file__).parent))
from here import own_code_here
from pages import ROOT, Block, Reader, blocks_of, pages
from processes import PATIENCE

_FOLDERS = ("backends/", "benchmarks/", "cases/", "docs/", "examples/", "harness/", "reports/", "tests/", ".ci/")
FINDINGS = ROOT / "examples" / "findings"
HOW_TO_WRITE = "python tests/docs/pages.py {} writes the output again"
_MEASURED = re.compile(
    r"0x[\d.a-f]+p[+-]\d+|-?\d+\.\d+(?:e[+-]\d+)?|\d+e[+-]\d+|(?<=is within bounds: output)\[[\d, ]+\]| +"
)
"""What depends on the processor: last digits at least, the widths of columns that follow from them, and which element
differs most between two ways to compute the same."""


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def _named(paths: list[Path]) -> list[Any]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("page", _named(pages()))
def test_everything_on_a_page_works(page: Path, tmp_path: Path, machines: Callable[[str], dict[str, str]]) -> None:
    text = page.read_text(encoding="utf-8")
    if re.search("^attncheck (ex|im)port onnx", text, re.MULTILINE):
        pytest.importorskip("onnx", reason="the extra onnx is not installed")
    if page.parent.name == "examples":
        shutil.copytree(page.parent, tmp_path, dirs_exist_ok=True)
    found = Reader(tmp_path, machines, own_code_here).follow(text, page.name)
    assert _MEASURED.sub(" ", found) == _MEASURED.sub(" ", text), HOW_TO_WRITE.format(page.relative_to(ROOT))


def test_every_block_has_a_language_that_says_how_it_is_tested() -> None:
    languages = {"python", "yaml", "toml", "sh", "text", "diff"}
    for page in pages():
        for block in blocks_of(page.read_text(encoding="utf-8")):
            assert block.language in languages, f"{page}:{block.line}"
            assert block.language not in ("yaml", "toml") or block.file, f"{page}:{block.line}: it has to name its file"


def _of_frameworks() -> list[Any]:
    """Return what needs a framework: blocks of pages, and the scripts of findings."""
    found: list[tuple[str, Block, PublishedFinding | None]] = [
        (f"{page.name}:{block.line}", block, None)
        for page in pages()
        for block in blocks_of(page.read_text(encoding="utf-8"))
    ]
    found += [(each.anchor, Block("python", each.script, 1, (0, 0)), each) for each in read_findings(FINDINGS)]
    return [
        pytest.param(block, finding, marks=getattr(pytest.mark, block.framework), id=name)
        for name, block, finding in found
        if block.framework
    ]


def test_every_finding_is_run_by_its_library() -> None:
    scripts = [each.script for each in read_findings(FINDINGS)]
    assert [script for script in scripts if not Block("python", script, 1, (0, 0)).framework] == []


@pytest.mark.parametrize(("block", "finding"), _of_frameworks())
def test_a_snippet_prints_what_it_says(
    block: Block, finding: PublishedFinding | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if finding is not None:
        now = version(ALL_ENTRIES[finding.library].packages[0])
        if not f"{now}.".startswith(f"{finding.release}."):
            pytest.skip(f"found in {finding.library} {finding.release}; this is {now}")
    processor = re.match(r"# on a processor with (\w+)\n", block.text)
    if processor and processor[1] not in (processor_flags() or ()):
        pytest.skip(f"this processor has no {processor[1]}, on which the finding depends")
    Reader(tmp_path, lambda command: {}).execute(block.text, "snippet")
    printed = [_numbers(line) for line in capsys.readouterr().out.splitlines()]
    said = [_numbers(line.rpartition("# ")[2]) for line in block.text.splitlines() if line.startswith("print(")]
    assert len(printed) == len(said) > 0
    assert all(len(one) == len(other) > 0 for one, other in zip(printed, said, strict=True))
    np.testing.assert_allclose(np.concatenate(printed), np.concatenate(said), atol=6e-4)


def _numbers(text: str) -> NDArray[np.float64]:
    return np.array([float(each) for each in re.findall(r"-?\d+\.\d+|nan", text)])


def test_every_path_and_link_of_a_page_leads_somewhere() -> None:
    lost = []
    for page in pages():
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        paths = [each for each in re.findall(r"`([\w./*-]+)`", prose) if each.startswith(_FOLDERS)]
        lost += [(page, each) for each in paths if not list(ROOT.glob(each.rstrip("/")))]
        for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", prose):
            path = (page.parent / target).resolve() if target else page
            if not path.is_file() or (anchor and anchor not in _anchors(path)):
                lost.append((page, f"{target}#{anchor}"))
    assert lost == []


def _anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = [line for block in re.findall(r"```{toctree}\n(.*?)```", contents, re.DOTALL) for line in block.split()]
    names = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    assert names - {"index"} <= set(listed)


@pytest.fixture
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, str]]]:
    """Run the commands that set machines up: a cluster really, of installations what they refer to."""
    started: list[subprocess.Popen[bytes]] = []
    file = tmp_path_factory.mktemp("cluster") / "scheduler.json"

    def run(command: str) -> dict[str, str]:
        words = shlex.split(command)
        if words[0] != "dask":
            check_reference(words)
            return {}
        pytest.importorskip("distributed", reason="the extra dask is not installed")
        here = ["--host", "127.0.0.1", "--scheduler-file", str(file)] if words[1] == "scheduler" else []
        port = ["--port", "0"] if words[1] == "scheduler" else ["--local-directory", str(file.parent)]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "dask", *words[1:], *here, *port, "--no-dashboard"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        while not (file.is_file() and file.read_text(encoding="utf-8").strip()):  # it is there before it is written
            assert started[-1].poll() is None, f"`{command}` ended with {started[-1].returncode}"
            time.sleep(0.05)
        address = str(json.loads(file.read_text(encoding="utf-8"))["address"])
        if words[1] == "worker":
            _wait_for_workers(address, int(words[words.index("--nworkers") + 1]))
        return {"tcp://HOST:8786": address}

    yield run
    for process in reversed(started):
        process.terminate()
        process.wait(timeout=PATIENCE)


def _wait_for_workers(address: str, count: int) -> None:
    from distributed import Client

    with Client(address, timeout=PATIENCE, set_as_default=False) as client:
        client.wait_for_workers(count, timeout=PATIENCE)


def check_reference(words: list[str]) -> None:
    """Hold a command that installs or builds against what it refers to. Raises ``AssertionError``."""
    command = " ".join(words)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    words = words[words[0] == "uv" :]
    if words[:2] == ["pip", "install"]:
        extras = {each for word in words[2:] for found in re.findall(r"\[(.*?)\]", word) for each in found.split(",")}
        assert extras <= set(project["project"]["optional-dependencies"]), command
        assert "-c" not in words or (ROOT / words[words.index("-c") + 1]).is_file(), command
        groups = {words[place + 1] for place, word in enumerate(words) if word == "--group"}
        assert groups <= set(project["dependency-groups"]), command
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets), command
    elif words[0] == "tox":
        sections = re.findall(r"^\[testenv:(.*)\]$", (ROOT / "tox.ini").read_text(encoding="utf-8"), re.MULTILINE)
        known = {name for section in sections for name in section.strip("{}").split(",")}
        assert len(words) == 1 or words[words.index("-e") + 1] in known or "py3" in command, command
    elif words[0] == "sphinx-build":
        assert Path(words[-2], "conf.py").is_file(), command
    else:
        raise AssertionError(f"no test knows what `{command}` does")
