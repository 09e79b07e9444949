"""Runs the pages of the documentation: what they tell a reader to write is written, what they tell to run is run.

A page is run from top to bottom in an empty folder, as a reader would. Its fenced blocks are

- ``python``, ``yaml`` and ``toml`` blocks that begin with a comment that names a file: that file is written;
- other ``python`` blocks: they are executed, after the files and blocks before them, in one namespace, except for those
  that import a framework, which are executed by themselves where it is installed;
- ``diff`` blocks: a file that was written before is changed;
- ``sh`` blocks: every line is a command, which has to end with 0, or with the code of a comment ``# exits with N``;
- a ``text`` block right behind a ``sh`` block: what its commands print. Commands without one run on a few cases.

``python tests/docs/pages.py`` writes these ``text`` blocks anew.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from here import INSIDE, run_here

from attncheck.backends import BACKENDS, NATIVE, BackendEntry, Mode, numpy_backend
from attncheck.cli import gating
from attncheck.gating import run as gating_run
from attncheck.reading import selection
from attncheck.reading.model import TAG_FILE
from attncheck.reading.selection import TILE_TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\{[\w-]+\}|\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
_NAMED = re.compile(r"# ([\w./-]+\.(?:py|ya?ml|toml))$", re.MULTILINE)
_ENDING = re.compile(r"\s+# exits with (\d+)$")
_COMMENT = re.compile(r"\s+# .*$|^# .*$")
_IMPORTED = re.compile(
    r"^(?:import|from) (torch|tensorflow|jax|onnxruntime|onnx|mlx|openvino|triton|tokamax|flax|paddle|transformers"
    r"|keras|diffusers|x_transformers|equinox|haiku|timm|tinygrad)\b",
    re.MULTILINE,
)
_GATE_SECONDS, _STEP_SHARE = 60.0, 0.003
"""The time is never over, even on a slow machine, and every step is as short as may be."""
_VERSION = re.compile(r"(?<=[a-z] )\d+\.\d+\.\d+\S*")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, the line of its first line, and where the text stands."""

    language: str
    text: str
    line: int
    span: tuple[int, int]

    @property
    def file(self) -> str | None:
        """The file that the block is, where its first line names one."""
        found = _NAMED.match(self.text)
        return found[1] if found and self.language in ("python", "yaml", "toml") else None

    @property
    def framework(self) -> str:
        """The framework that a Python block imports, or the library beside one; empty where it needs none."""
        found = _IMPORTED.findall(self.text) if self.language == "python" else []
        return next((name for name in found if name not in BACKENDS), next(iter(found), ""))


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a page, without the indentation of lists; directives of the site are none."""
    found = []
    for match in _FENCE.finditer(text):
        body = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(match["language"], body, line, match.span("text")))
    return [block for block in found if not block.language.startswith("{")]


def commands_of(block: Block) -> list[tuple[str, int]]:
    """Return the commands of a block, each with the exit code that it has to have."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        ending = _ENDING.search(line)
        command = _COMMENT.sub("", _ENDING.sub("", line)).strip()
        if command:
            found.append((command, int(ending[1]) if ending else 0))
    return found


