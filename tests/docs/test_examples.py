"""The README and the examples: kernels agree, cases run, and the workflow and its action do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).parent))
from here import own_code_here
from pages import DOCS, ROOT, Block, attncheck, blocks_of, commands_of, small_corpus

from attncheck import check

EXAMPLES = ROOT / "examples"


@pytest.mark.torch
def test_the_torch_kernel_agrees_at_every_stage() -> None:
    result = check(f"{EXAMPLES}/torch_kernel.py:attention", cases=["attention", "softcap"])
    assert result.agrees, result.explain()
    agreeing = result.frames.results.query("verdict == 'agree'")
    assert {"scores", "capped", "biased", "masked", "weights", "output"} <= set(agreeing["stage"])
    assert set(agreeing["dtype"]) == {"float64", "float32", "bfloat16"}


def test_the_cases_agree() -> None:
    with own_code_here():
        result = check(f"{EXAMPLES}/numpy_kernel.py:attention", cases=[str(EXAMPLES / "my_cases")])
    assert result.agrees, result.explain()
    assert result.judged == result.asked == 2


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

    The checkout of attncheck is this repository, and ``pip`` a program that writes down what it is asked for.
    """
    action = _yaml(ACTION)
    inputs = {name: str(each.get("default", "")) for name, each in action["inputs"].items()} | given
    programs = folder.parent / "programs"
    programs.mkdir()
    (programs / "pip").write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word"; done > {programs}/installed\n')
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
    installed = (tmp_path / "programs" / "installed").read_text().splitlines()
    assert installed == ["install", "--constraint", "attncheck/constraints.txt", "./attncheck[torch]"]
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


def test_no_expression_stands_in_a_script() -> None:
    steps = [*_steps(), *_yaml(ACTION)["runs"]["steps"]]
    scripts = [step["run"] for step in steps if "run" in step]
    assert len(scripts) == 2
    assert not [script for script in scripts if "${{" in script]


def test_the_workflow_checks_out_what_it_uses_and_may_upload_what_it_keeps() -> None:
    steps = _steps()
    [checked_out] = [step["with"]["path"] for step in steps if "repository" in step.get("with", {})]
    [used] = [step["uses"] for step in steps if _is_in_the_action(step)]
    assert used == f"./{checked_out}/examples/action"
    action = _yaml(ACTION)
    assert action["inputs"]["source"]["default"] == checked_out
    [given] = [step["with"] for step in steps if _is_in_the_action(step)]
    assert set(given) <= set(action["inputs"])
    assert {name for name, each in action["inputs"].items() if each.get("required")} <= set(given)
    assert _yaml("attention.yml")["permissions"]["security-events"] == "write"


SKILL = EXAMPLES / "skills" / "attncheck" / "SKILL.md"


def test_the_skill_has_the_front_matter_that_agents_read() -> None:
    _, head, text = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    fields = dict(YAML(typ="safe").load(head))
    assert fields.keys() == {"name", "description"}
    assert fields["name"] == SKILL.parent.name
    assert 0 < len(fields["description"]) <= 1024
    assert text.startswith("\n# ")


def test_every_command_of_the_skill_prints_a_document_with_the_fields_that_it_names(tmp_path: Path) -> None:
    text = SKILL.read_text(encoding="utf-8")
    kernel = (EXAMPLES / "numpy_kernel.py").read_text(encoding="utf-8")
    (tmp_path / "my_kernel.py").write_text(kernel, encoding="utf-8")
    commands = [command for block in blocks_of(text) for command, _ in commands_of(block)]
    assert len(commands) == 5
    found = {}
    with small_corpus(), own_code_here():
        for command in commands:
            code, printed = attncheck(command.replace("--problems 200", "--problems 5"), tmp_path)
            assert code == 0, printed
            found.update(json.loads(printed[printed.index("{") :]))
    named = {"exit_code", "failures", "next", "notes", "too_few_judged", "in_common", "coverage", "judged"}
    assert named <= found.keys()
    assert named <= set(re.findall(r"`([a-z_]+)`", text))


def test_the_page_on_ci_shows_the_same_workflow() -> None:
    blocks: list[Block] = blocks_of((DOCS / "how-to" / "ci.md").read_text(encoding="utf-8"))
    [shown] = [block.text for block in blocks if block.file == ".github/workflows/attention.yml"]
    text = (EXAMPLES / "attention.yml").read_text(encoding="utf-8")
    assert shown.partition("\n")[2] == text[text.index("name: ") :]


README = ROOT / "README.md"


def kernel_of_the_readme() -> str:
    (text,) = re.findall(r"```python\n# my_kernel\.py\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return str(text)


def test_the_readme_is_short_with_the_kernel_of_the_examples_and_what_is_published() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert (EXAMPLES / "numpy_kernel.py").read_text(encoding="utf-8").endswith(f"\n\n{kernel_of_the_readme()}")
    (shown,) = re.findall(r"ends like this:\n\n```\w*\n(.*?)```", text, re.DOTALL)
    assert len(shown.splitlines()) == 5
    published = (ROOT / "reports" / "published" / "README.md").read_text(encoding="utf-8")
    (documents,) = re.findall(r"^- (The documents print .*)$", published.partition("\n## ")[0], re.MULTILINE)
    assert documents in shown.splitlines()  # what is published is of all cases on JAX too
    versions = re.findall(r"^\| (\w+\.\w+) \| (\S+) \|$", published, re.MULTILINE)
    assert len(versions) == 4
    assert all(f"`{name} {version}`" in text for name, version in versions)


TRI = "np.tri(*scores.shape[-2:], dtype=bool)"
MISTAKES = {
    TRI: (TRI.replace(", dtype", ", scores.shape[-1] - scores.shape[-2], dtype"), "semantic", "aligned bottom-right"),
    "query.shape[-1] ** -0.5 if": ("1 / query.shape[-1] if", "numeric", "1/D"),
}


def test_the_readmes_kernel_agrees_and_a_usual_mistake_in_it_is_told_by_name(tmp_path: Path) -> None:
    kernel = kernel_of_the_readme()
    (tmp_path / "my_kernel.py").write_text(kernel, encoding="utf-8")
    with own_code_here():
        result = check(f"{tmp_path}/my_kernel.py:attention", cases=["attention", "grouped_heads", "coincidences"])
    assert result.agrees, result.explain()
    assert {"agree", "unsupported"} == set(result.frames.results["verdict"])
    for right, (wrong, verdict, told) in MISTAKES.items():
        assert right in kernel
        (tmp_path / "my_kernel.py").write_text(kernel.replace(right, wrong), encoding="utf-8")
        with own_code_here():
            result = check(f"{tmp_path}/my_kernel.py:attention", cases=["attention"], dtypes=["float32"])
        failing = [row for row in result.failures if row.comparison == "stage"]
        assert {row.verdict for row in failing} == {verdict}
        assert all(told in row.message for row in failing)
        assert verdict != "numeric" or {row.begins_at for row in failing} == {"scores"}
