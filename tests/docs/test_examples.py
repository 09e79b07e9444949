"""The README, examples and notebooks: kernels agree, cases run, and the workflow and its action do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).parent))
from here import own_code_here
from pages import DOCS, ROOT, Block, Reader, attncheck, blocks_of, commands_of, small_corpus

sys.path.insert(0, str(DOCS))
from site_tables import columns

from attncheck import check
from attncheck.results.reader import read_run

EXAMPLES = ROOT / "examples"


@pytest.mark.torch
def test_the_torch_kernel_agrees_at_every_stage() -> None:
    result = check(f"{EXAMPLES}/torch_kernel.py:attention", cases=["attention", "softcap"])
    assert result.agrees, result.explain()
    agreeing = result.frames.results.query("verdict == 'agree'")
    assert {"scores", "capped", "biased", "masked", "weights", "output"} <= set(agreeing["stage"])
    assert set(agreeing["dtype"]) == {"float64", "float32", "bfloat16"}


def _yaml(path: str) -> dict[str, Any]:
    return dict(YAML(typ="safe").load((EXAMPLES / path).read_text(encoding="utf-8")))


def _steps() -> list[dict[str, Any]]:
    return list(_yaml("attention.yml")["jobs"]["conformance"]["steps"])


ACTION = "action/action.yml"
_INPUT = re.compile(r"\$\{\{ inputs\.([\w-]+) \}\}")


def _is_in_the_action(step: dict[str, Any]) -> bool:
    return str(step.get("uses", "")).startswith("./")


def _run_action(given: dict[str, str], folder: Path) -> tuple[list[int], dict[str, str]]:
    """Run the steps of the action as a runner does; return their exit codes, and the outputs of the last.

    The checkout of attncheck is this repository. ``pip`` and ``uv`` are programs that write down their arguments.
    """
    action = _yaml(ACTION)
    inputs = {name: str(each.get("default", "")) for name, each in action["inputs"].items()} | given
    programs = folder.parent / "programs"
    programs.mkdir()
    for name in ("pip", "uv"):
        (programs / name).write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word"; done > {programs}/{name}.txt\n')
    (programs / "attncheck").write_text(f'#!/bin/sh\nexec {sys.executable} -m attncheck "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    files = {name: str(folder.parent / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    codes = []
    for step in action["runs"]["steps"]:
        own = {name: _INPUT.sub(lambda found: inputs[found[1]], text) for name, text in step["env"].items()}
        where = folder / _INPUT.sub(lambda found: inputs[found[1]], step.get("working-directory", "."))
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=where,
            env={**os.environ, **files, **own, "PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        codes.append(done.returncode)
        assert not done.returncode or "attncheck: " in done.stderr + done.stdout, done.stderr
    outputs = dict(line.split("=") for line in Path(files["GITHUB_OUTPUT"]).read_text().splitlines())
    return codes, outputs


def test_the_action_checks_and_leaves_every_file_that_the_workflow_keeps(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(EXAMPLES, folder)
    [given] = [step["with"] for step in _steps() if _is_in_the_action(step)]
    given = {**given, "cases": "attention/a-causal-row-*\nmy_cases\n", "dtype": "float32", "extras": "torch"}
    codes, outputs = _run_action(given, folder)
    assert (codes, outputs) == ([0, 0], {"exit-code": "0"})
    installed = (tmp_path / "programs" / "uv.txt").read_text().splitlines()
    assert installed[-3:] == ["--constraint", "attncheck/constraints.txt", "./attncheck[torch]"]
    names = ["attncheck.sarif", "badge.json", "badge.svg", "junit.xml", "latest", "outcome.json"]
    assert sorted(each.name for each in (folder / "results").iterdir()) == names
    outcome = json.loads((folder / "results" / "outcome.json").read_text(encoding="utf-8"))
    assert (outcome["exit_code"], len(outcome["verdicts"])) == (0, 4)
    assert "agrees" in (tmp_path / "github_step_summary").read_text(encoding="utf-8")
    kept = [step["with"] for step in _steps() if "upload" in step.get("uses", "")]
    paths = [each.get("path") or each["sarif_file"] for each in kept]
    assert paths == ["results/attncheck.sarif", "results"]
    assert all((folder / path).exists() for path in paths)


def test_what_the_action_is_given_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    folder.mkdir()
    hostile = "x.py:f; touch pwned $(touch pwned) `touch pwned` \" ' --json"
    codes, outputs = _run_action({"implementation": hostile, "cases": f"--help\n{hostile}"}, folder)
    assert codes[1] == 2 == int(outputs["exit-code"])
    assert not list(tmp_path.rglob("pwned"))


def test_every_command_of_the_skill_prints_a_document_with_the_fields_that_it_names(tmp_path: Path) -> None:
    skill = EXAMPLES / "skills" / "attncheck" / "SKILL.md"
    text = skill.read_text(encoding="utf-8")
    fields = dict(YAML(typ="safe").load(text.split("---\n", 2)[1]))  # which agents read
    assert fields.keys() == {"name", "description"}
    assert fields["name"] == skill.parent.name
    assert 0 < len(fields["description"]) <= 1024
    (tmp_path / "my_kernel.py").write_text(KERNEL, encoding="utf-8")
    commands = [command for block in blocks_of(text) for command, _ in commands_of(block)]
    assert len(commands) == 6
    found = {}
    with small_corpus(), own_code_here():
        for command in commands:
            code, printed = attncheck(command.replace("--problems 200", "--problems 5"), tmp_path)
            assert code == 0, printed
            found.update(json.loads(printed[printed.index("{") :]))
    named = {"exit_code", "failures", "next", "notes", "too_few_judged", "in_common", "coverage", "judged"}
    assert named <= found.keys()
    assert named <= set(re.findall(r"`([a-z_]+)`", text))


def test_the_readme_has_the_kernel_of_the_examples_which_agrees_and_what_is_published(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    (kernel,) = re.findall(r"```python\n# my_kernel\.py\n(.*?)```", text, re.DOTALL)
    assert KERNEL.endswith(f"\n\n{kernel}")
    published = (ROOT / "reports" / "published" / "README.md").read_text(encoding="utf-8")
    (documents,) = re.findall(r"^- (The documents print .*)$", published.partition("\n## ")[0], re.MULTILINE)
    assert documents in text.splitlines()  # what is published is of all cases on JAX too
    versions = re.findall(r"^\| (\w+\.\w+) \| (\S+) \|$", published, re.MULTILINE)
    assert len(versions) == 4
    assert all(f"`{name} {version}`" in text for name, version in versions)
    (tmp_path / "my_kernel.py").write_text(kernel, encoding="utf-8")
    with own_code_here():
        result = check(f"{tmp_path}/my_kernel.py:attention", cases=["attention", "grouped_heads", "coincidences"])
        own = check(f"{EXAMPLES}/numpy_kernel.py:attention", cases=[str(EXAMPLES / "my_cases")])
    assert result.agrees, result.explain()
    assert {"agree", "unsupported"} == set(result.frames.results["verdict"])
    assert own.agrees, own.explain()
    assert own.judged == own.asked == 2


def test_the_workflow_checks_out_what_it_uses_may_upload_what_it_keeps_and_has_no_expression_in_a_script() -> None:
    steps, action = _steps(), _yaml(ACTION)
    [checked_out] = [step["with"]["path"] for step in steps if "repository" in step.get("with", {})]
    [(used, given)] = [(step["uses"], step["with"]) for step in steps if _is_in_the_action(step)]
    assert used == f"./{checked_out}/examples/action"
    assert action["inputs"]["source"]["default"] == checked_out
    assert set(given) <= set(action["inputs"])
    assert {name for name, each in action["inputs"].items() if each.get("required")} <= set(given)
    assert _yaml("attention.yml")["permissions"]["security-events"] == "write"
    scripts = [step["run"] for step in (*steps, *action["runs"]["steps"]) if "run" in step]
    assert len(scripts) == 2
    assert not [script for script in scripts if "${{" in script]
    # The page on CI shows the same.
    blocks: list[Block] = blocks_of((DOCS / "how-to" / "ci.md").read_text(encoding="utf-8"))
    [shown] = [block.text for block in blocks if block.file == ".github/workflows/attention.yml"]
    text = (EXAMPLES / "attention.yml").read_text(encoding="utf-8")
    assert shown.partition("\n")[2] == text[text.index("name: ") :]


NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
KERNEL = (ROOT / "examples" / "numpy_kernel.py").read_text(encoding="utf-8")
IN_SIXTEEN_BITS = '\n\nattention.classes = {"float16": "eager"}\n'
CAUSAL = "np.tri(*scores.shape[-2:], dtype=bool)"


def cells(path: Path, kind: str) -> list[str]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def commands(path: Path) -> list[str]:
    text = "\n".join(cells(path, "markdown")).replace("\\\n", " ")
    return re.findall(r"^    (attncheck check .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_answers_its_question_from_the_results_of_its_commands(path: Path, tmp_path: Path) -> None:
    """A kernel in NumPy, which an edit makes wrong before the last of several commands, stands for the libraries."""
    kernel = tmp_path / "kernel.py"
    kernel.write_text(KERNEL + IN_SIXTEEN_BITS, encoding="utf-8")
    lines = commands(path)
    for line in lines:
        if line is lines[-1] and len(lines) > 1:
            wrong = CAUSAL.replace(", dtype", ", scores.shape[-1] - scores.shape[-2], dtype")
            kernel.write_text(KERNEL.replace(CAUSAL, wrong) + IN_SIXTEEN_BITS, encoding="utf-8")
        chosen = re.sub(r"--implementation \S+", "--implementation kernel.py:attention", line)
        with own_code_here():
            assert attncheck(f"{chosen} --no-report --quiet", tmp_path)[0] in (0, 1)
    reader = Reader(tmp_path, lambda command: {})
    code = cells(path, "code")
    for number, cell in enumerate(code, 1):
        reader.execute(cell, f"{path.name}:{number}")
    assert len(reader.namespace["answer"])


def test_the_columns_of_rows_are_what_numpy_reads_and_each_is_documented_once(tmp_path: Path) -> None:
    assert attncheck("attncheck check 'softmax/*' --backend numpy --no-report --quiet", tmp_path)[0] == 0
    results = tmp_path / "results" / "latest"
    rows = read_run(results).rows
    with np.load(results / "rows" / "part-00000.npz") as part:
        assert [name for name in part.files if "." not in name] == list(rows)
        words = json.loads(part["case.words"].tobytes())
        assert [words[code] for code in part["case"]] == rows["case"].tolist()
        assert part["ratio"][~part["ratio.null"]].tolist() == rows["ratio"].dropna().tolist()
    documented = re.findall(r"^\| `(\w+)` \| rows\b", columns(), re.MULTILINE)
    assert sorted(documented) == sorted(rows)
