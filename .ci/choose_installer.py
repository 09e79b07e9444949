"""Chooses how `make` installs packages, so that PyTorch comes without CUDA wherever that is possible.

    python .ci/choose_installer.py uv|pip --python .tools/bin/python --output .tools/environment

The public index has only one build of torch for Linux, and it requires several gigabytes of CUDA packages. These are
tried in turn, by resolving torch without downloading it:

1. uv, which knows where PyTorch publishes its CPU builds;
2. what pip is configured to use on this machine: a mirror, a folder of wheels, another index;
3. the public index as it is.

The output is a shell file that sets `INSTALLER` and the variables that uv, pip and tox read.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
_CUDA_PACKAGES = ("nvidia-", "cuda-")
_PIP_SETTING = re.compile(r"^(?:global|install|:env:)\.(find-links|index-url)=(.*)$", re.MULTILINE)
_FROM_PIP = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX"}
"""Settings of pip, and the variables by which uv takes the same."""
_FAST_FAILURE = {"UV_HTTP_RETRIES": "0", "UV_HTTP_CONNECT_TIMEOUT": "10"}
"""A machine that cannot reach an index says so at once instead of after three retries."""
_SIZE = (
    "torch brings CUDA packages: 2.7 GB to download and 4.5 GB on disk. To avoid them, let uv reach PyTorch's index "
    "of CPU builds, or make one available to pip (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), and run `make clean` first."
)
"""Measured with torch 2.13.0 for Linux on x86-64 and Python 3.11."""


@dataclass(frozen=True)
class Choice:
    """An installer with the variables that it needs, and a line that says what it does."""

    installer: str
    line: str
    variables: dict[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """Return the choice as a file that a shell reads."""
        runner = {"uv": "uv-venv-runner", "pip": "virtualenv"}[self.installer]
        variables = {"INSTALLER": self.installer, "TOX_RUNNER": runner, **self.variables}
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def choose(installer: str, python: Path) -> Choice:
    """Return the first way to install torch that brings no CUDA packages, or else the fastest that works."""
    uv_settings = _uv_settings_of_pip(python)
    if installer == "uv":
        mirror = {name: value for name, value in uv_settings.items() if name == "UV_DEFAULT_INDEX"}
        cpu = {**mirror, "UV_TORCH_BACKEND": "cpu"}
        if _packages_of_uv(python, cpu | _FAST_FAILURE):
            return Choice("uv", "uv installs PyTorch's CPU build.", cpu)
        if _is_cpu(_packages_of_uv(python, uv_settings)):
            return Choice("uv", "uv installs the CPU build of torch that this machine offers.", uv_settings)
    packages = _packages_of_pip(python)
    if _is_cpu(packages):
        return Choice("pip", "pip installs the CPU build of torch that this machine offers.")
    if installer == "uv" and _packages_of_uv(python, uv_settings):
        return Choice("uv", f"uv installs torch from the public index. {_SIZE}", uv_settings)
    line = f"pip installs torch from the public index. {_SIZE}" if packages else "pip, as it is configured."
    return Choice("pip", line)


def _is_cpu(packages: list[str]) -> bool:
    return bool(packages) and not any(name.lower().startswith(_CUDA_PACKAGES) for name in packages)


def _packages_of_uv(python: Path, variables: dict[str, str]) -> list[str]:
    """Return the names of what uv would install for torch; none if it cannot resolve torch."""
    command = [str(python.parent / "uv"), "pip", "install", "--dry-run", "--reinstall", "--python", str(python)]
    return re.findall(r"^ \+ ([\w.-]+)==", _resolve_torch(command, variables).stderr, re.MULTILINE)


def _packages_of_pip(python: Path) -> list[str]:
    """Return the names of what pip would install for torch; none if it cannot resolve torch."""
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = _resolve_torch([*command, "--disable-pip-version-check"], {})
    return [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]] if done.returncode == 0 else []


def _resolve_torch(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [*command, "--constraint", str(CONSTRAINTS), "torch"]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def _uv_settings_of_pip(python: Path) -> dict[str, str]:
    """Return variables by which uv uses pip's index and folders of wheels; those that are set already stay."""
    command = [str(python), "-m", "pip", "config", "list"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    settings = {}
    for name, value in _PIP_SETTING.findall(printed):
        separator = "," if name == "find-links" else " "
        settings[_FROM_PIP[name]] = separator.join(str(ast.literal_eval(value)).split())
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def main() -> int:
    """Write the choice to a file, and print its line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("installer", choices=("uv", "pip"), help="uv tries all of the above, pip only 2 and 3")
    parser.add_argument("--python", type=Path, required=True, help="the interpreter that has pip and uv")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    choice = choose(arguments.installer, arguments.python)
    print(f"Installing: {choice.line}", flush=True)
    arguments.output.write_text(choice.shell(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
