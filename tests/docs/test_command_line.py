"""Help: it fits into 80 columns, and its examples run."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from here import own_code_here
from pages import DOCS, Block, attncheck, blocks_of, commands_of, pages, small_corpus, without_versions

sys.path.insert(0, str(DOCS))
from site_tables import examples_of

from attncheck.backends import LIBRARIES
from attncheck.cli import app, releases
from attncheck.cli.app import COMMAND_PANELS, OPTION_PANELS
from attncheck.common.errors import ExitCode
from attncheck.mutation import score as command_of_faults

GROUP: Any = typer.main.get_command(app)
KERNEL = (DOCS.parent / "examples" / "numpy_kernel.py").read_text(encoding="utf-8")


def _installed(release: releases.Release) -> bool:
    """Stands for an installation: what is here stands for every release."""
    return True


def _checked(release: releases.Release, arguments: Sequence[str], output: Path) -> None:
    if earlier := [each for each in output.parent.glob("*") if (each / "summary.json").is_file()]:
        shutil.copytree(earlier[0], output)  # the same is here for every release
        return
    words = ["numpy" if each == "onnxruntime.attention" else each for each in arguments]
    code, printed = attncheck(f"attncheck check {shlex.join(words)} --output {output} --no-report --quiet", Path.cwd())
    assert code == 0, printed


NEEDED = (
    "attncheck check",
    "attncheck check --no-report -b numpy --label before -o results/before",
    "attncheck check --no-report -b numpy --label after -o results/after",
)
"""What leaves results that other examples read."""


def on_pages() -> set[str]:
    """Return the commands that the tests of the pages run."""
    blocks = (block for page in pages() for block in blocks_of(page.read_text(encoding="utf-8")))
    return {command for block in blocks if block.language == "sh" for command, _ in commands_of(block)}


def test_every_example_of_the_help_that_stands_on_no_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in one folder: what a check leaves, other commands read."""
    monkeypatch.setattr(releases, "ensure_release_installed", _installed)
    monkeypatch.setattr(releases, "run_check_of_release", _checked)
    monkeypatch.setattr(command_of_faults, "available_processors", lambda: 1)  # how many processes score faults
    (tmp_path / "my_kernel.py").write_text(KERNEL, encoding="utf-8")
    program = DOCS.parent / "tests" / "harness" / "execution" / "program.py"
    (tmp_path / "my_program").write_text(f"#!{sys.executable}\n{program.read_text(encoding='utf-8')}", encoding="utf-8")
    (tmp_path / "my_program").chmod(0o755)
    folder = DOCS.parent / "examples" / "my_cases"
    (tmp_path / "my_cases").mkdir()
    for path in folder.iterdir():
        (tmp_path / "my_cases" / path.name).write_bytes(path.read_bytes())
    texts = [GROUP.epilog, *(command.epilog for command in GROUP.commands.values())]
    lines = dict.fromkeys(line for text in texts for line in examples_of(text))
    run_elsewhere = on_pages() - {*NEEDED}
    assert len(lines) - len(run_elsewhere & lines.keys()) >= 30
    with small_corpus(), own_code_here():
        for line in lines:
            [(command, _)] = commands_of(Block("sh", line, 0, (0, 0)))
            if command in run_elsewhere:
                continue
            command = command.replace("--problems 20", "--problems 5")
            # Two cases do not catch every fault.
            code = int(command.startswith("attncheck mutants"))
            if " onnx " in command and not LIBRARIES["onnx"].is_installed:
                code = ExitCode.BAD_INPUT
            ended, printed = attncheck(command, tmp_path)
            assert ended == code, f"`{command}` ended with {ended}:\n{printed}"


def test_every_command_and_every_option_stands_in_one_panel() -> None:
    grouped = [name for names in COMMAND_PANELS.values() for name in names]
    assert sorted(grouped) == sorted(GROUP.commands)
    listed = [name for names in OPTION_PANELS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert {each.name for each in GROUP.commands["check"].params} - {*listed, "cases"} == set()


def test_help_fits_ends_with_examples_and_says_types_and_ranges_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("", *GROUP.commands):
        code, text = attncheck(f"attncheck {name} --help", tmp_path)
        assert code == 0
        assert max(map(len, text.splitlines())) <= 80, name
        assert not re.search(r"\.\.\.$|\u2026", text.partition("\n\n")[2], re.MULTILINE), f"{name}: a text is cut off"
        assert not re.search(r"<(str|int|Path|list|float)|[<>]=|None", text), name
        examples = examples_of(text)
        assert examples, name
        assert all(each.startswith(f"attncheck {name}".strip()) for each in examples)
        assert examples == examples_of(without_versions((GROUP.commands[name] if name else GROUP).epilog))