@dataclass
class Reader:
    """Somebody who does what a page says, in a folder."""

    folder: Path
    elsewhere: Callable[[str], Mapping[str, str]]
    """Runs other commands; returns what stands for which words of the page from there on, such as an address."""
    quick: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around commands whose output is not shown."""
    namespace: dict[str, Any] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)

    def follow(self, text: str, where: str) -> str:
        """Run a page and return its text with the output of its commands as it is now. Raises ``AssertionError``."""
        blocks, outputs = blocks_of(text), []
        for block, after in zip(blocks, [*blocks, None][1:], strict=True):
            place = f"{where}:{block.line}"
            if block.file is not None:
                self._write(block, block.file)
            elif block.language == "python" and not block.framework:
                self.execute(block.text, place)
            elif block.language == "diff":
                self._change(block.text, place)
            elif block.language == "sh":
                is_shown = after is not None and after.language == "text" and _are_adjacent(text, block, after)
                commands = commands_of(block)
                printed = "".join(self.run(command, code, place, is_shown=is_shown) for command, code in commands)
                if after is not None and is_shown:
                    outputs.append((after.span, printed))
        self._forget_modules()
        for (start, end), printed in reversed(outputs):
            text = text[:start] + printed + text[end:]
        return text

    def _change(self, text: str, where: str) -> None:
        """Apply a diff of one hunk to the file that its first line names."""
        first, *lines = (line for line in text.splitlines() if not line.startswith(("+++", "@@")))
        path = self.folder / first.removeprefix("--- ")
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
        source = path.read_text(encoding="utf-8")
        assert source.count(before) == 1, f"{where}: the diff does not fit {path.name}"
        path.write_text(source.replace(before, after), encoding="utf-8")

    def _forget_modules(self) -> None:
        """Let another page have modules of the same names."""
        for name, module in list(sys.modules.items()):
            if self.folder in Path(getattr(module, "__file__", None) or "").parents:
                del sys.modules[name]

    def _write(self, block: Block, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        if path.suffix == ".py" and not path.name.startswith("test_"):
            self.execute(block.text, name)

    def execute(self, source: str, name: str) -> None:
        """Run Python behind what ran before."""
        with _inside(self.folder):
            exec(compile(source, name, "exec"), self.namespace)

    def run(self, command: str, code: int, where: str, *, is_shown: bool) -> str:
        """Run a command and return what it prints. Raises ``AssertionError`` where it ends with another code."""
        for said, is_meant in self.meant.items():
            command = command.replace(said, is_meant)
        words = shlex.split(command)
        if words[0] == "attncheck":
            with ExitStack() as around:
                if not is_shown:
                    around.enter_context(small_corpus())
                    around.enter_context(self.quick())
                ended, printed = attncheck(command, self.folder)
        elif words[0] == "pytest":
            with self.quick():
                ended, printed = pytest_here(words[1:], self.folder)
        elif words[0] == "python":
            ended, printed = python(words[1:], self.folder)
        else:
            self.meant |= self.elsewhere(command)
            return ""
        assert ended == code, f"{where}: `{command}` ended with {ended}:\n{printed}"
        return printed


def attncheck(command: str, folder: Path) -> tuple[int, str]:
    """Run a command of attncheck in this process; return its exit code and what it printed."""
    words, _, target = command.partition(" > ")
    printed = io.StringIO()
    with _inside(folder), redirect_stdout(printed), redirect_stderr(printed):
        code = run_here(shlex.split(words)[1:])
    if target:
        (folder / target).write_text(printed.getvalue(), encoding="utf-8")
        return code, ""
    return code, without_versions(printed.getvalue())


def without_versions(text: str) -> str:
    """Return a text with every version number written X.Y.Z."""
    return _VERSION.sub("X.Y.Z", text)


def python(words: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run Python in a process of its own."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def pytest_here(words: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run pytest in this process; what it imports from the folder is forgotten."""
    printed, before = io.StringIO(), {*sys.modules}
    with _inside(folder), redirect_stdout(printed), redirect_stderr(printed):
        code = pytest.main([*INSIDE, "-p", "no:cacheprovider", *words])
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
    return int(code), printed.getvalue()


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)


def _are_adjacent(text: str, first: Block, second: Block) -> bool:
    between = text[first.span[1] : second.span[0]]
    return re.fullmatch(r" *```\s+```text\n", between) is not None


SMALL_CORPUS = {
    "attention.yaml": 5,
    "documents/base_r_vignette.yaml": 9,
    "merge_states.yaml": 2,
    "properties.yaml": 1,
    f"{TILE_TEMPLATE}.yaml": 4,
}
"""How many cases of which files, from the beginning."""


@contextmanager
def small_corpus() -> Iterator[None]:
    """Make of the bundled corpus a few cases, so that every command is quick, and let NumPy compute for torch as well.

    No other framework is there: which of them are installed makes no difference.
    """
    before, entries = selection.find_bundled_cases_folder, dict(BACKENDS)
    read_duration, required, shares = gating.read_duration, gating_run.REQUIRED_CALLS, gating_run.STEP_SHARES
    table = cast(dict[str, BackendEntry], BACKENDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, count in SMALL_CORPUS.items():
            head, *cases = (ROOT / "cases" / file).read_text(encoding="utf-8").split("\n  - name: ")
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text("\n  - name: ".join([head, *cases[:count]]), encoding="utf-8")
        (folder / TAG_FILE).write_bytes((ROOT / "cases" / TAG_FILE).read_bytes())
        selection.find_bundled_cases_folder = lambda: folder
        # A reader has more time; how much has to be judged is tested elsewhere.
        gating.read_duration, gating_run.REQUIRED_CALLS = (lambda text: _GATE_SECONDS), {}
        gating_run.STEP_SHARES = dict.fromkeys(shares, _STEP_SHARE)
        table.clear()
        table.update({name: _by_numpy(entries[name]) for name in ("numpy", "torch")})
        try:
            yield
        finally:
            selection.find_bundled_cases_folder = before
            gating.read_duration, gating_run.REQUIRED_CALLS, gating_run.STEP_SHARES = read_duration, required, shares
            table.clear()
            table.update(entries)


def _by_numpy(entry: BackendEntry) -> BackendEntry:
    changes: dict[str, Any] = {"module": numpy_backend.__name__, "classes": NATIVE}
    modes = tuple(Mode(mode.name, description=mode.description, package="numpy", **changes) for mode in entry.modes)
    return replace(entry, **changes, packages=("numpy",), modes=modes, cache={}, without_cache={}, environment={})


def pages() -> list[Path]:
    """Return every page of the documentation."""
    at_the_top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
    return [*at_the_top, *sorted(DOCS.rglob("*.md"))]


def main() -> None:
    """Write what commands print into the pages that are named, or into all."""
    os.environ["COLUMNS"] = "100"
    for path in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        text = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            path.write_text(Reader(Path(folder), lambda command: {}).follow(text, str(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
